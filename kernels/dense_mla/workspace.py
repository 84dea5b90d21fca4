"""Bytes and views of the split partials, over one buffer that the caller owns."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .problem import HEAD_DIM_V, DecodeProblem
from .schedule import INVARIANT_PIECES, max_slots

ALIGNMENT = 256  # bytes; of the buffer and of lse_partial within it
MAX_PARTIAL_VALUES = 2**31 - 1  # of out_partial


@dataclass(frozen=True)
class WorkspaceSize:
    """Workspace of a batch of at most `requests` requests. All sizes in bytes."""

    requests: int
    slots: int
    out_partial_bytes: int
    lse_partial_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of the buffer that `workspace_views` cuts, alignment included."""
        return _aligned(self.out_partial_bytes) + _aligned(self.lse_partial_bytes)


def workspace_size(problem: DecodeProblem, num_requests: int, sm_count: int) -> WorkspaceSize:
    """Bytes that no batch of at most `num_requests` requests exceeds: they depend on no context length.

    Raises:
        ValueError: more SMs than the kernels share work among, or more values than their 32-bit offsets reach. Only batch invariance, with its
            slots for every request, gets there.
    """
    slots = max_slots(num_requests, problem.num_ranges(sm_count), problem.batch_invariant)
    rows = slots * problem.rows
    if rows * HEAD_DIM_V > MAX_PARTIAL_VALUES:
        most = MAX_PARTIAL_VALUES // (INVARIANT_PIECES * HEAD_DIM_V * problem.rows)
        raise ValueError(
            f"a batch-invariant batch of {problem.rows} rows a request must have at most {most} requests (max_num_seqs), got {num_requests}"
        )
    return WorkspaceSize(num_requests, slots, rows * HEAD_DIM_V * problem.partial_dtype.itemsize, rows * 4)


def workspace_views(problem: DecodeProblem, buffer: torch.Tensor, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a `torch.uint8` buffer of a multiple of ALIGNMENT bytes: out_partial [slots, tokens, heads, 512] in the partial dtype and
    lse_partial [slots, tokens, heads] in FP32."""
    tokens, heads, rows = problem.query_len, problem.num_heads, problem.rows
    lse_start = _aligned(slots * rows * HEAD_DIM_V * problem.partial_dtype.itemsize) // 4
    # As few views as do it: each costs the host a microsecond or two, in every layer of every step.
    partials = buffer.view(problem.partial_dtype)
    out_partial = partials.as_strided((slots, tokens, heads, HEAD_DIM_V), (rows * HEAD_DIM_V, heads * HEAD_DIM_V, HEAD_DIM_V, 1))
    sums = partials if problem.partial_dtype == torch.float32 else buffer.view(torch.float32)
    lse_partial = sums.as_strided((slots, tokens, heads), (rows, heads, 1), sums.storage_offset() + lse_start)
    return out_partial, lse_partial


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT

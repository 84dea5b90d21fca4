"""Bytes and views of the split partials, over one buffer that the caller owns."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .problem import HEAD_DIM_V, DecodeProblem
from .schedule import max_slots

ALIGNMENT = 256  # bytes; of the buffer and of lse_partial within it


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
    """Bytes that no batch of at most `num_requests` requests exceeds: they depend on no context length."""
    slots = max_slots(num_requests, problem.num_ranges(sm_count), problem.batch_invariant)
    rows = slots * problem.rows
    return WorkspaceSize(num_requests, slots, rows * HEAD_DIM_V * problem.partial_dtype.itemsize, rows * 4)


def workspace_views(problem: DecodeProblem, buffer: torch.Tensor, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a `torch.uint8` buffer: out_partial [slots, rows, 512] in the partial dtype and lse_partial [slots, rows] in FP32."""
    shape = (slots, problem.rows, HEAD_DIM_V)
    out_bytes = slots * problem.rows * HEAD_DIM_V * problem.partial_dtype.itemsize
    lse_start = _aligned(out_bytes)
    out_partial = buffer[:out_bytes].view(problem.partial_dtype).view(shape)
    lse_partial = buffer[lse_start : lse_start + slots * problem.rows * 4].view(torch.float32).view(shape[:2])
    return out_partial, lse_partial


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT

"""The merge of rows as the Hopper forwards leave them: PTX of the schedule and the merge kernel on the CPU, random pieces against FP64."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dense_mla.compiled import CompiledKernels, kernel_sources
from dense_mla.decoder import DenseMLADecoder
from dense_mla.problem import DecodeProblem
from dense_mla.schedule import plan
from dense_mla.workspace import workspace_views
from ptx_launch import Launch, kernel_text

SMS = 132
SM80 = (8, 0)  # these two kernels have no instruction of a later architecture but for dependent launch
ONE_LONG = [64 * 200]
BESIDE_SHORT = [64 * 140, 0, 30]
MANY = [64 * 11 + 3] * 32
UNEVEN = [5000, 70, 0, 8999, 64, 3000, 1, 6400, 129, 2500]
EMPTY_SHARE = 0.2  # of the pieces' rows that saw no key


def decoder_for(problem: DecodeProblem, folder: Path, monkeypatch: pytest.MonkeyPatch) -> DenseMLADecoder:
    """A decoder of an H200's size, for `schedule` and for its merge kernel."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=SMS))
    schedule, forward, merge = kernel_sources(problem, SM80, "sm80")
    launches = [Launch(source, SM80, kernel_text(source, SM80, folder)) for source in (schedule, merge)]
    return DenseMLADecoder(problem, torch.device("cpu"), 64, CompiledKernels(launches[0], forward, launches[1], row_tiles=problem.row_tiles))


def random_pieces(out_partial: torch.Tensor, lse_partial: torch.Tensor) -> None:
    """Values and base-2 LSEs of all slots; NaN where a piece saw no key."""
    generator = torch.Generator().manual_seed(0)
    lse_partial.copy_(torch.randn(lse_partial.shape, generator=generator) * 4)
    out_partial.copy_(torch.randn(out_partial.shape, generator=generator))
    empty = torch.rand(lse_partial.shape, generator=generator) < EMPTY_SHARE
    lse_partial[empty], out_partial[empty] = -math.inf, math.nan


def merged(out_partial: torch.Tensor, lse_partial: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule in FP64: output, and natural-log LSE, of pieces [pieces, tokens, heads, ...]."""
    weights = torch.exp2(lse_partial.double())
    values = torch.where(weights[..., None] > 0, out_partial.double(), 0.0)
    total = weights.sum(0)
    return (weights[..., None] * values).sum(0) / total.clamp(min=1e-300)[..., None], total.log()


@pytest.mark.parametrize("partial_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("heads", "query_len", "batch_invariant", "seq_lens"),
    [
        (3, 1, False, UNEVEN),
        (16, 1, False, ONE_LONG),
        (16, 1, True, UNEVEN),
        (24, 1, False, MANY),
        (8, 4, False, BESIDE_SHORT),
        (16, 4, False, ONE_LONG),
        (64, 1, True, BESIDE_SHORT),
        (128, 1, False, BESIDE_SHORT),
        (128, 4, False, ONE_LONG),
    ],
)
def test_merge(
    heads: int, query_len: int, batch_invariant: bool, seq_lens: list[int], partial_dtype: torch.dtype, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    problem = DecodeProblem(heads, 64, partial_dtype, query_len=query_len, return_lse=True, batch_invariant=batch_invariant)
    decoder = decoder_for(problem, tmp_path, monkeypatch)
    words, requests = decoder.empty_schedule(), len(seq_lens)
    table = torch.zeros(requests, max(seq_lens) // 64 + 1, dtype=torch.int32)
    decoder.schedule(torch.tensor(seq_lens, dtype=torch.int32), table, words)
    size = decoder.workspace_size(requests)
    buffer = torch.empty(size.total_bytes + 256, dtype=torch.uint8)
    out_partial, lse_partial = workspace_views(problem, buffer[-buffer.data_ptr() % 256 :][: size.total_bytes], size.slots)
    random_pieces(out_partial, lse_partial)
    out = torch.full((requests, query_len, heads, 512), math.nan, dtype=torch.bfloat16)
    lse = torch.full((requests, query_len, heads), math.nan)
    decoder._kernels.merge(out_partial, lse_partial, words, out, lse, decoder.num_ranges, decoder.sm_count)

    splits = plan(seq_lens, 64, decoder.num_ranges, batch_invariant=batch_invariant).splits
    assert splits
    for split in splits:
        slots = slice(split.first_slot, split.first_slot + split.pieces)
        expected, expected_lse = merged(out_partial[slots], lse_partial[slots])
        torch.testing.assert_close(out[split.request].double(), expected, rtol=2**-8, atol=1e-5)
        torch.testing.assert_close(lse[split.request].double(), expected_lse, rtol=1e-6, atol=1e-5)
    whole = [request for request in range(requests) if request not in {split.request for split in splits}]
    assert out[whole].isnan().all() and lse[whole].isnan().all(), "a request in one piece is the forward's"

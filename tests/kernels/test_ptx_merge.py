"""The merge of rows as the Hopper forwards leave them: PTX of the schedule and the merge kernel on the CPU, the schedule against `plan` and
`merge_shares`, random pieces against FP64."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dense_mla.compiled import CompiledKernels, kernel_sources
from dense_mla.decoder import DenseMLADecoder
from dense_mla.problem import DecodeProblem
from dense_mla.schedule import Split, plan
from dense_mla.workspace import workspace_views
from ptx_launch import Launch, kernel_text
from test_decoder import assert_same_plan

SMS = 132
SM80 = (8, 0)  # these two kernels have no instruction of a later architecture but for dependent launch
ONE_LONG = [64 * 200]
BESIDE_SHORT = [64 * 140, 0, 30]
MANY = [64 * 11 + 3] * 32
UNEVEN = [5000, 70, 0, 8999, 64, 3000, 1, 6400, 129, 2500]
MORE_THAN_THREADS = [257 + 64 * (i % 3) if i % 7 else i % 2 for i in range(1284)]  # split requests, with batch invariance
IN_TURNS = [17, 40_000, 0, 300, 2000, 257] * 4  # with batch invariance, 32 pieces: strands in several warps, and more blocks than CTAs
EMPTY_SHARE = 0.2  # of the pieces' rows that saw no key


def decoder_for(problem: DecodeProblem, max_requests: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> DenseMLADecoder:
    """A decoder of an H200's size, for `schedule` and for its merge kernel."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=SMS))
    schedule, forward, merge = kernel_sources(problem, SM80, "sm80")
    launches = [Launch(source, SM80, kernel_text(source, SM80, folder)) for source in (schedule, merge)]
    kernels = CompiledKernels(launches[0], forward, launches[1], row_tiles=problem.row_tiles)
    return DenseMLADecoder(problem, torch.device("cpu"), max_requests, kernels)


def scheduled(decoder: DenseMLADecoder, seq_lens: list[int]) -> tuple[torch.Tensor, tuple[Split, ...]]:
    """The words of the schedule, the merge's shares among them, once they are what they should be; and its split requests."""
    problem, words = decoder.problem, decoder.empty_schedule().fill_(-7)
    width = max(seq_lens) // problem.page_size + 1
    table = torch.arange(len(seq_lens) * width, dtype=torch.int32).view(len(seq_lens), width)
    decoder.schedule(torch.tensor(seq_lens, dtype=torch.int32), table, words)
    expected = plan(seq_lens, problem.page_size, decoder.num_ranges, problem.batch_invariant)
    assert_same_plan(words.tolist(), expected, decoder, seq_lens, table)
    assert expected.splits
    return words, expected.splits


def partials(decoder: DenseMLADecoder, requests: int) -> tuple[torch.Tensor, torch.Tensor]:
    size = decoder.workspace_size(requests)
    buffer = torch.empty(size.total_bytes + 256, dtype=torch.uint8)
    views = workspace_views(decoder.problem, buffer[-buffer.data_ptr() % 256 :][: size.total_bytes], size.slots)
    random_pieces(*views)
    return views


def run_merge(
    decoder: DenseMLADecoder, words: torch.Tensor, pieces: tuple[torch.Tensor, torch.Tensor], requests: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = (requests, decoder.problem.query_len, decoder.problem.num_heads)
    out, lse = torch.full((*rows, 512), math.nan, dtype=torch.bfloat16), torch.full(rows, math.nan)
    decoder._kernels.merge(*pieces, words, out, lse, decoder.num_ranges, decoder.sm_count)
    return out, lse


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
        (1, 1, True, MORE_THAN_THREADS),
        (3, 1, False, UNEVEN),
        (16, 1, False, ONE_LONG),
        (16, 1, True, IN_TURNS),
        (24, 1, False, MANY),
        (8, 4, False, BESIDE_SHORT),
        (16, 4, False, ONE_LONG),
        (64, 1, True, BESIDE_SHORT),
        (128, 1, False, BESIDE_SHORT),
        (128, 4, False, ONE_LONG),
        (128, 16, False, UNEVEN),
    ],
)
def test_merge(
    heads: int, query_len: int, batch_invariant: bool, seq_lens: list[int], partial_dtype: torch.dtype, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    problem = DecodeProblem(heads, 64, partial_dtype, query_len=query_len, return_lse=True, batch_invariant=batch_invariant)
    requests = len(seq_lens)
    decoder = decoder_for(problem, requests, tmp_path, monkeypatch)
    words, splits = scheduled(decoder, seq_lens)
    out_partial, lse_partial = partials(decoder, requests)
    out, lse = run_merge(decoder, words, (out_partial, lse_partial), requests)
    for split in splits:
        slots = slice(split.first_slot, split.first_slot + split.pieces)
        expected, expected_lse = merged(out_partial[slots], lse_partial[slots])
        torch.testing.assert_close(out[split.request].double(), expected, rtol=2**-8, atol=1e-5)
        torch.testing.assert_close(lse[split.request].double(), expected_lse, rtol=1e-6, atol=1e-5)
    whole = [request for request in range(requests) if request not in {split.request for split in splits}]
    assert out[whole].isnan().all() and lse[whole].isnan().all(), "a request in one piece is the forward's"


@pytest.mark.parametrize("rows", [16, 24, 64])
def test_bits_of_a_request_do_not_depend_on_the_batch(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = DecodeProblem(rows, 64, torch.float32, return_lse=True, batch_invariant=True)
    decoder = decoder_for(problem, len(IN_TURNS), tmp_path, monkeypatch)
    words, splits = scheduled(decoder, IN_TURNS)
    pieces = partials(decoder, len(IN_TURNS))
    out, lse = run_merge(decoder, words, pieces, len(IN_TURNS))
    for split in splits[4:8]:
        words, (alone,) = scheduled(decoder, [IN_TURNS[split.request]])
        slots = slice(split.first_slot, split.first_slot + split.pieces)
        assert (alone.first_slot, alone.pieces) == (0, split.pieces)
        again, again_lse = run_merge(decoder, words, (pieces[0][slots].clone(), pieces[1][slots].clone()), 1)
        assert torch.equal(again[0], out[split.request]) and torch.equal(again_lse[0], lse[split.request])


def test_a_nan_of_one_piece_shows_in_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its LSE, as a forward leaves it whose row saw one."""
    decoder = decoder_for(DecodeProblem(16, 64, return_lse=True), 1, tmp_path, monkeypatch)
    words, (split,) = scheduled(decoder, ONE_LONG)
    out_partial, lse_partial = partials(decoder, 1)
    lse_partial[split.first_slot + split.pieces // 2, 0, 3] = math.nan
    out, lse = run_merge(decoder, words, (out_partial, lse_partial), 1)
    rows = torch.arange(16) == 3
    assert torch.equal(out[0, 0].isnan(), rows[:, None].expand(16, 512)) and torch.equal(lse[0, 0].isnan(), rows)

"""The reference against plain softmax, and the known faults on it. The kernels run the same inputs on a GPU."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import cases
from cases import Case
from dense_mla import DecodeProblem, workspace_size
from dense_mla.reference import attention, decode, merge, relative_l2
from dense_mla.schedule import plan
from dense_mla.workspace import workspace_views

DTYPES = [torch.bfloat16, torch.float32]
SPLIT_COUNTS = [1, 2, 3, 4, 8, 16, 17, 31, 32, 44, 132]


def run(case: Case, partial_dtype: torch.dtype, num_ranges: int = 132) -> tuple[torch.Tensor, torch.Tensor]:
    problem = DecodeProblem(case.num_heads, case.page_size, partial_dtype)
    return decode(problem, case.q, case.kv_cache, case.block_table, case.seq_lens, scale=case.scale, num_ranges=num_ranges)


def check(case: Case, partial_dtype: torch.dtype, num_ranges: int = 132) -> None:
    case.check(*run(case, partial_dtype, num_ranges), partial_dtype)


def test_attention_is_plain_softmax() -> None:
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2, 3, 576, generator=generator, dtype=torch.float64)
    kv = torch.randn(4, 16, 576, generator=generator, dtype=torch.float64)
    out, lse = attention(q, kv, torch.tensor([[3, 1], [2, 0]]), torch.tensor([20, 16]), 0.05)
    for r, keys in enumerate([torch.cat([kv[3], kv[1, :4]]), kv[2]]):
        weights = torch.exp(0.05 * torch.einsum("hd,kd->hk", q[r], keys))
        torch.testing.assert_close(out[r], weights @ keys[:, :512] / weights.sum(-1, keepdim=True), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse[r], weights.sum(-1).log(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", cases.FAULTS)
def test_known_faults(fault: str, dtype: torch.dtype) -> None:
    check(cases.FAULTS[fault]("cpu"), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", SPLIT_COUNTS)
@pytest.mark.parametrize("build", [cases.fewer_keys_than_splits, cases.repeated_calls, cases.many_splits], ids=lambda build: build.__name__)
def test_the_bound_holds_at_every_split_count(build: Callable[[], Case], splits: int, dtype: torch.dtype) -> None:
    check(build(), dtype, splits)


@pytest.mark.parametrize("splits", [16, 17, 31])
def test_repeated_calls_are_bit_equal(splits: int) -> None:
    case = cases.repeated_calls()
    out, lse = run(case, torch.bfloat16, splits)
    for _ in range(5):
        again = run(case, torch.bfloat16, splits)
        assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


def test_fp32_partials_cost_two_percent_over_one_piece_and_bf16_partials_more() -> None:
    case = cases.many_splits()
    whole = relative_l2(run(case, torch.float32, 1)[0], case.expected_out)
    for splits in (2, 4, 44):
        assert relative_l2(run(case, torch.float32, splits)[0], case.expected_out) <= 1.02 * whole
        assert relative_l2(run(case, torch.bfloat16, splits)[0], case.expected_out) <= 1.6 * whole
        # The dtype is real: where a request is split, some of the output moves with it.
        assert not torch.equal(run(case, torch.bfloat16, splits)[0], run(case, torch.float32, splits)[0])


def test_the_partial_dtype_changes_no_lse_and_no_request_in_one_piece() -> None:
    case = cases.gaussian([5000, 20, 0, 700], heads=4)
    (out_a, lse_a), (out_b, lse_b) = run(case, torch.bfloat16, 8), run(case, torch.float32, 8)
    assert torch.equal(lse_a, lse_b)
    whole = sorted({0, 1, 2, 3} - {s.request for s in plan([5000, 20, 0, 700], 64, 8).splits})
    assert 1 in whole and torch.equal(out_a[whole], out_b[whole])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_only_the_pieces_of_split_requests_are_stored(dtype: torch.dtype) -> None:
    case = cases.gaussian([5000, 20, 0, 700], heads=4)
    problem = DecodeProblem(4, 64, dtype)
    size = workspace_size(problem, 4, 8)
    workspace = torch.empty(size.total_bytes, dtype=torch.uint8)
    decode(problem, case.q, case.kv_cache, case.block_table, case.seq_lens, scale=case.scale, num_ranges=8, workspace=workspace)
    out_partial, lse_partial = workspace_views(problem, workspace, size.slots)
    used = {slot for s in plan([5000, 20, 0, 700], 64, 8).splits for slot in range(s.first_slot, s.first_slot + s.pieces)}
    assert out_partial.dtype == dtype and lse_partial.dtype == torch.float32
    assert {slot for slot in range(size.slots) if not out_partial[slot].isnan().any()} == used
    assert {slot for slot in range(size.slots) if not lse_partial[slot].isnan().any()} == used


def test_the_null_page_changes_no_bit() -> None:
    clean, junk = run(cases.null_page_batch(null_page=0.0), torch.bfloat16), run(cases.null_page_batch(), torch.bfloat16)
    assert torch.equal(clean[0], junk[0]) and torch.equal(clean[1], junk[1])


def test_pages_of_whole_tiles_change_no_bit() -> None:
    by_page = [run(cases.same_tokens_at(size), torch.bfloat16) for size in (16, 32, 64, 128, 768, 1024)]
    for out, lse in by_page[1:]:
        assert torch.equal(out, by_page[0][0]) and torch.equal(lse, by_page[0][1])


def test_a_strided_pair_equals_its_contiguous_copy() -> None:
    case = cases.strided_query()
    joined = replace(case, q=torch.cat(case.q, -1).contiguous())
    assert torch.equal(run(case, torch.bfloat16)[0], run(joined, torch.bfloat16)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [2, 8])
def test_merging_empty_pieces_gives_zero_and_minus_infinity(count: int, dtype: torch.dtype) -> None:
    out, lse = merge(torch.full((count, 3, 512), math.nan, dtype=dtype), torch.full((count, 3), -math.inf))
    assert (out == 0).all() and (lse == -math.inf).all()


def test_an_empty_piece_has_no_say() -> None:
    partial = torch.randn(3, 2, 512, generator=torch.Generator().manual_seed(5))
    partial[1] = math.nan
    out, lse = merge(partial, torch.tensor([[1.0, 2.0], [-math.inf, -math.inf], [3.0, 2.0]]))
    torch.testing.assert_close(out[0], (2 * partial[0, 0] + 8 * partial[2, 0]) / 10)
    torch.testing.assert_close(lse, torch.tensor([math.log2(10.0), 3.0]))


def test_a_nan_key_that_is_visible_is_not_hidden() -> None:
    case = cases.gaussian([5000, 20], heads=4)
    case.kv_cache[case.block_table[0, 3]] = math.nan
    out, lse = run(case, torch.bfloat16)
    assert out[0].isnan().all() and lse[0].isnan().all()
    assert not out[1].isnan().any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 4, 512)}, "q must be [requests, heads, 576] or a pair that joins to it, got [2, 4, 512]"),
        ({"q": torch.zeros(2, 5, 576)}, "q must have the problem's 4 heads, got 5"),
        ({"kv_cache": torch.zeros(3, 64, 512)}, "kv_cache must be [pages, page_size, 576], got [3, 64, 512]"),
        ({"kv_cache": torch.zeros(9, 128, 576)}, "kv_cache must have the problem's page_size 64, got 128"),
        ({"seq_lens": torch.tensor([1])}, "seq_lens must be [2] for q of 2 rows, 1 a request, got [1]"),
        ({"seq_lens": torch.tensor([1, -1])}, "seq_lens must be at least 0, got -1"),
        ({"block_table": torch.zeros(1, 4)}, "block_table must be [2, width], got [1, 4]"),
        ({"seq_lens": torch.tensor([65, 257])}, "block_table must have 5 columns for seq_len 257 in pages of 64, got 4"),
    ],
)
def test_bad_input_is_named(change: dict[str, torch.Tensor], message: str) -> None:
    case = replace(cases.gaussian([65, 128], heads=4), **change)  # type: ignore[arg-type]
    problem = DecodeProblem(4, 64)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        decode(problem, case.q, case.kv_cache, case.block_table, case.seq_lens, scale=case.scale, num_ranges=8)

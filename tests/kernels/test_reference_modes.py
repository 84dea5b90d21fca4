"""The reference with several query tokens, context ranks, batch invariance and FP16, against plain restatements of each rule."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import cases
from cases import Case
from dense_mla.problem import ContextShard, DecodeProblem
from dense_mla.reference import attention, decode

NUM_RANGES = 132


def run(case: Case, partial_dtype: torch.dtype, *, batch_invariant: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    problem = case.problem(partial_dtype, return_lse=True, batch_invariant=batch_invariant)
    total_lens = case.total_lens if problem.needs_total_lens else None
    cache = (case.kv_cache, case.block_table, case.seq_lens)
    return decode(problem, case.q, *cache, scale=case.scale, num_ranges=problem.num_ranges(NUM_RANGES), total_lens=total_lens)


@pytest.mark.parametrize("query_len", [2, 5])
def test_a_causal_token_sees_the_keys_up_to_itself(query_len: int) -> None:
    """Token t of a block is the last token of the request cut off behind it. The first tokens of a request of two keys see nothing."""
    block = cases.gaussian([2, 64, 130], query_len=query_len)
    assert isinstance(block.q, torch.Tensor)
    for t in range(query_len):
        lens = (block.seq_lens - (query_len - 1 - t)).clamp(min=0)
        out, lse = attention(block.q[t::query_len], block.kv_cache, block.block_table, lens, block.scale)
        torch.testing.assert_close(block.expected_out[t::query_len], out, rtol=1e-12, atol=0)
        torch.testing.assert_close(block.expected_lse[t::query_len], lse, rtol=1e-12, atol=0)
    assert (block.expected_lse[0] == -math.inf).all() == (query_len > 2)


def test_without_causality_every_token_sees_all_keys() -> None:
    block = cases.gaussian([5, 130], query_len=3, causal=False)
    assert isinstance(block.q, torch.Tensor)
    for t in range(3):
        out, _ = attention(block.q[t::3], block.kv_cache, block.block_table, block.seq_lens, block.scale)
        torch.testing.assert_close(block.expected_out[t::3], out, rtol=1e-12, atol=0)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("interleave", [1, 2, 5, 16])
def test_a_shard_holds_every_worldth_run(world: int, interleave: int) -> None:
    for rank in range(world):
        shard = ContextShard(world, rank, interleave)
        assert [shard.held(n) for n in range(200)] == [sum(k // interleave % world == rank for k in range(n)) for n in range(200)]


@pytest.mark.parametrize(
    ("shard", "message"),
    [((0, 0, 1), "got 0 and 1"), ((2, 0, 0), "got 2 and 0"), ((2, 2, 1), "rank must be from 0 to 1, got 2"), ((2, -1, 1), "got -1")],
)
def test_an_impossible_shard_is_refused(shard: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ContextShard(*shard)


@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (8, 1), (3, 5)])
def test_context_ranks_merge_to_the_undivided_answer(world: int, interleave: int, query_len: int) -> None:
    """Faults 56 and 60, with ranks that hold nothing among them. The causal rule counts the keys of all ranks."""
    whole, ranks = cases.context_shards([1, 3, 70, 5000], world, interleave, heads=16, query_len=query_len)
    lse = torch.stack([rank.expected_lse for rank in ranks])
    weights = (lse - lse.logsumexp(0)).exp().nan_to_num(0.0)[..., None]
    merged = (weights * torch.stack([rank.expected_out for rank in ranks])).sum(0)
    torch.testing.assert_close(merged, whole.expected_out, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(lse.logsumexp(0), whole.expected_lse, rtol=1e-12, atol=0)
    for rank in ranks:
        rank.check(*run(rank, torch.float32), torch.float32)


@pytest.mark.parametrize("partial_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("query_len", [1, 3, 8])
def test_decode_is_attention_in_every_mode(query_len: int, batch_invariant: bool, partial_dtype: torch.dtype) -> None:
    case = cases.gaussian([0, 1, 2, 64, 300, 3000], query_len=query_len)
    case.check(*run(case, partial_dtype, batch_invariant=batch_invariant), partial_dtype)


@pytest.mark.parametrize("case", [cases.gaussian([0, 65, 3000], dtype=torch.float16), cases.sink()], ids=lambda case: case.name)
def test_fp16(case: cases.Case) -> None:
    """Fault 14 in another type: unscaled, the small probabilities beside a sink round to 0."""
    case.check(*run(case, torch.float32), torch.float32)


@pytest.mark.parametrize("query_len", [1, 4])
def test_batch_invariance_is_what_makes_the_bits_a_rows_own(query_len: int) -> None:
    """Faults 18 and 20. The same row alone and in a batch: equal bits with it, and without it other ones, or this test would show nothing."""
    alone = cases.gaussian([3000], query_len=query_len)
    others = cases.gaussian([3000, *range(100, 4000, 300)], query_len=query_len)
    batch = replace(
        others,
        q=torch.cat([alone.q, others.q[query_len:]]),
        kv_cache=torch.cat([others.kv_cache, alone.kv_cache]),
        block_table=others.block_table.clone(),
    )
    pages = alone.block_table[0, :47]
    batch.block_table[0, :47] = pages + others.kv_cache.shape[0]
    for batch_invariant in (True, False):
        (out, lse), (row, row_lse) = (run(case, torch.bfloat16, batch_invariant=batch_invariant) for case in (batch, alone))
        same = torch.equal(out[:query_len], row) and torch.equal(lse[:query_len], row_lse)
        assert same == batch_invariant


def test_causal_tokens_on_several_ranks_need_the_lengths_of_all() -> None:
    """As for the kernels: this rank's lengths in their place would give an answer, and a wrong one."""
    _, (case, _) = cases.context_shards([300], 2, 1, query_len=2)
    arguments = case.q, case.kv_cache, case.block_table, case.seq_lens
    with pytest.raises(ValueError, match=r"^total_lens must be given for causal blocks of query tokens on several ranks, got None$"):
        decode(case.problem(torch.float32), *arguments, scale=case.scale, num_ranges=NUM_RANGES)
    with pytest.raises(ValueError, match=r"^total_lens must be given"):
        attention(*arguments, case.scale, query_len=2, context=case.context)
    attention(*arguments, case.scale, query_len=2, context=case.context, causal=False)


@pytest.mark.parametrize("heads", [1, 3, 12, 16, 64, 96, 128])
@pytest.mark.parametrize("query_len", [1, 2, 5, 16])
@pytest.mark.parametrize(("kv_dtype", "most"), [(torch.bfloat16, 64), (torch.float8_e4m3fn, 32)])
def test_row_tiles_hold_every_token_and_head(heads: int, query_len: int, kv_dtype: torch.dtype, most: int) -> None:
    problem = DecodeProblem(heads, 64, kv_dtype=kv_dtype, query_len=query_len)
    assert problem.tile_heads * problem.head_tiles >= heads and problem.tile_tokens * problem.token_tiles >= query_len
    assert problem.tile_heads * problem.tile_tokens <= problem.tile_rows <= most
    assert problem.row_tiles == problem.head_tiles * problem.token_tiles
    assert problem.tile_tokens == 1 or problem.head_tiles == 1, "a tile is whole tokens, or part of the heads of one"

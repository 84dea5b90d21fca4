"""Decode context parallelism: each rank's builder and layer on its shard of the keys, merged with vLLM's own code."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import HEADS, SCALE, cache_and_query, make_builder, make_impl, step

from dense_mla import reference
from dense_mla.problem import WHOLE_CONTEXT, ContextShard

PAGE = 16
WIDTH = 24  # pages of a request's whole context


@pytest.fixture
def rank_of(vllm_config, monkeypatch):
    """Makes this process one rank of a group, as vLLM's parallel state and its layer know it."""
    from vllm.distributed import parallel_state
    from vllm.v1.attention.ops.dcp import MLADCPManager

    layer = vllm_config.compilation_config.static_forward_context["layer"]
    layer.dcp_manager = MLADCPManager.__new__(MLADCPManager)
    layer.dcp_manager.init_kv_gather = lambda workspace, max_tokens: None

    def become(rank, world, interleave=1):
        monkeypatch.setattr(parallel_state, "_DCP", SimpleNamespace(world_size=world, rank_in_group=rank))
        monkeypatch.setattr(vllm_config.parallel_config, "decode_context_parallel_size", world)
        monkeypatch.setattr(vllm_config.parallel_config, "cp_kv_cache_interleave_size", interleave)
        return vllm_config

    return become


def shard_of(cache, table, seq_lens, shard):
    """The keys of one rank, in pages of its own: [pages, PAGE, 576]. NaN wherever it holds none."""
    pages = torch.full((len(seq_lens) * WIDTH + 1, PAGE, 576), torch.nan, dtype=cache.dtype)
    for row, seq_len in enumerate(seq_lens):
        keys = cache[table[row].long()].flatten(0, 1)[:seq_len]
        own = keys[[k for k in range(seq_len) if k // shard.interleave % shard.world == shard.rank]]
        pages[row * WIDTH + 1 : (row + 1) * WIDTH + 1].view(-1, 576)[: own.shape[0]] = own
    return pages


def decode_on(rank_of, shard, seq_lens, query_lens, cache, q, **how):
    """One rank's out, lse and metadata; `cache` is the whole context."""
    config = rank_of(shard.rank, shard.world, shard.interleave)
    local = [shard.held(n) for n in seq_lens]
    common = step(seq_lens, query_lens=query_lens, width=WIDTH, local_lens=local, **how)
    metadata = make_builder(config, PAGE).build(0, common)
    layer = make_impl(config)
    assert layer.need_to_return_lse_for_decode
    out, lse = layer.forward_mqa(q, shard_of(cache, common.block_table_tensor, seq_lens, shard), metadata, layer=None)
    return out, lse, metadata


def merged(parts, query_start_loc):
    """vLLM's combination of the ranks, whose kernels need a GPU: the masking of empty shards as it is, then its torch form of the merge."""
    from vllm.v1.attention.ops.dcp import _lse_weighted_combine, mask_dcp_empty_shards_

    for _, lse, metadata in parts:
        mask_dcp_empty_shards_(lse, metadata.decode.seq_lens, query_start_loc)
    return _lse_weighted_combine(torch.stack([out for out, *_ in parts]).float(), torch.stack([lse for _, lse, _ in parts]))


@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize("query_len", [1, 2, 4])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_merge_to_the_whole_answer(speculate, rank_of, prepared, no_workspace, world, query_len, interleave):
    """Faults 56, 57 and 60: natural-log FP32 LSE, contiguous, over all ranks' heads; local lengths for the keys and global ones for causality."""
    speculate(3)
    seq_lens, query_lens = [300, query_len, 64, 33], [query_len] * 4
    cache, q = cache_and_query(4 * WIDTH + 1, PAGE, 4 * query_len, pair=False, heads=HEADS * world)
    shards = [ContextShard(world, rank, interleave) for rank in range(world)]
    parts = [decode_on(rank_of, shard, seq_lens, query_lens, cache, q) for shard in shards]
    for out, lse, metadata in parts:
        assert lse.dtype == torch.float32 and lse.is_contiguous() and lse.shape == out.shape[:2] == (4 * query_len, HEADS * world)
        assert out.isfinite().all() and metadata.decode.decoder.problem.num_heads == HEADS * world
    common = step(seq_lens, query_lens=query_lens, width=WIDTH)
    exact, exact_lse = reference.attention(q, cache, common.block_table_tensor, common.seq_lens, SCALE, query_len=query_len)
    assert reference.relative_l2(merged(parts, common.query_start_loc), exact) < 5e-3
    natural = torch.stack([lse for _, lse, _ in parts]).logsumexp(0)
    assert torch.allclose(natural.double(), exact_lse, atol=1e-2)


def test_sums_of_two_and_eight(rank_of, prepared, no_workspace):
    """Fault 56 as reported: 2 keys of value 0 and 8 keys of value 1, all logits 0. Natural logarithms give 0.8, a mixed base 0.7233."""
    q = torch.zeros(1, HEADS * 2, 576, dtype=torch.bfloat16)
    parts = []
    for rank, (keys, value) in enumerate([(2, 0.0), (8, 1.0)]):
        config = rank_of(rank, 2)
        metadata = make_builder(config, PAGE).build(0, step([10], width=WIDTH, local_lens=[keys]))
        cache = torch.full((WIDTH + 1, PAGE, 576), value, dtype=torch.bfloat16)
        parts.append((*make_impl(config).forward_mqa(q, cache, metadata, layer=None), metadata))
    assert [float(lse[0, 0]) for _, lse, _ in parts] == pytest.approx([math.log(2), math.log(8)], abs=1e-5)
    assert merged(parts, torch.tensor([0, 1])).mean().item() == pytest.approx(0.8, abs=1e-3)


@pytest.mark.parametrize("query_len", [1, 2])
def test_ranks_without_keys(speculate, rank_of, prepared, no_workspace, query_len):
    """Fault 60: 3 keys on 8 ranks. Those that hold none answer 0 and -inf, and so do padded requests."""
    speculate(1)
    cache, q = cache_and_query(2 * WIDTH + 1, PAGE, 2 * query_len, pair=False, heads=HEADS * 8)
    how = {"num_tokens": 2 * query_len}
    parts = [decode_on(rank_of, ContextShard(8, rank, 1), [3, 0], [query_len, 0], cache, q, **how) for rank in range(8)]
    for out, lse, _ in parts[3:]:
        assert not out.any() and (lse == -math.inf).all()
    answer = merged(parts, torch.tensor([0, query_len, query_len]))
    common = step([3, 0], query_lens=[query_len, 0], width=WIDTH)
    exact, _ = reference.attention(q, cache, common.block_table_tensor, common.seq_lens, SCALE, query_len=query_len)
    assert answer.isfinite().all() and reference.relative_l2(answer, exact) < 5e-3


def test_blocks_that_see_ahead_over_ranks(speculate, rank_of, prepared, no_workspace):
    """A row sees all keys of every rank: nothing of the other ranks is needed before the merge."""
    config = speculate(3)
    config.compilation_config.static_forward_context["layer"].non_causal_multi_token_decode = True
    cache, q = cache_and_query(2 * WIDTH + 1, PAGE, 8, pair=False, heads=HEADS * 2)
    parts = []
    for rank in range(2):
        shard = ContextShard(2, rank)
        common = step([100, 37], query_lens=[4, 4], width=WIDTH, local_lens=[shard.held(100), shard.held(37)])
        common.causal = False
        metadata = make_builder(rank_of(rank, 2), PAGE).build(0, common)
        assert metadata.decode.total_lens is None
        pages = shard_of(cache, common.block_table_tensor, [100, 37], shard)
        parts.append((*make_impl(config).forward_mqa(q, pages, metadata, layer=None), metadata))
    exact, _ = reference.attention(q, cache, common.block_table_tensor, common.seq_lens, SCALE, query_len=4, causal=False)
    assert reference.relative_l2(merged(parts, common.query_start_loc), exact) < 5e-3


def test_ranks_share_the_kernels_of_one_token(speculate, rank_of, prepared):
    """They are compiled once on each; more tokens than one make them a rank's own."""
    speculate(2)
    for rank in range(2):
        make_builder(rank_of(rank, 2, interleave=16))
    problems = [decoder.problem for decoder in prepared]
    assert [problem.query_len for problem in problems] == [1, 2, 3, 1, 2, 3]
    assert problems[0] == problems[3] and problems[0].context == WHOLE_CONTEXT
    assert problems[1].context == ContextShard(2, 0, 16) and problems[4].context == ContextShard(2, 1, 16)
    assert all(problem.return_lse for problem in problems)


def test_workspace_is_sized_for_the_heads_of_all_ranks(rank_of, prepared, workspace):
    """Fault 36: 12 heads on each of 8 ranks are 96 rows of one request."""
    config = rank_of(0, 8)
    layer, builder = make_impl(config), make_builder(config)
    reserved = workspace._workspace_size_bytes(workspace._current_workspaces[0])
    assert prepared[0].problem.num_heads == 96 and reserved == builder._prepared[prepared[0].problem].buckets.largest.total_bytes
    workspace.lock()
    cache, q = cache_and_query(12 * WIDTH + 1, 64, 12, pair=False, heads=96)
    out, lse = layer.forward_mqa(q, cache, builder.build(0, step([90] * 12, local_lens=[12] * 12)), layer=None)
    assert out.shape == (12, 96, 512) and lse.shape == (12, 96)


@pytest.mark.parametrize(("max_model_len", "interleave", "local"), [(4096, 1, 512), (4100, 1, 513), (4100, 16, 528)])
def test_bound_of_a_ranks_keys(rank_of, prepared, monkeypatch, max_model_len, interleave, local):
    """vLLM's own bound runs past the model's length by the tokens that are not there yet."""
    config = rank_of(0, 8, interleave)
    monkeypatch.setattr(config.model_config, "max_model_len", max_model_len)
    metadata = make_builder(config).build(0, step([9], local_lens=[2], max_seq_len=max_model_len + 500))
    assert metadata.decode.max_seq_len == local


def test_draft_steps_over_ranks_are_planned_on_the_host(rank_of, prepared):
    assert not make_builder(rank_of(1, 2)).supports_draft_decode_metadata_update


def test_too_many_heads_over_all_ranks(rank_of, prepared, no_workspace):
    """Refused when vLLM selects and when a builder is made: 12 heads on each of 12 ranks are 144."""
    from test_selection import reasons
    from vllm.config import set_current_vllm_config

    config = rank_of(0, 12)
    message = "a rank must attend with at most 128 query heads, got 12 x 12 ranks of decode context parallelism"
    with set_current_vllm_config(config):
        assert reasons(use_dcp=True) == [message]
    with pytest.raises(ValueError, match=f"^{message}$"):
        make_builder(config)


def test_vllm_accepts_the_layer(rank_of, no_workspace, speculate):
    """vLLM's own check of every layer before it starts with context ranks and speculation, runs of several tokens included."""
    from vllm.v1.worker.cp_utils import check_attention_cp_compatibility

    speculate(2)
    config = rank_of(1, 2, interleave=16)
    layer = config.compilation_config.static_forward_context["layer"]
    layer.impl = make_impl(config)
    check_attention_cp_compatibility(config)
    assert layer.impl.dcp_world_size == 2

"""VLLM_BATCH_INVARIANT: the kernels that are prepared, and a request's bits alone and among others."""

from __future__ import annotations

import pytest
import torch
from conftest import MAX_NUM_SEQS, cache_and_query, make_builder, make_impl, prepared_buckets, step

WIDTH = 80  # pages of 64: long enough for several pieces


@pytest.fixture
def invariant(monkeypatch):
    from vllm import envs

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert envs.VLLM_BATCH_INVARIANT


def answers(config, builder, seq_lens, cache, q):
    metadata = builder.build(0, step(seq_lens, width=WIDTH))
    return make_impl(config).forward_mqa(q, cache, metadata, layer=None)[0]


def test_the_flag_reaches_every_kernel(speculate, prepared, invariant):
    make_builder(speculate(2))
    assert len(prepared) == 3 and all(decoder.problem.batch_invariant for decoder in prepared)


def test_without_the_flag(vllm_config, prepared):
    make_builder(vllm_config)
    assert not prepared[0].problem.batch_invariant


@pytest.mark.parametrize("partial_dtype", ["bf16", "fp32"])
def test_a_requests_bits_do_not_depend_on_the_batch(vllm_config, prepared, no_workspace, invariant, monkeypatch, partial_dtype):
    """5,000 keys, in pieces of its own, alone and beside others, in any bucket and with padded requests."""
    from vllm_dense_mla.registration import PARTIAL_DTYPE_VARIABLE

    monkeypatch.setenv(PARTIAL_DTYPE_VARIABLE, partial_dtype)
    cache, q = cache_and_query(5 * WIDTH + 1, 64, 5, pair=False)
    builder = make_builder(vllm_config)
    alone = answers(vllm_config, builder, [5000], cache, q[:1])
    for others in ([1, 0, 0], [5000, 5000], [64, 3, 2000, 700]):
        together = answers(vllm_config, builder, [5000, *others], cache, q[: 1 + len(others)])
        assert torch.equal(together[0], alone[0])


def test_workspace_holds_every_piece(vllm_config, prepared, workspace, invariant):
    make_impl(vllm_config)
    largest = prepared_buckets(make_builder(vllm_config))[1].largest
    assert largest.slots == 32 * MAX_NUM_SEQS
    assert workspace._workspace_size_bytes(workspace._current_workspaces[0]) == largest.total_bytes


def test_the_log_says_it(vllm_config, prepared, log, invariant):
    make_builder(vllm_config)
    assert log[0].getMessage().endswith("bytes, batch invariant")


@pytest.mark.parametrize("tokens", [0, 2])
def test_the_log_says_where_it_ends(vllm_config, speculate, prepared, log, invariant, tokens):
    """With speculation, which requests are decoded together is vLLM's choice of the whole step."""
    make_builder(speculate(tokens) if tokens else vllm_config)
    warnings = [record.getMessage() for record in log if record.levelname == "WARNING" and "speculative decoding" in record.getMessage()]
    assert len(warnings) == (tokens > 0)


def test_with_speculation_the_other_requests_decide_how_one_is_computed(speculate, prepared, invariant):
    """What that warning says: a request of one token is decoded alone, and verified as prefill beside one of three."""
    builder = make_builder(speculate(2))
    alone = builder.build(0, step([300], query_lens=[1]))
    beside = builder.build(0, step([90, 300], query_lens=[3, 1]))
    assert (alone.num_decodes, alone.num_prefills, beside.num_decodes, beside.num_prefills) == (1, 0, 1, 1)

"""Several query tokens a request, through vLLM's builder and our layer: verification, its padding, its draft steps, and its limit."""

from __future__ import annotations

import pytest
import torch
from conftest import HEADS, MAX_MODEL_LEN, MAX_NUM_SEQS, SCALE, SM_COUNT, cache_and_query, make_builder, make_impl, prepared_buckets, step

from dense_mla import reference
from vllm_dense_mla.backend import DenseMLABackend
from vllm_dense_mla.metadata import uniform_query_len

WIDTH = 8  # pages of a request in `step`


def decoded(vllm_config, metadata, pair=False):
    """What the layer makes of a decode step, and the queries and keys that it made it of."""
    rows = metadata.num_decode_tokens
    cache, q = cache_and_query(metadata.num_decodes * WIDTH + 1, 64, rows, pair)
    out, lse = make_impl(vllm_config).forward_mqa(q, cache, metadata, layer=None)
    assert lse is None
    return out, q, cache


def exact(metadata, q, cache, **how):
    decode = metadata.decode
    return reference.attention(q, cache, decode.block_table, decode.seq_lens, SCALE, query_len=decode.query_len, **how)[0]


@pytest.mark.parametrize("query_len", range(2, 9))
def test_verification_sees_no_later_token(speculate, prepared, no_workspace, query_len):
    """Fault 66, query lengths that a kernel gets wrong: every row of a uniform batch against FP64, each with its own number of keys."""
    config = speculate(query_len - 1)
    metadata = make_builder(config).build(0, step([300, query_len, 64, 100], query_lens=[query_len] * 4))
    assert (metadata.num_decodes, metadata.num_prefills, metadata.decode.query_len) == (4, 0, query_len)
    out, q, cache = decoded(config, metadata, pair=query_len % 2 == 0)
    assert reference.relative_l2(out, exact(metadata, q, cache)) < 5e-3
    # The reference itself: the last token sees what the first does not.
    assert reference.relative_l2(exact(metadata, q, cache, causal=False), exact(metadata, q, cache)) > 5e-3


def test_query_rows_share_their_requests_page_table(speculate, prepared, no_workspace):
    """Fault 64, query rows that index the block table: 12 requests x 3 tokens on a table of 12 rows, all full of keys."""
    config = speculate(2)
    metadata = make_builder(config).build(0, step([500] * MAX_NUM_SEQS, query_lens=[3] * MAX_NUM_SEQS))
    out, q, cache = decoded(config, metadata)
    assert metadata.decode.block_table.shape == (MAX_NUM_SEQS, WIDTH) and out.shape == (3 * MAX_NUM_SEQS, HEADS, 512)
    assert reference.relative_l2(out, exact(metadata, q, cache)) < 5e-3


def test_every_query_length_is_prepared_once_and_before_the_first_step(speculate, prepared):
    """Fault 73: what vLLM may hand over later compiles nothing. Requests without a draft bring one token, prompts' ends any number."""
    config = speculate(4)
    builder = make_builder(config)
    assert [decoder.problem.query_len for decoder in prepared] == [1, 2, 3, 4, 5]
    assert len({decoder.problem for decoder in prepared}) == 5 and all(decoder.max_requests == MAX_NUM_SEQS for decoder in prepared)
    assert builder.reorder_batch_threshold == 5
    for query_len in (1, 5, 2, 1, 4, 3, 5):
        decode = builder.build(0, step([90, 40], query_lens=[query_len] * 2)).decode
        assert decode.decoder is prepared[query_len - 1] and decode.query_len == query_len
        assert decode.bucket == prepared_buckets(builder)[query_len].bucket_for(2)
    assert len(prepared) == 5


@pytest.mark.parametrize("query_len", [1, 3])
def test_a_query_length_keeps_its_schedules_address(speculate, prepared, query_len):
    """A graph holds it. Steps of other lengths in between do not touch the buffer."""
    builder = make_builder(speculate(2))
    schedule = builder.build(0, step([90, 40], query_lens=[query_len] * 2)).decode.schedule
    before = schedule.clone()
    for other in {1, 2, 3} - {query_len}:
        builder.build(0, step([70, 30], query_lens=[other] * 2))
    assert torch.equal(schedule, before)
    assert builder.build(0, step([9], query_lens=[query_len])).decode.schedule.data_ptr() == schedule.data_ptr()


@pytest.mark.parametrize(
    ("query_lens", "query_len", "decodes"),
    [([1, 4, 4, 2], 1, 1), ([4, 4, 2, 1], 4, 2), ([1, 1, 4, 90], 1, 2), ([4, 4, 4, 90], 4, 3), ([2, 1, 1, 1], 2, 1)],
)
def test_mixed_query_lengths_do_not_reach_one_launch(speculate, prepared, query_lens, query_len, decodes):
    """Fault 66: what differs from the first request is prefill, whatever comes after it."""
    builder = make_builder(speculate(3))
    metadata = builder.build(0, step([200, 100, 50, 99], query_lens=query_lens))
    assert (metadata.num_decodes, metadata.num_prefills, metadata.num_decode_tokens) == (decodes, 4 - decodes, decodes * query_len)
    assert (metadata.decode.query_len, metadata.decode.request_lens.shape) == (query_len, (decodes,))
    assert prepared[query_len - 1].scheduled == [[200, 100, 50, 99][:decodes]]
    assert sum(len(decoder.scheduled) for decoder in prepared) == 1


@pytest.mark.parametrize(
    ("query_lens", "prefilling", "asynchronous", "context"),
    [
        ([4, 4, 2], [False] * 3, True, [100]),  # a draft cut short: by the token budget, or by the longest context
        ([2, 4, 4], [False] * 3, True, [150, 98]),  # a micro-batch that begins within a request
        ([4, 4, 2], None, True, [100]),
        ([4, 90, 4], [False, True, False], True, [64, 98]),  # behind a prompt
        ([4, 4, 2], [False, False, True], True, [103]),  # a prompt's end: its length on the host is exact
        ([4, 4, 90], [False, False, True], True, [15]),
        ([4, 4, 2], [False] * 3, False, [103]),  # the host knows what was rejected
    ],
)
def test_a_verification_that_becomes_prefill_sees_no_rejected_draft(speculate, prepared, query_lens, prefilling, asynchronous, context):
    """Its lengths on the host count every drafted token of the step before; those on the device do not."""
    config = speculate(3)
    config.scheduler_config.async_scheduling = asynchronous
    common = step([204, 154, 102], query_lens=query_lens)
    common.seq_lens_cpu_upper_bound = common.seq_lens + 3
    common.is_prefilling = None if prefilling is None else torch.tensor(prefilling)
    metadata = make_builder(config).build(0, common)
    assert metadata.prefill.chunked_context.context_lens_list == context


@pytest.mark.parametrize(
    ("query_lens", "prefilling"), [([4, 4, 4], [False] * 3), ([4, 4, 0], [False] * 3), ([4, 4, 90], [False, False, True]), ([90, 80, 90], [True] * 3)]
)
def test_no_other_step_waits_for_the_device(speculate, prepared, monkeypatch, query_lens, prefilling):
    """Verifications, a graph's padding behind them, prompts: what reads a length on the device fails the test."""
    config = speculate(3)
    config.scheduler_config.async_scheduling = True
    builder = make_builder(config)
    common = step([204, 154, 102], query_lens=query_lens, num_tokens=12 if 0 in query_lens else None)
    common.is_prefilling = torch.tensor(prefilling)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: pytest.fail("read from the device"))
    builder.build(0, common)


def test_longer_than_a_verification_is_prefill(speculate, prepared):
    metadata = make_builder(speculate(3)).build(0, step([90, 80], query_lens=[5, 5]))
    assert metadata.decode is None and metadata.num_prefills == 2


def test_padded_requests_of_a_graph(speculate, prepared, no_workspace):
    """vLLM pads a graph of 4 x 3 rows: two requests, then two without tokens and keys, whose rows still count."""
    config = speculate(2)
    metadata = make_builder(config).build(0, step([70, 40, 0, 0], query_lens=[3, 3, 0, 0], num_tokens=12))
    decode = metadata.decode
    assert (decode.query_len, decode.request_lens.tolist(), decode.bucket.requests) == (3, [70, 40, 0, 0], 6)
    out, q, cache = decoded(config, metadata)
    assert out.shape[0] == 12 and not out[6:].any() and reference.relative_l2(out, exact(metadata, q, cache)) < 5e-3


def test_padded_requests_without_rows(speculate, prepared, no_workspace):
    """Outside of graphs a draft step's padded requests have no rows: two rows of four requests are not half a query token each."""
    config = speculate(2)
    metadata = make_builder(config).build(0, step([70, 40, 0, 0], query_lens=[1, 1, 0, 0]))
    assert (metadata.num_decodes, metadata.decode.query_len, metadata.decode.request_lens.tolist()) == (4, 1, [70, 40])
    out, *_ = decoded(config, metadata)
    assert out.shape[0] == 2 and prepared[0].runs[0]["seq_lens"].tolist() == [70, 40]


def test_padding_of_a_rejected_draft_counts_in_the_length(speculate, prepared, no_workspace):
    """A request with fewer drafts than the others is padded to their number: its padded tokens have keys, and rows that nobody reads."""
    config = speculate(3)
    metadata = make_builder(config).build(0, step([104, 102], query_lens=[4, 4]))
    out, q, cache = decoded(config, metadata)
    assert reference.relative_l2(out, exact(metadata, q, cache)) < 5e-3


def test_first_step_of_a_capture(speculate, prepared, no_workspace):
    """As long as the tokens themselves, on the null page, with the model's length as bound."""
    config = speculate(3)
    common = step([4] * 6, query_lens=[4] * 6, max_seq_len=MAX_MODEL_LEN, width=MAX_MODEL_LEN // 64)
    common.block_table_tensor.zero_()
    metadata = make_builder(config).build_for_cudagraph_capture(common)
    assert (metadata.decode.query_len, metadata.decode.max_seq_len) == (4, MAX_MODEL_LEN)
    out, *_ = decoded(config, metadata)
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("starts", "tokens", "expected"),
    [
        ([0, 4, 8], 8, (4, 2)),
        ([0, 4, 8, 8], 12, (4, 3)),
        ([0, 1, 2, 2, 2], 2, (1, 2)),
        ([0, 0, 0], 6, (3, 2)),  # a micro-batch of a graph that holds nothing but padding
        ([0, 0, 0], 0, (1, 0)),
    ],
)
def test_query_length_of_a_batch(starts, tokens, expected):
    assert uniform_query_len(torch.tensor(starts, dtype=torch.int32), tokens) == expected


@pytest.mark.parametrize(("starts", "tokens"), [([0, 4, 7], 7), ([0, 4, 8], 12)])
def test_batches_that_are_not_uniform_are_refused(starts, tokens):
    message = f"DENSE_MLA decodes requests of one query length, got {tokens} query tokens of 2 requests, 4 of the first"
    with pytest.raises(ValueError, match=f"^{message}$"):
        uniform_query_len(torch.tensor(starts, dtype=torch.int32), tokens)


def test_a_query_length_that_is_not_prepared_is_refused(vllm_config, prepared):
    lens, starts = torch.tensor([8, 8], dtype=torch.int32), torch.tensor([0, 4, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^DENSE_MLA decodes 1 to 1 query tokens of each request here, got 4$"):
        make_builder(vllm_config)._build_decode(
            block_table_tensor=lens[:, None],
            seq_lens_device=lens,
            max_seq_len=8,
            query_start_loc_cpu=starts,
            query_start_loc_device=starts,
            num_decode_tokens=8,
            max_query_len=4,
            dcp_tot_seq_lens_device=None,
        )
    assert prepared[0].scheduled == []


def test_draft_steps_plan_again_on_the_device(speculate, prepared, no_workspace):
    """vLLM records the update in the draft's graph, between two of its steps: the lengths grow in place, and the schedule with them."""
    config = speculate(2)
    builder = make_builder(config)
    assert builder.supports_draft_decode_metadata_update
    common = step([70, 40])
    metadata = builder.build(0, common)
    address = metadata.decode.schedule.data_ptr()
    common.seq_lens += 1
    builder.update_draft_decode_metadata(metadata)
    assert prepared[0].scheduled == [[70, 40], [71, 41]] and metadata.decode.schedule.data_ptr() == address
    out, q, cache = decoded(config, metadata)
    assert reference.relative_l2(out, exact(metadata, q, cache)) < 5e-3


def non_causal(config, query_lens, seq_lens, **how):
    common = step(seq_lens, query_lens=query_lens, **how)
    common.causal = False
    config.compilation_config.static_forward_context["layer"].non_causal_multi_token_decode = True
    return common


@pytest.mark.parametrize("query_len", [2, 4])
def test_draft_blocks_that_see_ahead(speculate, prepared, no_workspace, query_len):
    """Every token of a block sees all of it; the same builder still decodes causal steps."""
    config = speculate(3)
    common = non_causal(config, [query_len, query_len, 0], [70, 300, 0], num_tokens=3 * query_len)
    builder = make_builder(config)
    metadata = builder.build(0, common)
    assert not metadata.causal and not metadata.decode.decoder.problem.causal
    out, q, cache = decoded(config, metadata)
    assert reference.relative_l2(out, exact(metadata, q, cache, causal=False)) < 5e-3
    after = builder.build(0, step([70, 300], query_lens=[query_len] * 2))
    assert after.decode.decoder.problem.causal and after.decode.schedule.data_ptr() != metadata.decode.schedule.data_ptr()
    # One query token sees all keys either way: 1, and 2 to 4 of both kinds.
    assert len(prepared) == 7


def test_blocks_that_see_ahead_take_a_layer_that_declares_them(speculate, prepared):
    common = step([70, 40], query_lens=[4, 4])
    common.causal = False
    with pytest.raises(ValueError, match="Non-causal"):
        make_builder(speculate(3)).build(0, common)


def test_the_longest_query(speculate, prepared, no_workspace, monkeypatch):
    """16 query tokens are served; 17 are refused when vLLM selects, when a layer is made and when a builder is."""
    from test_selection import reasons
    from vllm.config import set_current_vllm_config

    config = speculate(15)
    make_impl(config)
    make_builder(config)
    assert len(prepared) == 16
    with set_current_vllm_config(config):
        assert reasons() == []
    config = speculate(16)
    message = "a request may bring at most 16 query tokens to a decode step, got 17: num_speculative_tokens must be at most 15"
    with set_current_vllm_config(config):
        assert reasons() == [message]
    with pytest.raises(ValueError, match=f"^{message}$"):
        make_builder(config)


def test_a_layer_of_too_long_queries(speculate, workspace):
    with pytest.raises(ValueError, match=r"num_speculative_tokens must be at most 15$"):
        make_impl(speculate(16))


def test_workspace_of_the_longest_query_is_reserved(speculate, prepared, workspace):
    """Faults 33 and 34: verification of the largest batch after one-token steps, on a locked workspace, at one address."""
    config = speculate(4)
    layer, builder = make_impl(config), make_builder(config)
    reserved = workspace._workspace_size_bytes(workspace._current_workspaces[0])
    assert reserved == max(table.largest.total_bytes for table in prepared_buckets(builder).values())
    assert reserved == prepared_buckets(builder)[5].largest.total_bytes
    workspace.lock()
    cache, _ = cache_and_query(MAX_NUM_SEQS * WIDTH + 1, 64, 1, pair=False)
    addresses = set()
    for requests, query_len in ((1, 1), (MAX_NUM_SEQS, 5), (3, 2), (MAX_NUM_SEQS, 1)):
        metadata = builder.build(0, step([9] * requests, query_lens=[query_len] * requests))
        layer.forward_mqa(torch.zeros(requests * query_len, HEADS, 576, dtype=torch.bfloat16), cache, metadata, layer=None)
        addresses.add(metadata.decode.decoder.runs[-1]["workspace"].data_ptr())
    assert len(addresses) == 1


def test_graphs_hold_verifications(vllm_config):
    from vllm.model_executor.layers.attention.mla_attention import QueryLenSupport
    from vllm.v1.attention.backend import AttentionCGSupport

    builder = DenseMLABackend.get_builder_cls()
    assert builder.get_cudagraph_support(vllm_config, None) == AttentionCGSupport.UNIFORM_BATCH
    assert builder.query_len_support == QueryLenSupport.UNIFORM
    # vLLM recognises these by name and would share one workspace among builders.
    assert not hasattr(builder, "_get_workspace_buffer") and not hasattr(builder, "set_workspace_buffer")


def test_sm_count_is_what_the_table_is_made_for(speculate, prepared, log):
    config = speculate(1)
    builder = make_builder(config)
    line, _, table = log
    assert "1 to 2 query tokens" in line.getMessage() and builder._steps.workspace(torch.bfloat16, SM_COUNT).largest.total_bytes > 0
    assert table.getMessage().endswith(str(builder._steps.workspace(torch.bfloat16, SM_COUNT)))

"""Dual batch overlap: a step in two micro-batches, cut by vLLM's own code, each with a builder of its own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import HEADS, MAX_MODEL_LEN, SCALE, cache_and_query, make_builder, make_impl, step

from dense_mla import reference

WIDTH = 8  # pages of a request in `step`
LENS = [300, 1, 70, 64, 5, 130, 12, 90]


def runner_batch(seq_lens, padded_requests, padded_tokens):
    """One-token requests as vLLM's current runner holds them, padded for a graph or to the tokens of another data-parallel rank."""
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

    real = len(seq_lens)
    batch = InputBatch.make_dummy(real, real, InputBuffers(16, 16, torch.device("cpu")))
    padding = padded_requests - real
    starts = np.array([*range(real + 1), *[real] * padding], dtype=np.int32)
    lens = torch.tensor([*seq_lens, *[0] * padding], dtype=torch.int32)
    return replace(
        batch,
        num_reqs_after_padding=padded_requests,
        num_tokens_after_padding=padded_tokens,
        query_start_loc=torch.from_numpy(starts),
        query_start_loc_np=starts,
        seq_lens=lens,
        seq_lens_cpu_upper_bound=lens,
    )


def micro_batches(batch, mode, group):
    """The metadata of each micro-batch, and the tokens that it has of the batch's."""
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState
    from vllm.v1.worker.gpu.ubatch_utils import _slice_input_batch, create_ubatch_slices

    state = SimpleNamespace(max_model_len=MAX_MODEL_LEN, supports_mm_inputs=False)
    table = torch.arange(16 * WIDTH, dtype=torch.int32).view(16, WIDTH) + 1
    config = SimpleNamespace(kv_cache_groups=[None])
    for index, part in enumerate(create_ubatch_slices(batch, 2)):
        requests = part.request_slice
        buffers = torch.zeros(17, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
        ubatch = _slice_input_batch(batch, part, *buffers)
        slots = torch.zeros(1, part.num_tokens, dtype=torch.int64)
        metadata = DefaultModelState.prepare_attn(state, ubatch, mode, (table[requests],), slots, [[group]], config, ubatch_idx=index)
        yield part.token_slice, metadata["layer"]


@pytest.fixture
def group(vllm_config, prepared):
    """A KV-cache group of one layer, whose builders vLLM makes."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec
    from vllm.v1.worker.utils import AttentionGroup

    from vllm_dense_mla.backend import DenseMLABackend

    spec = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    group = AttentionGroup(DenseMLABackend, ["layer"], spec, 0)
    group.create_metadata_builders(vllm_config, torch.device("cpu"), 64, num_metadata_builders=2)
    return group


@pytest.mark.parametrize(
    ("real", "requests", "tokens"), [(8, 8, 8), (7, 8, 8), (5, 8, 8), (4, 8, 8), (2, 4, 4), (1, 2, 2)], ids=lambda number: str(number)
)
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_micro_batches_answer_as_the_whole_batch(vllm_config, group, no_workspace, graph, real, requests, tokens):
    """Down to a second one of nothing but padding, which vLLM hands a request that it has no token of."""
    from vllm.config import CUDAGraphMode

    lens = LENS[:real]
    batch = runner_batch(lens, requests if graph else real, tokens)
    cache, q = cache_and_query(16 * WIDTH + 1, 64, tokens, pair=False)
    layer, out = make_impl(vllm_config), torch.full((tokens, HEADS, 512), torch.nan, dtype=torch.bfloat16)
    for part, metadata in micro_batches(batch, CUDAGraphMode.FULL if graph else CUDAGraphMode.NONE, group):
        assert metadata.num_prefills == 0
        rows = slice(part.start, part.start + metadata.num_decode_tokens)
        if metadata.num_decode_tokens:
            out[rows], _ = layer.forward_mqa(q[rows], cache, metadata, layer=None)
    whole = step(lens)
    exact, _ = reference.attention(q[:real], cache, whole.block_table_tensor, whole.seq_lens, SCALE)
    assert reference.relative_l2(out[:real], exact) < 5e-3


def split(query_len, requests):
    """A verification step in two, as the runner before the current one cuts it: wherever half of the tokens ends."""
    from vllm.v1.worker.ubatch_utils import maybe_create_ubatch_slices, split_attn_metadata

    tokens = np.full(requests, query_len, dtype=np.int32)
    slices, _ = maybe_create_ubatch_slices(True, tokens, query_len * requests, requests, 2)
    common = step([query_len] * requests, query_lens=[query_len] * requests, max_seq_len=MAX_MODEL_LEN, width=MAX_MODEL_LEN // 64)
    return split_attn_metadata(slices, common)


def test_a_graph_that_cuts_a_request_in_two_is_refused(speculate, prepared, monkeypatch):
    """11 requests of 3 tokens end one micro-batch with 1 token. vLLM makes what differs from the first request prefill, and a graph of it
    would be replayed with the keys that the dummy requests had: none."""
    config = speculate(2)
    monkeypatch.setattr(config.parallel_config, "enable_dbo", True)
    builder = make_builder(config)
    for part, lens in zip(split(3, 11), ("3, 3, 3, 3, 3, 1", "2, 3, 3, 3, 3, 3"), strict=True):
        message = f"^DENSE_MLA decodes requests of one query length in a full CUDA graph, got {lens}: .* must be multiples of 6$"
        with pytest.raises(ValueError, match=message):
            builder.build_for_cudagraph_capture(part)
        # Without a graph the rest goes through prefill, with its own keys.
        assert builder.build(0, part).num_prefills > 0


def test_graphs_of_whole_requests_are_taken(speculate, prepared):
    builder = make_builder(speculate(2))
    for part in split(3, 12):
        metadata = builder.build_for_cudagraph_capture(part)
        assert (metadata.num_decodes, metadata.decode.query_len) == (6, 3)

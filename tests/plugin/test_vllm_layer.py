"""vLLM's own MLA layer around ours, without its weights' loading and its prefill: what it hands over and what it does with the answer."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import HEADS, MAX_NUM_SEQS, SCALE, cache_and_query, make_builder, make_impl, step

from dense_mla import reference

WIDTH = 8
NOPE, ROPE, V = 128, 64, 128


def make_layer(vllm_config):
    """A layer as it is once its weights are absorbed. W_UK_T [heads, 128, 512] leads a query to the latent keys, W_UV [heads, 512, 128] back."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    generator = torch.Generator().manual_seed(5)
    off = dict.fromkeys(("use_pcp", "is_aiter_triton_fp4_bmm_enabled", "is_aiter_triton_fp8_bmm_enabled", "is_amx_bmm_enabled"), False)
    layer = SimpleNamespace(
        impl=make_impl(vllm_config),
        num_heads=HEADS,
        kv_lora_rank=512,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=V,
        kv_cache_dtype="auto",
        q_pad_num_heads=None,
        prefill_backend=None,
        chunked_prefill_workspace_size=64,
        W_UK_T=(torch.randn(HEADS, NOPE, 512, generator=generator) * NOPE**-0.5).bfloat16(),
        W_UV=(torch.randn(HEADS, 512, V, generator=generator) * 512**-0.5).bfloat16(),
        **off,
    )
    layer._v_up_proj = partial(MLAAttention._v_up_proj, layer)
    layer.forward_impl = partial(MLAAttention.forward_impl, layer)
    return layer


def query(rows):
    """[rows, heads, 192], part of a wider projection as vLLM's layers have it."""
    return torch.randn(rows, HEADS, NOPE + ROPE, generator=torch.Generator().manual_seed(rows)).bfloat16()


@pytest.mark.parametrize("query_len", [1, 3])
def test_a_step_through_vllms_layer(speculate, prepared, workspace, query_len):
    """Absorbed query, decode and up-projection against attention in FP64; a graph's padded rows, and rows past the step, do no harm."""
    config = speculate(2)
    layer, builder = make_layer(config), make_builder(config)
    workspace.lock()
    lens, rows = [300, 70, 0], 3 * query_len
    metadata = builder.build(0, step(lens, query_lens=[query_len, query_len, 0], num_tokens=rows))
    cache, _ = cache_and_query(3 * WIDTH + 1, 64, 1, pair=False)
    q, output = query(rows + 2), torch.full((rows + 2, HEADS * V), torch.nan, dtype=torch.bfloat16)
    keys = torch.zeros(rows + 2, 512), torch.zeros(rows + 2, ROPE)
    assert layer.forward_impl(q, *keys, cache, metadata, output=output) is output
    assert output[rows:].isnan().all() and not output[2 * query_len : rows].any()
    latent = torch.bmm(q[:rows, :, :NOPE].transpose(0, 1), layer.W_UK_T).transpose(0, 1)
    absorbed = torch.cat((latent, q[:rows, :, NOPE:]), dim=-1)
    decode = metadata.decode
    exact, _ = reference.attention(absorbed, cache, decode.block_table, decode.seq_lens, SCALE, query_len=query_len)
    exact = torch.einsum("rhl,hlv->rhv", exact, layer.W_UV.double()).flatten(1)
    assert reference.relative_l2(output[:rows], exact) < 1e-2
    (run,) = decode.decoder.runs
    assert [part.shape for part in run["q"]] == [(rows, HEADS, 512), (rows, HEADS, ROPE)]


def test_the_profile_run_sets_the_workspace_aside(vllm_config, workspace):
    """Without metadata, before vLLM counts what memory is left for keys: as much as the largest batch will ask for, in each micro-batch."""
    from vllm.v1.worker import workspace as module

    layer, rows = make_layer(vllm_config), 4
    keys = torch.zeros(rows, 512), torch.zeros(rows, ROPE)
    for micro_batch in range(2):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(module, "dbo_current_ubatch_id", lambda micro_batch=micro_batch: micro_batch)
            output = layer.forward_impl(query(rows), *keys, torch.tensor([]), None, output=torch.full((rows, HEADS * V), torch.nan))
        assert not output.any()
    largest = layer.impl._steps.workspace(torch.bfloat16, 132).largest
    assert largest.requests == MAX_NUM_SEQS
    assert [workspace._workspace_size_bytes(arena) for arena in workspace._current_workspaces] == [largest.total_bytes] * 2

"""KV caches of other elements than BF16: models of FP16, and E4M3 with its one scale."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from conftest import HEADS, SCALE, cache_and_query, make_builder, make_impl, step
from test_selection import reasons

from dense_mla import reference
from dense_mla.arch import ARCHITECTURES
from vllm_dense_mla import cache_dtypes

E4M3 = torch.float8_e4m3fn


def layer_with(k_scale, **others):
    return SimpleNamespace(_k_scale=None if k_scale is None else torch.tensor(k_scale, dtype=torch.float32), **others)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "float16"])
def test_decode_of_a_float16_model(vllm_config, prepared, no_workspace, monkeypatch, kv_cache_dtype):
    monkeypatch.setattr(vllm_config.model_config, "dtype", torch.float16)
    metadata = make_builder(vllm_config, kv_cache_dtype=kv_cache_dtype, dtype=torch.float16).build(0, step([300, 7, 0]))
    cache, q = cache_and_query(3 * 8 + 1, 64, 3, pair=True, dtype=torch.float16)
    out, _ = make_impl(vllm_config, kv_cache_dtype=kv_cache_dtype).forward_mqa(q, cache, metadata, layer_with(0.06))
    exact, _ = reference.attention(q, cache, metadata.decode.block_table, metadata.decode.seq_lens, SCALE)
    assert prepared[0].problem.kv_dtype == out.dtype == torch.float16 and reference.relative_l2(out, exact) < 5e-3


def test_a_bf16_cache_in_a_float16_model(vllm_config, no_workspace, monkeypatch):
    monkeypatch.setattr(vllm_config.model_config, "dtype", torch.float16)
    with pytest.raises(NotImplementedError, match=r"^DENSE_MLA: kv_cache_dtype must be auto or the model's dtype, float16, got bfloat16: "):
        make_impl(vllm_config, kv_cache_dtype="bfloat16")


def test_no_scale_touches_a_bf16_cache(vllm_config, prepared, no_workspace):
    """Fault 52: a cache that is not quantised, in a layer that has scales all the same."""
    metadata = make_builder(vllm_config).build(0, step([300]))
    cache, q = cache_and_query(9, 64, 1, pair=False)
    layer = make_impl(vllm_config)
    scaled = layer.forward_mqa(q, cache, metadata, layer_with(0.06, _v_scale=9.0))[0]
    assert torch.equal(scaled, layer.forward_mqa(q, cache, metadata, layer_with(1.0))[0])


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e4m3"])
@pytest.mark.parametrize("k_scale", [0.06, 1.0, 2.5])
def test_decode_of_an_fp8_cache(speculate, prepared, no_workspace, kv_cache_dtype, k_scale):
    """Fault 53: the scale counts in scores and values, the other layer scales do not. vLLM may hand over bytes; queries stay BF16."""
    config = speculate(1)
    metadata = make_builder(config, kv_cache_dtype=kv_cache_dtype, dtype=E4M3).build(0, step([300, 64], query_lens=[2, 2]))
    layer = make_impl(config, kv_cache_dtype=kv_cache_dtype)
    keys, q = cache_and_query(17, 64, 4, pair=True)
    cache = (keys.float() / k_scale).to(E4M3)
    scales = layer_with(k_scale, _v_scale=torch.tensor(9.0), _q_scale=torch.tensor(0.5))
    out, _ = layer.forward_mqa(q, cache.view(torch.uint8), metadata, scales)
    exact, _ = reference.attention(
        q, cache.double() * k_scale, metadata.decode.block_table, metadata.decode.seq_lens, SCALE, query_len=2
    )
    assert not layer.supports_quant_query_input and out.dtype == torch.bfloat16
    assert reference.relative_l2(out, exact) < 5e-3


def test_the_scale_is_the_layers_own_number_on_the_device(vllm_config, prepared, no_workspace):
    """What a captured launch reads is the layer's memory: a later scale counts at the next replay."""
    metadata = make_builder(vllm_config, kv_cache_dtype="fp8", dtype=E4M3).build(0, step([30]))
    keys, q = cache_and_query(9, 64, 1, pair=False)
    scales = layer_with(1.0)
    make_impl(vllm_config, kv_cache_dtype="fp8").forward_mqa(q, keys.to(E4M3), metadata, scales)
    assert prepared[0].runs[0]["k_scale"].data_ptr() == scales._k_scale.data_ptr()


def test_a_missing_scale_is_1_and_is_said_once(vllm_config, prepared, no_workspace, log):
    builder = make_builder(vllm_config, kv_cache_dtype="fp8", dtype=E4M3)
    assert "KV cache float8_e4m3fn" in log[0].getMessage()
    layer, (keys, q) = make_impl(vllm_config, kv_cache_dtype="fp8"), cache_and_query(9, 64, 1, pair=False)
    log.clear()
    for _ in range(2):
        layer.forward_mqa(q, keys.to(E4M3), builder.build(0, step([30])), layer_with(None))
    first, second = prepared[0].runs
    assert first["k_scale"].tolist() == [1.0] and first["k_scale"].data_ptr() == second["k_scale"].data_ptr()
    assert [line.getMessage() for line in log] == ["DENSE_MLA: a layer has no scale for its FP8 KV cache, 1.0 is taken"]


def test_scales_of_heads_are_refused(vllm_config, prepared, no_workspace):
    metadata = make_builder(vllm_config, kv_cache_dtype="fp8", dtype=E4M3).build(0, step([30]))
    keys, q = cache_and_query(9, 64, 1, pair=False)
    with pytest.raises(ValueError, match=rf"^an FP8 KV cache must have one scale, got \({HEADS},\)$"):
        make_impl(vllm_config, kv_cache_dtype="fp8").forward_mqa(q, keys.to(E4M3), metadata, layer_with([1.0] * HEADS))


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e4m3"])
def test_selection_of_an_fp8_cache(kv_cache_dtype):
    """Fault 55: BF16 queries on an FP8 cache, on Hopper, said by the capability methods; with whatever else is asked for."""
    assert reasons(kv_cache_dtype=kv_cache_dtype) == []
    assert reasons(kv_cache_dtype=kv_cache_dtype, use_dcp=True, use_batch_invariant=True) == []
    assert reasons(kv_cache_dtype=kv_cache_dtype, dtype=torch.float16) == [
        f"kv_cache_dtype {kv_cache_dtype} takes a model of bfloat16, got float16: the kernels multiply an FP8 cache as BF16"
    ]


def test_selection_of_an_fp8_cache_on_another_gpu(monkeypatch):
    """As the kernels have it: the reason is theirs."""
    from vllm_dense_mla import backend

    def forward_class(capability, problem=None):
        if problem is not None and capability == (12, 0):
            raise ValueError("an FP8 cache needs compute capability 9.0, got 12.0")

    monkeypatch.setattr(backend, "forward_class", forward_class)
    monkeypatch.setattr(backend, "unsupported_reason", lambda capability: None)
    assert reasons((12, 0), kv_cache_dtype="fp8") == [
        "kv_cache_dtype fp8 is not supported on this GPU: an FP8 cache needs compute capability 9.0, got 12.0"
    ]
    assert reasons((12, 0)) == reasons((9, 0), kv_cache_dtype="fp8") == []


def test_fp8_is_read_wherever_there_is_a_kernel():
    """Every GPU of the list has a kernel for E4M3."""
    assert [reasons(capability, kv_cache_dtype="fp8") for capability in ARCHITECTURES] == [[]] * len(ARCHITECTURES)


def test_names_of_elements():
    assert cache_dtypes.cache_element_type("auto", torch.float16) == torch.float16
    assert cache_dtypes.cache_element_type("bfloat16", torch.float16) == torch.bfloat16
    assert {cache_dtypes.cache_element_type(name, torch.bfloat16) for name in cache_dtypes.E4M3} == {E4M3}

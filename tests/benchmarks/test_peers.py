"""Every peer is called with arguments that its function takes.

The peers' functions live in CUDA extensions' modules, which do not import without a GPU. Stand-ins are made from the signatures in the installed
vLLM's source: a renamed or missing argument fails here and not on the GPU.
"""

import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stand_ins import BATCH, CONTEXT, HEADS, PAGE_SIZE, installed, stand_in, stub_module, two_requests

from benchmarks.batch_shape import BatchShape
from benchmarks.decode_inputs import DecodeInputs
from benchmarks.outside_peers import b12x_is_installed
from benchmarks.peers import PEERS

pytest.importorskip("vllm")


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> DecodeInputs:
    return two_requests(monkeypatch)


def run_once(peer: str, inputs: DecodeInputs) -> torch.Tensor:
    outs = inputs.empty_outputs()
    PEERS[peer](inputs)(inputs.caches[1], outs[1])
    return outs[1]


def test_flashmla(inputs: DecodeInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    source, calls, metadata = installed("vllm", "third_party/flashmla/flash_mla_interface.py"), [], object()
    result = torch.ones(BATCH, 1, HEADS, 512)
    stub_module(
        monkeypatch,
        "vllm.v1.attention.ops.flashmla",
        flash_mla_with_kvcache=stand_in(source, "flash_mla_with_kvcache", (result, None), calls),
        get_mla_metadata=stand_in(source, "get_mla_metadata", (metadata, None), []),
        is_flashmla_dense_supported=lambda: (True, None),
    )
    out = PEERS["FLASHMLA"](inputs)(inputs.caches[1], inputs.empty_outputs()[1])
    (call,) = calls
    assert call["q"].shape == (BATCH, 1, HEADS, 576)
    assert call["k_cache"].shape == (65 + 1, PAGE_SIZE, 1, 576) and call["k_cache"].data_ptr() == inputs.caches[1].data_ptr()
    assert out is not None and out.shape == (BATCH, HEADS, 512) and out.data_ptr() == result.data_ptr() and call["out"] is None
    assert (call["tile_scheduler_metadata"], call["head_dim_v"], call["softmax_scale"]) == (metadata, 512, 192**-0.5)


def test_flashmla_with_an_e4m3_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8_inputs = two_requests(monkeypatch, 2, torch.float8_e4m3fn, 0.5)
    source, planned, calls = installed("vllm", "v1/attention/ops/flashmla.py"), [], []
    metadata, num_splits, result = torch.zeros(132, 8), torch.zeros(3), torch.ones(BATCH, 2, HEADS, 512)
    stub_module(
        monkeypatch,
        "vllm.v1.attention.ops.flashmla",
        flash_mla_with_kvcache=None,
        get_mla_metadata=None,
        flash_mla_with_kvcache_fp8=stand_in(source, "flash_mla_with_kvcache_fp8", (result, None), calls),
        get_mla_metadata_dense_fp8=stand_in(source, "get_mla_metadata_dense_fp8", (metadata, num_splits), planned),
        is_flashmla_dense_supported=lambda: (True, None),
    )
    out = PEERS["FLASHMLA"](fp8_inputs)(fp8_inputs.caches[1], fp8_inputs.empty_outputs()[1])
    (call,) = calls
    assert (planned[0]["num_q_tokens_per_head_k"], planned[0]["num_heads_k"]) == (2 * HEADS, 1)
    assert out is not None and out.shape == (BATCH * 2, HEADS, 512) and out.data_ptr() == result.data_ptr()
    assert call["q"].shape == (BATCH, 2, HEADS, 576) and call["q"].dtype == call["k_cache"].dtype == torch.float8_e4m3fn
    dequantised = call["q"].flatten(0, 1).float() * call["descale_q"]
    assert ((dequantised - fp8_inputs.q.float()).norm() / fp8_inputs.q.float().norm()).item() < 0.04
    assert call["k_cache"].shape == (66, PAGE_SIZE, 1, 576) and call["k_cache"].data_ptr() == fp8_inputs.caches[1].data_ptr()
    assert call["descale_q"].tolist() == [1.0] and call["descale_k"].tolist() == [0.5]
    assert call["tile_scheduler_metadata"] is metadata and call["num_splits"] is num_splits
    assert (call["causal"], call["head_dim_v"], call["softmax_scale"]) == (True, 512, 192**-0.5)


@pytest.mark.parametrize("peer", ["TRITON_MLA", "FLASHINFER", "B12X"])
def test_peers_of_one_query_token_say_so(peer: str, inputs: DecodeInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_module(monkeypatch, "flashinfer.mla", BatchMLAPagedAttentionWrapper=object)
    several = DecodeInputs(BatchShape("2 requests", (CONTEXT, 100), 2), inputs.q.repeat(2, 1, 1), inputs.caches, inputs.block_table, inputs.seq_lens)
    with pytest.raises(ValueError, match=f"{peer} is timed with 1 query token of each request, got 2"):
        PEERS[peer](several)


def test_flashmla_takes_several_query_tokens(inputs: DecodeInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    source, calls = installed("vllm", "third_party/flashmla/flash_mla_interface.py"), []
    result = torch.ones(BATCH, 2, HEADS, 512)
    stub_module(
        monkeypatch,
        "vllm.v1.attention.ops.flashmla",
        flash_mla_with_kvcache=stand_in(source, "flash_mla_with_kvcache", (result, None), calls),
        get_mla_metadata=stand_in(source, "get_mla_metadata", (object(), None), []),
        is_flashmla_dense_supported=lambda: (True, None),
    )
    several = DecodeInputs(BatchShape("2 requests", (CONTEXT, 100), 2), inputs.q.repeat(2, 1, 1), inputs.caches, inputs.block_table, inputs.seq_lens)
    out = PEERS["FLASHMLA"](several)(several.caches[1], several.empty_outputs()[1])
    assert calls[0]["q"].shape == (BATCH, 2, HEADS, 576)
    assert out is not None and out.shape == (BATCH * 2, HEADS, 512) and out.data_ptr() == result.data_ptr() and calls[0]["out"] is None


def test_flashmla_refuses_other_pages(inputs: DecodeInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    small = DecodeInputs(inputs.shape, inputs.q, inputs.caches.view(2, -1, 32, 576), inputs.block_table, inputs.seq_lens)
    with pytest.raises(ValueError, match="pages of 64 keys, got 32"):
        PEERS["FLASHMLA"](small)


def test_flash_attn_mla(inputs: DecodeInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    source, schedules, calls, schedule = installed("vllm", "vllm_flash_attn/flash_attn_interface.py"), [], [], object()
    stub_module(
        monkeypatch,
        "vllm.v1.attention.backends.fa_utils",
        flash_attn_supports_mla=lambda: True,
        flash_attn_varlen_func=stand_in(source, "flash_attn_varlen_func", None, calls),
        get_scheduler_metadata=stand_in(source, "get_scheduler_metadata", schedule, schedules),
    )
    out = run_once("FLASH_ATTN_MLA", inputs)
    (planned,), (call,) = schedules, calls
    assert (planned["headdim"], planned["headdim_v"], planned["num_heads_kv"], planned["page_size"]) == (64, 512, 1, PAGE_SIZE)
    assert planned["num_splits"] == call["num_splits"] == 32
    assert planned["cu_seqlens_q"].tolist() == call["cu_seqlens_q"].tolist() == [0, 1, 2]
    assert (call["scheduler_metadata"], call["fa_version"], call["max_seqlen_k"]) == (schedule, 3, CONTEXT)
    assert torch.equal(torch.cat([call["q_v"], call["q"]], dim=-1), inputs.q)
    assert torch.equal(torch.cat([call["v"], call["k"]], dim=-1).squeeze(2), inputs.caches[1])
    assert call["out"].data_ptr() == out.data_ptr()


def test_triton_mla(inputs: DecodeInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.mla import triton_mla
    from vllm.v1.attention.ops import triton_decode_attention

    monkeypatch.setattr(triton_mla, "triton", pytest.importorskip("triton"))  # vLLM has a placeholder there without a GPU
    calls: list[dict[str, Any]] = []
    function = stand_in(Path(triton_decode_attention.__file__), "decode_attention_fwd", None, calls)
    monkeypatch.setattr(triton_decode_attention, "decode_attention_fwd", function)
    monkeypatch.setattr(type(current_platform), "num_compute_units", classmethod(lambda cls, device_id=0: 132))
    out = run_once("TRITON_MLA", inputs)
    scaled = DecodeInputs(
        inputs.shape, inputs.q, inputs.caches.to(torch.float8_e4m3fn), inputs.block_table, inputs.seq_lens, k_scale=torch.tensor([0.5])
    )
    run_once("TRITON_MLA", scaled)
    call, fp8_call = calls
    assert fp8_call["k_scale"].tolist() == fp8_call["v_scale"].tolist() == [0.5]
    assert fp8_call["q"].dtype == torch.bfloat16 and fp8_call["k_buffer"].dtype == fp8_call["v_buffer"].dtype == torch.float8_e4m3fn
    assert call["num_kv_splits"] == 8  # 4096 keys, 512 a split
    assert call["attn_logits"].shape == (BATCH, HEADS, 8, 513)
    assert call["k_buffer"].shape == (66, PAGE_SIZE, 1, 576) and call["v_buffer"].shape == (66, PAGE_SIZE, 1, 512)
    assert (call["page_size"], call["is_mla"], call["sm_scale"]) == (PAGE_SIZE, True, 192**-0.5)
    assert call["o"].data_ptr() == out.data_ptr() and call["k_scale"].item() == call["v_scale"].item() == 1.0


def test_flashinfer(inputs: DecodeInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("FlashInfer is not installed")
    source, name = installed("flashinfer", "mla/_batch_mla/_wrapper.py"), "BatchMLAPagedAttentionWrapper"
    made: list[dict[str, Any]] = []
    plans: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    methods = {
        "__init__": stand_in(source, "__init__", None, made, name),
        "plan": stand_in(source, "plan", None, plans, name),
        "run": stand_in(source, "run", None, calls, name),
    }
    stub_module(monkeypatch, "flashinfer.mla", BatchMLAPagedAttentionWrapper=type(name, (), methods))
    out = run_once("FLASHINFER", inputs)
    (planned,), (call,) = plans, calls
    assert planned["kv_indptr"].tolist() == [0, 64, 66] and planned["kv_indices"].dtype == torch.int32
    assert sorted(planned["kv_indices"].tolist()) == list(range(66))
    assert [part.shape[-1] for part in call["query"]] == [part.shape[-1] for part in call["kv_cache"]] == [512, 64]
    assert call["out"].data_ptr() == out.data_ptr()


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_b12x(kv_dtype: torch.dtype, inputs: DecodeInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own planning and its own checks of a binding run here; only the kernels are stand-ins."""
    if not b12x_is_installed():
        pytest.skip("b12x is not installed")
    kernels = importlib.import_module("b12x.attention.dense_mla._kernel")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    compiled: list[Any] = []
    launched: list[Any] = []
    monkeypatch.setattr(kernels, "compile_dense_mla", lambda *, binding: compiled.append(binding))
    monkeypatch.setattr(kernels, "run_dense_mla", lambda *, binding: launched.append(binding))
    if kv_dtype == torch.float8_e4m3fn:
        inputs = DecodeInputs.random(inputs.shape, HEADS, PAGE_SIZE, torch.device("cpu"), kv_dtype, 0.5)
    outs = inputs.empty_outputs()
    call = PEERS["B12X"](inputs)
    for layer in (0, 1):
        call(inputs.caches[layer], outs[layer])
    assert len(compiled) == 1 and len(launched) == 2
    first, second = launched
    assert kernels._signature(first) == kernels._signature(second) == kernels._signature(compiled[0])  # nothing compiles in a call
    assert second.kv_cache.data_ptr() == inputs.caches[1].data_ptr() and second.output.data_ptr() == outs[1].data_ptr()
    assert second.scratch.shared_scratch.data_ptr() == first.scratch.shared_scratch.data_ptr()
    assert second.q.dtype == second.kv_cache.dtype == kv_dtype and second.query_quant is None
    assert second.cu_seqlens_q.tolist() == [0, 1, 2] and second.sm_scale == 192**-0.5
    assert (second.scratch.max_batch, second.scratch.max_cache_tokens, second.scratch.use_cuda_graph) == (BATCH, CONTEXT, True)
    assert second.kv_scale is None if kv_dtype == torch.bfloat16 else second.kv_scale.tolist() == [0.5]


def test_an_uninstalled_peer_says_so(inputs: DecodeInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setitem(sys.modules, "flashinfer.mla", None)
    monkeypatch.setattr(importlib.metadata, "version", missing)
    for peer, name in (("FLASHINFER", "FlashInfer"), ("B12X", "b12x")):
        with pytest.raises(RuntimeError, match=f"{name} is not installed"):
            PEERS[peer](inputs)


def test_flashinfers_copy_is_not_taken_for_b12x(inputs: DecodeInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.5.1")
    copy = SimpleNamespace(__file__="/site-packages/flashinfer/experimental/b12x/attention/dense_mla/_kernel.py")
    stub_module(monkeypatch, "b12x.attention.dense_mla", _kernel=copy, _scratch=None)
    with pytest.raises(RuntimeError, match="b12x is FlashInfer's copy here"):
        PEERS["B12X"](inputs)

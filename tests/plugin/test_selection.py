"""vLLM's own validation of the backend: what it accepts, and each refusal with its reason."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from vllm_dense_mla.backend import DenseMLABackend

CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]


def reasons(capability=(9, 0), **changes):
    """What vLLM's selector asks for a dense MLA layer, with changes, exactly as its CUDA platform asks."""
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.selector import AttentionSelectorConfig

    asked = {"head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None, "use_mla": True, **changes}
    config = AttentionSelectorConfig(**asked)
    return DenseMLABackend.validate_configuration(device_capability=DeviceCapability(*capability), **config._asdict())


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16", None])
@pytest.mark.parametrize("block_size", [None, 16, 64, 528, 768, 944])
def test_accepts(kv_cache_dtype, block_size):
    assert reasons(kv_cache_dtype=kv_cache_dtype, block_size=block_size) == []


def test_accepts_kv_connector():
    assert reasons(use_kv_connector=True) == []


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_capability(capability):
    """Fault 79, wrong arch dispatch: Hopper, and a reason that names the capability everywhere else."""
    found = reasons(capability)
    if capability == (9, 0):
        assert found == []
    else:
        (reason,) = found
        assert f"{capability[0]}.{capability[1]}" in reason and "9.0" in reason


REFUSALS = [
    ({"dtype": torch.float16}, "dtype must be torch.bfloat16, got torch.float16"),
    ({"dtype": torch.float32}, "dtype must be torch.bfloat16, got torch.float32"),
    ({"head_size": 320}, "head_size must be 576 (kv_lora_rank 512 + qk_rope_head_dim 64), got 320"),
    ({"head_size": 512}, "head_size must be 576 (kv_lora_rank 512 + qk_rope_head_dim 64), got 512"),
    ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype must be auto or bfloat16, got fp8; an FP8 KV cache is not built"),
    ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype must be auto or bfloat16, got fp8_e4m3; an FP8 KV cache is not built"),
    ({"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype must be auto or bfloat16, got fp8_ds_mla; an FP8 KV cache is not built"),
    ({"kv_cache_dtype": "float16"}, "kv_cache_dtype must be auto or bfloat16, got float16"),
    ({"block_size": 24}, "block_size must be a multiple of 16, got 24"),
    ({"block_size": 1}, "block_size must be a multiple of 16, got 1"),
    ({"use_sparse": True}, "sparse MLA is not supported: DENSE_MLA reads every key of a request"),
    ({"use_mla": False}, "DENSE_MLA is for models with Multi-head Latent Attention, this layer has none"),
    ({"use_dcp": True}, "decode context parallelism is not built: decode_context_parallel_size must be 1"),
    ({"use_pcp": True}, "prefill context parallelism is not built: prefill_context_parallel_size must be 1"),
    (
        {"use_batch_invariant": True},
        "batch invariance (VLLM_BATCH_INVARIANT) is not built: how a request's keys are split depends on the rest of the batch",
    ),
    (
        {"use_non_causal": True},
        "non-causal attention is not supported: a decode step is one query token of each request, and it sees the keys up to itself",
    ),
    (
        {"use_adaptive_verification": True},
        "adaptive verification of speculative decoding is not supported: a decode step is one query token of each request",
    ),
    ({"has_sliding_window": True}, "sliding window not supported"),
    ({"has_sink": True}, "attention sinks not supported"),
    ({"attn_type": "encoder_only"}, "attention type encoder_only not supported"),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSALS, ids=[f"{k}={v}" for changes, _ in REFUSALS for k, v in changes.items()])
def test_refusal(changes, reason):
    """Fault 49, page sizes refused at selection and not at run time, among the others. One reason each, with the value."""
    assert reasons(**changes) == [reason]


def test_refusals_add_up():
    found = reasons((8, 0), dtype=torch.float16, use_dcp=True, use_non_causal=True)
    assert len(found) == 5
    assert any("8.0" in reason for reason in found) and "non-causal attention with decode context parallelism is not supported" in found


def test_kernel_pages():
    """Called by vLLM with and without the cache's spec. Any multiple of 16: a hybrid model's page reaches the kernels as it is."""
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.worker.utils import select_common_block_size

    assert DenseMLABackend.get_supported_kernel_block_sizes() == [MultipleOf(16)]
    assert DenseMLABackend.get_supported_kernel_block_sizes(None) == [MultipleOf(16)]
    assert [select_common_block_size(size, [DenseMLABackend]) for size in (16, 528, 768, 944)] == [16, 528, 768, 944]


def test_preferred_page_is_a_tile():
    assert [DenseMLABackend.get_preferred_block_size(size) for size in (16, 24, 64, 128)] == [64, 64, 64, 128]


def test_graphs_hold_single_token_decodes(vllm_config):
    """With speculative decoding vLLM then leaves verification out of full graphs, and our builder leaves it to prefill."""
    from vllm.model_executor.layers.attention.mla_attention import QueryLenSupport
    from vllm.v1.attention.backend import AttentionCGSupport

    builder = DenseMLABackend.get_builder_cls()
    assert builder.get_cudagraph_support(vllm_config, None) == AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert builder.query_len_support == QueryLenSupport.SINGLE_ONLY and builder.reorder_batch_threshold == 1
    # vLLM recognises these by name and would share one workspace among builders.
    assert not hasattr(builder, "_get_workspace_buffer") and not hasattr(builder, "set_workspace_buffer")


def test_impl_declares_what_is_not_built():
    impl = DenseMLABackend.get_impl_cls()
    assert not (impl.supports_dcp or impl.supports_pcp or impl.can_return_lse_for_decode)
    assert impl.lse_base_on_e


class BrokenModule(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        raise RuntimeError("two CUDA runtimes")


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (BrokenModule("dense_mla.forward_sm90"), "RuntimeError: two CUDA runtimes"),
        (None, "ModuleNotFoundError: import of dense_mla.forward_sm90 halted; None in sys.modules"),
    ],
    ids=["broken", "missing"],
)
def test_kernels_that_do_not_load_are_an_import_error(monkeypatch, module, reason):
    """Fault 78, dependency clashes: vLLM turns an ImportError into its one-line refusal, and lets anything else through raw."""
    monkeypatch.setitem(sys.modules, "dense_mla.forward_sm90", module)
    with pytest.raises(ImportError, match=rf"^DENSE_MLA cannot load its kernels: {reason}$"):
        reasons()


def test_other_gpus_do_not_load_cutlass(monkeypatch):
    monkeypatch.setitem(sys.modules, "dense_mla.forward_sm90", BrokenModule("dense_mla.forward_sm90"))
    assert len(reasons((12, 0))) == 1


def test_kernel_name(monkeypatch):
    from vllm_dense_mla.metadata import kernel_name

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert kernel_name(torch.device("cuda", 0)) == "ForwardSm90 for sm_90a"

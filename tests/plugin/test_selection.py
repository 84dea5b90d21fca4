"""vLLM's own validation of the backend: what it accepts, and each refusal with its reason."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from vllm_dense_mla.backend import DenseMLABackend

SERVED = [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]
REFUSED = [(7, 0), (7, 5), (8, 8), (9, 9), (10, 1), (12, 2), (13, 0)]
CACHES = "auto, float16, bfloat16, fp8 or fp8_e4m3"


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


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "float16"])
def test_accepts_models_of_float16(kv_cache_dtype):
    assert reasons(dtype=torch.float16, kv_cache_dtype=kv_cache_dtype) == []


@pytest.mark.parametrize(
    "field", ["use_dcp", "use_batch_invariant", "use_non_causal", "use_kv_connector"], ids=lambda field: field.removeprefix("use_")
)
@pytest.mark.parametrize("capability", SERVED)
def test_accepts_on_every_gpu_that_is_served(capability, field):
    """Fault 79, wrong arch dispatch. What is served does not depend on the GPU."""
    assert reasons(capability, **{field: True}) == []


def test_accepts_everything_at_once():
    assert reasons(use_dcp=True, use_batch_invariant=True, use_non_causal=True, use_kv_connector=True, block_size=16) == []


@pytest.mark.parametrize("capability", REFUSED)
def test_other_gpus(capability):
    """A reason that names the capability, and those that are served."""
    (reason,) = reasons(capability)
    assert f"{capability[0]}.{capability[1]}" in reason and all(f"{major}.{minor}" in reason for major, minor in SERVED)


REFUSALS = [
    ({"dtype": torch.float32}, "dtype must be torch.bfloat16 or torch.float16, got torch.float32"),
    ({"head_size": 320}, "head_size must be 576 (kv_lora_rank 512 + qk_rope_head_dim 64), got 320"),
    ({"head_size": 512}, "head_size must be 576 (kv_lora_rank 512 + qk_rope_head_dim 64), got 512"),
    (
        {"kv_cache_dtype": "fp8_e5m2"},
        f"kv_cache_dtype must be {CACHES}, got fp8_e5m2: the kernels read E4M3, whose numbers are twice as fine as those of E5M2",
    ),
    ({"kv_cache_dtype": "fp8_ds_mla"}, f"kv_cache_dtype must be {CACHES}, got fp8_ds_mla: its records of 656 bytes are for sparse MLA"),
    (
        {"kv_cache_dtype": "fp8_per_token_head"},
        f"kv_cache_dtype must be {CACHES}, got fp8_per_token_head: the kernels take one scale for the whole cache",
    ),
    ({"kv_cache_dtype": "nvfp4"}, f"kv_cache_dtype must be {CACHES}, got nvfp4"),
    (
        {"kv_cache_dtype": "float16"},
        "kv_cache_dtype must be auto or the model's dtype, bfloat16, got float16: queries and keys are multiplied as they are",
    ),
    (
        {"kv_cache_dtype": "bfloat16", "dtype": torch.float16},
        "kv_cache_dtype must be auto or the model's dtype, float16, got bfloat16: queries and keys are multiplied as they are",
    ),
    ({"use_per_head_quant_scales": True}, "scales of single heads are not supported: the latent KV cache has one head and one scale"),
    ({"block_size": 24}, "block_size must be a multiple of 16, got 24"),
    ({"block_size": 1}, "block_size must be a multiple of 16, got 1"),
    ({"use_sparse": True}, "sparse MLA is not supported: DENSE_MLA reads every key of a request"),
    ({"use_mla": False}, "DENSE_MLA is for models with Multi-head Latent Attention, this layer has none"),
    ({"use_pcp": True}, "prefill context parallelism is not built: prefill_context_parallel_size must be 1"),
    (
        {"use_adaptive_verification": True},
        "adaptive verification of speculative decoding is not supported: a decode step has one query length, which the host has to know",
    ),
    ({"has_sliding_window": True}, "sliding window not supported"),
    ({"has_sink": True}, "attention sinks not supported"),
    ({"attn_type": "encoder_only"}, "attention type encoder_only not supported"),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSALS, ids=["-".join(f"{k}={v}" for k, v in changes.items()) for changes, _ in REFUSALS])
def test_refusal(changes, reason):
    """Fault 49, page sizes refused at selection and not at run time, among the others. One reason each, with the value."""
    assert reasons(**changes) == [reason]


def test_refusals_add_up():
    found = reasons((7, 5), dtype=torch.float32, use_pcp=True, block_size=24)
    assert len(found) == 4 and any("7.5" in reason for reason in found)


def test_kernel_pages():
    """Called by vLLM with and without the cache's spec. Any multiple of 16: a hybrid model's page reaches the kernels as it is."""
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.worker.utils import select_common_block_size

    assert DenseMLABackend.get_supported_kernel_block_sizes() == [MultipleOf(16)]
    assert DenseMLABackend.get_supported_kernel_block_sizes(None) == [MultipleOf(16)]
    assert [select_common_block_size(size, [DenseMLABackend]) for size in (16, 528, 768, 944)] == [16, 528, 768, 944]


def test_preferred_page_is_a_tile():
    assert [DenseMLABackend.get_preferred_block_size(size) for size in (16, 24, 64, 128)] == [64, 64, 64, 128]


def test_what_impl_and_builder_declare():
    """vLLM asks the backend, which asks these. Prefill context parallelism is vLLM's default for an MLA layer, and not ours."""
    impl, builder = DenseMLABackend.get_impl_cls(), DenseMLABackend.get_builder_cls()
    assert impl.supports_dcp and impl.can_return_lse_for_decode and impl.lse_base_on_e and impl.supports_mtp_with_cp_non_trivial_interleave_size
    assert not impl.supports_pcp
    assert builder.supports_non_causal_multi_token_decode and builder.supports_non_causal_multi_token_dcp


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
    for module in ("dense_mla.forward_sm90", "dense_mla.forward_sm80"):
        monkeypatch.setitem(sys.modules, module, BrokenModule(module))
    assert len(reasons((7, 5))) == 1


@pytest.mark.parametrize(
    ("capability", "heads", "name"),
    [
        ((9, 0), 8, "ForwardSm90 for sm_90a"),
        ((9, 0), 64, "ForwardSm90Wide for sm_90a"),
        ((8, 0), 64, "ForwardSm80 for sm_80"),
        ((12, 0), 8, "ForwardSm80 for sm_120a"),
    ],
)
def test_kernel_name(monkeypatch, capability, heads, name):
    from dense_mla import DecodeProblem
    from vllm_dense_mla.metadata import kernel_name

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert kernel_name(types.SimpleNamespace(device=torch.device("cuda", 0), problem=DecodeProblem(heads, 64))) == name

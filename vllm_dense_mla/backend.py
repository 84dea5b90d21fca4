"""What DENSE_MLA supports, and the reason when it does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.v1.attention.backend import MultipleOf

from dense_mla.arch import forward_class, unsupported_reason
from dense_mla.problem import HEAD_DIM_QK, HEAD_DIM_V, TILE_KEYS, DecodeProblem

from .cache_dtypes import E4M3, SUPPORTED, refuse_cache_dtype
from .decode_steps import read_steps
from .impl import DenseMLAImpl
from .metadata import DenseMLAMetadataBuilder
from .registration import BACKEND_NAME

if TYPE_CHECKING:
    from vllm.config.cache import CacheDType
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.kv_cache_interface import KVCacheSpec

PAGE_MULTIPLE = 16  # keys; a page is a whole number of the smallest TMA box


class DenseMLABackend(MLACommonBackend):
    """Dense MLA decode. Prefill is vLLM's."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = list(SUPPORTED)

    @staticmethod
    def get_name() -> str:
        return BACKEND_NAME

    @staticmethod
    def get_impl_cls() -> type[DenseMLAImpl]:
        return DenseMLAImpl

    @staticmethod
    def get_builder_cls() -> type[DenseMLAMetadataBuilder]:
        return DenseMLAMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [HEAD_DIM_QK]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(PAGE_MULTIPLE)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Page size where the user gives none: at least one tile, because pages of 16 and 32 keys take several TMA boxes a tile."""
        return max(super().get_preferred_block_size(default_block_size), TILE_KEYS)

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        """Whether there are kernels for it. Loads CUTLASS where there are.

        Raises:
            ImportError: CUTLASS does not load. vLLM refuses the backend with that line.
        """
        if unsupported_reason((capability.major, capability.minor)) is not None:
            return False
        _load_kernels((capability.major, capability.minor))
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """False: which kernels a step runs depends on its query length, which only the host knows in time."""
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """True: requests are then cut at places that their own length decides, with up to 32 pieces each."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """True: a draft block whose query tokens all see every key."""
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: CacheDType | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: DeviceCapability,
    ) -> str | None:
        """A reason for a cache that the kernels read, and not with this model or on this GPU."""
        if not cls.supports_kv_cache_dtype(kv_cache_dtype):
            return None
        return refuse_cache_dtype(kv_cache_dtype, dtype) or _refuse_fp8_here(kv_cache_dtype, device_capability)

    @classmethod
    def validate_configuration(cls, **request: Any) -> list[str]:
        """vLLM's own checks, each refusal with the value that was asked for and what is supported.

        Args:
            **request: the fields of vLLM's AttentionSelectorConfig, and `device_capability`.
        """
        reasons = [_explain(reason, request) for reason in super().validate_configuration(**request)]
        return reasons + _refused_steps()


def _load_kernels(capability: tuple[int, int]) -> None:
    try:
        forward_class(capability)
    except Exception as error:
        # A broken CUTLASS or CUDA install raises all kinds; vLLM takes ImportError for a refusal, and lets others through raw.
        raise ImportError(f"{BACKEND_NAME} cannot load its kernels: {type(error).__name__}: {error}") from error


def _refuse_fp8_here(kv_cache_dtype: str | None, capability: DeviceCapability) -> str | None:
    """Why a GPU that has kernels has none for an FP8 cache. A GPU without any is not spoken of."""
    here = (capability.major, capability.minor)
    if kv_cache_dtype not in E4M3 or unsupported_reason(here) is not None:
        return None
    try:
        forward_class(here, DecodeProblem(1, TILE_KEYS, kv_dtype=torch.float8_e4m3fn))
    except ValueError as error:
        return f"kv_cache_dtype {kv_cache_dtype} is not supported on this GPU: {error}"
    return None


def _refused_steps() -> list[str]:
    """What is wrong with the query lengths and the heads of the config that vLLM selects for; it does not pass them."""
    config = get_current_vllm_config_or_none()
    if config is None or config.model_config is None or not config.model_config.use_mla:
        return []
    # Which elements the cache has does not matter here.
    return read_steps(config, config.model_config.get_num_attention_heads(config.parallel_config), "auto").refusals()


def _explain(reason: str, request: Mapping[str, Any]) -> str:
    """A refusal of vLLM's in full; one that this version of vLLM words otherwise stays as it is."""
    explain = _EXPLANATIONS.get(reason)
    return explain(request) if explain else reason


def _explain_capability(request: Mapping[str, Any]) -> str:
    capability = request["device_capability"]
    return str(unsupported_reason((capability.major, capability.minor)))


# Keyed by the words of AttentionBackend.validate_configuration.
_EXPLANATIONS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "head_size not supported": lambda request: (
        f"head_size must be {HEAD_DIM_QK} (kv_lora_rank {HEAD_DIM_V} + qk_rope_head_dim {HEAD_DIM_QK - HEAD_DIM_V}), got {request['head_size']}"
    ),
    "dtype not supported": lambda request: f"dtype must be torch.bfloat16 or torch.float16, got {request['dtype']}",
    "kv_cache_dtype not supported": lambda request: str(refuse_cache_dtype(request["kv_cache_dtype"], request["dtype"])),
    "block_size not supported": lambda request: f"block_size must be a multiple of {PAGE_MULTIPLE}, got {request['block_size']}",
    "compute capability not supported": _explain_capability,
    "non-MLA not supported": lambda request: f"{BACKEND_NAME} is for models with Multi-head Latent Attention, this layer has none",
    "sparse not supported": lambda request: f"sparse MLA is not supported: {BACKEND_NAME} reads every key of a request",
    "per-head quant scales not supported": lambda request: "scales of single heads are not supported: the latent KV cache has one head and one scale",
    "PCP not supported": lambda request: "prefill context parallelism is not built: prefill_context_parallel_size must be 1",
    "device-cpu query lens mismatch not supported, this is needed for adaptive verification": lambda request: (
        "adaptive verification of speculative decoding is not supported: a decode step has one query length, which the host has to know"
    ),
}

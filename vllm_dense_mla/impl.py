"""Once a layer: the decode attention itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl
from vllm.v1.attention.backend import AttentionType
from vllm.v1.worker.workspace import current_workspace_manager, is_workspace_manager_initialized

from dense_mla.problem import HEAD_DIM_QK, HEAD_DIM_V

from .cache_dtypes import refuse_cache_dtype
from .decode_steps import read_steps
from .metadata import DenseMLAMetadata, logger
from .registration import BACKEND_NAME
from .settings import load_settings

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionLayer


class DenseMLAImpl(MLACommonImpl[DenseMLAMetadata]):
    """Launches forward and merge of the prepared kernels; prefill is inherited.

    The constructor reserves the workspace of the largest bucket, because it is the one hook that every model runs (Kimi-K3's layer calls
    neither `reserve_workspace` nor `process_weights_after_loading`) and that runs before memory profiling counts what is left.
    """

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True
    # The causal rule counts the keys of all ranks, whichever runs of them this one holds.
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True
    supports_pcp: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        _refuse("alibi_slopes", alibi_slopes)
        _refuse("sliding_window", sliding_window)
        _refuse("logits_soft_cap", logits_soft_cap)
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"{BACKEND_NAME} supports attn_type decoder, got {AttentionType(attn_type).value}")
        config = get_current_vllm_config()
        reason = refuse_cache_dtype(kv_cache_dtype, config.model_config.dtype)
        if reason is not None:
            raise NotImplementedError(f"{BACKEND_NAME}: {reason}")
        if (self.kv_lora_rank, self.qk_rope_head_dim) != (HEAD_DIM_V, HEAD_DIM_QK - HEAD_DIM_V):
            raise NotImplementedError(
                f"{BACKEND_NAME} supports kv_lora_rank {HEAD_DIM_V} with qk_rope_head_dim {HEAD_DIM_QK - HEAD_DIM_V}, "
                f"got {self.kv_lora_rank} with {self.qk_rope_head_dim}"
            )
        self.supports_quant_query_input = False
        self._steps = read_steps(config, num_heads, kv_cache_dtype)
        self._unit_scale: torch.Tensor | None = None
        self._reserved_bytes = 0
        self.reserve_workspace()

    def reserve_workspace(self) -> None:
        """Reserve the largest bucket in vLLM's workspace, where there is one. vLLM calls it again in the profile run, for each micro-batch."""
        if not is_workspace_manager_initialized():
            return
        self._reserved_bytes = self._steps.workspace(load_settings().torch_dtype, current_sm_count()).largest.total_bytes
        current_workspace_manager().get_simultaneous(((self._reserved_bytes,), torch.uint8))

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: DenseMLAMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend the latent keys: out [R, H, 512] in q's dtype, and, where ranks share out the keys, the natural-log LSE [R, H] in FP32.

        Args:
            q: [R, H, 576], or the pair [R, H, 512] and [R, H, 64]; R rows, query_len for each request of the decode batch. H heads of this
                rank, or with decode context parallelism of all its ranks.
            kv_c_and_k_pe_cache: [pages, page_size, 576].
            attn_metadata: of the step.
            layer: the scale of an FP8 cache is its `_k_scale`; no scale counts for another cache.
        """
        decode = attn_metadata.decode
        assert decode is not None
        cache, scale = kv_c_and_k_pe_cache, {}
        if self._steps.kv_dtype == torch.float8_e4m3fn:
            cache, scale = cache.view(torch.float8_e4m3fn), {"k_scale": self._k_scale(layer, cache.device)}
        rows = q[0] if isinstance(q, tuple) else q
        out = rows.new_empty((rows.shape[0], rows.shape[1], HEAD_DIM_V))
        lse = rows.new_empty(rows.shape[:2], dtype=torch.float32) if decode.decoder.problem.return_lse else None
        decode.decoder.run(
            q,
            cache,
            decode.block_table,
            decode.request_lens,
            schedule=decode.schedule,
            workspace=self._workspace(decode.bucket.total_bytes, out.device),
            out=out,
            scale=self.scale,
            lse=lse,
            total_lens=decode.total_lens,
            max_seq_len=decode.max_seq_len,
            **scale,
        )
        return out, lse

    def _k_scale(self, layer: AttentionLayer | None, device: torch.device) -> torch.Tensor:
        """The scale of an FP8 cache, [1] FP32 on the device: read there by every launch, so that one that changes after a capture counts.

        Raises:
            ValueError: several scales.
        """
        scale = getattr(layer, "_k_scale", None)
        if scale is None:
            logger.info_once("%s: a layer has no scale for its FP8 KV cache, 1.0 is taken", BACKEND_NAME, scope="global")
            if self._unit_scale is None:
                self._unit_scale = torch.ones(1, dtype=torch.float32, device=device)
            return self._unit_scale
        if scale.numel() != 1:
            raise ValueError(f"an FP8 KV cache must have one scale, got {tuple(scale.shape)}")
        return scale.view(1)

    def _workspace(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """At least `num_bytes` of the shared workspace, valid until this layer returns.

        Always asks for the whole reservation: a micro-batch whose workspace is its own then has it from its first, eager, step, and it
        never grows under a captured graph.
        """
        if not is_workspace_manager_initialized():
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
        reservation = ((max(self._reserved_bytes, num_bytes),), torch.uint8)
        return current_workspace_manager().get_simultaneous(reservation)[0]


def current_sm_count() -> int:
    """Streaming multiprocessors of the current CUDA device."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def _refuse(name: str, value: object) -> None:
    if value is not None:
        raise NotImplementedError(f"{BACKEND_NAME} does not support {name}, got {value!r}")

"""vLLM's own MLA decode kernels, called with the arguments that their backends pass in a step of full CUDA graphs (peers.py says what is timed)."""

from __future__ import annotations

import torch

from benchmarks.decode_inputs import Call, DecodeInputs, quantised, require_one_query_token
from dense_mla.problem import HEAD_DIM_QK, HEAD_DIM_V

FLASHMLA_PAGE_SIZE = 64


def flashmla(inputs: DecodeInputs) -> Call:
    """FLASHMLA. Its scheduler metadata is filled by the first call and kept, as it is from a step's first layer to its last.

    As in its backend the kernel makes its own output: the one that it would take has another layout where a request has several query tokens.
    """
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata, is_flashmla_dense_supported

    if inputs.page_size != FLASHMLA_PAGE_SIZE:
        raise ValueError(f"FLASHMLA needs pages of {FLASHMLA_PAGE_SIZE} keys, got {inputs.page_size}")
    supported, reason = is_flashmla_dense_supported()
    if not supported:
        raise RuntimeError(reason)
    if inputs.k_scale is not None:
        return _flashmla_fp8(inputs, inputs.k_scale)
    metadata, _ = get_mla_metadata(inputs.seq_lens, inputs.heads * inputs.query_len, 1, is_fp8_kvcache=False)
    tokens = (inputs.shape.batch, inputs.query_len)

    def call(kv_cache: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = flash_mla_with_kvcache(
            q=inputs.q.unflatten(0, tokens),
            k_cache=kv_cache.unsqueeze(-2),
            block_table=inputs.block_table,
            cache_seqlens=inputs.seq_lens,
            head_dim_v=HEAD_DIM_V,
            tile_scheduler_metadata=metadata,
            softmax_scale=inputs.scale,
            causal=True,
            is_fp8_kvcache=False,
        )[0]
        return result.flatten(0, 1)

    return call


def _flashmla_fp8(inputs: DecodeInputs, k_scale: torch.Tensor) -> Call:
    """FLASHMLA with an E4M3 cache: q in E4M3 too, with the scale of 1 that a layer without a calibrated one has.

    vLLM's layer quantises q while it concatenates, before the backend: no part of the call. The kernel takes no output.
    """
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache_fp8, get_mla_metadata_dense_fp8

    metadata, num_splits = get_mla_metadata_dense_fp8(inputs.seq_lens, inputs.heads * inputs.query_len, 1)
    q_scale = torch.ones(1, dtype=torch.float32, device=inputs.q.device)
    q = quantised(inputs.q, q_scale).unflatten(0, (inputs.shape.batch, inputs.query_len))

    def call(kv_cache: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = flash_mla_with_kvcache_fp8(
            q=q,
            k_cache=kv_cache.unsqueeze(-2),
            block_table=inputs.block_table,
            cache_seqlens=inputs.seq_lens,
            head_dim_v=HEAD_DIM_V,
            tile_scheduler_metadata=metadata,
            num_splits=num_splits,
            softmax_scale=inputs.scale,
            causal=True,
            descale_q=q_scale,
            descale_k=k_scale,
        )[0]
        return result.flatten(0, 1)

    return call


def flash_attn_mla(inputs: DecodeInputs) -> Call:
    """FLASH_ATTN_MLA: FlashAttention 3 with its ahead-of-time schedule, and vLLM's default cap on splits in CUDA graphs."""
    from vllm.config.attention import AttentionConfig
    from vllm.v1.attention.backends.fa_utils import flash_attn_supports_mla, flash_attn_varlen_func, get_scheduler_metadata

    if not flash_attn_supports_mla():
        raise RuntimeError("FlashAttention 3 with MLA is not supported here")
    max_splits = AttentionConfig().flash_attn_max_num_splits_for_cuda_graph
    cu_query_lens = torch.arange(inputs.shape.batch + 1, dtype=torch.int32, device=inputs.q.device) * inputs.query_len
    schedule = get_scheduler_metadata(
        batch_size=inputs.shape.batch,
        max_seqlen_q=inputs.query_len,
        max_seqlen_k=inputs.shape.context,
        num_heads_q=inputs.heads,
        num_heads_kv=1,
        headdim=HEAD_DIM_QK - HEAD_DIM_V,
        cache_seqlens=inputs.seq_lens,
        qkv_dtype=torch.bfloat16,
        headdim_v=HEAD_DIM_V,
        page_size=inputs.page_size,
        cu_seqlens_q=cu_query_lens,
        causal=True,
        num_splits=max_splits,
    )
    q_latent, q_rope = torch.split(inputs.q, [HEAD_DIM_V, HEAD_DIM_QK - HEAD_DIM_V], dim=-1)

    def call(kv_cache: torch.Tensor, out: torch.Tensor) -> None:
        flash_attn_varlen_func(
            q=q_rope,
            k=kv_cache[..., HEAD_DIM_V:].unsqueeze(-2),
            v=kv_cache[..., :HEAD_DIM_V].unsqueeze(-2),
            q_v=q_latent,
            max_seqlen_q=inputs.query_len,
            cu_seqlens_q=cu_query_lens,
            max_seqlen_k=inputs.shape.context,
            seqused_k=inputs.seq_lens,
            block_table=inputs.block_table,
            softmax_scale=inputs.scale,
            causal=True,
            return_softmax_lse=False,
            out=out,
            fa_version=3,
            scheduler_metadata=schedule,
            num_splits=max_splits,
        )

    return call


def triton_mla(inputs: DecodeInputs) -> Call:
    """TRITON_MLA, with the split count that its backend computes. Its output needs no zeroing here: no request is empty."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.mla.triton_mla import _compute_num_kv_splits
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    require_one_query_token("TRITON_MLA", inputs)
    splits = _compute_num_kv_splits(inputs.shape.context, current_platform.num_compute_units())
    batch, heads, device = inputs.shape.batch, inputs.heads, inputs.q.device
    logits = torch.empty(batch, heads, splits, HEAD_DIM_V + 1, dtype=torch.float32, device=device)
    lse = torch.zeros(batch, heads, dtype=inputs.q.dtype, device=device)
    scale = torch.ones((), dtype=torch.float32, device=device) if inputs.k_scale is None else inputs.k_scale

    def call(kv_cache: torch.Tensor, out: torch.Tensor) -> None:
        keys = kv_cache.unsqueeze(2)
        decode_attention_fwd(
            inputs.q,
            keys,
            keys[..., :HEAD_DIM_V],
            out,
            lse,
            inputs.block_table,
            inputs.seq_lens,
            logits,
            splits,
            inputs.scale,
            inputs.page_size,
            k_scale=scale,
            v_scale=scale,
            is_mla=True,
        )

    return call

"""The peers: vLLM's own MLA decode kernels, called with the arguments that their backends pass in a step of full CUDA graphs, and two more
where they are installed.

What a backend computes once a step (scheduler metadata, split counts) is computed once here, before anything is timed, and so is
scratch that a backend takes from a preallocated workspace. What it launches for every layer, its merge included, is the call. All get
q as one `[requests, heads, 576]` tensor, as Kimi-K3's layer passes it, so that no peer pays for a concatenation, and write into `out`;
one whose kernel allocates its output returns that.

A server freezes `max_seq_len` at the model's limit when it captures a graph; here it is the batch's longest request, which is the best
case for the peers that choose their splits from it.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode_inputs import DecodeInputs, quantised
from dense_mla.problem import HEAD_DIM_QK, HEAD_DIM_V

# Decode one layer: (kv_cache [pages, page_size, 576], out [R, heads, 512]). Writes `out`, or leaves it alone and returns an output of its own.
Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]

FLASHMLA_PAGE_SIZE = 64
FLASHINFER_WORKSPACE_BYTES = 128 * 2**20


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

    _require_one_query_token("TRITON_MLA", inputs)
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


def flashinfer(inputs: DecodeInputs) -> Call:
    """FlashInfer's MLA wrapper with its FA3 kernel. vLLM does not use it on Hopper; measured where it is installed."""
    try:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper
    except ImportError as error:
        raise RuntimeError(f"FlashInfer is not installed: {error}") from error
    _require_one_query_token("FLASHINFER", inputs)
    batch, device = inputs.shape.batch, inputs.q.device
    pages = inputs.shape.pages(inputs.page_size)
    ends = torch.tensor((0, *pages), device=device).cumsum(0).int()
    ids = torch.cat([row[:n] for row, n in zip(inputs.block_table, pages)])
    queries = torch.arange(batch + 1, dtype=torch.int32, device=device)
    workspace = torch.empty(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = BatchMLAPagedAttentionWrapper(
        workspace,
        use_cuda_graph=True,
        qo_indptr=queries.clone(),
        kv_indptr=ends.clone(),
        kv_indices=ids.clone(),
        kv_len_arr=inputs.seq_lens.clone(),
        backend="fa3",
    )
    wrapper.plan(
        qo_indptr=queries,
        kv_indptr=ends,
        kv_indices=ids,
        kv_len_arr=inputs.seq_lens,
        num_heads=inputs.heads,
        head_dim_ckv=HEAD_DIM_V,
        head_dim_kpe=HEAD_DIM_QK - HEAD_DIM_V,
        page_size=inputs.page_size,
        causal=False,
        sm_scale=inputs.scale,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    query = torch.split(inputs.q, [HEAD_DIM_V, HEAD_DIM_QK - HEAD_DIM_V], dim=-1)

    def call(kv_cache: torch.Tensor, out: torch.Tensor) -> None:
        wrapper.run(query=query, kv_cache=(kv_cache[..., :HEAD_DIM_V], kv_cache[..., HEAD_DIM_V:]), out=out)

    return call


def b12x(inputs: DecodeInputs) -> Call:
    """b12x's dense MLA, made for SM120, planned for exactly this batch with the split count that it has by default.

    Planned, bound, compiled and run through the modules below its public functions, which need no SM120; its search for another split count is
    left out. An E4M3 cache is read with q in E4M3, quantised before the call as for FLASHMLA.
    """
    _require_one_query_token("B12X", inputs)
    if not b12x_is_installed():
        raise RuntimeError("b12x is not installed")
    from b12x.attention.dense_mla import _kernel, _scratch  # type: ignore[import-untyped,import-not-found,unused-ignore]

    if "flashinfer" in Path(_kernel.__file__).parts:
        raise RuntimeError("b12x is FlashInfer's copy here, not the package: put the package's folder before FlashInfer's on the path")
    batch, device = inputs.shape.batch, inputs.q.device
    capacity = _scratch.Caps(
        device=device,
        mode="decode",
        kv_dtype=inputs.caches.dtype,
        num_q_heads=inputs.heads,
        page_size=inputs.page_size,
        max_total_q=batch,
        max_batch=batch,
        max_cache_tokens=inputs.shape.context,
        max_page_table_width=inputs.block_table.shape[1],
        num_cache_pages=inputs.caches.shape[1],
        use_cuda_graph=True,
    )
    plan = _scratch.plan_dense_mla_scratch(capacity)
    scratch = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in plan.shapes_and_dtypes()]
    q_scale = None if inputs.k_scale is None else torch.ones(1, dtype=torch.float32, device=device)
    q = inputs.q if q_scale is None else quantised(inputs.q, q_scale)
    query_ends = torch.arange(batch + 1, dtype=torch.int32, device=device)

    def bind(kv_cache: torch.Tensor, out: torch.Tensor) -> Any:
        return plan.bind(
            scratch=scratch,
            q=q,
            kv_cache=kv_cache,
            output=out,
            page_table=inputs.block_table,
            cache_seqlens=inputs.seq_lens,
            cu_seqlens_q=query_ends,
            kv_scale=inputs.k_scale,
            q_scale=q_scale,
            sm_scale=inputs.scale,
        )

    _kernel.compile_dense_mla(binding=bind(inputs.caches[0], inputs.empty_outputs()[0]))

    def call(kv_cache: torch.Tensor, out: torch.Tensor) -> None:
        _kernel.run_dense_mla(binding=bind(kv_cache, out))

    return call


def b12x_is_installed() -> bool:
    """Whether the package is. Importing it says nothing: FlashInfer puts a copy, of no stated version, under the same name."""
    try:
        return bool(importlib.metadata.version("b12x"))
    except importlib.metadata.PackageNotFoundError:
        return False


def _require_one_query_token(name: str, inputs: DecodeInputs) -> None:
    if inputs.query_len != 1:
        raise ValueError(f"{name} is timed with 1 query token of each request, got {inputs.query_len}")


PEERS: dict[str, Callable[[DecodeInputs], Call]] = {
    "FLASHMLA": flashmla,
    "FLASH_ATTN_MLA": flash_attn_mla,
    "TRITON_MLA": triton_mla,
    "FLASHINFER": flashinfer,
    "B12X": b12x,
}
PEERS_OF_SEVERAL_TOKENS = ("FLASHMLA", "FLASH_ATTN_MLA")
PEERS_OF_FP8_CACHES = ("FLASHMLA", "TRITON_MLA", "B12X")
PEERS_QUANTISING_Q = ("FLASHMLA", "B12X")  # beside an E4M3 cache

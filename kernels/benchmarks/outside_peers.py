"""Two MLA decode kernels outside vLLM, where they are installed: FlashInfer's and b12x's (peers.py says what is timed)."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode_inputs import Call, DecodeInputs, quantised, require_one_query_token
from dense_mla.problem import HEAD_DIM_QK, HEAD_DIM_V

FLASHINFER_WORKSPACE_BYTES = 128 * 2**20


def flashinfer(inputs: DecodeInputs) -> Call:
    """FlashInfer's MLA wrapper with its FA3 kernel. vLLM does not use it on Hopper; measured where it is installed."""
    try:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper
    except ImportError as error:
        raise RuntimeError(f"FlashInfer is not installed: {error}") from error
    require_one_query_token("FLASHINFER", inputs)
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
    require_one_query_token("B12X", inputs)
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

"""The numerical part of `vllm-dense-mla check`: what it decodes, and how far from FP64 that may be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dense_mla import DecodeProblem, reference

from .demo import H200_SMS, PARTIAL_NAMES, SCALE, decode_on_cpu, decode_on_gpu, make_batch

# Heads and page size of a rank: Kimi-K3's and DeepSeek-V3's at tensor parallel 8, and of one that sees all heads of Kimi-K2. An FP8 cache
# has kernels of its own.
SELF_TESTS = (
    DecodeProblem(12, 768),
    DecodeProblem(16, 64),
    DecodeProblem(64, 64),
    *(DecodeProblem(heads, 64, kv_dtype=torch.float8_e4m3fn) for heads in (16, 64)),
)
# Relative L2 against FP64, in units of what rounding the exact answer to BF16 costs. P is rounded to BF16 too; with BF16 partials so are they.
ERROR_BOUNDS = {torch.bfloat16: 1.6, torch.float32: 1.2}


def answer(problem: DecodeProblem, device: torch.device | None) -> dict[str, Any]:
    """Error of one ragged batch, with NaN wherever no request may read: by the kernels on `device`, or by the torch reference on the CPU."""
    heads, page_size, dtype = problem.num_heads, problem.page_size, problem.partial_dtype
    data = make_batch(heads=heads, batch=6, max_len=4096 if device else 700, page_size=page_size, seed=0, device=device or torch.device("cpu"))
    if problem.needs_k_scale:
        # The scale is the 1 that vLLM takes where none was measured. NaN becomes a NaN code.
        data = replace(data, kv_cache=data.kv_cache.to(problem.kv_dtype))
    exact, _ = reference.attention(data.q, data.kv_cache, data.block_table, data.seq_lens, SCALE)
    decoded = decode_on_gpu(problem, data) if device else decode_on_cpu(problem, data, H200_SMS)
    error = reference.relative_l2(decoded.out, exact) / reference.relative_l2(exact.bfloat16(), exact)
    return {
        "heads": heads,
        "page_size": page_size,
        "kv_cache": "fp8" if problem.needs_k_scale else "bf16",
        "partial_dtype": PARTIAL_NAMES[dtype],
        "error": round(error, 3),
        "bound": ERROR_BOUNDS[dtype],
    }

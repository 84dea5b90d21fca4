"""`vllm-dense-mla plan`: what a deployment decodes with and what it sets aside, before there is a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import torch

from dense_mla.arch import compile_target, forward_class
from dense_mla.problem import PARTIAL_DTYPES, TILE_KEYS, DecodeProblem

from .absent_gpu import CAPABILITY
from .buckets import BucketTable, size_buckets
from .demo import PARTIAL_NAMES
from .deployment import Deployment


def print_heads_plan(heads: int, capture_sizes: Sequence[int], max_num_seqs: int, sm_count: int) -> None:
    """The workspace tables of a rank with `heads` query heads; knows nothing of a model."""
    # Any page size: the bytes do not depend on it.
    tables = {dtype: size_buckets(DecodeProblem(heads, TILE_KEYS, dtype), capture_sizes, max_num_seqs, sm_count) for dtype in PARTIAL_DTYPES}
    print(f"{heads} heads on each GPU of {sm_count} SMs. Workspace of each decode batch, by the storage of the split partials (rows: requests):")
    for dtype, table in tables.items():
        print(f"\n{PARTIAL_NAMES[dtype]}: each GPU reserves {table.largest.total_bytes:,} bytes, once for all layers\n{table}")
    if max(capture_sizes) > max_num_seqs:
        print(f"\nCapture sizes above max-num-seqs {max_num_seqs} hold no decode batch: no bucket is theirs.")


def print_plan(deployment: Deployment, sm_count: int, capability: tuple[int, int] = CAPABILITY) -> None:
    """Everything that a rank decodes with, and the workspace tables of both partial dtypes."""
    for name, value in plan_lines(deployment, sm_count, capability):
        print(f"{name:13}{value}")
    print("\nWorkspace of each decode batch (rows: query tokens), once for all layers")
    for dtype, table in workspace_tables(deployment, sm_count).items():
        print(f"\n{PARTIAL_NAMES[dtype]}: each GPU reserves {table.largest.total_bytes:,} bytes\n{table}")


def plan_lines(deployment: Deployment, sm_count: int, capability: tuple[int, int] = CAPABILITY) -> list[tuple[str, str]]:
    """The lines above the tables: a name and a sentence each."""
    d = deployment
    lines = [
        ("model", d.model),
        ("GPUs", f"{_parallelism(d)}, {sm_count} SMs each"),
        ("heads", _heads(d)),
        ("kernel", f"{forward_class(capability).__name__} for {compile_target(capability)}"),
        ("block size", f"{d.page_size:,} tokens: the page that the kernels see"),
        ("batch", _batch(d)),
        ("KV a token", _token_bytes(d)),
        ("KV a request", f"{d.token_bytes * d.max_model_len / 1e9:,.1f} GB on a rank at the longest context, {d.max_model_len:,} tokens"),
        ("fp32 costs", _cost_of_fp32(d, sm_count)),
    ]
    if d.draft:
        lines.append(("draft", f"{d.draft} drafts tokens: its own weights and KV cache are not in these numbers"))
    return lines


def workspace_tables(deployment: Deployment, sm_count: int) -> dict[torch.dtype, BucketTable]:
    """The bucket table of each partial dtype, by dtype: the same sizes that the backend reserves with."""
    return {
        dtype: size_buckets(_problem(deployment, dtype), deployment.capture_sizes, deployment.max_num_seqs, sm_count)
        for dtype in PARTIAL_DTYPES
    }


def _problem(deployment: Deployment, partial_dtype: torch.dtype) -> DecodeProblem:
    return DecodeProblem(
        num_heads=deployment.kernel_heads,
        page_size=deployment.page_size,
        partial_dtype=partial_dtype,
        query_len=deployment.query_len,
        return_lse=deployment.decode_context_parallel > 1,
    )


def _parallelism(d: Deployment) -> str:
    sizes = [("tensor", d.tensor_parallel), ("pipeline", d.pipeline_parallel), ("decode context", d.decode_context_parallel)]
    named = [f"{name} parallel {size}" for name, size in sizes if size > 1]
    return f"{d.tensor_parallel * d.pipeline_parallel} ({', '.join(named)})" if named else "1"


def _heads(d: Deployment) -> str:
    if d.decode_context_parallel == 1:
        return f"{d.heads} query heads on a rank"
    return f"{d.heads} query heads on a rank, {d.kernel_heads} in its kernels: those of {d.decode_context_parallel} ranks that share the keys"


def _batch(d: Deployment) -> str:
    tokens = "1 query token" if d.query_len == 1 else f"{d.query_len} query tokens"
    graphs = f"CUDA graphs of {len(d.capture_sizes)} sizes up to {max(d.capture_sizes)} tokens" if d.capture_sizes else "no CUDA graphs"
    return f"up to {d.max_num_seqs} requests of {tokens}; {graphs}"


def _token_bytes(d: Deployment) -> str:
    whole = f"{d.key_bytes * d.model_mla_layers:,} for the model's {d.model_mla_layers} MLA layers"
    shared = f", over {d.decode_context_parallel} ranks" if d.decode_context_parallel > 1 else ""
    return f"{d.key_bytes:,} bytes a layer; {d.token_bytes:,.0f} on a rank ({d.mla_layers} layers{shared}), {whole}"


def _cost_of_fp32(d: Deployment, sm_count: int) -> str:
    bf16, fp32 = (table.largest.total_bytes for table in workspace_tables(d, sm_count).values())
    return f"{fp32 - bf16:,} bytes more than bf16 partials on each GPU: the KV cache of {ceil((fp32 - bf16) / d.token_bytes):,} tokens"

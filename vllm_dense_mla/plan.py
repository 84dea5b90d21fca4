"""`vllm-dense-mla plan`: what a deployment decodes with and what it sets aside, before there is a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import torch

from dense_mla.arch import build_forward, compile_target, ran_on
from dense_mla.problem import PARTIAL_DTYPES, TILE_KEYS, DecodeProblem

from .absent_gpu import CAPABILITY
from .buckets import WorkspaceTables, size_buckets
from .demo import PARTIAL_NAMES
from .deployment import Deployment


def print_heads_plan(heads: int, capture_sizes: Sequence[int], max_num_seqs: int, sm_count: int) -> None:
    """The workspace tables of a rank with `heads` query heads; knows nothing of a model."""
    # Any page size: the bytes do not depend on it.
    tables = {dtype: size_buckets(DecodeProblem(heads, TILE_KEYS, dtype), capture_sizes, max_num_seqs, sm_count) for dtype in PARTIAL_DTYPES}
    print(f"{heads} heads on each GPU of {sm_count} SMs. Workspace of each decode batch, by the storage of the split partials:")
    for dtype, table in tables.items():
        print(f"\n{PARTIAL_NAMES[dtype]}: each GPU reserves {table.largest.total_bytes:,} bytes, once for all layers\n{table}")
    if max(capture_sizes) > max_num_seqs:
        print(f"\nCapture sizes above max-num-seqs {max_num_seqs} hold no decode batch: no bucket is theirs.")


def print_plan(deployment: Deployment, sm_count: int, capability: tuple[int, int] = CAPABILITY) -> None:
    """Everything that a rank decodes with, and the workspace tables of both partial dtypes."""
    for name, value in plan_lines(deployment, sm_count, capability):
        print(f"{name:13}{value}")
    print("\nWorkspace of each decode batch, once for all layers")
    each = f", for {deployment.micro_batches} micro-batches" if deployment.micro_batches > 1 else ""
    for dtype, tables in workspace_tables(deployment, sm_count).items():
        print(f"\n{PARTIAL_NAMES[dtype]}: each GPU reserves {_reserved_bytes(deployment, tables):,} bytes{each}\n{tables}")


def plan_lines(deployment: Deployment, sm_count: int, capability: tuple[int, int] = CAPABILITY) -> list[tuple[str, str]]:
    """The lines above the tables: a name and a sentence each."""
    d = deployment
    lines = [
        ("model", d.model),
        ("GPUs", f"{_parallelism(d)}, {sm_count} SMs each"),
        ("heads", _heads(d)),
        ("kernel", _kernels(d, capability)),
        ("KV cache", str(d.steps.kv_dtype).removeprefix("torch.")),
        ("block size", f"{d.page_size:,} tokens: the page that the kernels see"),
        ("batch", _batch(d)),
        ("KV a token", _token_bytes(d)),
        ("KV a request", f"{d.token_bytes * d.max_model_len / 1e9:,.1f} GB on a rank at the longest context, {d.max_model_len:,} tokens"),
        ("fp32 costs", _cost_of_fp32(d, sm_count)),
    ]
    if d.draft:
        lines.append(("draft", f"{d.draft} drafts tokens: its own weights and KV cache are not in these numbers"))
    return lines


def workspace_tables(deployment: Deployment, sm_count: int) -> dict[torch.dtype, WorkspaceTables]:
    """The bucket tables of each partial dtype, by dtype: those that the backend reserves with."""
    return {dtype: deployment.steps.workspace(dtype, sm_count) for dtype in PARTIAL_DTYPES}


def _reserved_bytes(d: Deployment, tables: WorkspaceTables) -> int:
    return tables.largest.total_bytes * d.micro_batches


def _kernels(d: Deployment, capability: tuple[int, int]) -> str:
    """By query length, where they differ: the kernel depends on the rows that share a request's keys. ValueError where one does not fit."""
    names: dict[str, list[int]] = {}
    for query_len, problem in d.steps.problems(d.page_size, PARTIAL_DTYPES[0]).items():
        names.setdefault(type(build_forward(capability, problem)).__name__, []).append(query_len)
    named = [name if len(names) == 1 else f"{name} (query tokens: {', '.join(map(str, lens))})" for name, lens in names.items()]
    gpu = ran_on(capability)
    evidence = f"tested on an {gpu}" if gpu else "compiled only, never run on such a GPU: see vllm-dense-mla check"
    return f"{', '.join(named)} for {compile_target(capability)} ({evidence})"


def _parallelism(d: Deployment) -> str:
    sizes = [("tensor", d.tensor_parallel), ("pipeline", d.pipeline_parallel), ("decode context", d.steps.context_world)]
    named = [f"{name} parallel {size}" for name, size in sizes if size > 1]
    return f"{d.tensor_parallel * d.pipeline_parallel} ({', '.join(named)})" if named else "1"


def _heads(d: Deployment) -> str:
    steps = d.steps
    if steps.context_world == 1:
        return f"{steps.heads} query heads on a rank"
    return f"{steps.heads} query heads on a rank, {steps.kernel_heads} in its kernels: those of {steps.context_world} ranks that share the keys"


def _batch(d: Deployment) -> str:
    steps = d.steps
    tokens = "1 query token" if steps.longest_query == 1 else f"1 to {steps.longest_query} query tokens"
    sizes = steps.capture_sizes
    graphs = f"CUDA graphs of {len(sizes)} sizes up to {max(sizes)} tokens" if sizes else "no CUDA graphs"
    return f"up to {steps.max_num_seqs} requests of {tokens}; {graphs}{'; batch invariant' if steps.batch_invariant else ''}"


def _token_bytes(d: Deployment) -> str:
    whole = f"{d.key_bytes * d.model_mla_layers:,} for the model's {d.model_mla_layers} MLA layers"
    shared = f", over {d.steps.context_world} ranks" if d.steps.context_world > 1 else ""
    return f"{d.key_bytes:,} bytes a layer; {d.token_bytes:,.0f} on a rank ({d.mla_layers} layers{shared}), {whole}"


def _cost_of_fp32(d: Deployment, sm_count: int) -> str:
    bf16, fp32 = (_reserved_bytes(d, tables) for tables in workspace_tables(d, sm_count).values())
    return f"{fp32 - bf16:,} bytes more than bf16 partials on each GPU: the KV cache of {ceil((fp32 - bf16) / d.token_bytes):,} tokens"

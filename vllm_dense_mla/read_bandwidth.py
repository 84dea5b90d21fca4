"""Bandwidths of this GPU: the fastest streaming read, which nothing that is bound by memory beats, and a decode's."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from dense_mla import DecodeProblem, DenseMLADecoder
from dense_mla.problem import HEAD_DIM_QK, HEAD_DIM_V

from .settings import load_settings

READ_BYTES = 2**30  # some twenty times an H200's L2
DECODE_REQUESTS, DECODE_KEYS = 64, 16384  # 1.2 GB of keys, for the same reason
WARM_UP, SAMPLES = 20, 15  # launches; the clock rises only under load
# (elements a load, loads of a program, warps): which one is fastest depends on the GPU.
SHAPES = ((2048, 4, 4), (8192, 1, 8), (8192, 4, 16), (4096, 8, 4))


@triton.jit  # type: ignore[untyped-decorator]
def _add_kernel(words, sums, BLOCK: tl.constexpr, LOADS: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    start = program.to(tl.int64) * (BLOCK * LOADS) + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for load in tl.static_range(LOADS):
        total += tl.load(words + start + load * BLOCK)
    tl.store(sums + program, tl.sum(total, axis=0))


def measure_read(device: torch.device) -> float:
    """GB/s of the fastest of a few streaming sums.

    Raises:
        RuntimeError: a sum is wrong, so that its time means nothing.
    """
    words = torch.ones(READ_BYTES // 4, dtype=torch.int32, device=device)
    with torch.cuda.device(device):
        return READ_BYTES / min(_read_seconds(words, *shape) for shape in SHAPES) / 1e9


def measure_decode(problem: DecodeProblem, device: torch.device) -> float:
    """GB/s of KV cache that one decode of 64 requests of 16,384 keys reads, forward and merge, with a schedule that is there already."""
    requests, pages = DECODE_REQUESTS, -(-DECODE_KEYS // problem.page_size)
    decoder = DenseMLADecoder.prepare(problem, device, max_requests=requests, cache_dir=load_settings().cache_folder)
    kv_cache = torch.randn((requests * pages, problem.page_size, HEAD_DIM_QK), dtype=torch.bfloat16, device=device)
    block_table = torch.randperm(requests * pages, device=device).int().view(requests, pages)
    seq_lens = torch.full((requests,), DECODE_KEYS, dtype=torch.int32, device=device)
    q = torch.randn((requests, problem.num_heads, HEAD_DIM_QK), dtype=torch.bfloat16, device=device)
    out = torch.empty((requests, problem.num_heads, HEAD_DIM_V), dtype=torch.bfloat16, device=device)
    workspace = torch.empty(decoder.workspace_size(requests).total_bytes, dtype=torch.uint8, device=device)
    schedule = decoder.empty_schedule()
    decoder.schedule(seq_lens, block_table, schedule)
    scale = HEAD_DIM_QK**-0.5
    key_bytes = requests * DECODE_KEYS * HEAD_DIM_QK * kv_cache.element_size()
    with torch.cuda.device(device):
        return key_bytes / 1e9 / _seconds(
            lambda: decoder.run(q, kv_cache, block_table, seq_lens, schedule=schedule, workspace=workspace, out=out, scale=scale)
        )


def _read_seconds(words: torch.Tensor, block: int, loads: int, warps: int) -> float:
    programs = words.numel() // (block * loads)
    sums = torch.zeros(programs, dtype=torch.int32, device=words.device)
    seconds = _seconds(lambda: _add_kernel[(programs,)](words, sums, BLOCK=block, LOADS=loads, num_warps=warps))
    if int(sums.sum(dtype=torch.int64)) != words.numel():
        raise RuntimeError(f"the read kernel summed {int(sums.sum(dtype=torch.int64))} of {words.numel()} ones")
    return seconds


def _seconds(launch: Callable[[], object]) -> float:
    """Median of the launches, the queue kept full: no sample waits for the host."""
    for _ in range(WARM_UP):
        launch()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(SAMPLES + 1)]
    events[0].record()
    for event in events[1:]:
        launch()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in itertools.pairwise(events)) / 1e3

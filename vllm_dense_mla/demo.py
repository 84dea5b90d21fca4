"""`vllm-dense-mla demo`: one ragged paged batch, decoded with both partial dtypes and compared with the exact answer.

The kernels do it where a GPU that they support is, the torch reference on the CPU anywhere else. The report says which.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dense_mla import DecodeProblem, reference
from dense_mla.paged_kv import PageTiling
from dense_mla.problem import HEAD_DIM_QK, HEAD_DIM_V, PARTIAL_DTYPES
from dense_mla.reference import NAN_BYTE, Query
from dense_mla.schedule import plan

from .buckets import size_buckets

SCALE = 192**-0.5  # DeepSeek's and Kimi's: 1 / sqrt(128 + 64)
H200_SMS = 132  # the schedule that the CPU shows is an H100's or H200's
MAX_KEYS = 2**20  # of a demo batch; the FP64 answer needs 4.6 KB a key
REPEATS = 20
PARTIAL_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}  # as the setting spells them


@dataclass(frozen=True)
class Batch:
    """A decode input: q [requests, heads, 576], kv_cache [pages, page_size, 576], block_table [requests, width], seq_lens [requests]."""

    q: Query
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    lens: list[int]


@dataclass(frozen=True)
class Decoded:
    """What one partial dtype gave: out [requests, heads, 512] and the seconds that one decode took."""

    out: torch.Tensor
    seconds: float


def run(*, heads: int, batch: int, max_len: int, page_size: int, seed: int) -> None:
    """Decode and print the report.

    Raises:
        ValueError: heads or page size that the kernels do not take, or a batch that is too large for a demo.
    """
    if batch * max_len > MAX_KEYS:
        raise ValueError(f"--batch x --max-len must be at most {MAX_KEYS} keys, got {batch * max_len}")
    problems = [DecodeProblem(heads, page_size, dtype) for dtype in PARTIAL_DTYPES]
    device, sm_count, path = pick_path()
    print(f"path       {path}")
    data = make_batch(heads=heads, batch=batch, max_len=max_len, page_size=page_size, seed=seed, device=device)
    _print_batch(data, heads, page_size)
    _print_schedule(problems[0], data, sm_count)
    _print_workspace(problems, batch, sm_count)
    _print_results(problems, data, sm_count)


def pick_path() -> tuple[torch.device, int, str]:
    """The device that decodes, its SMs (an H200's on the CPU) and why."""
    if not torch.cuda.is_available():
        return torch.device("cpu"), H200_SMS, f"CPU, the torch reference (no CUDA device here); the schedule is the one for {H200_SMS} SMs"
    from dense_mla import unsupported_reason

    properties = torch.cuda.get_device_properties(0)
    reason = unsupported_reason((properties.major, properties.minor))
    if reason is not None:
        return torch.device("cpu"), H200_SMS, f"CPU, the torch reference ({properties.name}: {reason})"
    return torch.device("cuda", 0), properties.multi_processor_count, f"{properties.name}, the kernels, on {properties.multi_processor_count} SMs"


def make_batch(*, heads: int, batch: int, max_len: int, page_size: int, seed: int, device: torch.device) -> Batch:
    """Unit-Gaussian q and keys. The first request has max_len keys, the last of three or more has none, the others 1 to max_len.

    Pages are in random order, and NaN fills everything that no request may read.
    """
    generator = torch.Generator().manual_seed(seed)
    lens = torch.randint(1, max_len + 1, (batch,), generator=generator)
    lens[0] = max_len
    if batch >= 3:
        lens[-1] = 0
    width = -(-max_len // page_size)
    num_pages = batch * width
    block_table = torch.randperm(num_pages, generator=generator).int().view(batch, width)
    kv_cache = torch.full((num_pages, page_size, HEAD_DIM_QK), torch.nan, dtype=torch.bfloat16)
    for pages, seq_len in zip(block_table, lens.tolist(), strict=True):
        keys = torch.full((width * page_size, HEAD_DIM_QK), torch.nan, dtype=torch.bfloat16)
        keys[:seq_len] = torch.randn(seq_len, HEAD_DIM_QK, generator=generator).bfloat16()
        kv_cache[pages] = keys.view(width, page_size, HEAD_DIM_QK)
    q = torch.randn(batch, heads, HEAD_DIM_QK, generator=generator).bfloat16()
    return Batch(q.to(device), kv_cache.to(device), block_table.to(device), lens.int().to(device), lens.tolist())


def decode_on_cpu(problem: DecodeProblem, data: Batch, sm_count: int) -> Decoded:
    """One decode with the reference, timed once."""
    start = time.perf_counter()
    out, _ = reference.decode(
        problem, data.q, data.kv_cache, data.block_table, data.seq_lens, scale=SCALE, num_ranges=problem.num_ranges(sm_count)
    )
    return Decoded(out, time.perf_counter() - start)


def decode_on_gpu(problem: DecodeProblem, data: Batch) -> Decoded:
    """One decode with the kernels, forward and merge, timed as replays of a CUDA graph."""
    from dense_mla import DenseMLADecoder

    from .settings import load_settings

    device, requests = data.kv_cache.device, len(data.lens)
    decoder = DenseMLADecoder.prepare(problem, device, max_requests=requests, cache_dir=load_settings().cache_folder)
    schedule = decoder.empty_schedule()
    workspace = torch.full((decoder.workspace_size(requests).total_bytes,), NAN_BYTE, dtype=torch.uint8, device=device)
    out = torch.full((requests, problem.num_heads, HEAD_DIM_V), torch.nan, dtype=torch.bfloat16, device=device)
    k_scale = torch.ones(1, device=device) if problem.needs_k_scale else None
    decoder.schedule(data.seq_lens, data.block_table, schedule)

    def launch() -> None:
        decoder.run(
            data.q, data.kv_cache, data.block_table, data.seq_lens,
            schedule=schedule, workspace=workspace, out=out, scale=SCALE, k_scale=k_scale,
        )  # fmt: skip

    return Decoded(out, _replay_seconds(launch))


def _replay_seconds(launch: Callable[[], None]) -> float:
    """Median seconds of a captured launch, the keys in the L2 cache from the replay before."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    samples: list[float] = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(samples)


def _print_batch(data: Batch, heads: int, page_size: int) -> None:
    print(f"batch      {len(data.lens)} requests, {heads} query heads, pages of {page_size} keys; NaN wherever no request may read")
    print(f"lengths    {_shortened(data.lens)}    (0: a padded row of a CUDA graph)" if 0 in data.lens else f"lengths    {_shortened(data.lens)}")


def _print_schedule(problem: DecodeProblem, data: Batch, sm_count: int) -> None:
    ranges = problem.num_ranges(sm_count)
    schedule = plan(data.lens, problem.page_size, ranges, fixed_cost=problem.fixed_cost)
    num_tiles = [PageTiling(problem.page_size).num_tiles(n) for n in data.lens]
    counts = [0] * len(data.lens)
    for piece in reference.pieces(schedule, num_tiles):
        counts[piece.request] += 1
    busy = sum(r.first_request <= r.last_request for r in schedule.ranges) * problem.row_tiles
    tiles = f"{sum(num_tiles)} tiles of up to 64 keys"
    print(f"schedule   {tiles} over {busy} CTAs of {ranges * problem.row_tiles}; {len(schedule.splits)} of {len(counts)} requests are split")
    print(f"pieces     {_shortened(counts)}\n")


def _print_workspace(problems: list[DecodeProblem], batch: int, sm_count: int) -> None:
    print(f"Workspace of any {batch} requests, whatever their lengths")
    for problem in problems:
        header, sizes = str(size_buckets(problem, (), batch, sm_count)).splitlines()
        if problem is problems[0]:
            print(f"partials  {header}")
        print(f"{PARTIAL_NAMES[problem.partial_dtype]:8}  {sizes.rjust(len(header))}")
    print()


def _print_results(problems: list[DecodeProblem], data: Batch, sm_count: int) -> None:
    exact, _ = reference.attention(data.q, data.kv_cache, data.block_table, data.seq_lens, SCALE)
    on_gpu = data.kv_cache.is_cuda
    how = f"median of {REPEATS} CUDA graph replays, keys in the L2 cache" if on_gpu else "the reference's, which says nothing about the kernels"
    print(f"Error against FP64, and the time of one decode, forward and merge ({how})")
    print("partials  relative L2       time")
    for problem in problems:
        decoded = decode_on_gpu(problem, data) if on_gpu else decode_on_cpu(problem, data, sm_count)
        took = f"{decoded.seconds * 1e6:.1f} us" if on_gpu else f"{decoded.seconds * 1e3:.0f} ms"
        print(f"{PARTIAL_NAMES[problem.partial_dtype]:8}  {reference.relative_l2(decoded.out, exact):11.2e}  {took:>9}")
    print(f"The FP64 answer itself, rounded to BF16, has {reference.relative_l2(exact.bfloat16(), exact):.2e}: no BF16 output has less.")


def _shortened(values: list[int], shown: int = 16) -> str:
    more = f" and {len(values) - shown} more" if len(values) > shown else ""
    return " ".join(str(v) for v in values[:shown]) + more

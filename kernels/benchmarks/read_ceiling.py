"""The fastest that this GPU reads: a streaming sum over a buffer far larger than the L2. The floor of a memory-bound kernel."""

from __future__ import annotations

import statistics

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from benchmarks.graph_timing import time_launches

BUFFER_BYTES = 4 * 2**30
# (elements a load, loads a program, warps): which one is fastest depends on the GPU.
VARIANTS = ((2048, 4, 4), (4096, 4, 8), (8192, 1, 8), (8192, 4, 16), (4096, 8, 4), (1024, 16, 4))


@triton.jit  # type: ignore[untyped-decorator]
def _sum_kernel(values, sums, BLOCK: tl.constexpr, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0).to(tl.int64)
    offsets = program * (BLOCK * STEPS) + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for step in tl.static_range(STEPS):
        total += tl.load(values + offsets + step * BLOCK)
    tl.store(sums + program, tl.sum(total, axis=0))


def measure_read_ceiling(device: torch.device, passes: int = 12) -> float:
    """Bytes read / median time of the fastest variant, in GB/s.

    Raises:
        RuntimeError: a variant's sum is not the buffer's.
    """
    values = torch.empty(BUFFER_BYTES // 4, dtype=torch.float32, device=device).uniform_()
    expected = values.sum(dtype=torch.float64).item()
    medians = [statistics.median(_time_variant(values, expected, *variant, passes)) for variant in VARIANTS]
    return BUFFER_BYTES / min(medians) / 1e3


def _time_variant(values: torch.Tensor, expected: float, block: int, steps: int, warps: int, passes: int) -> list[float]:
    programs = values.numel() // (block * steps)
    sums = torch.full((programs,), float("nan"), device=values.device)

    def launch() -> None:
        _sum_kernel[(programs,)](values, sums, BLOCK=block, STEPS=steps, num_warps=warps)

    launch()
    found = sums.sum(dtype=torch.float64).item()
    if not abs(found - expected) <= 1e-4 * expected:
        raise RuntimeError(f"the read kernel summed {found}, the buffer holds {expected}: its time means nothing")
    return time_launches(launch, passes)

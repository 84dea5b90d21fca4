"""Prefix sum over the threads of a CTA."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def block_scan(value: Int32, sWarpSums: cute.Tensor, thread: Int32, warps: cutlass.Constexpr) -> tuple[Int32, Int32]:
    """Sum of the values of all threads before this one, and of all. Every thread of the CTA takes part; `sWarpSums` holds `warps` words."""
    lane, warp = thread % 32, thread // 32
    inclusive = value
    for i in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(inclusive, offset=1 << i)
        inclusive = inclusive + below if lane >= 1 << i else inclusive
    cute.arch.sync_threads()  # the last scan's sums are read
    if lane == 31:
        sWarpSums[warp] = inclusive
    cute.arch.sync_threads()
    before, total = Int32(0), Int32(0)
    for i in cutlass.range_constexpr(warps):
        warp_sum = sWarpSums[i]
        before = before + warp_sum if i < warp else before
        total += warp_sum
    return before + inclusive - value, total

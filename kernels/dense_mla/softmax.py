"""Online softmax over the keys of S^T tiles, with the scores of a query row spread over the four warps of a warpgroup.

S^T[64 keys, N rows] comes from WGMMA: thread (warp, g = lane / 4, q = lane % 4) holds, for each block of eight rows, the two rows
2q and 2q + 1 at the keys 16 warp + g and 16 warp + g + 8. So a row's maximum is a shuffle over g and a pass through shared memory over
the warps, while its sum stays a sum per thread until the end of the request.

Everything is in base 2: `scale_log2` is the softmax scale times log2(e).
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32

LANES_OF_ROW = (4, 8, 16)  # shuffle offsets that walk g
P_SHIFT = 15.0  # P in FP16 is at most 2^15: half of the type's largest value


def weight_scale(dtype: Any) -> float:
    """What P is multiplied with before it is rounded to `dtype` for the tensor cores.

    FP16 has no more than 14 binary orders below 1 at full precision and 25 at all: many small probabilities beside a large one would vanish
    from the output, and not from the row's sum.
    """
    return 2.0**P_SHIFT if dtype is Float16 else 1.0


def weights(probabilities: Any, dtype: Any) -> Any:
    """Probabilities, FP32 in registers, as the tensor cores take them: `weight_scale` times larger, rounded to `dtype`."""
    values, scale = probabilities.load(), weight_scale(dtype)
    rounded = cute.make_rmem_tensor(probabilities.shape, dtype)
    rounded.store((values if scale == 1.0 else values * scale).to(dtype))
    return rounded


def inverse_sum(total: Float32, dtype: Any) -> Float32:
    """What the output of a row with this sum of unscaled probabilities is multiplied with; `weights` is undone. The sum is not 0."""
    inverse, scale = cute.arch.rcp_approx(total), weight_scale(dtype)
    return inverse if scale == 1.0 else inverse * (1.0 / scale)


def accumulator_view(acc: Any, row_blocks: int, m_tiles: int = 1) -> Any:
    """WGMMA accumulator [64 m_tiles, 8 row_blocks] as (row parity, half of the m64 tile's 16 lines, row block, m tile)."""
    return cute.make_tensor(acc.iterator, cute.make_layout((2, 2, row_blocks, m_tiles)))


def row_of(block: int, parity: int, lane: Any) -> Any:
    """Row of the tile that a register of row block `block` and row parity `parity` belongs to."""
    return block * 8 + (lane % 4) * 2 + parity


@cute.jit
def scale_and_mask(scores: cute.Tensor, visible: cute.Tensor, first_key: Int32, scale_log2: Float32):
    """Scores to base-2 logits; the keys of the tile at `visible` [2 parities, row blocks] and beyond become -inf.

    `first_key`: this thread's first key in the tile.
    """
    for block in cutlass.range_constexpr(scores.shape[2]):
        for half in cutlass.range_constexpr(2):
            for parity in cutlass.range_constexpr(2):
                # A select, not a product: the score of an unread key may be NaN.
                score = scores[parity, half, block, 0] * scale_log2
                scores[parity, half, block, 0] = score if first_key + 8 * half < visible[parity, block] else -Float32.inf


@cute.jit
def publish_max(scores: cute.Tensor, warp_values: cute.Tensor, warp: Int32, lane: Int32):
    """This warp's maximum of every row into `warp_values` [4 warps, rows]; a barrier must follow."""
    for block in cutlass.range_constexpr(scores.shape[2]):
        for parity in cutlass.range_constexpr(2):
            value = cute.arch.fmax(scores[parity, 0, block, 0], scores[parity, 1, block, 0])
            for offset in cutlass.range_constexpr(len(LANES_OF_ROW)):
                value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=LANES_OF_ROW[offset]))
            if lane < 4:
                warp_values[warp, block * 8 + lane * 2 + parity] = value


@cute.jit
def update(
    scores: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    factor: cute.Tensor,
    warp_values: cute.Tensor,
    lane: Int32,
    rows_may_see_nothing: cutlass.Constexpr,
):
    """Logits to probabilities against the new maximum; `factor` is what older sums and outputs have to be multiplied with."""
    for block in cutlass.range_constexpr(scores.shape[2]):
        for parity in cutlass.range_constexpr(2):
            row = row_of(block, parity, lane)
            tile_max = cute.arch.fmax(
                cute.arch.fmax(warp_values[0, row], warp_values[1, row]), cute.arch.fmax(warp_values[2, row], warp_values[3, row])
            )
            new_max = cute.arch.fmax(row_max[parity, block], tile_max)
            reference = new_max
            if cutlass.const_expr(rows_may_see_nothing):
                # A row that has seen no key yet has maximum -inf, and -inf - -inf is NaN.
                reference = new_max if new_max > -Float32.inf else Float32(0.0)
            factor[parity, block] = cute.math.exp2(row_max[parity, block] - reference, fastmath=True)
            row_max[parity, block] = new_max
            tile_sum = Float32(0.0)
            for half in cutlass.range_constexpr(2):
                p = cute.math.exp2(scores[parity, half, block, 0] - reference, fastmath=True)
                scores[parity, half, block, 0] = p
                tile_sum += p
            row_sum[parity, block] = row_sum[parity, block] * factor[parity, block] + tile_sum


@cute.jit
def scale_output(output: cute.Tensor, factor: cute.Tensor):
    """Every value of O^T, an `accumulator_view`, times the factor of its row."""
    for m_tile in cutlass.range_constexpr(output.shape[3]):
        for block in cutlass.range_constexpr(output.shape[2]):
            for half in cutlass.range_constexpr(2):
                for parity in cutlass.range_constexpr(2):
                    output[parity, half, block, m_tile] = output[parity, half, block, m_tile] * factor[parity, block]


@cute.jit
def publish_sum(row_sum: cute.Tensor, warp_values: cute.Tensor, warp: Int32, lane: Int32):
    """This warp's sum of every row into `warp_values` [4 warps, rows]; a barrier must follow."""
    for block in cutlass.range_constexpr(row_sum.shape[1]):
        for parity in cutlass.range_constexpr(2):
            value = row_sum[parity, block]
            for offset in cutlass.range_constexpr(len(LANES_OF_ROW)):
                value += cute.arch.shuffle_sync_bfly(value, offset=LANES_OF_ROW[offset])
            if lane < 4:
                warp_values[warp, block * 8 + lane * 2 + parity] = value


@cute.jit
def collect_sum(row_sum: cute.Tensor, warp_values: cute.Tensor, lane: Int32):
    """The four warps' sums of every row, added in warp order, back into `row_sum`."""
    for block in cutlass.range_constexpr(row_sum.shape[1]):
        for parity in cutlass.range_constexpr(2):
            row = row_of(block, parity, lane)
            row_sum[parity, block] = warp_values[0, row] + warp_values[1, row] + warp_values[2, row] + warp_values[3, row]

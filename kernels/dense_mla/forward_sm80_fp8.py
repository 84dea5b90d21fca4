"""Portable forward on an E4M3 cache: 576 bytes a key, converted to 16 bits on the way from shared memory into the tensor cores.

Every code is converted twice, for the scores and for the values, between its ldmatrix and its mma.sync (tile_sm80_fp8.py). BF16 and FP16
both hold every E4M3 number exactly; which one it is depends on the GPU:

- with an instruction from E4M3 to FP16 (SM89 and up, fp8_convert.py): FP16. Every row of Q is scaled by a power of two that brings its largest
  value to 2^14 or just above, once a request and in registers, and P is 2^P_SHIFT times larger, so that small probabilities count: as in the
  Hopper kernel. NaN codes become NaN;
- without one: BF16, by integer arithmetic (e4m3_bits.py). Q and P stay what they are for a BF16 cache. A NaN code is found on the way to the
  scores, and becomes a NaN key there.

Either way the scores of a key with a NaN code are NaN in every row, and so are the outputs of the rows that see it; to the values of other rows
the code is a number, times a probability of 0. The cache's one scale is a device scalar, read at launch: a factor of the softmax scale, and of
1 / sum. Rows, ring, softmax, pieces and slots are those of ForwardSm80.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint32
from cutlass.cute.nvgpu import warp as warp_ops

from . import fp8_convert
from .e4m3_bits import NANS, alternate_to_bf16, nan_codes, neighbours_to_bf16
from .forward_sm80 import ForwardSm80
from .problem import HEAD_DIM_V, DecodeProblem
from .special_register import pinned_lane_index
from .tile_sm80 import CHUNKS, COLUMN_SPLITS, VALUE_COLUMNS, choose_tile
from .tile_sm80_fp8 import TileSm80Fp8

UNIT_COLUMNS = 16
UNITS = VALUE_COLUMNS // UNIT_COLUMNS  # of a warp's value columns


class ForwardSm80Fp8(ForwardSm80):
    """The portable forward kernel of one problem with `kv_dtype` E4M3. Arguments and errors as of ForwardSm80.

    Args:
        converts_e4m3: whether there is an instruction from E4M3 to FP16: compute capability 8.9 and up.
    """

    tile: TileSm80Fp8

    def __init__(self, problem: DecodeProblem, shared_memory_limit: int, dependent_launch: bool, converts_e4m3: bool):
        self.converts_queries = converts_e4m3
        super().__init__(problem, shared_memory_limit, dependent_launch)
        self.pins_lane = self.tile.m_tiles > 1

    def operand_dtype(self) -> Any:
        return Float16 if self.converts_queries else self.query_dtype

    def choose_tile(self, shared_memory_limit: int) -> TileSm80Fp8:
        return choose_tile(self.problem.rows, shared_memory_limit, TileSm80Fp8)

    @cute.jit
    def __call__(
        self,
        mKV: cute.Tensor,
        mQNope: cute.Tensor,
        mQRope: cute.Tensor,
        mTable: cute.Tensor,
        mSeqLens: cute.Tensor,
        mTotalLens: cute.Tensor | None,
        mSchedule: cute.Tensor,
        mOut: cute.Tensor,
        mLse: cute.Tensor | None,
        mOutPartial: cute.Tensor,
        mLsePartial: cute.Tensor,
        mKScale: cute.Tensor,
        scale_log2: Float32,
        num_ranges: Int32,
        stream: cuda.CUstream,
    ) -> None:
        outputs = (mOut, mLse, mOutPartial, mLsePartial)
        self.launch(mKV, mQNope, mQRope, mTable, (mSeqLens, mTotalLens), mSchedule, outputs, mKScale, scale_log2, num_ranges, stream)

    @cute.jit
    def convert_queries(self, rQ: cute.Tensor, sS: cute.Tensor, row_scales: cute.Tensor, scale_log2: Float32, warp: Int32) -> None:
        """Q of a request from BF16 to FP16, where it is, and what the scores of each of this lane's softmax rows are scaled with.

        The largest value of a row is found over the four warps that share its columns, through the scores' place: nobody needs that now.
        """
        lane = pinned_lane_index()
        sTop = cute.make_tensor(
            cute.recast_ptr(sS.iterator, dtype=Uint32), cute.make_layout((COLUMN_SPLITS, self.tile.rows), stride=(1, COLUMN_SPLITS))
        )
        words = cute.recast_tensor(rQ, Uint32)  # (1, half + 2 * upper, chunk, m tile)
        for m_tile in cutlass.range_constexpr(self.tile.m_tiles):
            for half in cutlass.range_constexpr(2):
                top = Uint32(0)
                for chunk in cutlass.range_constexpr(CHUNKS):
                    for upper in cutlass.range_constexpr(2):
                        top = fp8_convert.larger_magnitude(top, words[0, half + 2 * upper, chunk, m_tile])
                for offset in cutlass.range_constexpr(1, 3):
                    top = cutlass.max(top, cute.arch.shuffle_sync_bfly(top, offset=offset))
                # The warps of both key groups hold the same part of Q.
                if warp < COLUMN_SPLITS:
                    if lane % 4 == 0:
                        sTop[warp, m_tile * 16 + half * 8 + lane // 4] = top
        cute.arch.sync_threads()
        for m_tile in cutlass.range_constexpr(self.tile.m_tiles):
            for half in cutlass.range_constexpr(2):
                shrink = fp8_convert.query_shrink(self.row_exponent(sTop, m_tile * 16 + half * 8 + lane // 4))
                for chunk in cutlass.range_constexpr(CHUNKS):
                    for upper in cutlass.range_constexpr(2):
                        place = (0, half + 2 * upper, chunk, m_tile)
                        words[place] = fp8_convert.scaled_bf16_to_f16(words[place], shrink)
            exponent = self.row_exponent(sTop, self.tile.softmax_row(lane, warp, m_tile))
            row_scales[m_tile] = fp8_convert.query_growth(exponent) * scale_log2

    @cute.jit
    def row_exponent(self, sTop: cute.Tensor, row: Int32) -> Int32:
        """Exponent field of the largest magnitude of a row of Q, over the warps that share it."""
        parts = cute.make_rmem_tensor((COLUMN_SPLITS,), Uint32)
        cute.autovec_copy(sTop[None, row], parts)
        return fp8_convert.query_exponent(cutlass.max(cutlass.max(parts[0], parts[1]), cutlass.max(parts[2], parts[3])))

    @cute.jit
    def multiply_keys(self, acc: cute.Tensor, sK: cute.Tensor, rQ: cute.Tensor, stage: Int32, lane: Int32, warp: Int32) -> None:
        """acc += Q K^T over this warp's unit of every chunk: two chunks a load, the ninth alone."""
        key, unit, next_chunk = self.tile.score_unit(self.lane_here(lane), warp)
        found = cute.make_rmem_tensor((self.key_blocks,), Uint32)
        found.fill(0)
        queries = cute.recast_tensor(rQ, self.dtype)
        for first in cutlass.range_constexpr(0, CHUNKS, 2):
            chunks = 2 if first + 1 < CHUNKS else 1
            load = cute.make_copy_atom(warp_ops.LdMatrix8x8x16bOp(False, chunks * self.key_blocks), self.dtype)
            codes = cute.make_rmem_tensor((2 * chunks * self.key_blocks,), self.dtype)
            chunk = first + next_chunk if cutlass.const_expr(chunks == 2) else first
            cute.copy_atom_call(load, sK[None, unit, key, chunk, stage], codes)
            words = cute.recast_tensor(codes, Uint32)
            for i in cutlass.range_constexpr(chunks):
                rK = cute.make_rmem_tensor((4, self.key_blocks), self.dtype)
                operands = cute.recast_tensor(rK, Uint32)
                for block in cutlass.range_constexpr(self.key_blocks):
                    word = words[i * self.key_blocks + block]
                    if cutlass.const_expr(self.converts_queries):
                        lower, upper = fp8_convert.e4m3_to_f16(word)
                    else:
                        found[block] = found[block] | nan_codes(word)
                        lower, upper = neighbours_to_bf16(word)
                        if cutlass.const_expr(first + i == CHUNKS - 1):
                            # Once a tile: one NaN anywhere in a lane's part of a key makes the key's score NaN.
                            lower = Uint32(NANS) if found[block] != 0 else lower
                    operands[0, block], operands[1, block] = lower, upper
                self.multiply_chunk(acc, queries, rK, first + i)

    @cute.jit
    def multiply_units(self, rO: cute.Tensor, rA: cute.Tensor, rV: cute.Tensor, pair: cutlass.Constexpr) -> None:
        """rO += P V for 16 keys and the columns of two units. `rV`: byte pairs, what ldmatrix.trans gave."""
        words = cute.recast_tensor(rV, Uint32)
        for i in cutlass.range_constexpr(2):
            rB = cute.make_rmem_tensor((4, 2), self.dtype)  # blocks: even columns, odd columns
            operands = cute.recast_tensor(rB, Uint32)
            for upper in cutlass.range_constexpr(2):
                operands[upper, 0], operands[upper, 1] = self.value_operands(words[upper, i])
            self.multiply_columns(rO, rA, rB, pair * 4 + i * 2)

    def value_operands(self, word: Uint32) -> tuple[Uint32, Uint32]:
        """Two columns of two keys: B of the even column, and of the odd one. A NaN code that not every row sees becomes a number: 0 * NaN is NaN."""
        if not self.converts_queries:
            return alternate_to_bf16(word)
        even, odd = fp8_convert.e4m3_to_f16(fp8_convert.swap_middle_bytes(word))
        if self.problem.rows_differ:
            even, odd = fp8_convert.numbers_only(even), fp8_convert.numbers_only(odd)
        return even, odd

    @cute.jit
    def store_row(self, rO: cute.Tensor, gRow: cute.Tensor, m_tile: cutlass.Constexpr, half: cutlass.Constexpr, lane: Int32, warp: Int32) -> None:
        """One row of the fragment: four neighbouring columns a store, four lanes a unit."""
        view = cute.make_layout((4, UNITS, HEAD_DIM_V // VALUE_COLUMNS), stride=(1, UNIT_COLUMNS, VALUE_COLUMNS))
        column = cute.assume(self.tile.output_columns(lane), divby=4)
        gQuads = cute.make_tensor(gRow.iterator + column, view)  # (element, unit, warp)
        store = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), gRow.element_type, num_bits_per_copy=4 * gRow.element_type.width)
        quad = cute.make_rmem_tensor((4,), gRow.element_type)
        for unit in cutlass.range_constexpr(UNITS):
            for parity in cutlass.range_constexpr(2):
                for odd in cutlass.range_constexpr(2):
                    quad[2 * parity + odd] = rO[parity, half, 2 * unit + odd, m_tile].to(gRow.element_type)
            cute.copy(store, quad, gQuads[None, unit, warp])

"""Portable forward on an E4M3 cache: 576 bytes a key, converted to BF16 on the way from shared memory into the tensor cores.

BF16 holds every E4M3 number exactly, so that Q and P stay what they are for a BF16 cache: nothing is rescaled, and the error is that of the
BF16 kernel. Every code is converted twice, for the scores and for the values, between its ldmatrix and its mma.sync (e4m3_bits.py,
tile_sm80_fp8.py). The cache's one scale is a device scalar, read at launch: a factor of the softmax scale, and of 1 / sum.

A NaN code is found on the way to the scores and becomes a NaN key there: the scores of its key are NaN in every row, and so are the outputs of
the rows that see it. Rows, ring, softmax, pieces and slots are those of ForwardSm80.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import warp as warp_ops

from .e4m3_bits import NANS, alternate_to_bf16, nan_codes, neighbours_to_bf16
from .forward_sm80 import ForwardSm80
from .problem import HEAD_DIM_V, DecodeProblem
from .tile_sm80 import CHUNKS, VALUE_COLUMNS, choose_tile
from .tile_sm80_fp8 import TileSm80Fp8

UNIT_COLUMNS = 16
UNITS = VALUE_COLUMNS // UNIT_COLUMNS  # of a warp's value columns


class ForwardSm80Fp8(ForwardSm80):
    """The portable forward kernel of one problem with `kv_dtype` E4M3. Arguments and errors as of ForwardSm80."""

    tile: TileSm80Fp8

    def __init__(self, problem: DecodeProblem, shared_memory_limit: int, dependent_launch: bool):
        super().__init__(problem, shared_memory_limit, dependent_launch)
        self.pins_lane = self.tile.m_tiles > 1

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
    def multiply_keys(self, acc: cute.Tensor, sK: cute.Tensor, rQ: cute.Tensor, stage: Int32, lane: Int32, warp: Int32) -> None:
        """acc += Q K^T over this warp's unit of every chunk: two chunks a load, the ninth alone."""
        key, unit, next_chunk = self.tile.score_unit(self.lane_here(lane), warp)
        found = cute.make_rmem_tensor((self.key_blocks,), Uint32)
        found.fill(0)
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
                    found[block] = found[block] | nan_codes(word)
                    lower, upper = neighbours_to_bf16(word)
                    if cutlass.const_expr(first + i == CHUNKS - 1):
                        # Once a tile: one NaN anywhere in a lane's part of a key makes the key's score NaN.
                        lower = Uint32(NANS) if found[block] != 0 else lower
                    operands[0, block], operands[1, block] = lower, upper
                self.multiply_chunk(acc, rQ, rK, first + i)

    @cute.jit
    def multiply_units(self, rO: cute.Tensor, rA: cute.Tensor, rV: cute.Tensor, pair: cutlass.Constexpr) -> None:
        """rO += P V for 16 keys and the columns of two units. `rV`: byte pairs, what ldmatrix.trans gave."""
        words = cute.recast_tensor(rV, Uint32)
        for i in cutlass.range_constexpr(2):
            rB = cute.make_rmem_tensor((4, 2), self.dtype)  # blocks: even columns, odd columns
            operands = cute.recast_tensor(rB, Uint32)
            for upper in cutlass.range_constexpr(2):
                operands[upper, 0], operands[upper, 1] = alternate_to_bf16(words[upper, i])
            self.multiply_columns(rO, rA, rB, pair * 4 + i * 2)

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

"""Merge of the pieces of split requests: out = sum_i 2^(lse_i - m) out_i / sum_i 2^(lse_i - m), with m the largest lse_i.

This is the log-sum-exp rule by which FlashDecoding and FlashAttention combine splits. `out_i` is normalised by its own sum and `lse_i`
is in base 2; the LSE handed out is in natural log. Pieces are added in a fixed order: the same bits for the same schedule.

A thread owns four columns of one row. Where few requests are split, several threads ("strands") share the pieces of a row, so that a single
long request still fills the GPU: up to four strands in a warp, whose sums meet by shuffles, and up to eight warps, whose sums meet in
shared memory. Requests that one CTA covered are not touched.
"""

import math
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from .problem import HEAD_DIM_V, DecodeProblem
from .schedule import HEADER_WORDS, RANGE_WORDS, SPLIT_WORDS
from .torch_types import cutlass_dtype

THREADS = 512
WARPS = THREADS // 32
VECTOR = 4  # columns of a thread
ROW_VECTORS = HEAD_DIM_V // VECTOR
LANE_STRANDS_LOG2 = 2  # at most 4 strands in a warp: 8 lanes remain, which read 128 neighbouring bytes of FP32
WARP_STRANDS_LOG2 = 3
BATCH = 5  # pieces of a strand whose loads are in flight together: 160 of a row, more than an H200 has ranges
LN2 = math.log(2.0)


class Merge:
    """The merge kernel of one problem: the partial dtype is a compile-time fact, the batch and the number of pieces are not."""

    def __init__(self, problem: DecodeProblem, dependent_launch: bool = True):
        self.dependent_launch = dependent_launch
        self.rows = problem.rows
        self.heads = problem.num_heads
        self.out_dtype = cutlass_dtype(problem.query_dtype)
        self.partial_dtype = cutlass_dtype(problem.partial_dtype)
        self.return_lse = problem.return_lse
        self.batch_invariant = problem.batch_invariant

    @cute.jit
    def __call__(
        self,
        mOutPartial: cute.Tensor,
        mLsePartial: cute.Tensor,
        mSchedule: cute.Tensor,
        mOut: cute.Tensor,
        mLse: cute.Tensor | None,
        num_ranges: Int32,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel(mOutPartial, mLsePartial, mSchedule, mOut, mLse, num_ranges, num_ctas).launch(
            grid=(num_ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=self.dependent_launch
        )

    @cute.kernel
    def kernel(
        self,
        mOutPartial: cute.Tensor,
        mLsePartial: cute.Tensor,
        mSchedule: cute.Tensor,
        mOut: cute.Tensor,
        mLse: cute.Tensor | None,
        num_ranges: Int32,
        num_ctas: Int32,
    ) -> None:
        thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        lane, warp = thread % 32, cute.arch.make_warp_uniform(thread // 32)

        @cute.struct
        class Storage:
            sums: cute.struct.Align[cute.struct.MemRange[Float32, THREADS * VECTOR], 16]
            weights: cute.struct.MemRange[Float32, THREADS]
            maxima: cute.struct.MemRange[Float32, THREADS]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        sSums = storage.sums.get_tensor(cute.make_layout((VECTOR, 32, WARPS)))
        sWeights = storage.weights.get_tensor(cute.make_layout((32, WARPS)))
        sMaxima = storage.maxima.get_tensor(cute.make_layout((32, WARPS)))

        # Step 1: share out the work. The schedule was complete before the forward started: it may be read before the wait.
        vectors = mSchedule[0] * (self.rows * ROW_VECTORS)
        lane_log2, warp_log2 = Int32(0), Int32(0)
        if cutlass.const_expr(self.batch_invariant):
            lane_log2 = Int32(LANE_STRANDS_LOG2)  # the order of a row's sum must not depend on how many rows there are
        for i in cutlass.range_constexpr(1, 1 if self.batch_invariant else LANE_STRANDS_LOG2 + WARP_STRANDS_LOG2 + 1):
            fits = (vectors << i) <= num_ctas * THREADS
            if cutlass.const_expr(i <= LANE_STRANDS_LOG2):
                lane_log2 = Int32(i) if fits else lane_log2
            else:
                warp_log2 = Int32(i - LANE_STRANDS_LOG2) if fits else warp_log2
        warp_vectors = Int32(32) >> lane_log2  # of a warp: neighbouring columns of one row
        cta_vectors = Int32(THREADS) >> (lane_log2 + warp_log2)
        warp_strand = warp % (Int32(1) << warp_log2)
        strand = warp_strand * (Int32(1) << lane_log2) + lane // warp_vectors
        strands = Int32(1) << (lane_log2 + warp_log2)
        column = (warp >> warp_log2) * warp_vectors + lane % warp_vectors

        base = cta * cta_vectors
        # A warp without work of its own repeats the last row, so that shuffles and barriers meet everyone.
        vector = cutlass.max(cutlass.min(base + column, vectors - 1), 0)
        request, first, pieces = self.split_of(mSchedule, num_ranges, vector)

        # Step 2: the forward's partials. Also where nothing is split: our end must not come before the forward's.
        if cutlass.const_expr(self.dependent_launch):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        while base < vectors:
            row = vector // ROW_VECTORS % self.rows
            total = cute.make_rmem_tensor((VECTOR,), Float32)
            maximum, weight = self.add_pieces(mOutPartial, mLsePartial, total, first, pieces, row, vector % ROW_VECTORS, strand, strands)
            maximum, weight = self.add_lanes(total, maximum, weight, lane_log2)
            if warp_log2 > 0:
                maximum, weight = self.add_warps(sSums, sWeights, sMaxima, total, maximum, weight, lane, warp, warp_strand, warp_log2)
            if strand == 0:
                if base + column < vectors:
                    self.store(total, maximum, weight, mOut, mLse, request, row, vector % ROW_VECTORS)
            base += num_ctas * cta_vectors
            vector = cutlass.min(base + column, vectors - 1)
            request, first, pieces = self.split_of(mSchedule, num_ranges, vector)

    @cute.jit
    def split_of(self, mSchedule: cute.Tensor, num_ranges: Int32, vector: Int32) -> tuple[Int32, Int32, Int32]:
        """Request, first slot and pieces of the split request that a vector belongs to."""
        words = mSchedule.iterator + HEADER_WORDS + num_ranges * RANGE_WORDS + vector // (self.rows * ROW_VECTORS) * SPLIT_WORDS
        words = cute.make_tensor(words, cute.make_layout((SPLIT_WORDS,)))
        return words[0], words[1], words[2]

    @cute.jit
    def add_pieces(
        self,
        mOutPartial: cute.Tensor,
        mLsePartial: cute.Tensor,
        total: cute.Tensor,
        first: Int32,
        pieces: Int32,
        row: Int32,
        column: Int32,
        strand: Int32,
        strands: Int32,
    ) -> tuple[Float32, Float32]:
        """Weighted sum of this strand's pieces (strand, strand + strands, ...), with their maximum and the sum of their weights.

        Each strand goes by its own maximum: a look at the LSEs of all pieces would touch a line of memory for every one of them.
        """
        lse = cute.make_rmem_tensor((BATCH,), Float32)
        values = cute.make_rmem_tensor((VECTOR, BATCH), self.partial_dtype)
        maximum, weight = -Float32.inf, Float32(0.0)
        total.fill(0.0)
        for base in cutlass.range(strand, pieces, strands * BATCH, unroll=1):
            self.load_pieces(mOutPartial, mLsePartial, lse, values, first, pieces, row, column, base, strands)
            new_maximum = maximum
            for i in cutlass.range_constexpr(BATCH):
                new_maximum = cute.arch.fmax(new_maximum, lse[i])
            reference = self.finite(new_maximum)
            factor = cute.math.exp2(maximum - reference, fastmath=True)
            weight = weight * factor
            for j in cutlass.range_constexpr(VECTOR):
                total[j] = total[j] * factor
            for i in cutlass.range_constexpr(BATCH):
                w = cute.math.exp2(lse[i] - reference, fastmath=True)
                weight += w
                for j in cutlass.range_constexpr(VECTOR):
                    # An empty piece's values were never written: not even times 0. A NaN is not 0: it shows in the output.
                    value = values[j, i].to(Float32)
                    total[j] = total[j] if w == 0.0 else total[j] + w * value
            maximum = new_maximum
        return maximum, weight

    @cute.jit
    def finite(self, maximum: Float32) -> Float32:
        """What to subtract from an LSE: where every piece is empty the maximum is -inf, and inf - inf would be NaN."""
        return maximum if maximum > -Float32.inf else Float32(0.0)

    @cute.jit
    def load_pieces(
        self,
        mOutPartial: cute.Tensor,
        mLsePartial: cute.Tensor,
        lse: cute.Tensor,
        values: cute.Tensor,
        first: Int32,
        pieces: Int32,
        row: Int32,
        column: Int32,
        begin: Int32,
        strands: Int32,
    ) -> None:
        """LSE and values of the BATCH pieces begin, begin + strands, ...; a piece past the end has weight 0."""
        for i in cutlass.range_constexpr(BATCH):
            piece = begin + i * strands
            lse[i] = -Float32.inf
            if piece < pieces:
                lse[i] = mLsePartial[first + piece, row]
                source = cute.local_tile(mOutPartial[first + piece, row, None], (VECTOR,), (column,))
                cute.autovec_copy(source, values[None, i])

    @cute.jit
    def add_lanes(self, total: cute.Tensor, maximum: Float32, weight: Float32, lane_log2: Int32) -> tuple[Float32, Float32]:
        """Adds the strands of a warp into all of its lanes."""
        for i in cutlass.range_constexpr(LANE_STRANDS_LOG2):
            if i < lane_log2:
                other_maximum = cute.arch.shuffle_sync_bfly(maximum, offset=16 >> i)
                new_maximum = cute.arch.fmax(maximum, other_maximum)
                reference = self.finite(new_maximum)
                mine = cute.math.exp2(maximum - reference, fastmath=True)
                others = cute.math.exp2(other_maximum - reference, fastmath=True)
                weight = weight * mine + cute.arch.shuffle_sync_bfly(weight, offset=16 >> i) * others
                for j in cutlass.range_constexpr(VECTOR):
                    total[j] = total[j] * mine + cute.arch.shuffle_sync_bfly(total[j], offset=16 >> i) * others
                maximum = new_maximum
        return maximum, weight

    @cute.jit
    def add_warps(
        self,
        sSums: cute.Tensor,
        sWeights: cute.Tensor,
        sMaxima: cute.Tensor,
        total: cute.Tensor,
        maximum: Float32,
        weight: Float32,
        lane: Int32,
        warp: Int32,
        warp_strand: Int32,
        warp_log2: Int32,
    ) -> tuple[Float32, Float32]:
        """Adds the strands of neighbouring warps, in order, into the first of them."""
        cute.autovec_copy(total, sSums[None, lane, warp])
        sWeights[lane, warp] = weight
        sMaxima[lane, warp] = maximum
        cute.arch.sync_threads()
        if warp_strand == 0:
            warps = Int32(1) << warp_log2
            for i in cutlass.range_constexpr(1, 1 << WARP_STRANDS_LOG2):
                if i < warps:
                    maximum = cute.arch.fmax(maximum, sMaxima[lane, warp + i])
            reference = self.finite(maximum)
            weight = Float32(0.0)
            total.fill(0.0)
            part = cute.make_rmem_tensor((VECTOR,), Float32)
            for i in cutlass.range_constexpr(1 << WARP_STRANDS_LOG2):
                if i < warps:
                    factor = cute.math.exp2(sMaxima[lane, warp + i] - reference, fastmath=True)
                    weight += sWeights[lane, warp + i] * factor
                    cute.autovec_copy(sSums[None, lane, warp + i], part)
                    for j in cutlass.range_constexpr(VECTOR):
                        total[j] = total[j] + part[j] * factor
        cute.arch.sync_threads()
        return maximum, weight

    @cute.jit
    def store(
        self,
        total: cute.Tensor,
        maximum: Float32,
        weight: Float32,
        mOut: cute.Tensor,
        mLse: cute.Tensor | None,
        request: Int32,
        row: Int32,
        column: Int32,
    ) -> None:
        inverse = Float32(0.0) if weight == 0.0 else 1.0 / weight
        token, head = row // self.heads, row % self.heads
        result = cute.make_rmem_tensor((VECTOR,), self.out_dtype)
        for j in cutlass.range_constexpr(VECTOR):
            result[j] = (total[j] * inverse).to(self.out_dtype)
        cute.autovec_copy(result, cute.local_tile(mOut[request, token, head, None], (VECTOR,), (column,)))
        if cutlass.const_expr(self.return_lse):
            if column == 0:
                mLse[request, token, head] = (maximum + cute.math.log2(weight, fastmath=True)) * LN2


def fake_arguments(problem: DecodeProblem) -> tuple[Any, ...]:
    """Arguments for `cute.compile`: rows and dtypes are static, counts and the strides of `out` vary."""
    rows, tokens, heads, slots = problem.rows, problem.query_len, problem.num_heads, cute.sym_int()
    partial = cutlass_dtype(problem.partial_dtype)
    out_partial = make_fake_tensor(partial, (slots, rows, HEAD_DIM_V), (rows * HEAD_DIM_V, HEAD_DIM_V, 1), assumed_align=16)
    lse_partial = make_fake_tensor(Float32, (slots, rows), (rows, 1))
    schedule = make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=16)
    strides = (*(cute.sym_int64(divisibility=8) for _ in range(3)), 1)
    out = make_fake_tensor(cutlass_dtype(problem.query_dtype), (cute.sym_int(), tokens, heads, HEAD_DIM_V), strides, assumed_align=16)
    lse = make_fake_tensor(Float32, (cute.sym_int(), tokens, heads), (rows, heads, 1)) if problem.return_lse else None
    return out_partial, lse_partial, schedule, out, lse, Int32(1), Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True)

"""Merge of the pieces of split requests: out = sum_i 2^(lse_i - m) out_i / sum_i 2^(lse_i - m), with m the largest lse_i.

This is the log-sum-exp rule by which FlashDecoding and FlashAttention combine splits. `out_i` is normalised by its own sum and `lse_i`
is in base 2; the LSE handed out is in natural log. Pieces are added in a fixed order: the same bits for the same schedule.

A thread owns four or eight columns of one row. The longer a request's list of pieces, the more threads ("strands") share it, so that a row's
pieces are all in flight at once and one long request fills the GPU, also among many short ones: up to four strands in a warp, whose sums meet
by shuffles, and up to eight warps, whose sums meet in shared memory; fewer where the GPU would not hold all strands at once. Many rows leave
room for few strands: their threads own more columns and load more pieces at once (MergeTile in merge_plan.py). Requests that one CTA covered
are not touched.

Which blocks a CTA works on stands in the schedule (merge_plan.py). A CTA that starts last, because its SM was busy with the forward until the
end, has everything that it does before its first load of a piece on the way of the whole GPU: that is two loads of its own share.

One CTA an SM, launched with all the shared memory that a CTA may have, which the forward about fills: an SM that divides its memory into L1 and
shared memory in another way for the next kernel has to drain first.
"""

import math
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.cutlass_dsl import dsl_user_op

from .merge_plan import LANE_STRANDS_LOG2, THREADS, WARP_STRANDS_LOG2, MergeTile, split_blocks
from .merge_shares import BLOCK, BLOCKS, FIRST_SLOT, MOST, PIECES, REQUEST, SPLIT, share_tensors, strands_log2
from .problem import HEAD_DIM_V, DecodeProblem
from .schedule import SHARE_WORDS, SPLIT_WORDS
from .torch_types import cutlass_dtype

WARPS = THREADS // 32
THREADS_LOG2 = THREADS.bit_length() - 1
LN2 = math.log(2.0)


@dsl_user_op
def load_quad_from_l2(pointer: cute.Pointer, *, loc: Any = None, ip: Any = None) -> cute.TensorSSA:
    """Four words of the schedule, at a multiple of 16 bytes, from the L2: an L1 may hold lines of an older schedule."""
    quad = cute.arch.load(pointer, ir.VectorType.get([4], Int32.mlir_type), cop="cg", loc=loc, ip=ip)
    return cute.TensorSSA(quad, (4,), Int32, loc=loc, ip=ip)


class Merge:
    """The merge kernel of one problem: rows, tile and partial dtype are compile-time facts, the batch and the number of pieces are not.

    `shared_memory_bytes`: what a CTA is launched with.
    """

    def __init__(self, problem: DecodeProblem, dependent_launch: bool, shared_memory_bytes: int):
        self.dependent_launch = dependent_launch
        self.shared_memory_bytes = shared_memory_bytes
        self.rows = problem.rows
        self.tile = MergeTile.of(problem.rows)
        self.vectors = self.rows * self.tile.row_vectors  # of a request
        self.heads = problem.num_heads
        self.out_dtype = cutlass_dtype(problem.query_dtype)
        self.partial_dtype = cutlass_dtype(problem.partial_dtype)
        # BF16 values stay words of two until every load of the round is out: taking them apart waits for them, and ptxas put that between the
        # loads.
        self.pairs = self.partial_dtype.width == 16
        self.return_lse = problem.return_lse

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
        # The forward's partials, [slots, tokens, heads, 512] and [slots, tokens, heads]: here tokens and heads are rows.
        slots, row = mOutPartial.shape[0], HEAD_DIM_V
        gOutPartial = cute.make_tensor(mOutPartial.iterator, cute.make_layout((slots, self.rows, row), stride=(self.rows * row, row, 1)))
        gLsePartial = cute.make_tensor(mLsePartial.iterator, cute.make_layout((slots, self.rows), stride=(self.rows, 1)))
        self.kernel(gOutPartial, gLsePartial, mSchedule, mOut, mLse, num_ranges, num_ctas).launch(
            grid=(num_ctas, 1, 1),
            block=(THREADS, 1, 1),
            # One CTA an SM is what its shared memory allows. Left to itself, ptxas saves registers for two, and loads later for it.
            min_blocks_per_mp=1 if self.pairs else 0,
            smem=self.shared_memory_bytes,
            stream=stream,
            use_pdl=self.dependent_launch,
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
            sums: cute.struct.Align[cute.struct.MemRange[Float32, THREADS * self.tile.vector], 16]
            weights: cute.struct.MemRange[Float32, THREADS]
            maxima: cute.struct.MemRange[Float32, THREADS]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        # Quads of columns of all lanes side by side: 16 bytes a lane without bank conflicts.
        quads = ((4, self.tile.vector // 4), 32, WARPS)
        sSums = storage.sums.get_tensor(cute.make_layout(quads, stride=((1, 4 * 32), 4, self.tile.vector * 32)))
        sWeights = storage.weights.get_tensor(cute.make_layout((32, WARPS)))
        sMaxima = storage.maxima.get_tensor(cute.make_layout((32, WARPS)))

        # Step 1: this CTA's share. The schedule was complete before the forward started: no need to wait. Every thread asks for itself, because
        # only this CTA wants these 32 bytes; a few lines that every thread of the GPU asks for are the slowest of all loads.
        gShares, gSplits = share_tensors(mSchedule, num_ranges, num_ctas)
        place = cute.make_rmem_tensor((SHARE_WORDS,), Int32)
        self.load_share(gShares.iterator + cta * SHARE_WORDS, place)

        # All that follows from it about the first block is worked out before the wait.
        strands, warp_strand, strand, vector = self.locate(place, lane, warp)

        # Step 2: the forward's partials. One CTA waits also where nothing is split: our end must not come before the forward's.
        if cutlass.const_expr(self.dependent_launch):
            # Whoever comes next may queue up right away: it waits for our end by itself, and all of our CTAs have their places.
            cute.arch.griddepcontrol_launch_dependents()
            if (place[BLOCKS] > 0) | (cta == 0):
                cute.arch.griddepcontrol_wait()
        while place[BLOCKS] > 0:
            request, first, pieces = place[REQUEST], place[FIRST_SLOT], place[PIECES]
            lane_log2 = cutlass.min(strands, LANE_STRANDS_LOG2)
            warp_log2 = strands - lane_log2
            exists = vector < self.vectors
            # A thread without work of its own repeats the last row, so that shuffles and barriers meet everyone.
            vector = cutlass.min(vector, self.vectors - 1)
            row, column = vector // self.tile.row_vectors, vector % self.tile.row_vectors
            self.walk_on(gSplits.iterator, place, strands)  # before the pieces: the next split request then arrives behind them
            total = cute.make_rmem_tensor((self.tile.vector,), Float32)
            maximum, weight = self.add_pieces(mOutPartial, mLsePartial, total, first, pieces, row, column, strand, Int32(1) << strands)
            maximum, weight = self.add_lanes(total, maximum, weight, lane_log2)
            if warp_log2 > 0:
                maximum, weight = self.add_warps(sSums, sWeights, sMaxima, total, maximum, weight, lane, warp, warp_strand, warp_log2)
            if strand == 0:
                if exists:
                    self.store(total, maximum, weight, mOut, mLse, request, row, column)
            strands, warp_strand, strand, vector = self.locate(place, lane, warp)

    @cute.jit
    def load_share(self, share: cute.Pointer, place: cute.Tensor) -> None:
        """A share of the schedule, `merge_plan.MergeShare`, into registers: where this CTA is, and how many blocks it has left."""
        first, second = self.load_quad(share), self.load_quad(share + 4)
        for i in cutlass.range_constexpr(4):
            place[i], place[4 + i] = first[i], second[i]

    @cute.jit
    def walk_on(self, splits: cute.Pointer, place: cute.Tensor, strands: Int32) -> None:
        """To the next block, of the same split request or of the next one in the list. `strands`: log2 of the present one's."""
        place[BLOCK], place[BLOCKS] = place[BLOCK] + 1, place[BLOCKS] - 1
        if place[BLOCKS] > 0:
            if place[BLOCK] == split_blocks(Int32(self.vectors), strands):
                place[BLOCK] = 0
                entry = self.load_quad(splits + (place[SPLIT] + 1) * SPLIT_WORDS)
                for i in cutlass.range_constexpr(SPLIT_WORDS):
                    place[i] = entry[i]

    @cute.jit
    def locate(self, place: cute.Tensor, lane: Int32, warp: Int32) -> tuple[Int32, Int32, Int32, Int32]:
        """Log2 of a row's strands; a thread's strand among warps and among all, and its vector among those of the request's rows.

        In a request's last block, that vector need not exist.
        """
        strands = strands_log2(place[PIECES], place[MOST], Int32(self.tile.batch))
        lane_log2 = cutlass.min(strands, LANE_STRANDS_LOG2)
        warp_log2 = strands - lane_log2
        warp_vectors_log2 = 5 - lane_log2  # of a warp: neighbouring columns of one row
        warp_strand = warp & ((Int32(1) << warp_log2) - 1)
        strand = (warp_strand << lane_log2) + (lane >> warp_vectors_log2)
        vector = (place[BLOCK] << (THREADS_LOG2 - strands)) + ((warp >> warp_log2) << warp_vectors_log2)
        return strands, warp_strand, strand, vector + (lane & ((Int32(1) << warp_vectors_log2) - 1))

    @cute.jit
    def load_quad(self, pointer: cute.Pointer) -> cute.TensorSSA:
        """Four words of the schedule. A test on the CPU reads them from the host's memory instead."""
        return load_quad_from_l2(pointer)

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
        lse = cute.make_rmem_tensor((self.tile.batch,), Float32)
        loaded = self.empty_columns()
        maximum, weight = -Float32.inf, Float32(0.0)
        total.fill(0.0)
        for base in cutlass.range(strand, pieces, strands * self.tile.batch, unroll=1):
            self.load_pieces(mOutPartial, mLsePartial, lse, loaded, first, pieces, row, column, base, strands)
            new_maximum = maximum
            for i in cutlass.range_constexpr(self.tile.batch):
                new_maximum = cute.arch.fmax(new_maximum, lse[i])
            reference = self.finite(new_maximum)
            factor = cute.math.exp2(maximum - reference, fastmath=True)
            weight = weight * factor
            for j in cutlass.range_constexpr(self.tile.vector):
                total[j] = total[j] * factor
            for i in cutlass.range_constexpr(self.tile.batch):
                w = cute.math.exp2(lse[i] - reference, fastmath=True)
                weight += w
                for j in cutlass.range_constexpr(self.tile.vector):
                    # Not even times 0: of a row that sees no key of the piece, the forward stored 0 times the values of its keys, which is NaN where
                    # one of those is. A weight that is NaN is not 0: it shows in the output.
                    value = self.value(loaded, j, i)
                    total[j] = total[j] if w == 0.0 else total[j] + w * value
            maximum = new_maximum
        return maximum, weight

    @cute.jit
    def finite(self, maximum: Float32) -> Float32:
        """What to subtract from an LSE: where every piece is empty the maximum is -inf, and inf - inf would be NaN."""
        return maximum if maximum > -Float32.inf else Float32(0.0)

    @cute.jit
    def empty_columns(self) -> cute.Tensor:
        """Registers for what a thread loads in a round, [values or pairs, pieces]."""
        if cutlass.const_expr(self.pairs):
            return cute.make_rmem_tensor((self.tile.vector // 2, self.tile.batch), Int32)
        return cute.make_rmem_tensor((self.tile.vector, self.tile.batch), self.partial_dtype)

    @cute.jit
    def load_pieces(
        self,
        mOutPartial: cute.Tensor,
        mLsePartial: cute.Tensor,
        lse: cute.Tensor,
        loaded: cute.Tensor,
        first: Int32,
        pieces: Int32,
        row: Int32,
        column: Int32,
        begin: Int32,
        strands: Int32,
    ) -> None:
        """LSE and columns of the tile's pieces begin, begin + strands, ...; a piece past the end has weight 0."""
        for i in cutlass.range_constexpr(self.tile.batch):
            piece = begin + i * strands
            lse[i] = -Float32.inf
            if piece < pieces:
                lse[i] = mLsePartial[first + piece, row]
                source = cute.local_tile(mOutPartial[first + piece, row, None], (self.tile.vector,), (column,))
                cute.autovec_copy(cute.recast_tensor(source, loaded.element_type), loaded[None, i])

    @cute.jit
    def value(self, loaded: cute.Tensor, column: cutlass.Constexpr, piece: cutlass.Constexpr) -> Float32:
        """One of the loaded values, in FP32."""
        if cutlass.const_expr(not self.pairs):
            return loaded[column, piece].to(Float32)
        pair = loaded[column // 2, piece]
        bits = cute.make_rmem_tensor((1,), Int32)
        bits[0] = pair & -65536 if cutlass.const_expr(column % 2) else pair << 16  # BF16 is the upper half of FP32
        return cute.recast_tensor(bits, Float32)[0]

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
                for j in cutlass.range_constexpr(self.tile.vector):
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
            part = cute.make_rmem_tensor((self.tile.vector,), Float32)
            for i in cutlass.range_constexpr(1 << WARP_STRANDS_LOG2):
                if i < warps:
                    factor = cute.math.exp2(sMaxima[lane, warp + i] - reference, fastmath=True)
                    weight += sWeights[lane, warp + i] * factor
                    cute.autovec_copy(sSums[None, lane, warp + i], part)
                    for j in cutlass.range_constexpr(self.tile.vector):
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
        result = cute.make_rmem_tensor((self.tile.vector,), self.out_dtype)
        for j in cutlass.range_constexpr(self.tile.vector):
            result[j] = (total[j] * inverse).to(self.out_dtype)
        cute.autovec_copy(result, cute.local_tile(mOut[request, token, head, None], (self.tile.vector,), (column,)))
        if cutlass.const_expr(self.return_lse):
            if column == 0:
                mLse[request, token, head] = (maximum + cute.math.log2(weight, fastmath=True)) * LN2


def fake_arguments(problem: DecodeProblem) -> tuple[Any, ...]:
    """Arguments for `cute.compile`: rows and dtypes are static, counts and the strides of `out` vary."""
    rows, tokens, heads, slots = problem.rows, problem.query_len, problem.num_heads, cute.sym_int()
    partial = cutlass_dtype(problem.partial_dtype)
    strides = (rows * HEAD_DIM_V, heads * HEAD_DIM_V, HEAD_DIM_V, 1)
    out_partial = make_fake_tensor(partial, (slots, tokens, heads, HEAD_DIM_V), strides, assumed_align=16)
    lse_partial = make_fake_tensor(Float32, (slots, tokens, heads), (rows, heads, 1))
    schedule = make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=16)
    strides = (*(cute.sym_int64(divisibility=8) for _ in range(3)), 1)
    out = make_fake_tensor(cutlass_dtype(problem.query_dtype), (cute.sym_int(), tokens, heads, HEAD_DIM_V), strides, assumed_align=16)
    lse = make_fake_tensor(Float32, (cute.sym_int(), tokens, heads), (rows, heads, 1)) if problem.return_lse else None
    return out_partial, lse_partial, schedule, out, lse, Int32(1), Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True)

"""Merge of the pieces of split requests: out = sum_i 2^(lse_i - m) out_i / sum_i 2^(lse_i - m), with m the largest lse_i.

This is the log-sum-exp rule by which FlashDecoding and FlashAttention combine splits. `out_i` is normalised by its own sum and `lse_i`
is in base 2; the LSE handed out is in natural log. Pieces are added in a fixed order: the same bits for the same schedule.

A thread owns four columns of one row. The longer a request's list of pieces, the more threads ("strands") share it, so that a row's pieces
are all in flight at once and one long request fills the GPU, also among many short ones: up to four strands in a warp, whose sums meet by
shuffles, and up to eight warps, whose sums meet in shared memory; fewer where the GPU would not hold all strands at once. Requests that one
CTA covered are not touched.

One CTA an SM, launched with as much shared memory as the forward's: an SM that divides its memory into L1 and shared memory in another way for
the next kernel has to drain first.
"""

import math
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from .block_scan import block_scan
from .problem import HEAD_DIM_V, MAX_RANGES, DecodeProblem
from .schedule import HEADER_WORDS, MAX_REQUESTS, RANGE_WORDS, SPLIT_WORDS
from .torch_types import cutlass_dtype

THREADS = 512
WARPS = THREADS // 32
VECTOR = 4  # columns of a thread
ROW_VECTORS = HEAD_DIM_V // VECTOR
LANE_STRANDS_LOG2 = 2  # at most 4 strands in a warp: 8 lanes remain, which read 128 neighbouring bytes of FP32
WARP_STRANDS_LOG2 = 3
STRANDS_LOG2 = LANE_STRANDS_LOG2 + WARP_STRANDS_LOG2
BATCH = 5  # pieces of a strand whose loads are in flight together: 160 of a row, more than an H200 has ranges
LN2 = math.log(2.0)


class Merge:
    """The merge kernel of one problem: the partial dtype is a compile-time fact, the batch and the number of pieces are not.

    `shared_memory_bytes`: what a CTA is launched with.
    """

    def __init__(self, problem: DecodeProblem, dependent_launch: bool, shared_memory_bytes: int):
        self.dependent_launch = dependent_launch
        self.shared_memory_bytes = shared_memory_bytes
        self.rows = problem.rows
        self.heads = problem.num_heads
        self.out_dtype = cutlass_dtype(problem.query_dtype)
        self.partial_dtype = cutlass_dtype(problem.partial_dtype)
        self.return_lse = problem.return_lse
        self.batch_invariant = problem.batch_invariant
        self.max_splits = MAX_REQUESTS if problem.batch_invariant else MAX_RANGES  # cut by ranges, fewer requests are split than there are ranges

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
            sums: cute.struct.Align[cute.struct.MemRange[Float32, THREADS * VECTOR], 16]
            weights: cute.struct.MemRange[Float32, THREADS]
            maxima: cute.struct.MemRange[Float32, THREADS]
            warp_sums: cute.struct.MemRange[Int32, WARPS]
            count: cute.struct.MemRange[Int32, 1]
            ends: cute.struct.MemRange[Int32, self.max_splits]
            splits: cute.struct.Align[cute.struct.MemRange[Int32, self.max_splits * SPLIT_WORDS], 16]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        sSums = storage.sums.get_tensor(cute.make_layout((VECTOR, 32, WARPS)))
        sWeights = storage.weights.get_tensor(cute.make_layout((32, WARPS)))
        sMaxima = storage.maxima.get_tensor(cute.make_layout((32, WARPS)))
        sWarpSums = storage.warp_sums.get_tensor(cute.make_layout((WARPS,)))
        sEnds = storage.ends.get_tensor(cute.make_layout((self.max_splits,)))
        sSplits = storage.splits.get_tensor(cute.make_layout((SPLIT_WORDS, self.max_splits)))

        # Step 1: share out the work, in blocks of one request each. The schedule was complete before the forward started: no need to wait.
        most = Int32(STRANDS_LOG2)
        plan = (sSplits, sEnds, sWarpSums)
        count = self.load_splits(mSchedule, num_ranges, storage.count.get_tensor(cute.make_layout((1,))), sSplits, thread)
        blocks = self.lay_out(plan, count, thread, most)
        if cutlass.const_expr(not self.batch_invariant):  # there, the order of a row's sum must not depend on the batch
            while (blocks > num_ctas) & (most > 0):
                most -= 1
                blocks = self.lay_out(plan, count, thread, most)
        block = cta
        split, first_block = self.split_of(sEnds, count, block)

        # Step 2: the forward's partials. One CTA waits also where nothing is split: our end must not come before the forward's.
        if cutlass.const_expr(self.dependent_launch):
            # Whoever comes next may queue up right away: it waits for our end by itself, and all of our CTAs have their places.
            cute.arch.griddepcontrol_launch_dependents()
            if cta < cutlass.max(blocks, 1):
                cute.arch.griddepcontrol_wait()
        while block < blocks:
            request, first, pieces = sSplits[0, split], sSplits[1, split], sSplits[2, split]
            strands_log2 = self.strands_log2(pieces, most)
            lane_log2 = cutlass.min(strands_log2, LANE_STRANDS_LOG2)
            warp_log2 = strands_log2 - lane_log2
            warp_vectors = Int32(32) >> lane_log2  # of a warp: neighbouring columns of one row
            warp_strand = warp % (Int32(1) << warp_log2)
            strand = warp_strand * (Int32(1) << lane_log2) + lane // warp_vectors
            vector = (block - first_block) * (Int32(THREADS) >> strands_log2) + (warp >> warp_log2) * warp_vectors + lane % warp_vectors
            exists = vector < self.rows * ROW_VECTORS
            # A thread without work of its own repeats the last row, so that shuffles and barriers meet everyone.
            vector = cutlass.min(vector, self.rows * ROW_VECTORS - 1)
            row, column = vector // ROW_VECTORS, vector % ROW_VECTORS
            total = cute.make_rmem_tensor((VECTOR,), Float32)
            maximum, weight = self.add_pieces(
                mOutPartial, mLsePartial, total, first, pieces, row, column, strand, Int32(1) << strands_log2
            )
            maximum, weight = self.add_lanes(total, maximum, weight, lane_log2)
            if warp_log2 > 0:
                maximum, weight = self.add_warps(sSums, sWeights, sMaxima, total, maximum, weight, lane, warp, warp_strand, warp_log2)
            if strand == 0:
                if exists:
                    self.store(total, maximum, weight, mOut, mLse, request, row, column)
            block += num_ctas
            split, first_block = self.split_of(sEnds, count, block)

    @cute.jit
    def load_splits(self, mSchedule: cute.Tensor, num_ranges: Int32, sCount: cute.Tensor, sSplits: cute.Tensor, thread: Int32) -> Int32:
        """The split requests into shared memory, each by the thread that lays it out. Their number.

        They are read before the wait, so from the L2: an L1 may hold lines of an older schedule. And only by whom it takes: a few lines that every
        thread of the GPU asks for are the slowest of all loads.
        """
        if thread == 0:
            sCount[0] = cute.arch.load(mSchedule.iterator, Int32, cop="cg")
        cute.arch.sync_threads()
        count = sCount[0]
        words = mSchedule.iterator + HEADER_WORDS + num_ranges * RANGE_WORDS
        for index in cutlass.range(thread, count, THREADS, unroll=1):
            for i in cutlass.range_constexpr(3):
                sSplits[i, index] = cute.arch.load(words + index * SPLIT_WORDS + i, Int32, cop="cg")
        return count

    @cute.jit
    def lay_out(self, plan: tuple[cute.Tensor, cute.Tensor, cute.Tensor], count: Int32, thread: Int32, most: Int32) -> Int32:
        """The block at which each split request ends, into shared memory. The number of all blocks.

        `plan`: split requests, where their ends go, and the scan's memory. `most`: log2 of the strands that a row may have.
        """
        blocks = self.lay_out_some(plan, count, thread, most, Int32(0), Int32(0))
        if cutlass.const_expr(self.max_splits > THREADS):
            for base in cutlass.range(THREADS, count, THREADS, unroll=1):
                blocks = self.lay_out_some(plan, count, thread, most, base, blocks)
        cute.arch.sync_threads()
        return blocks

    @cute.jit
    def lay_out_some(
        self, plan: tuple[cute.Tensor, cute.Tensor, cute.Tensor], count: Int32, thread: Int32, most: Int32, base: Int32, blocks: Int32
    ) -> Int32:
        """The split requests from `base` on, one a thread, behind `blocks` blocks; all blocks with these."""
        sSplits, sEnds, sWarpSums = plan
        index, needed = base + thread, Int32(0)
        if index < count:
            needed = ((Int32(self.rows * ROW_VECTORS) << self.strands_log2(sSplits[2, index], most)) + THREADS - 1) // THREADS
        before, added = block_scan(needed, sWarpSums, thread, WARPS)
        if index < count:
            sEnds[index] = blocks + before + needed
        return blocks + added

    @cute.jit
    def strands_log2(self, pieces: Int32, most: Int32) -> Int32:
        """As many strands as it takes to have all pieces of a row in flight at once, in powers of two; at most 2^most."""
        found = Int32(0)
        for i in cutlass.range_constexpr(STRANDS_LOG2):
            found += Int32(1) if pieces > BATCH << i else Int32(0)
        return cutlass.min(found, most)

    @cute.jit
    def split_of(self, sEnds: cute.Tensor, count: Int32, block: Int32) -> tuple[Int32, Int32]:
        """Which split request a block belongs to, and the request's first block; anything for a block past the end."""
        low, high = Int32(0), cutlass.max(count - 1, 0)
        while low < high:
            middle = (low + high) // 2
            beyond = sEnds[middle] <= block
            low = middle + 1 if beyond else low
            high = high if beyond else middle
        first_block = sEnds[low - 1] if low > 0 else Int32(0)
        return low, first_block

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
    strides = (rows * HEAD_DIM_V, heads * HEAD_DIM_V, HEAD_DIM_V, 1)
    out_partial = make_fake_tensor(partial, (slots, tokens, heads, HEAD_DIM_V), strides, assumed_align=16)
    lse_partial = make_fake_tensor(Float32, (slots, tokens, heads), (rows, heads, 1))
    schedule = make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=16)
    strides = (*(cute.sym_int64(divisibility=8) for _ in range(3)), 1)
    out = make_fake_tensor(cutlass_dtype(problem.query_dtype), (cute.sym_int(), tokens, heads, HEAD_DIM_V), strides, assumed_align=16)
    lse = make_fake_tensor(Float32, (cute.sym_int(), tokens, heads), (rows, heads, 1)) if problem.return_lse else None
    return out_partial, lse_partial, schedule, out, lse, Int32(1), Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True)

"""Hopper forward for 33 to 64 query rows a CTA: rows in the 64-row side of WGMMA, tiles of keys to two warpgroups in turn.

    S[64 rows, 64 keys] = Q[64, 576] K[64, 576]^T       A = Q, B = the K tile, both K-major in shared memory
    O[64 rows, 512]    += P[64, 64] V[64, 512]          B = the first 512 columns of the same tile, read MN-major: no copy, no transpose

With this many rows the 64-row side is full of queries, and K is read from shared memory once a product instead of once for every group of
rows: 2,368 cycles of shared-memory bandwidth a tile where the swap-AB kernel of fewer rows takes 3,300.

Warpgroup 0 owns the value columns 0 to 255 of O and the even tiles, warpgroup 1 the columns from 256 and the odd tiles ("even" counts the
CTA's tiles, so that a tile's owner is its stage). The owner of a tile multiplies its scores and does its softmax; both multiply its P with
their half of the values: the owner from registers, the other from shared memory, in the middle of the scores of its own next tile. So one
warpgroup's softmax hides behind the other's products. The running maximum goes from tile to tile through shared memory; each warpgroup
sums the probabilities of its own tiles. P V runs in two halves of columns: the first is through with its keys while the second still multiplies.

Row tiles of one range run side by side and each loads the keys for itself, mostly from the L2. As a cluster that multicasts them, each would
wait for the other's stages as well as for its own.

What a CTA works on, where results go and what a row without keys gets: as in forward_sm90.py.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from . import softmax
from .forward_sm90 import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    K_STAGES,
    PRODUCER_REGISTERS,
    SHARED_MEMORY_LIMIT,
    THREADS,
    VALUE_COLUMNS,
)
from .named_barrier import NamedBarrierSm90
from .problem import HEAD_DIM_QK, HEAD_DIM_V, TILE_KEYS, DecodeProblem
from .request_range import FIRST_REQUEST, LAST_REQUEST
from .request_walk import CHUNK, CHUNKS, RequestWalk, k_major
from .schedule import NO_SLOT
from .special_register import pinned, pinned_lane_index

M_ROWS = 64  # rows of the tile in shared memory and registers, however many of them are queries
HALF = VALUE_COLUMNS // CHUNK  # chunks of K that hold one warpgroup's value columns
ROPE = CHUNKS - 1  # the chunk that is no value
PARTS = 2  # of a P V, by columns: each gives its chunks back as soon as it is through
PART_COLUMNS = VALUE_COLUMNS // PARTS


class ForwardSm90Wide(RequestWalk):
    """The forward kernel of one problem with more than 32 rows a CTA. Construction takes compile-time facts only."""

    def __init__(self, problem: DecodeProblem):
        super().__init__(problem)
        self.tile_rows = M_ROWS
        # After so many chunks of its scores a warpgroup multiplies the other's P. The rope columns and its own half come first, because the
        # previous tile in the stage gave them back first. Later, the other's stage would be free later; earlier, its softmax is not through.
        self.chunks_before_other = 4 if self.row_tiles == 1 else 5

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
        scale_log2: Float32,
        num_ranges: Int32,
        stream: cuda.CUstream,
    ) -> None:
        # Step 1: tensor maps.
        tma, gInputs = self.tensor_maps(mKV, mQNope, mQRope)

        # Step 2: matrix instructions: scores, P from registers, P from shared memory.
        def mma(columns: int, source: warpgroup.OperandSource, b_major: OperandMajorMode) -> cute.TiledMma:
            op = warpgroup.MmaF16BF16Op(self.dtype, Float32, (M_ROWS, columns, 16), source, OperandMajorMode.K, b_major)
            return cute.make_tiled_mma(op)

        sources = warpgroup.OperandSource
        self.kernel(
            tma,
            gInputs,
            mTable,
            (mSeqLens, mTotalLens),
            mSchedule,
            (mOut, mLse, mOutPartial, mLsePartial),
            scale_log2,
            k_major(self.dtype, TILE_KEYS, HEAD_DIM_QK, K_STAGES),
            k_major(self.dtype, M_ROWS, HEAD_DIM_QK, self.q_stages),
            k_major(self.dtype, M_ROWS, TILE_KEYS),
            mma(TILE_KEYS, sources.SMEM, OperandMajorMode.K),
            mma(PART_COLUMNS, sources.RMEM, OperandMajorMode.MN),
            mma(PART_COLUMNS, sources.SMEM, OperandMajorMode.MN),
        ).launch(
            # Row tiles of a range are neighbours, so they run side by side and the second reads the keys from L2.
            grid=(self.row_tiles, num_ranges, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        tma: tuple[cute.CopyAtom, cute.CopyAtom, cute.CopyAtom],
        gInputs: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        mTable: cute.Tensor,
        lens: tuple[cute.Tensor, cute.Tensor | None],
        mSchedule: cute.Tensor,
        outputs: tuple[cute.Tensor, cute.Tensor | None, cute.Tensor, cute.Tensor],
        scale_log2: Float32,
        lK: cute.ComposedLayout,
        lQ: cute.ComposedLayout,
        lP: cute.ComposedLayout,
        mma_s: cute.TiledMma,
        mma_own: cute.TiledMma,
        mma_other: cute.TiledMma,
    ) -> None:
        row_tile, range_index, _ = cute.arch.block_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        # Step 1: shared memory and barriers.
        @cute.struct
        class Storage:
            k_full: cute.struct.MemRange[Int64, K_STAGES * CHUNKS]
            k_empty: cute.struct.MemRange[Int64, K_STAGES * CHUNKS]
            q_full: cute.struct.MemRange[Int64, self.q_stages]
            q_empty: cute.struct.MemRange[Int64, self.q_stages]
            maxima: cute.struct.Align[cute.struct.MemRange[Float32, M_ROWS], 16]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, 2 * CONSUMERS * M_ROWS], 16]
            K: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(lK)], 1024]
            Q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(lQ)], 1024]
            P: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(lP)], 1024]

        self.shared_memory_bytes = Storage.size_in_bytes()
        assert self.shared_memory_bytes <= SHARED_MEMORY_LIMIT, self.shared_memory_bytes
        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        sK = storage.K.get_tensor(lK.outer, swizzle=lK.inner)
        sQ = storage.Q.get_tensor(lQ.outer, swizzle=lQ.inner)
        k_full, k_empty = storage.k_full.data_ptr(), storage.k_empty.data_ptr()
        q_full, q_empty = storage.q_full.data_ptr(), storage.q_empty.data_ptr()
        if warp_index == 0:
            for i in cutlass.range_constexpr(3):
                cpasync.prefetch_descriptor(tma[i])
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(K_STAGES * CHUNKS):
                    cute.arch.mbarrier_init(k_full + i, 1)
                    cute.arch.mbarrier_init(k_empty + i, 4)
                cute.arch.mbarrier_init(q_full, 1)
                cute.arch.mbarrier_init(q_empty, CONSUMERS * 4)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        # Step 2: wait for the kernel before, then let the merge queue up behind this one: it waits for our end by itself.
        early = self.early_words(mSchedule, range_index)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        # Step 3: this CTA's range of the line.
        words = self.range_words(mSchedule, range_index)
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp_index == 0:
                self.load_keys(tma[0], gInputs[0], mTable, lens[0], early, sK, k_full, k_empty)
            if warp_index == 1:
                self.load_queries(tma, gInputs, lens[0], early, sQ, q_full, q_empty, row_tile)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.consume(storage, lP, sK, sQ, (mma_s, mma_own, mma_other), lens, words, outputs, scale_log2, row_tile)

    @cute.jit
    def load_keys(
        self,
        tma: cute.CopyAtom,
        gKV: cute.Tensor,
        mTable: cute.Tensor,
        mSeqLens: cute.Tensor,
        words: cute.Tensor,
        sK: cute.Tensor,
        k_full: cute.Pointer,
        k_empty: cute.Pointer,
    ) -> None:
        """Producer of K, chunk by chunk in the order in which a stage's owner multiplies and gives them back."""
        tiling = self.tiling
        boxes, num_pages = tiling.pages_per_tile, cute.size(gKV, mode=[2])
        tKsK, tKgK = self.key_boxes(tma, gKV, sK, (tiling.box_keys, CHUNK))
        pages = cute.make_rmem_tensor((boxes,), Int32)
        stage, phase = Int32(0), Int32(1)  # a fresh barrier lets a wait for parity 1 pass
        for request in cutlass.range(words[FIRST_REQUEST], words[LAST_REQUEST] + 1, unroll=1):
            begin, end = self.tile_span(words, request, mSeqLens)
            seq_len = mSeqLens[request]
            for tile in cutlass.range(begin, end, unroll=1):
                part = Int32(0)
                if cutlass.const_expr(boxes == 1):
                    pages[0], part = self.page_of(mTable, words, request, begin, tile), tile % tiling.tiles_per_page
                else:
                    for i in cutlass.range_constexpr(boxes):
                        pages[i] = num_pages
                        if self.box_has_keys(tile, i, seq_len):
                            pages[i] = mTable[request, tile * boxes + i]
                # Rolled: unrolled copies of several boxes spill the producer's registers.
                for step in cutlass.range(CHUNKS, unroll=1):
                    chunk = self.chunk_at(step, stage)
                    barrier = k_full + stage * CHUNKS + chunk
                    cute.arch.mbarrier_wait(k_empty + stage * CHUNKS + chunk, phase)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(barrier, TILE_KEYS * CHUNK * 2)
                    for i in cutlass.range_constexpr(boxes):
                        cute.copy(tma, tKgK[None, part, chunk, pages[i]], tKsK[None, i, chunk, stage], tma_bar_ptr=barrier)
                stage, phase = stage ^ 1, phase ^ stage

    @cute.jit
    def chunk_at(self, step: Any, owner: Int32) -> Int32:
        """The chunk that the owner of a tile multiplies in a step: the rope columns, its own values, the other warpgroup's.

        With batch invariance in one order for both: which of them owns a tile depends on the requests before, and a score's bits on the order.
        """
        if cutlass.const_expr(self.problem.batch_invariant):
            owner = Int32(0)
        return Int32(ROPE) if step == 0 else (step - 1) ^ (owner * HALF)

    @cute.jit
    def score_row(self, block: cutlass.Constexpr, half: cutlass.Constexpr, thread: Int32) -> Int32:
        """Row of the tile of a thread's first or second line of S and O. There is one block: a thread has two row statistics, [half, 0]."""
        return thread // 32 * 16 + thread % 32 // 4 + 8 * half

    @cute.jit
    def consume(
        self,
        storage: cutlass.Constexpr,
        lP: cute.ComposedLayout,
        sK: cute.Tensor,
        sQ: cute.Tensor,
        mma: tuple[cute.TiledMma, cute.TiledMma, cute.TiledMma],
        lens: tuple[cute.Tensor, cute.Tensor | None],
        words: cute.Tensor,
        outputs: tuple[cute.Tensor, cute.Tensor | None, cute.Tensor, cute.Tensor],
        scale_log2: Float32,
        row_tile: Int32,
    ) -> None:
        """One consumer warpgroup: scores and softmax of every other tile, 256 value columns of all."""
        thread = cute.arch.thread_idx()[0] % 128
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128) - 1
        mma_s, mma_own, mma_other = mma

        # Step 1: operands.
        sP = storage.P.get_tensor(lP.outer, swizzle=lP.inner)
        sV = cute.composition(sK, cute.make_layout((HEAD_DIM_V, TILE_KEYS, K_STAGES), stride=(TILE_KEYS, 1, TILE_KEYS * HEAD_DIM_QK)))
        sV = cute.flat_divide(sV, (PART_COLUMNS, TILE_KEYS))[None, None, None, 0, None]
        thr_s, thr_other = mma_s.get_slice(thread), mma_other.get_slice(thread)
        tSrQ = thr_s.make_fragment_A(thr_s.partition_A(cute.flat_divide(sQ, (M_ROWS, CHUNK))[None, None, 0, None, 0]))  # (MMA, 1, 4, 9)
        tSrK = thr_s.make_fragment_B(thr_s.partition_B(cute.flat_divide(sK, (TILE_KEYS, CHUNK))[None, None, 0, None, None]))  # (MMA, 1, 4, 9, stage)
        tOrV = thr_other.make_fragment_B(thr_other.partition_B(sV))  # (MMA, 1, 4, 2 parts of 2 warpgroups, stage)
        tOrP = thr_other.make_fragment_A(thr_other.partition_A(sP))  # (MMA, 1, 4)
        acc_o = cute.make_rmem_tensor((M_ROWS * VALUE_COLUMNS // 128,), Float32)
        store_p = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        store_p = cute.make_tiled_copy_C(store_p, mma_s).get_slice(thread)
        tPsP = store_p.partition_D(sP)

        # Step 2: row statistics of the two rows that this thread sees.
        row_max, row_sum, factor = (cute.make_rmem_tensor((2, 1), Float32) for _ in range(3))
        limits, visible = (cute.make_rmem_tensor((2, 1), Int32) for _ in range(2))
        statistics = (row_max, row_sum, factor)

        # Step 3: the requests of the range. `count`: tiles that this CTA is through with.
        count, q_phase, finished = Int32(0), Int32(0), Int32(0)
        for request in cutlass.range(words[FIRST_REQUEST], words[LAST_REQUEST] + 1, unroll=1):
            seq_len, begin, end = self.work_span(words, request, lens[0])
            self.row_limits(limits, lens, request, seq_len, row_tile, thread)
            if begin < end:
                cute.arch.mbarrier_wait(storage.q_full.data_ptr(), q_phase)
            for piece in cutlass.range(self.range.num_pieces(begin, end, seq_len), unroll=1):
                piece_begin, piece_end, slot = self.piece(words, request, begin, end, seq_len, piece)
                row_max.fill(-Float32.inf)
                row_sum.fill(0.0)
                acc_o.fill(0.0)
                for tile in cutlass.range(piece_begin + ((count ^ group) & 1), piece_end, 2, unroll=1):
                    acc_s = cute.make_rmem_tensor(mma_s.partition_shape_C((M_ROWS, TILE_KEYS)), Float32)
                    index = count + tile - piece_begin
                    others = (mma_other, acc_o, tOrP, tOrV)
                    self.scores(storage, mma_s, acc_s, tSrQ, tSrK, others, statistics, index, tile > piece_begin, group, thread)
                    key0 = self.tiling.first_key(tile)
                    self.visible_in_tile(visible, limits, tile, key0)
                    self.probabilities(acc_s, statistics, visible, scale_log2, thread)
                    rP = self.rounded(acc_s)
                    # All warps of this warpgroup are through with the other's P, which lies where ours goes.
                    self.sync_warpgroup(group)
                    cute.copy(store_p, store_p.retile(rP), tPsP)
                    self.publish_max(storage, row_max, thread)
                    self.share(sK, seq_len - key0, group, thread)
                    self.accumulate_own(storage, mma_own, acc_o, rP, tOrV, factor, group)
                count += piece_end - piece_begin
                # The last tile is the other's: nothing of our own is left to multiply it in the middle of.
                if piece_begin < piece_end:
                    if (count - 1) % 2 != group:
                        self.accumulate_other(storage, mma_other, acc_o, tOrP, tOrV, statistics, count - 1, group, thread)
                        self.release_values(storage, 1 - group, group, behind=0)
                    if piece_end == end:
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive(storage.q_empty.data_ptr())
                self.finish_rows(storage, acc_o, statistics, outputs, request, slot, row_tile, group, finished)
                finished ^= 1
            if begin < end:
                q_phase ^= 1

    @cute.jit
    def scores(
        self,
        storage: cutlass.Constexpr,
        mma_s: cute.TiledMma,
        acc_s: cute.Tensor,
        tSrQ: cute.Tensor,
        tSrK: cute.Tensor,
        others: tuple[cute.TiledMma, cute.Tensor, cute.Tensor, cute.Tensor],
        statistics: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        index: Int32,
        has_previous: cutlass.Boolean,
        group: Int32,
        thread: Int32,
    ) -> None:
        """acc_s = Q K^T of one of our tiles, following its chunks as they arrive; between them, the previous tile's P V."""
        atom = cute.make_mma_atom(mma_s.op)
        atom.set(warpgroup.Field.ACCUMULATE, False)
        for step in cutlass.range_constexpr(CHUNKS):
            chunk = self.chunk_at(step, group)
            cute.arch.mbarrier_wait(storage.k_full.data_ptr() + group * CHUNKS + chunk, index // 2 % 2)
            if cutlass.const_expr(step == 0):
                warpgroup.fence()
            for block in cutlass.range_constexpr(CHUNK // 16):
                cute.gemm(atom, acc_s, tSrQ[None, None, block, chunk], tSrK[None, None, block, chunk, group], acc_s)
                atom.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            if cutlass.const_expr(step == self.chunks_before_other - 1):
                if has_previous:
                    self.accumulate_other(storage, *others, statistics, index - 1, group, thread)
            if cutlass.const_expr(step == self.chunks_before_other):
                if has_previous:
                    # With one more chunk of scores queued behind it, so that the tensor cores stay busy.
                    self.release_values(storage, 1 - group, group, behind=1)
        warpgroup.wait_group(0)
        self.release(storage.k_empty.data_ptr() + group * CHUNKS + ROPE)

    @cute.jit
    def probabilities(
        self,
        acc_s: cute.Tensor,
        statistics: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        visible: cute.Tensor,
        scale_log2: Float32,
        thread: Int32,
    ) -> None:
        """Scores to probabilities against the row's reference; the factor is what older sums and outputs have to be multiplied with.

        A thread holds keys 8 block + 2 (lane % 4) + parity of two rows; the four threads of a quad hold a row.
        """
        row_max, row_sum, _ = statistics
        rS = cute.make_tensor(acc_s.iterator, cute.make_layout((2, 2, TILE_KEYS // 8)))
        if cutlass.min(visible[0], visible[1]) < TILE_KEYS:
            self.mask(rS, visible, thread)
        for half in cutlass.range_constexpr(2):
            tile_max = -Float32.inf
            for block in cutlass.range_constexpr(TILE_KEYS // 8):
                for parity in cutlass.range_constexpr(2):
                    tile_max = cute.arch.fmax(tile_max, rS[parity, half, block])
            for offset in cutlass.range_constexpr(1, 3):
                tile_max = cute.arch.fmax(tile_max, cute.arch.shuffle_sync_bfly(tile_max, offset=offset))
            # The reference of a row that has seen no key is -inf, and -inf - -inf is NaN.
            # Letting the reference lag behind would save scaling O, but then the largest probability is no longer exactly 1: the error of
            # P's rounding grows by a fifth where few keys count.
            new_max = cute.arch.fmax(row_max[half], tile_max * scale_log2)
            self.raise_reference(statistics, new_max, half)
            reference = new_max if new_max > -Float32.inf else Float32(0.0)
            tile_sum = Float32(0.0)
            for block in cutlass.range_constexpr(TILE_KEYS // 8):
                for parity in cutlass.range_constexpr(2):
                    p = cute.math.exp2(rS[parity, half, block] * scale_log2 - reference, fastmath=True)
                    rS[parity, half, block] = p
                    tile_sum += p
            row_sum[half] = row_sum[half] + tile_sum

    @cute.jit
    def mask(self, rS: cute.Tensor, visible: cute.Tensor, thread: Int32) -> None:
        """Scores of the keys at `visible` and beyond to -inf. A select, not a product: the score of an unread key may be NaN."""
        for half in cutlass.range_constexpr(2):
            for block in cutlass.range_constexpr(TILE_KEYS // 8):
                for parity in cutlass.range_constexpr(2):
                    key = 8 * block + thread % 4 * 2 + parity
                    rS[parity, half, block] = rS[parity, half, block] if key < visible[half] else -Float32.inf

    @cute.jit
    def rounded(self, acc_s: cute.Tensor) -> cute.Tensor:
        """P in the operands' type, two to a register. Pinned: the compiler would compute the exponentials again for the second use of P."""
        rP = softmax.weights(acc_s, self.dtype)
        words = cute.recast_tensor(rP, Int32)
        for i in cutlass.range_constexpr(cute.size(words)):
            words[i] = pinned(words[i])
        return rP

    @cute.jit
    def raise_reference(self, statistics: tuple[cute.Tensor, cute.Tensor, cute.Tensor], new_max: Float32, half: cutlass.Constexpr) -> None:
        """Takes over a row's new reference, which is the old one or higher, and scales the sum so far to it."""
        row_max, row_sum, factor = statistics
        factor[half] = cute.math.exp2(row_max[half] - new_max, fastmath=True) if new_max > row_max[half] else Float32(1.0)
        row_max[half] = new_max
        row_sum[half] = row_sum[half] * factor[half]

    @cute.jit
    def publish_max(self, storage: cutlass.Constexpr, row_max: cute.Tensor, thread: Int32) -> None:
        """The new maxima, for the other warpgroup."""
        maxima = storage.maxima.get_tensor(cute.make_layout((M_ROWS,)))
        if thread % 4 == 0:
            for half in cutlass.range_constexpr(2):
                maxima[self.score_row(0, half, thread)] = row_max[half]

    @cute.jit
    def share(self, sK: cute.Tensor, keys: Int32, group: Int32, thread: Int32) -> None:
        """Hands P over. In a request's last tile the values of keys past its end become 0 first: 0 times the NaN of a reused page is NaN."""
        if keys < TILE_KEYS:
            vectors = cute.tiled_divide(sK, (1, 8))  # ((1, 8), 64, 72, stages)
            zeros = cute.make_rmem_tensor(((1, 8),), self.dtype)
            zeros.fill(0.0)
            store = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=128)
            for key in cutlass.range(cutlass.max(keys, 0) + thread // 64, TILE_KEYS, 2, unroll=1):
                cute.copy(store, zeros, vectors[None, key, thread % 64, group])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier_arrive(barrier_id=NamedBarrierSm90.P_READY_0 + group, number_of_threads=128 * CONSUMERS)
        if keys < TILE_KEYS:
            self.sync_warpgroup(group)

    @cute.jit
    def accumulate_own(
        self,
        storage: cutlass.Constexpr,
        mma_own: cute.TiledMma,
        acc_o: cute.Tensor,
        rP: cute.Tensor,
        tOrV: cute.Tensor,
        factor: cute.Tensor,
        group: Int32,
    ) -> None:
        """acc_o = acc_o factor + P V of our own tile, P from registers: the scores' accumulator has the layout of operand A."""
        self.scale_if_raised(acc_o, factor)
        tOrP = cute.make_tensor(rP.iterator, cute.make_layout(mma_own.partition_shape_A((M_ROWS, TILE_KEYS))))
        self.multiply_values(mma_own, acc_o, tOrP, tOrV, group, group)
        self.release_values(storage, group, group, behind=0)

    @cute.jit
    def accumulate_other(
        self,
        storage: cutlass.Constexpr,
        mma_other: cute.TiledMma,
        acc_o: cute.Tensor,
        tOrP: cute.Tensor,
        tOrV: cute.Tensor,
        statistics: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        index: Int32,
        group: Int32,
        thread: Int32,
    ) -> None:
        """Starts acc_o = acc_o factor + P V of the other's tile; whoever waits for it gives its columns back."""
        factor = statistics[2]
        cute.arch.barrier(barrier_id=NamedBarrierSm90.P_READY_0 + 1 - group, number_of_threads=128 * CONSUMERS)
        maxima = storage.maxima.get_tensor(cute.make_layout((M_ROWS,)))
        for half in cutlass.range_constexpr(2):
            self.raise_reference(statistics, maxima[self.score_row(0, half, thread)], half)
        self.scale_if_raised(acc_o, factor)
        # The owner has waited for these chunks; TMA's writes are ours to read once we have, too.
        for i in cutlass.range_constexpr(HALF):
            cute.arch.mbarrier_wait(storage.k_full.data_ptr() + (1 - group) * CHUNKS + group * HALF + i, index // 2 % 2)
        self.multiply_values(mma_other, acc_o, tOrP, tOrV, 1 - group, group)

    @cute.jit
    def scale_if_raised(self, acc_o: cute.Tensor, factor: cute.Tensor) -> None:
        if cute.arch.vote_any_sync((factor[0] != 1.0) | (factor[1] != 1.0)):
            warpgroup.wait_group(0)
            self.scale_output(acc_o, factor)

    @cute.jit
    def scale_output(self, acc_o: cute.Tensor, factor: cute.Tensor) -> None:
        rO = cute.make_tensor(acc_o.iterator, cute.make_layout((2, 2, VALUE_COLUMNS // 8)))
        for block in cutlass.range_constexpr(VALUE_COLUMNS // 8):
            for half in cutlass.range_constexpr(2):
                for parity in cutlass.range_constexpr(2):
                    rO[parity, half, block] = rO[parity, half, block] * factor[half]

    @cute.jit
    def multiply_values(
        self, mma: cute.TiledMma, acc_o: cute.Tensor, tOrP: cute.Tensor, tOrV: cute.Tensor, stage: Int32, group: Int32
    ) -> None:
        """Starts acc_o += P V of a stage for this warpgroup's columns, a part after the other."""
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        shape = mma.partition_shape_C((M_ROWS, PART_COLUMNS))
        warpgroup.fence()
        for part in cutlass.range_constexpr(PARTS):
            acc = cute.make_tensor(acc_o.iterator + part * cute.size(shape), cute.make_layout(shape))
            for block in cutlass.range_constexpr(TILE_KEYS // 16):
                cute.gemm(atom, acc, tOrP[None, None, block], tOrV[None, None, block, group * PARTS + part, stage], acc)
            warpgroup.commit_group()

    @cute.jit
    def release(self, empty: cute.Pointer) -> None:
        """Gives a chunk back to the producer."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(empty)

    @cute.jit
    def release_values(self, storage: cutlass.Constexpr, stage: Int32, group: Int32, *, behind: cutlass.Constexpr) -> None:
        """Gives this warpgroup's value columns of a stage back, part by part as their products end.

        `behind`: how many groups of products were committed after those of the values.
        """
        empty = storage.k_empty.data_ptr() + stage * CHUNKS + group * HALF
        for part in cutlass.range_constexpr(PARTS):
            warpgroup.wait_group(behind + PARTS - 1 - part)
            for i in cutlass.range_constexpr(HALF // PARTS):
                self.release(empty + part * (HALF // PARTS) + i)

    @cute.jit
    def finish_rows(
        self,
        storage: cutlass.Constexpr,
        acc_o: cute.Tensor,
        statistics: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        outputs: tuple[cute.Tensor, cute.Tensor | None, cute.Tensor, cute.Tensor],
        request: Int32,
        slot: Int32,
        row_tile: Int32,
        group: Int32,
        buffer: Int32,
    ) -> None:
        """Normalises the rows and writes them: to `out` where the request is whole, else to its partial slot."""
        # With a lane that can be hoisted, the addresses of all stores live across the loop over the tiles and spill.
        thread = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 32) % 4 * 32 + pinned_lane_index()
        row_max, row_sum, factor = statistics

        # Step 1: the rows' sums over the quad and both warpgroups. Two buffers in turn: the other may still read the last piece's.
        sums = storage.sums.get_tensor(cute.make_layout((M_ROWS, CONSUMERS, 2)))
        for half in cutlass.range_constexpr(2):
            for offset in cutlass.range_constexpr(1, 3):
                row_sum[half] = row_sum[half] + cute.arch.shuffle_sync_bfly(row_sum[half], offset=offset)
            if thread % 4 == 0:
                sums[self.score_row(0, half, thread), group, buffer] = row_sum[half]
        cute.arch.barrier(barrier_id=NamedBarrierSm90.CONSUMERS, number_of_threads=128 * CONSUMERS)
        for half in cutlass.range_constexpr(2):
            row = self.score_row(0, half, thread)
            row_sum[half] = sums[row, 0, buffer] + sums[row, 1, buffer]
            # A row without keys has sum 0: output 0, LSE -inf.
            factor[half] = Float32(0.0) if row_sum[half] == 0.0 else softmax.inverse_sum(row_sum[half], self.dtype)
        self.scale_output(acc_o, factor)

        # Step 2: store.
        mOut, mLse, mOutPartial, mLsePartial = outputs
        if slot == NO_SLOT:
            self.store_output(acc_o, mOut[request, None, None, None], row_tile, group, thread)
        else:
            self.store_output(acc_o, mOutPartial[slot, None, None, None], row_tile, group, thread)
        if group == 0:
            if thread % 4 == 0:
                self.store_lse(row_max, row_sum, mLse, mLsePartial, request, slot, row_tile, thread)

    @cute.jit
    def store_output(self, acc_o: cute.Tensor, gO: cute.Tensor, row_tile: Int32, group: Int32, thread: Int32) -> None:
        """Registers to gO [tokens, heads, 512], in units of 32 bytes or more: less than a sector of the L2 is a read and a write there.

        A quad holds a row, its threads two neighbouring columns of every eight. In FP32 these are the 32 bytes; of 16-bit values a thread
        collects eight columns first.
        """
        dtype, blocks = gO.element_type, VALUE_COLUMNS // 8
        unit = 2 if dtype.width == 32 else 8  # columns a store
        store = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=unit * dtype.width)
        columns = cute.make_layout((unit, 2 * blocks // unit), stride=(1, 4 * unit))  # (column of a unit, unit of the thread)
        rO = cute.make_tensor(acc_o.iterator, cute.make_layout((2, 2, blocks)))
        for half in cutlass.range_constexpr(2):
            values = cute.make_rmem_tensor(columns.shape, dtype)
            pairs = cute.make_tensor(values.iterator, cute.make_layout((2, blocks)))
            for block in cutlass.range_constexpr(blocks):
                for parity in cutlass.range_constexpr(2):
                    pairs[parity, block] = rO[parity, half, block].to(dtype)
            if cutlass.const_expr(dtype.width == 16):
                self.transpose_quads(cute.recast_tensor(values, Int32), thread)
            token, head, exists = self.locate(self.score_row(0, half, thread), row_tile)
            if exists:
                # One address a row; the columns are offsets from it.
                first = (gO[token, head, None].iterator + group * VALUE_COLUMNS + thread % 4 * unit).align(unit * dtype.width // 8)
                cute.copy(store, values, cute.make_tensor(first, columns))

    @cute.jit
    def transpose_quads(self, words: cute.Tensor, thread: Int32) -> None:
        """Of every four words: word j of the quad's thread t becomes word t of thread j."""
        for bit in cutlass.range_constexpr(2):
            upper = (thread >> bit) % 2 == 1
            for i in cutlass.range_constexpr(cute.size(words)):
                if cutlass.const_expr(i >> bit & 1 == 0):
                    low, high = words[i], words[i + (1 << bit)]
                    taken = cute.arch.shuffle_sync_bfly(low if upper else high, offset=1 << bit)
                    words[i] = taken if upper else low
                    words[i + (1 << bit)] = high if upper else taken

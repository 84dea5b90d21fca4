"""Hopper forward: swap-AB WGMMA over page-aligned tiles of 64 keys, one contiguous range of the schedule's line per CTA.

    S^T[64 keys, N] = K[64, 576] Q[N, 576]^T        A = the K tile, K-major in shared memory
    O^T[512, N]     = V^T[512, 64] P[N, 64]^T       A = the first 512 columns of the same tile, read MN-major: no copy, no transpose

N = query rows of the CTA, a multiple of 8, so that 12 heads cost 16 columns of the tensor core and not 64 rows.

One warp loads K tiles by TMA, one loads Q; two consumer warpgroups own 256 value columns each. They split the score product by columns of K
and add the halves through shared memory. More than 32 rows a CTA: forward_sm90_wide.py.

A request that lies in one range goes straight to `out` (and natural-log `lse`); a piece of a split one goes to its partial slot,
normalised by its own sum, with a base-2 LSE. A request without keys gets out 0 and LSE -inf.
"""

import math
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from . import softmax
from .named_barrier import NamedBarrierSm90
from .problem import HEAD_DIM_QK, HEAD_DIM_V, TILE_KEYS, DecodeProblem
from .request_range import FIRST_REQUEST, LAST_REQUEST
from .request_walk import CHUNK, CHUNKS, RequestWalk, k_major
from .schedule import NO_SLOT
from .special_register import pinned_lane_index
from .torch_types import cutlass_dtype

K_STAGES = 2  # 72 KiB each
CONSUMERS = 2  # warpgroups
VALUE_COLUMNS = HEAD_DIM_V // CONSUMERS
THREADS = 128 * (CONSUMERS + 1)
SHARED_MEMORY_LIMIT = 232_448  # bytes a CTA may have on compute capability 9.0
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232  # of 65,536 / 384 = 168 at launch
# Chunks in the order in which the last tile gives them back: the rope columns after the scores, then each warpgroup's value columns.
CHUNK_ORDER = (8, 0, 4, 1, 5, 2, 6, 3, 7)


def mn_major(dtype: Any, rows: int, copies: int) -> Any:
    """Shared-memory layout of P, [rows, 64 keys, copies] with rows contiguous, in the widest swizzle that divides them."""
    kinds = warpgroup.SmemLayoutAtomKind
    kind = {64: kinds.MN_SW128, 32: kinds.MN_SW64, 16: kinds.MN_SW32, 8: kinds.MN_INTER}[math.gcd(rows, 64)]
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), (rows, TILE_KEYS, copies), (1, 0, 2))


def transposed(tensor: Any) -> Any:
    """View of a two-dimensional tensor with its modes swapped."""
    return cute.composition(tensor, cute.make_ordered_layout((tensor.shape[1], tensor.shape[0]), order=(1, 0)))


class ForwardSm90(RequestWalk):
    """The forward kernel of one problem with up to 32 rows a CTA. Construction takes compile-time facts only."""

    def __init__(self, problem: DecodeProblem):
        super().__init__(problem)
        self.q_stages = 2 if self.tile_rows <= 16 else 1

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

        # Step 2: matrix instructions. P is stored with its rows contiguous: both operands of the second product are MN-major.
        def mma(major: OperandMajorMode) -> cute.TiledMma:
            shape, source = (TILE_KEYS, self.tile_rows, 16), warpgroup.OperandSource.SMEM
            return cute.make_tiled_mma(warpgroup.MmaF16BF16Op(self.dtype, Float32, shape, source, major, major))

        self.kernel(
            tma,
            gInputs,
            mTable,
            (mSeqLens, mTotalLens),
            mSchedule,
            (mOut, mLse, mOutPartial, mLsePartial),
            scale_log2,
            k_major(self.dtype, TILE_KEYS, HEAD_DIM_QK, K_STAGES),
            k_major(self.dtype, self.tile_rows, HEAD_DIM_QK, self.q_stages),
            mn_major(self.dtype, self.tile_rows, CONSUMERS),
            mma(OperandMajorMode.K),
            mma(OperandMajorMode.MN),
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
        mma_o: cute.TiledMma,
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
            warp_values: cute.struct.Align[cute.struct.MemRange[Float32, CONSUMERS * 4 * self.tile_rows], 16]
            K: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(lK)], 1024]
            Q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(lQ)], 1024]
            P: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(lP)], 1024]
            S: cute.struct.Align[cute.struct.MemRange[Float32, 4 * TILE_KEYS * self.tile_rows], 16]

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
                for i in cutlass.range_constexpr(self.q_stages):
                    cute.arch.mbarrier_init(q_full + i, 1)
                    cute.arch.mbarrier_init(q_empty + i, CONSUMERS * 4)
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
            self.consume(storage, lP, sK, sQ, (mma_s, mma_o), lens, words, outputs, scale_log2, row_tile)

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
        """Producer of K: each 64-column chunk of a stage has its own barrier, so that the scores can follow the arrival."""
        tiling = self.tiling
        tKsK, tKgK = self.key_boxes(tma, gKV, sK, (tiling.box_keys, CHUNK))
        num_pages = cute.size(gKV, mode=[2])
        stage, phase = Int32(0), Int32(1)  # a fresh barrier lets a wait for parity 1 pass
        for request in cutlass.range(words[FIRST_REQUEST], words[LAST_REQUEST] + 1, unroll=1):
            begin, end = self.tile_span(words, request, mSeqLens)
            for tile in cutlass.range(begin, end, unroll=1):
                if cutlass.const_expr(tiling.pages_per_tile == 1):
                    page, part = self.page_of(mTable, words, request, begin, tile), tile % tiling.tiles_per_page
                    for i in cutlass.range_constexpr(CHUNKS):
                        chunk = CHUNK_ORDER[i]
                        barrier = k_full + stage * CHUNKS + chunk
                        cute.arch.mbarrier_wait(k_empty + stage * CHUNKS + chunk, phase)
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(barrier, TILE_KEYS * CHUNK * 2)
                        cute.copy(tma, tKgK[None, part, chunk, page], tKsK[None, 0, chunk, stage], tma_bar_ptr=barrier)
                else:
                    self.load_small_pages(tma, mTable, mSeqLens[request], request, tile, num_pages, stage, phase, k_full, k_empty, tKsK, tKgK)
                stage, phase = self.next_stage(stage, phase, K_STAGES)

    @cute.jit
    def load_small_pages(
        self,
        tma: cute.CopyAtom,
        mTable: cute.Tensor,
        seq_len: Int32,
        request: Int32,
        tile: Int32,
        num_pages: Int32,
        stage: Int32,
        phase: Int32,
        k_full: cute.Pointer,
        k_empty: cute.Pointer,
        tKsK: cute.Tensor,
        tKgK: cute.Tensor,
    ) -> None:
        """A tile of several pages."""
        # Rolled loops: 36 unrolled copies spill the producer's registers.
        for chunk in cutlass.range(CHUNKS, unroll=1):
            cute.arch.mbarrier_wait(k_empty + stage * CHUNKS + chunk, phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(k_full + stage * CHUNKS + chunk, TILE_KEYS * CHUNK * 2)
        for box in cutlass.range(self.tiling.pages_per_tile, unroll=1):
            page = num_pages
            if self.box_has_keys(tile, box, seq_len):
                page = mTable[request, tile * self.tiling.pages_per_tile + box]
            for chunk in cutlass.range(CHUNKS, unroll=1):
                barrier = k_full + stage * CHUNKS + chunk
                cute.copy(tma, tKgK[None, 0, chunk, page], tKsK[None, box, chunk, stage], tma_bar_ptr=barrier)

    @cute.jit
    def consume(
        self,
        storage: cutlass.Constexpr,
        lP: cute.ComposedLayout,
        sK: cute.Tensor,
        sQ: cute.Tensor,
        mma: tuple[cute.TiledMma, cute.TiledMma],
        lens: tuple[cute.Tensor, cute.Tensor | None],
        words: cute.Tensor,
        outputs: tuple[cute.Tensor, cute.Tensor | None, cute.Tensor, cute.Tensor],
        scale_log2: Float32,
        row_tile: Int32,
    ) -> None:
        """One consumer warpgroup: scores, softmax and 256 value columns of every tile of the range."""
        thread = cute.arch.thread_idx()[0] % 128
        lane, warp_index = cute.arch.lane_idx(), cute.arch.make_warp_uniform(thread // 32)
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128) - 1
        mma_s, mma_o = mma

        # Step 1: shared-memory views.
        sP = storage.P.get_tensor(lP.outer, swizzle=lP.inner)[None, None, group]
        warp_values = cute.make_tensor(
            storage.warp_values.data_ptr() + group * (4 * self.tile_rows), cute.make_layout((4, self.tile_rows), stride=(self.tile_rows, 1))
        )

        # Step 2: operands. Of every 64 columns this warpgroup multiplies 32 for the scores.
        thr_s, thr_o = mma_s.get_slice(thread), mma_o.get_slice(thread)
        tSrK = thr_s.make_fragment_A(thr_s.partition_A(cute.flat_divide(sK, (TILE_KEYS, CHUNK))))  # (MMA, 1, 4, 1, 9, stage)
        sQChunks = cute.flat_divide(sQ, (self.tile_rows, CHUNK))[None, None, 0, None, None]
        tSrQ = thr_s.make_fragment_B(thr_s.partition_B(sQChunks))  # (MMA, 1, 4, 9, stage)
        sV = cute.composition(sK, cute.make_ordered_layout((HEAD_DIM_QK, TILE_KEYS, K_STAGES), order=(1, 0, 2)))
        tOrV = thr_o.make_fragment_A(thr_o.partition_A(cute.flat_divide(sV, (CHUNK, TILE_KEYS))))  # (MMA, 1, 4, 9, 1, stage)
        tOrP = thr_o.make_fragment_B(thr_o.partition_B(sP))
        acc_o = cute.make_rmem_tensor(mma_o.partition_shape_C((VALUE_COLUMNS, self.tile_rows)), Float32)
        rO = softmax.accumulator_view(acc_o, self.tile_rows // 8, VALUE_COLUMNS // 64)
        store_p = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 2 if self.tile_rows % 16 else 4), self.dtype)
        store_p = cute.make_tiled_copy_C(store_p, mma_s).get_slice(thread)
        tPsP = store_p.partition_D(transposed(sP))

        # Step 3: row statistics, one per score row that this thread sees.
        shape = (2, self.tile_rows // 8)
        row_max, row_sum, factor = (cute.make_rmem_tensor(shape, Float32) for _ in range(3))
        statistics = (row_max, row_sum, factor)
        limits, visible = (cute.make_rmem_tensor(shape, Int32) for _ in range(2))

        # Step 4: the requests of the range.
        stage, phase, q_stage, q_phase, exchange = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        for request in cutlass.range(words[FIRST_REQUEST], words[LAST_REQUEST] + 1, unroll=1):
            seq_len, begin, end = self.work_span(words, request, lens[0])
            self.row_limits(limits, lens, request, seq_len, row_tile, lane)
            if begin < end:
                cute.arch.mbarrier_wait(storage.q_full.data_ptr() + q_stage, q_phase)
            for piece in cutlass.range(self.range.num_pieces(begin, end, seq_len), unroll=1):
                piece_begin, piece_end, slot = self.piece(words, request, begin, end, seq_len, piece)
                row_max.fill(-Float32.inf)
                row_sum.fill(0.0)
                acc_o.fill(0.0)
                for tile in cutlass.range(piece_begin, piece_end, unroll=1):
                    acc_s = cute.make_rmem_tensor(mma_s.partition_shape_C((TILE_KEYS, self.tile_rows)), Float32)
                    self.scores(storage, mma_s, acc_s, tSrK, tSrQ, stage, phase, q_stage, exchange, group, thread)
                    key0 = self.tiling.first_key(tile)
                    self.visible_in_tile(visible, limits, tile, key0)
                    rP = self.probabilities(acc_s, statistics, visible, scale_log2, warp_values, group, warp_index, lane)
                    # Over the last tile's P: every warp has waited for its products with it, and has met the others twice since.
                    cute.copy(store_p, store_p.retile(rP), tPsP)
                    if seq_len - key0 < TILE_KEYS:
                        self.clear_values(sK, cutlass.max(seq_len - key0, 0), stage, group, thread)
                    # P, and cleared values, become visible to the tensor cores.
                    cute.arch.fence_proxy("async.shared", space="cta")
                    softmax.scale_output(rO, factor)
                    self.sync_warpgroup(group)
                    self.accumulate(storage, mma_o, acc_o, tOrV, tOrP, stage, group)
                    stage, phase = self.next_stage(stage, phase, K_STAGES)
                    exchange = exchange ^ 1
                self.finish(storage, rO, statistics, warp_values, outputs, request, slot, row_tile, group, warp_index, lane)
            if begin < end:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(storage.q_empty.data_ptr() + q_stage)
                q_stage, q_phase = self.next_stage(q_stage, q_phase, self.q_stages)

    @cute.jit
    def scores(
        self,
        storage: cutlass.Constexpr,
        mma_s: cute.TiledMma,
        acc_s: cute.Tensor,
        tSrK: cute.Tensor,
        tSrQ: cute.Tensor,
        stage: Int32,
        phase: Int32,
        q_stage: Int32,
        exchange: Int32,
        group: Int32,
        thread: Int32,
    ) -> None:
        """acc_s = K Q^T, following the chunks of the tile as they arrive: this warpgroup's half of every chunk's columns, plus the other's."""
        atom = cute.make_mma_atom(mma_s.op)
        atom.set(warpgroup.Field.ACCUMULATE, False)
        k_blocks = 4 // CONSUMERS
        for step in cutlass.range_constexpr(CHUNKS):
            chunk = CHUNK_ORDER[step]
            cute.arch.mbarrier_wait(storage.k_full.data_ptr() + stage * CHUNKS + chunk, phase)
            if cutlass.const_expr(step == 0):
                warpgroup.fence()
            for i in cutlass.range_constexpr(k_blocks):
                block = group * k_blocks + i
                cute.gemm(atom, acc_s, tSrK[None, None, block, 0, chunk, stage], tSrQ[None, None, block, chunk, q_stage], acc_s)
                atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        self.add_halves(storage, acc_s, exchange, group, thread)

    @cute.jit
    def add_halves(self, storage: cutlass.Constexpr, acc_s: cute.Tensor, exchange: Int32, group: Int32, thread: Int32) -> None:
        """Adds the other warpgroup's half of the score product. Two buffers in turn: a warpgroup may still read the last tile's."""
        quads = self.tile_rows // 8
        sS = cute.make_tensor(
            storage.S.data_ptr(), cute.make_layout((4, 128, quads, CONSUMERS, 2), stride=(1, 4, 512, 512 * quads, 1024 * quads))
        )
        quad = cute.make_rmem_tensor((4,), Float32)
        for block in cutlass.range_constexpr(quads):
            for i in cutlass.range_constexpr(4):
                quad[i] = acc_s[4 * block + i]
            cute.autovec_copy(quad, sS[None, thread, block, group, exchange])
        cute.arch.barrier(barrier_id=NamedBarrierSm90.CONSUMERS, number_of_threads=128 * CONSUMERS)
        for block in cutlass.range_constexpr(quads):
            cute.autovec_copy(sS[None, thread, block, 1 - group, exchange], quad)
            for i in cutlass.range_constexpr(4):
                acc_s[4 * block + i] = acc_s[4 * block + i] + quad[i]

    @cute.jit
    def probabilities(
        self,
        acc_s: cute.Tensor,
        statistics: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        visible: cute.Tensor,
        scale_log2: Float32,
        warp_values: cute.Tensor,
        group: Int32,
        warp_index: Int32,
        lane: Int32,
    ) -> cute.Tensor:
        """Scores to probabilities, rounded to the operands' type; the factor is what older sums and outputs have to be multiplied with."""
        rS = softmax.accumulator_view(acc_s, self.tile_rows // 8)
        softmax.scale_and_mask(rS, visible, warp_index * 16 + lane // 4, scale_log2)
        softmax.publish_max(rS, warp_values, warp_index, lane)
        self.sync_warpgroup(group)
        softmax.update(rS, *statistics, warp_values, lane, rows_may_see_nothing=self.problem.query_len > 1)
        return softmax.weights(acc_s, self.dtype)

    @cute.jit
    def clear_values(self, sK: cute.Tensor, keys: Int32, stage: Int32, group: Int32, thread: Int32) -> None:
        """Zeros the values of the keys past the end of the request: a probability of 0 times a NaN of a reused page is NaN.

        Nobody reads these keys for scores any more: the barrier of `add_halves` lies behind. Each warpgroup clears the columns that it multiplies.
        """
        vectors = cute.tiled_divide(sK, (1, 8))  # ((1, 8), 64, 72, stages)
        zeros = cute.make_rmem_tensor(((1, 8),), self.dtype)
        zeros.fill(0.0)
        store = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=128)
        column = group * (VALUE_COLUMNS // 8) + thread % 32
        for key in cutlass.range(keys + thread // 32, TILE_KEYS, 4, unroll=1):
            cute.copy(store, zeros, vectors[None, key, column, stage])

    @cute.jit
    def accumulate(
        self, storage: cutlass.Constexpr, mma_o: cute.TiledMma, acc_o: cute.Tensor, tOrV: cute.Tensor, tOrP: cute.Tensor, stage: Int32, group: Int32
    ) -> None:
        """acc_o += V^T P^T, 64 value columns at a time, each given back to the producer as soon as it is done with."""
        m_tiles = VALUE_COLUMNS // CHUNK
        empty = storage.k_empty.data_ptr() + stage * CHUNKS
        # The rope columns are no values. Both warpgroups have their scores: the barrier of `add_halves` lies behind.
        if group == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(empty + CHUNKS - 1)
        warpgroup.fence()
        for m_tile in cutlass.range_constexpr(m_tiles):
            atom = cute.make_mma_atom(mma_o.op)
            atom.set(warpgroup.Field.ACCUMULATE, True)
            shape = mma_o.partition_shape_C((CHUNK, self.tile_rows))
            acc = cute.make_tensor(acc_o.iterator + m_tile * (CHUNK * self.tile_rows // 128), cute.make_layout(shape))
            for block in cutlass.range_constexpr(TILE_KEYS // 16):
                cute.gemm(atom, acc, tOrV[None, None, block, group * m_tiles + m_tile, 0, stage], tOrP[None, None, block], acc)
            warpgroup.commit_group()
        for m_tile in cutlass.range_constexpr(m_tiles):
            warpgroup.wait_group(m_tiles - 1 - m_tile)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(empty + group * m_tiles + m_tile)

    @cute.jit
    def finish(
        self,
        storage: cutlass.Constexpr,
        rO: cute.Tensor,
        statistics: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        warp_values: cute.Tensor,
        outputs: tuple[cute.Tensor, cute.Tensor | None, cute.Tensor, cute.Tensor],
        request: Int32,
        slot: Int32,
        row_tile: Int32,
        group: Int32,
        warp_index: Int32,
        lane: Int32,
    ) -> None:
        """Normalises the request's rows and writes them: to `out` where the request is whole, else to its partial slot."""
        row_max, row_sum, inverse = statistics

        # Step 1: sums over the warps, and 1 / sum. A row without keys has sum 0: output 0, LSE -inf. Both warpgroups meet first: then nobody
        # still reads the partial scores, whose buffer the stores use.
        cute.arch.barrier(barrier_id=NamedBarrierSm90.CONSUMERS, number_of_threads=128 * CONSUMERS)
        softmax.publish_sum(row_sum, warp_values, warp_index, lane)
        self.sync_warpgroup(group)
        softmax.collect_sum(row_sum, warp_values, lane)
        for block in cutlass.range_constexpr(self.tile_rows // 8):
            for parity in cutlass.range_constexpr(2):
                total = row_sum[parity, block]
                inverse[parity, block] = Float32(0.0) if total == 0.0 else softmax.inverse_sum(total, self.dtype)
        softmax.scale_output(rO, inverse)

        # Step 2: store. With a lane that can be hoisted, the addresses of all stores live across the loop over the tiles and spill.
        lane = pinned_lane_index()
        mOut, mLse, mOutPartial, mLsePartial = outputs
        if slot == NO_SLOT:
            self.store_rows(storage, rO, mOut[request, None, None, None], row_tile, group, warp_index, lane)
        else:
            self.store_rows(storage, rO, mOutPartial[slot, None, None, None], row_tile, group, warp_index, lane)
        if warp_index + 4 * group == 0:
            if lane < 4:
                self.store_lse(row_max, row_sum, mLse, mLsePartial, request, slot, row_tile, lane)

    @cute.jit
    def store_rows(
        self,
        storage: cutlass.Constexpr,
        rO: cute.Tensor,
        gO: cute.Tensor,
        row_tile: Int32,
        group: Int32,
        warp_index: Int32,
        lane: Int32,
    ) -> None:
        """O^T registers to gO [tokens, heads, 512], through shared memory: a warp then writes 512 neighbouring bytes of a row at once.

        Stored from the registers, each instruction would touch eight rows, 16 bytes each, and take eight times as long: 1 us of a CTA's
        time at 16 rows. The buffer is this warpgroup's own two quarters of the partial scores, 512 bytes a row.
        """
        dtype = gO.element_type
        unit = 128 // dtype.width  # elements of 16 bytes
        pass_columns = 32 * unit
        quarter = TILE_KEYS * self.tile_rows  # FP32 elements; the quarters of a warpgroup lie two apart
        sO = cute.recast_ptr(storage.S.data_ptr() + group * quarter, dtype=dtype)
        half_units = quarter // 4 // self.tile_rows  # units of a row in each quarter
        for part in cutlass.range_constexpr(VALUE_COLUMNS // pass_columns):
            self.stage_rows(rO, sO, part * (pass_columns // 64), warp_index, lane)
            self.sync_warpgroup(group)
            for i in cutlass.range_constexpr((self.tile_rows + 3) // 4):
                row = i * 4 + warp_index
                token, head, exists = self.locate(row, row_tile)
                if exists:
                    place = self.unit_offset(row, lane, half_units, unit)
                    source = cute.make_tensor((sO + place).align(16), cute.make_layout((unit,)))
                    target = (gO[token, head, None].iterator + (group * VALUE_COLUMNS + part * pass_columns + lane * unit)).align(16)
                    values = cute.make_rmem_tensor((unit,), dtype)
                    cute.autovec_copy(source, values)
                    cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout((unit,))))
            self.sync_warpgroup(group)

    @cute.jit
    def unit_offset(self, row: Int32, index: Int32, half_units: cutlass.Constexpr, unit: cutlass.Constexpr) -> Int32:
        """Element offset of 16-byte unit `index` of a row in the buffer: units are permuted by row, so that neither side has bank conflicts."""
        swizzled = index ^ (row % 8)
        quarter, rest = swizzled // half_units, swizzled % half_units
        return (quarter * (2 * self.tile_rows * half_units) + row * half_units + rest) * unit

    @cute.jit
    def stage_rows(self, rO: cute.Tensor, sO: cute.Pointer, first_m_tile: cutlass.Constexpr, warp_index: Int32, lane: Int32) -> None:
        """Registers to the buffer, two neighbouring columns at a time.

        A thread holds two rows of one column; its neighbour in g holds the same rows of the next column. They swap one value, and then
        each holds one row of both columns.
        """
        dtype = sO.dtype
        unit = 128 // dtype.width
        even = (lane // 4) % 2 == 0
        store = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=2 * dtype.width)
        pair = cute.make_rmem_tensor((2,), dtype)
        half_units = TILE_KEYS // 4
        # One address for each half; rows of other blocks and columns of other m tiles are offsets from it, which the swizzle leaves alone.
        places = cute.make_layout(
            (2, self.tile_rows // 8, half_units * unit // 64, 2),
            stride=(1, 8 * half_units * unit, 64, 2 * self.tile_rows * half_units * unit),
        )
        row = (lane % 4) * 2 + (lane // 4) % 2
        for half in cutlass.range_constexpr(2):
            column = warp_index * 16 + half * 8 + lane // 8 * 2
            start = self.unit_offset(row, column // unit, half_units, unit) + column % unit
            sPairs = cute.make_tensor((sO + start).align(2 * dtype.width // 8), places)
            for m_tile in cutlass.range_constexpr(32 * unit // 64):
                for block in cutlass.range_constexpr(self.tile_rows // 8):
                    row_a, row_b = rO[0, half, block, first_m_tile + m_tile], rO[1, half, block, first_m_tile + m_tile]
                    mine = row_a if even else row_b
                    taken = cute.arch.shuffle_sync_bfly(row_b if even else row_a, offset=4)
                    pair[0] = (mine if even else taken).to(dtype)
                    pair[1] = (taken if even else mine).to(dtype)
                    tiles = half_units * unit // 64
                    cute.copy(store, pair, sPairs[None, block, m_tile % tiles, m_tile // tiles])


def fake_arguments(problem: DecodeProblem) -> tuple[Any, ...]:
    """Arguments for `cute.compile`: what is static (heads, page size, dtypes), what varies (counts, strides) and what is aligned."""
    heads, tokens, page_size = problem.num_heads, problem.query_len, problem.page_size
    dtype, partial_dtype = cutlass_dtype(problem.query_dtype), cutlass_dtype(problem.partial_dtype)
    kv_dtype, kv_stride = cutlass_dtype(problem.kv_dtype), cute.sym_int64(divisibility=16 // problem.kv_dtype.itemsize)

    def stride() -> Any:
        return cute.sym_int64(divisibility=8)  # 16 bytes: TMA's unit

    def rows(columns: int) -> Any:
        return make_fake_tensor(dtype, (cute.sym_int(), tokens, heads, columns), (stride(), stride(), stride(), 1), assumed_align=16)

    def lens() -> Any:
        return make_fake_tensor(Int32, (cute.sym_int(),), (1,))

    kv = make_fake_tensor(kv_dtype, (cute.sym_int(), page_size, HEAD_DIM_QK), (kv_stride, HEAD_DIM_QK, 1), assumed_align=16)
    k_scale = (make_fake_tensor(Float32, (1,), (1,)),) if problem.needs_k_scale else ()
    table = make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), (cute.sym_int64(), 1))
    schedule = make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=16)
    lse = make_fake_tensor(Float32, (cute.sym_int(), tokens, heads), (problem.rows, heads, 1)) if problem.return_lse else None
    slots, partial_strides = cute.sym_int(), (problem.rows * HEAD_DIM_V, heads * HEAD_DIM_V, HEAD_DIM_V, 1)
    out_partial = make_fake_tensor(partial_dtype, (slots, tokens, heads, HEAD_DIM_V), partial_strides, assumed_align=16)
    lse_partial = make_fake_tensor(Float32, (slots, tokens, heads), (problem.rows, heads, 1))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return (
        kv, rows(HEAD_DIM_V), rows(HEAD_DIM_QK - HEAD_DIM_V), table, lens(), lens() if problem.needs_total_lens else None, schedule,
        rows(HEAD_DIM_V), lse, out_partial, lse_partial, *k_scale, Float32(1.0), Int32(1), stream,
    )  # fmt: skip

"""Hopper forward on an E4M3 cache: 576 bytes a key, converted to FP16 on the way into the tensor cores; Q and P stay in 16 bits.

    S^T[64 keys, N] = K[64, 576] Q[N, 576]^T        A = K: 16-byte loads, converted in registers
    O^T[512, N]     = V^T[512, 64] P[N, 64]^T       A = V^T: ldmatrix.trans on byte pairs, one byte permute, converted in registers

FP16 holds every E4M3 value exactly, and FP8 operands would have to be K-major, which V^T is not. All reordering (fp8_tile.py) lies in the
order in which Q is stored, keys are read and O is written: none costs an instruction a tile.

One warp loads Q and K through one ring of stages; the consumer warpgroups, two or three, take whole tiles in turn, with all 512 value columns
each, so that one's chain of loads, conversions, products and softmax hides behind the others'. At the end of a piece they add up their
outputs in the last tile's stage (fp8_output.py).

Numbers. Every row of Q is scaled by a power of two that brings its largest value to 2^14 or just above: nothing overflows FP16, and what
becomes inexact is below 2^-30 of the row's largest. P is computed against the maximum less P_SHIFT, for the same reason: 2^-39 of the
largest probability still counts. The cache's one scale is a device scalar, read at launch: a factor of the scores and one of the output.
Keys, requests, slots, row tiles and the LSE are those of ForwardSm90.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from . import fp8_convert, fp8_products, fp8_tile, softmax
from .forward_sm90 import SHARED_MEMORY_LIMIT, mn_major, transposed
from .fp8_output import SIDES, OutputSm90Fp8
from .fp8_tile import ARRIVALS, BOX_BYTES, GROUPS, LINE, LINES, RECORD_BYTES, RECORDS, TILE_BYTES, VALUE_GROUPS
from .problem import HEAD_DIM_QK, HEAD_DIM_V, TILE_KEYS, DecodeProblem
from .request_range import FIRST_REQUEST, LAST_REQUEST
from .request_walk import k_major
from .softmax import P_SHIFT
from .special_register import pinned, pinned_lane_index

STAGES = 5  # 36 KiB each: tiles of keys, and the BF16 queries of a request on their way to FP16
QUERY_COLUMNS = 256  # of a TMA box of Q: as many as a box may have
QUERY_BOXES = HEAD_DIM_V // QUERY_COLUMNS
ROPE = HEAD_DIM_QK - HEAD_DIM_V
# Registers of a thread, in the loading warpgroup and in the others, by the number of consumer warpgroups: no more than 65,536 in all, of which
# 384 or 512 threads start with 168 or 128 each.
REGISTERS = {2: (40, 232), 3: (56, 152)}
LOWEST = -3.0e38  # the maximum of a row that has seen no key: finite, so that no difference of maxima is NaN


class ForwardSm90Fp8(OutputSm90Fp8):
    """The forward kernel of one problem with `kv_dtype` E4M3. Construction takes compile-time facts only."""

    def __init__(self, problem: DecodeProblem):
        # A tile is a chain of some 4,600 cycles, and DRAM brings one every 1,820: two warpgroups cannot keep up. Registers for a third one hold
        # the output of 16 rows.
        super().__init__(problem, consumers=3 if problem.tile_rows <= 16 else 2)
        # Column groups that are loaded ahead of their conversion, and products in flight behind it: as many as the registers hold.
        self.groups_ahead = 1

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
        # Step 1: tensor maps. Keys: records of two, pages as the last mode. A box never leaves its page: rows past the end arrive as zeros.
        load = cpasync.CopyBulkTensorTileG2SOp()
        box = (self.tiling.box_keys // 2, LINE)
        records = cute.make_layout(
            (self.tiling.page_size // 2, RECORD_BYTES, mKV.shape[0]), stride=(RECORD_BYTES, 1, mKV.stride[0])
        )
        tma_kv, gKV = cpasync.make_tiled_tma_atom(load, cute.make_tensor(mKV.iterator, records), k_major(Float8E4M3FN, *box), box)
        gQN = cute.make_tensor(mQNope.iterator, cute.select(mQNope.layout, mode=[2, 1, 3, 0]))
        gQR = cute.make_tensor(mQRope.iterator, cute.select(mQRope.layout, mode=[2, 1, 3, 0]))
        tma_qn, gQN = cpasync.make_tiled_tma_atom(load, gQN, self.query_box(QUERY_COLUMNS), self.query_box(QUERY_COLUMNS).shape)
        tma_qr, gQR = cpasync.make_tiled_tma_atom(load, gQR, self.query_box(ROPE), self.query_box(ROPE).shape)

        # Step 2: matrix instructions, A from registers. P is stored with its rows contiguous.
        def mma(major: OperandMajorMode) -> cute.TiledMma:
            shape, source = (TILE_KEYS, self.tile_rows, 16), warpgroup.OperandSource.RMEM
            return cute.make_tiled_mma(warpgroup.MmaF16BF16Op(Float16, Float32, shape, source, OperandMajorMode.K, major))

        self.kernel(
            (tma_kv, tma_qn, tma_qr),
            (gKV, gQN, gQR),
            mTable,
            (mSeqLens, mTotalLens),
            mSchedule,
            (mOut, mLse, mOutPartial, mLsePartial),
            mKScale,
            scale_log2,
            k_major(Float8E4M3FN, RECORDS, RECORD_BYTES, STAGES),
            k_major(Float16, self.tile_rows, HEAD_DIM_QK),
            mn_major(Float16, self.tile_rows, self.consumers),
            mma(OperandMajorMode.K),
            mma(OperandMajorMode.MN),
        ).launch(
            grid=(self.row_tiles, num_ranges, 1),
            block=(128 * (self.consumers + 1), 1, 1),
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
        mKScale: cute.Tensor,
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
            full: cute.struct.MemRange[Int64, STAGES * len(ARRIVALS)]
            empty: cute.struct.MemRange[Int64, STAGES]
            warp_values: cute.struct.Align[cute.struct.MemRange[Float32, self.consumer_warps * self.tile_rows], 16]
            group_max: cute.struct.Align[cute.struct.MemRange[Float32, self.consumers * self.tile_rows], 16]
            row_scale: cute.struct.Align[cute.struct.MemRange[Float32, self.tile_rows], 16]
            row_limit: cute.struct.Align[cute.struct.MemRange[Int32, self.tile_rows], 16]
            K: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(lK)], 1024]
            Q: cute.struct.Align[cute.struct.MemRange[Float16, cute.cosize(lQ)], 1024]
            P: cute.struct.Align[cute.struct.MemRange[Float16, cute.cosize(lP)], 1024]

        self.shared_memory_bytes = Storage.size_in_bytes()
        assert self.shared_memory_bytes <= SHARED_MEMORY_LIMIT, self.shared_memory_bytes
        assert self.tile_rows * HEAD_DIM_QK * 2 <= TILE_BYTES  # queries pass through a stage
        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        if warp_index == 0:
            for i in cutlass.range_constexpr(3):
                cpasync.prefetch_descriptor(tma[i])
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(STAGES * len(ARRIVALS)):
                    cute.arch.mbarrier_init(storage.full.data_ptr() + i, 1)
                for i in cutlass.range_constexpr(STAGES):
                    cute.arch.mbarrier_init(storage.empty.data_ptr() + i, self.consumer_warps)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        # Step 2: wait for the kernel before, then let the merge queue up behind this one: it waits for our end by itself.
        early = self.early_words(mSchedule, range_index)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        # Step 3: this CTA's range of the line.
        words = self.range_words(mSchedule, range_index)
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(REGISTERS[self.consumers][0])
            if warp_index == 0:
                sK = storage.K.get_tensor(lK.outer, swizzle=lK.inner)
                self.produce(storage, tma, gInputs, mTable, lens[0], early, sK, row_tile)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[self.consumers][1])
            self.consume_tiles(storage, lQ, lP, mma_s, mma_o, lens, words, outputs, mKScale[0], scale_log2, row_tile)

    def query_box(self, columns: int) -> Any:
        """Layout of one TMA box of Q, [heads, tokens, columns]: rows token x heads + head, one after the other."""
        heads, tokens = self.problem.tile_heads, self.problem.tile_tokens
        return cute.make_layout((heads, tokens, columns), stride=(columns, columns * heads, 1))

    def stage_of(self, position: Int32) -> tuple[Int32, Int32]:
        """Stage of a position in the ring, and the parity of its use."""
        use = position // STAGES
        return position - use * STAGES, use & 1

    @cute.jit
    def produce(
        self,
        storage: cutlass.Constexpr,
        tma: tuple[cute.CopyAtom, cute.CopyAtom, cute.CopyAtom],
        gInputs: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        mTable: cute.Tensor,
        mSeqLens: cute.Tensor,
        words: cute.Tensor,
        sK: cute.Tensor,
        row_tile: Int32,
    ) -> None:
        """The loading warp: of every request first Q, then the tiles, each in the next stage of the ring."""
        tiling = self.tiling
        tKsK, tKgK = self.key_boxes(tma[0], gInputs[0], sK, (tiling.box_keys // 2, LINE))
        num_pages = cute.size(gInputs[0], mode=[2])
        stage, phase = Int32(0), Int32(1)  # a fresh barrier lets a wait for parity 1 pass
        for request in cutlass.range(words[FIRST_REQUEST], words[LAST_REQUEST] + 1, unroll=1):
            begin, end = self.tile_span(words, request, mSeqLens)
            if begin < end:
                self.load_queries_to(storage, tma, gInputs, request, stage, phase, row_tile)
                stage, phase = self.next_stage(stage, phase, STAGES)
            for tile in cutlass.range(begin, end, unroll=1):
                full = storage.full.data_ptr() + stage * len(ARRIVALS)
                if cutlass.const_expr(tiling.pages_per_tile == 1):
                    page, part = self.page_of(mTable, words, request, begin, tile), tile % tiling.tiles_per_page
                    cute.arch.mbarrier_wait(storage.empty.data_ptr() + stage, phase)
                    for i in cutlass.range_constexpr(len(ARRIVALS)):
                        self.expect(full + i, len(ARRIVALS[i]) * BOX_BYTES)
                        for j in cutlass.range_constexpr(len(ARRIVALS[i])):
                            line = ARRIVALS[i][j]
                            cute.copy(tma[0], tKgK[None, part, line, page], tKsK[None, 0, line, stage], tma_bar_ptr=full + i)
                else:
                    cute.arch.mbarrier_wait(storage.empty.data_ptr() + stage, phase)
                    self.load_small(tma[0], mTable, mSeqLens[request], request, tile, num_pages, stage, full, tKsK, tKgK)
                stage, phase = self.next_stage(stage, phase, STAGES)

    @cute.jit
    def expect(self, barrier: cute.Pointer, num_bytes: cutlass.Constexpr) -> None:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, num_bytes)

    @cute.jit
    def load_small(
        self,
        tma: cute.CopyAtom,
        mTable: cute.Tensor,
        seq_len: Int32,
        request: Int32,
        tile: Int32,
        num_pages: Int32,
        stage: Int32,
        full: cute.Pointer,
        tKsK: cute.Tensor,
        tKgK: cute.Tensor,
    ) -> None:
        """A tile of several pages."""
        for i in cutlass.range_constexpr(len(ARRIVALS)):
            self.expect(full + i, len(ARRIVALS[i]) * BOX_BYTES)
        # Rolled loops: 36 unrolled copies spill the producer's registers.
        for box in cutlass.range(self.tiling.pages_per_tile, unroll=1):
            page = num_pages
            if self.box_has_keys(tile, box, seq_len):
                page = mTable[request, tile * self.tiling.pages_per_tile + box]
            for line in cutlass.range(LINES, unroll=1):
                barrier = full + fp8_tile.arrival_of_line(line)
                cute.copy(tma, tKgK[None, 0, line, page], tKsK[None, box, line, stage], tma_bar_ptr=barrier)

    @cute.jit
    def load_queries_to(
        self,
        storage: cutlass.Constexpr,
        tma: tuple[cute.CopyAtom, cute.CopyAtom, cute.CopyAtom],
        gInputs: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        request: Int32,
        stage: Int32,
        phase: Int32,
        row_tile: Int32,
    ) -> None:
        """The BF16 rows of a request into a stage: boxes of 256, 256 and 64 columns. Heads and tokens that do not exist arrive as zeros."""
        heads, tokens = row_tile % self.problem.head_tiles, row_tile // self.problem.head_tiles
        full = storage.full.data_ptr() + stage * len(ARRIVALS)
        cute.arch.mbarrier_wait(storage.empty.data_ptr() + stage, phase)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.problem.tile_heads * self.problem.tile_tokens * HEAD_DIM_QK * 2)
            for i in cutlass.range_constexpr(1, len(ARRIVALS)):
                cute.arch.mbarrier_arrive(full + i)
        start = cute.recast_ptr(storage.K.data_ptr() + stage * TILE_BYTES, dtype=BFloat16).align(1024)
        for i in cutlass.range_constexpr(QUERY_BOXES + 1):
            columns = QUERY_COLUMNS if cutlass.const_expr(i < QUERY_BOXES) else ROPE
            which = 1 if cutlass.const_expr(i < QUERY_BOXES) else 2
            box = self.query_box(columns)
            sBox = cute.group_modes(cute.make_tensor(start + i * QUERY_COLUMNS * self.problem.tile_heads * self.problem.tile_tokens, box), 0, 3)
            gBox = cute.group_modes(cute.local_tile(gInputs[which], box.shape, (None, None, None, None)), 0, 3)
            tQsQ, tQgQ = cpasync.tma_partition(tma[which], 0, cute.make_layout(1), sBox, gBox)
            cute.copy(tma[which], tQgQ[None, heads, tokens, i % QUERY_BOXES, request], tQsQ, tma_bar_ptr=full)

    @cute.jit
    def consume_tiles(
        self,
        storage: cutlass.Constexpr,
        lQ: cute.ComposedLayout,
        lP: cute.ComposedLayout,
        mma_s: cute.TiledMma,
        mma_o: cute.TiledMma,
        lens: tuple[cute.Tensor, cute.Tensor | None],
        words: cute.Tensor,
        outputs: tuple[cute.Tensor, cute.Tensor | None, cute.Tensor, cute.Tensor],
        k_scale: Float32,
        scale_log2: Float32,
        row_tile: Int32,
    ) -> None:
        """One consumer warpgroup: every second or third tile of every piece, and its part of the piece's end."""
        thread = cute.arch.thread_idx()[0] % 128
        lane, warp_index = cute.arch.lane_idx(), cute.arch.make_warp_uniform(thread // 32)
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128) - 1

        # Step 1: operands. Q is shared, P is this warpgroup's own; K and V are read from the stage's address on.
        sP = storage.P.get_tensor(lP.outer, swizzle=lP.inner)[None, None, group]
        sQ = storage.Q.get_tensor(lQ.outer, swizzle=lQ.inner)
        thr_s, thr_o = mma_s.get_slice(thread), mma_o.get_slice(thread)
        tSrQ = thr_s.make_fragment_B(thr_s.partition_B(sQ))  # (MMA, 1, 36)
        tOrP = thr_o.make_fragment_B(thr_o.partition_B(sP))  # (MMA, 1, 4)
        acc_o = cute.make_rmem_tensor(mma_o.partition_shape_C((HEAD_DIM_V, self.tile_rows)), Float32)
        rO = softmax.accumulator_view(acc_o, self.row_blocks, VALUE_GROUPS)
        store_p = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 2 if self.tile_rows % 16 else 4), Float16)
        store_p = cute.make_tiled_copy_C(store_p, mma_s).get_slice(thread)
        tPsP = store_p.partition_D(transposed(sP))
        score_offsets, value_offsets = fp8_tile.score_offsets(warp_index, lane), fp8_tile.value_offsets(warp_index, lane)
        first_key = fp8_tile.key_of_line(warp_index, lane // 4)

        # Step 2: row statistics, one per score row that this thread sees.
        warp_values = self.group_values(storage, group)
        row_max, row_sum, factor = (cute.make_rmem_tensor((2, self.row_blocks), Float32) for _ in range(3))
        statistics = (row_max, row_sum, factor)

        # Step 3: the requests of the range. `position` counts the stages that the producer has filled for the requests before.
        position = Int32(0)
        for request in cutlass.range(words[FIRST_REQUEST], words[LAST_REQUEST] + 1, unroll=1):
            seq_len, begin, end = self.work_span(words, request, lens[0])
            if begin < end:
                self.convert_queries(storage, lens, request, seq_len, position, scale_log2 * k_scale, row_tile, group, warp_index)
                position += 1
            for piece in cutlass.range(self.range.num_pieces(begin, end, seq_len), unroll=1):
                piece_begin, piece_end, slot = self.piece(words, request, begin, end, seq_len, piece)
                row_max.fill(LOWEST)
                row_sum.fill(0.0)
                acc_o.fill(0.0)
                if cutlass.const_expr(self.problem.batch_invariant):
                    self.sync_consumers()  # the sums of the piece before are read
                # Which warpgroup takes a tile depends on the piece alone: the same bits wherever the piece is computed.
                for tile in cutlass.range(piece_begin + group, piece_end, self.consumers, unroll=1):
                    stage, phase = self.stage_of(position + tile - begin)
                    address = storage.K.data_ptr().toint() + stage * TILE_BYTES
                    acc_s = cute.make_rmem_tensor(mma_s.partition_shape_C((TILE_KEYS, self.tile_rows)), Float32)
                    rS = softmax.accumulator_view(acc_s, self.row_blocks)
                    full = storage.full.data_ptr() + stage * len(ARRIVALS)
                    # The stage's use before this one was another warpgroup's. Were it still to arrive, its parity would pass for this one's.
                    # (The use before that, ten positions ago, is over: nobody is more than three positions past a tile that has arrived, and that
                    # one was loaded, in order, after the tile five positions before it had been given back.)
                    cute.arch.mbarrier_wait(storage.empty.data_ptr() + stage, phase ^ 1)
                    fp8_products.multiply_keys(mma_s, acc_s, tSrQ, [address + o for o in score_offsets], full, phase, self.groups_ahead)
                    keys = seq_len - self.tiling.first_key(tile)
                    if keys < TILE_KEYS:
                        self.clear_past(address, cutlass.max(keys, 0), thread)
                        self.sync_warpgroup(group)
                    values = [address + o for o in value_offsets]
                    ahead = [fp8_products.load_values(values, i) for i in range(self.groups_ahead)]
                    self.logits(storage, rS, keys, tile, first_key, lane)
                    softmax.publish_max(rS, warp_values, warp_index, lane)
                    self.raise_logits(rS)
                    self.sync_warpgroup(group)
                    softmax.update(rS, *statistics, warp_values, lane, rows_may_see_nothing=False)
                    rP = cute.make_rmem_tensor(acc_s.shape, Float16)
                    rP.store(acc_s.load().to(Float16))
                    cute.copy(store_p, store_p.retile(rP), tPsP)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    softmax.scale_output(rO, factor)
                    self.sync_warpgroup(group)
                    fp8_products.multiply_values(mma_o, acc_o, tOrP, values, ahead)
                    # The last stage of a piece is kept: the output passes through it.
                    if tile + 1 < piece_end:
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive(storage.empty.data_ptr() + stage, arrive_count=self.consumers)
                last_stage, _ = self.stage_of(cutlass.max(position + piece_end - 1 - begin, 0))
                self.finish_piece(
                    storage, rO, statistics, outputs, k_scale, request, slot, piece_end - piece_begin, last_stage,
                    row_tile, group, warp_index,
                )  # fmt: skip
            position += end - begin

    @cute.jit
    def convert_queries(
        self,
        storage: cutlass.Constexpr,
        lens: tuple[cute.Tensor, cute.Tensor | None],
        request: Int32,
        seq_len: Int32,
        position: Int32,
        scale_log2: Float32,
        row_tile: Int32,
        group: Int32,
        warp_index: Int32,
    ) -> None:
        """Q of a request from its stage to FP16, a warp a row; what the scores of a row are scaled with, and how many keys it sees."""
        # What is computed from lane and warp would live across the loop over the tiles, if it could be hoisted, and spill. So in `finish_piece`.
        lane, warp_index = pinned_lane_index(), cute.arch.make_warp_uniform(pinned(warp_index))
        stage, phase = self.stage_of(position)
        cute.arch.mbarrier_wait(storage.full.data_ptr() + stage * len(ARRIVALS), phase)
        if self.owns_side(group):
            self.convert_rows(storage, lens, request, seq_len, stage, scale_log2, row_tile, group, warp_index, lane)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.sync_consumers()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(storage.empty.data_ptr() + stage)

    @cute.jit
    def convert_rows(
        self,
        storage: cutlass.Constexpr,
        lens: tuple[cute.Tensor, cute.Tensor | None],
        request: Int32,
        seq_len: Int32,
        stage: Int32,
        scale_log2: Float32,
        row_tile: Int32,
        group: Int32,
        warp_index: Int32,
        lane: Int32,
    ) -> None:
        """The rows of one warp of the first two warpgroups: tile_rows are a multiple of their eight, and twelve warps would have as many turns."""
        source = storage.K.data_ptr().toint() + stage * TILE_BYTES + lane * 4
        box_bytes = self.problem.tile_heads * self.problem.tile_tokens * QUERY_COLUMNS * 2
        target = storage.Q.data_ptr().toint()
        row_scale = storage.row_scale.get_tensor(cute.make_layout((self.tile_rows,)))
        row_limit = storage.row_limit.get_tensor(cute.make_layout((self.tile_rows,)))
        for i in cutlass.range_constexpr(self.row_blocks):
            row = i * (4 * SIDES) + group * 4 + warp_index
            token, _, exists = self.locate(row, row_tile)
            words = cute.make_rmem_tensor((GROUPS,), Uint32)
            top = Uint32(0)
            for g in cutlass.range_constexpr(GROUPS):
                box, column = g * 64 // QUERY_COLUMNS, g * 64 % QUERY_COLUMNS
                row_bytes = (QUERY_COLUMNS if g * 64 < HEAD_DIM_V else ROPE) * 2
                # A row that is none may not have been loaded: the stage holds old keys there.
                word = fp8_convert.load_word(source + row * row_bytes, box * box_bytes + column * 2)
                words[g] = word if exists else Uint32(0)
                top = fp8_convert.larger_magnitude(top, words[g])
            exponent = fp8_convert.query_exponent(cute.arch.warp_redux_sync(top, "max"))
            shrink = fp8_convert.query_shrink(exponent)
            for g in cutlass.range_constexpr(GROUPS):
                address = target + g * (self.tile_rows * LINE) + fp8_tile.query_offset(row, lane, self.tile_rows)
                fp8_convert.store_word(address, fp8_convert.scaled_bf16_to_f16(words[g], shrink))
            if lane == 0:
                row_scale[row] = fp8_convert.query_growth(exponent) * scale_log2
                if cutlass.const_expr(self.problem.rows_differ):
                    total = lens[1][request] if cutlass.const_expr(self.problem.needs_total_lens) else seq_len
                    row_limit[row] = self.range.visible_keys(token, seq_len, total)

    @cute.jit
    def logits(self, storage: cutlass.Constexpr, rS: cute.Tensor, keys: Int32, tile: Int32, first_key: Int32, lane: Int32) -> None:
        """Scores to base-2 logits; keys that a row does not see become -inf. `keys`: of the request, from the tile's first key on."""
        row_scale = storage.row_scale.get_tensor(cute.make_layout((self.tile_rows,)))
        row_limit = storage.row_limit.get_tensor(cute.make_layout((self.tile_rows,)))
        rest = Int32(TILE_KEYS)
        if cutlass.const_expr(self.tiling.page_size % TILE_KEYS != 0 and self.tiling.pages_per_tile == 1):
            rest = cutlass.min(rest, self.tiling.page_size - tile % self.tiling.tiles_per_page * TILE_KEYS)
        for block in cutlass.range_constexpr(self.row_blocks):
            for parity in cutlass.range_constexpr(2):
                row = softmax.row_of(block, parity, lane)
                visible = cutlass.min(keys, rest)
                if cutlass.const_expr(self.problem.rows_differ):
                    visible = cutlass.min(row_limit[row] - self.tiling.first_key(tile), rest)
                for half in cutlass.range_constexpr(2):
                    # A select, not a product: the score of an unread key may be NaN.
                    logit = rS[parity, half, block, 0] * row_scale[row]
                    rS[parity, half, block, 0] = logit if first_key + 16 * half < visible else -Float32.inf

    def raise_logits(self, rS: Any) -> None:
        """What the maximum is subtracted from: P comes out 2^P_SHIFT times larger, and so does its sum."""
        for i in range(cute.size(rS)):
            rS[i] = rS[i] + P_SHIFT

    @cute.jit
    def clear_past(self, address: Int32, keys: Int32, thread: Int32) -> None:
        """Zeros the values of a tile's keys from `keys` on: a probability of 0 times a NaN of a reused page is NaN.

        Slower warps may still read these keys for their scores, which are masked.
        """
        for key in cutlass.range(keys + thread // 32, TILE_KEYS, 4, unroll=1):
            fp8_convert.clear_unit(address + fp8_tile.offset(key, thread % 32 * 16))

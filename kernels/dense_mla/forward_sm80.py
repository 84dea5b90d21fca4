"""Portable forward: mma.sync, ldmatrix and cp.async, SM80 to SM121; one contiguous range of the schedule's line per CTA.

    S[rows, keys] = Q[rows, 576] K[keys, 576]^T     m16n8k16: A = Q, kept in registers, B = K
    O[rows, 512] += P[rows, keys] V[keys, 512]      A = P, B = the first 512 columns of the same tile, by ldmatrix.trans: no copy

Rows are heads x query tokens, in CTAs of 16 or 32. Eight warps share a tile of 32 or 16 keys (tile_sm80.py):

- scores: a warp takes half of the keys and 16 of every 64 columns, so that its part of Q fits its registers and K is read once. The four
  column parts are added in shared memory by the softmax;
- softmax: half a warp takes a row; the maximum and the sum of a row live in those sixteen lanes until the request ends;
- values: a warp owns 64 columns of the output.

K comes through a ring of tiles, each warp issuing 16-byte copies far ahead of its use, across requests. The softmax of a tile runs beside the
value product of the tile before, so two barriers a tile do. A piece of a request is walked key by key from its first one: pages matter to
the addresses alone, and keys past the end arrive as zeros.

A request that lies in one range goes straight to `out` (and natural-log `lse`); a piece of a split one goes to its partial slot,
normalised by its own sum, with a base-2 LSE. A row that sees no key gets out 0 and LSE -inf.
"""

import math
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp as warp_ops

from . import softmax
from .async_copy import COPY_BYTES, copy_or_zero
from .forward_sm90 import fake_arguments
from .problem import HEAD_DIM_V, DecodeProblem
from .request_range import RequestRange
from .schedule import HEADER_WORDS, NO_SLOT, RANGE_WORDS
from .special_register import pinned_lane_index
from .tile_sm80 import CHUNK, CHUNKS, COLUMN_SPLITS, LANES_PER_ROW, THREADS, UNIT, VALUE_COLUMNS, TileSm80, choose_tile, row_tiles
from .torch_types import cutlass_dtype

__all__ = ["ForwardSm80", "fake_arguments"]

LN2 = math.log(2.0)
ROW_LANES = (1, 2, 4, 8)  # shuffle offsets that walk the sixteen lanes of a row
# Where the producer stands: request, the tile after this piece and the request's end tile; next key and end key of the piece; and for this
# thread's line of the next tile its page, its key in the page, and 16 or 0 bytes.
REQUEST, TILE, END_TILE, KEY, END, PAGE, PAGE_KEY, BYTES = range(8)
CURSOR_WORDS = 8


class ForwardSm80:
    """The portable forward kernel of one problem with a cache of 16 bits. Construction takes compile-time facts only.

    Args:
        problem: what is decoded.
        shared_memory_limit: bytes that a CTA may have on the architecture.
        dependent_launch: whether it has griddepcontrol: compute capability 9.0 and up.

    Raises:
        ValueError: the tile does not fit the shared memory.
    """

    # Whether the queries of a request are converted in registers, and its rows have scales of their own.
    converts_queries: bool = False

    def __init__(self, problem: DecodeProblem, shared_memory_limit: int, dependent_launch: bool):
        self.problem = problem
        self.range = RequestRange(problem)
        self.tile: TileSm80 = self.choose_tile(shared_memory_limit)
        self.row_tiles = row_tiles(problem.rows)
        self.query_dtype = cutlass_dtype(problem.query_dtype)  # of Q in memory
        self.dtype: Any = self.operand_dtype()  # of both products
        self.weight_scale = softmax.weight_scale(self.dtype)
        self.dependent_launch = dependent_launch
        self.mma_op = warp_ops.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16))
        # With one block of rows a warp's score products would be chains of nine: two sums in turn halve their latency.
        self.score_chains = 2 if self.tile.m_tiles == 1 else 1
        self.key_blocks = self.tile.warp_keys // 8
        # Loads run this many tiles ahead of the scores.
        self.ahead = self.tile.stages - 2
        # Whether the addresses of a tile's operands are computed for every tile, because no register is left for them across the loop.
        self.pins_lane = False
        self.shared_memory_bytes = 0  # known once traced

    def choose_tile(self, shared_memory_limit: int) -> TileSm80:
        return choose_tile(self.problem.rows, shared_memory_limit, TileSm80)

    def operand_dtype(self) -> Any:
        """Element type of both products."""
        return self.query_dtype

    def lane_here(self, lane: Any) -> Any:
        """The lane, where what is computed from it belongs: see `pins_lane`."""
        return pinned_lane_index() if self.pins_lane else lane

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
        outputs = (mOut, mLse, mOutPartial, mLsePartial)
        self.launch(mKV, mQNope, mQRope, mTable, (mSeqLens, mTotalLens), mSchedule, outputs, None, scale_log2, num_ranges, stream)

    @cute.jit
    def launch(
        self,
        mKV: cute.Tensor,
        mQNope: cute.Tensor,
        mQRope: cute.Tensor,
        mTable: cute.Tensor,
        lens: tuple[cute.Tensor, cute.Tensor | None],
        mSchedule: cute.Tensor,
        outputs: tuple[cute.Tensor, cute.Tensor | None, cute.Tensor, cute.Tensor],
        mKScale: cute.Tensor | None,
        scale_log2: Float32,
        num_ranges: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel(mKV, mQNope, mQRope, mTable, lens, mSchedule, outputs, mKScale, scale_log2).launch(
            # Row tiles of a range are neighbours, so they run side by side and the second reads the keys from L2.
            grid=(self.row_tiles, num_ranges, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=self.dependent_launch,
        )

    @cute.kernel
    def kernel(
        self,
        mKV: cute.Tensor,
        mQNope: cute.Tensor,
        mQRope: cute.Tensor,
        mTable: cute.Tensor,
        lens: tuple[cute.Tensor, cute.Tensor | None],
        mSchedule: cute.Tensor,
        outputs: tuple[cute.Tensor, cute.Tensor | None, cute.Tensor, cute.Tensor],
        mKScale: cute.Tensor | None,
        scale_log2: Float32,
    ) -> None:
        row_tile, range_index, _ = cute.arch.block_idx()
        thread = cute.arch.thread_idx()[0]
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        row0 = row_tile * self.tile.rows
        rows, keys = self.tile.rows, self.tile.keys

        # Step 1: shared memory.
        @cute.struct
        class Storage:
            K: cute.struct.Align[cute.struct.MemRange[self.dtype, self.tile.stages * self.tile.stage_bytes // 2], 1024]
            S: cute.struct.Align[cute.struct.MemRange[Float32, COLUMN_SPLITS * rows * keys], 128]
            P: cute.struct.Align[cute.struct.MemRange[self.dtype, 2 * rows * keys], 128]
            factor: cute.struct.Align[cute.struct.MemRange[Float32, 2 * rows], 16]
            inverse: cute.struct.Align[cute.struct.MemRange[Float32, rows], 16]

        self.shared_memory_bytes = Storage.size_in_bytes()
        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        # K by lines, in elements of 16 bits: (element, unit, key, chunk, stage); units are swizzled by the key.
        line = UNIT * self.tile.line_units
        sK = cute.make_tensor(
            storage.K.data_ptr(),
            cute.make_layout(
                (UNIT, self.tile.line_units, keys, CHUNKS, self.tile.stages), stride=(1, UNIT, line, line * keys, line * keys * CHUNKS)
            ),
        )
        # Scores: (element, pair, row, column split); pairs are swizzled by the row.
        sS = cute.make_tensor(storage.S.data_ptr(), cute.make_layout((2, keys // 2, rows, COLUMN_SPLITS), stride=(1, 2, keys, keys * rows)))
        # P: (element, element group, unit, row, buffer); units are swizzled by the row.
        group = self.tile.lane_keys
        sP = cute.make_tensor(
            storage.P.data_ptr(),
            cute.make_layout((group, UNIT // group, keys // UNIT, rows, 2), stride=(1, group, UNIT, keys, keys * rows)),
        )
        sFactor = cute.make_tensor(storage.factor.data_ptr(), cute.make_layout((rows, 2)))
        sInverse = cute.make_tensor(storage.inverse.data_ptr(), cute.make_layout((rows,)))

        # Step 2: wait for the kernel before, then let the merge queue up behind this one: it waits for our end by itself.
        if cutlass.const_expr(self.dependent_launch):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

        # Step 3: this CTA's range of the line. Q of the first request first: behind K it would queue.
        words = cute.make_tensor(mSchedule.iterator + HEADER_WORDS + range_index * RANGE_WORDS, cute.make_layout((6,)))
        first_request, last_request = words[0], words[2]
        k_scale = Float32(1.0)
        if cutlass.const_expr(self.problem.needs_k_scale):
            k_scale = mKScale[0]
            scale_log2 = scale_log2 * k_scale
        value_scale = k_scale * (1.0 / self.weight_scale) if cutlass.const_expr(self.weight_scale != 1.0) else k_scale
        rQ = cute.make_rmem_tensor((2, 4, CHUNKS, self.tile.m_tiles), self.query_dtype)
        cursor = cute.make_rmem_tensor((CURSOR_WORDS,), Int32)
        source = (words, mKV, mTable, lens[0])
        if first_request <= last_request:
            self.load_queries(mQNope, mQRope, rQ, first_request, row0, warp)
            cursor[REQUEST] = first_request
            cursor[TILE], cursor[END_TILE] = self.range.tile_span(words, first_request, lens[0][first_request])
            cursor[KEY], cursor[END] = 0, 0
            self.next_piece(cursor, source)
            self.find_line(cursor, source, thread)
            for stage in cutlass.range(self.ahead, unroll=1):
                self.load_tile(cursor, source, sK, stage, thread)

        # Step 4: the requests of the range. Slots of the ring: the tile of the scores, the one before it, and the one before that, now free.
        shape = (self.tile.m_tiles,)
        row_max, row_sum, factor = (cute.make_rmem_tensor(shape, Float32) for _ in range(3))
        limits = cute.make_rmem_tensor(shape, Int32)
        row_scales = scale_log2
        if cutlass.const_expr(self.converts_queries):
            row_scales = cute.make_rmem_tensor(shape, Float32)
        rP = cute.make_rmem_tensor((self.tile.lane_keys, self.tile.m_tiles), Float32)
        rO = cute.make_rmem_tensor((2, 2, VALUE_COLUMNS // 8, self.tile.m_tiles), Float32)  # (column parity, row half, block, m tile)
        free, before, current, buffer = Int32(self.tile.stages - 2), Int32(self.tile.stages - 1), Int32(0), Int32(0)
        for request in cutlass.range(first_request, last_request + 1, unroll=1):
            seq_len = lens[0][request]
            begin_tile, end_tile = self.range.tile_span(words, request, seq_len)
            self.row_limits(limits, lens, request, seq_len, row0, lane, warp)
            pieces = self.range.num_pieces(begin_tile, end_tile, seq_len)
            if cutlass.const_expr(self.converts_queries):
                # Here and not where they are loaded, which is before the last values of the request before: nobody waits for them there.
                if begin_tile < end_tile:
                    self.convert_queries(rQ, sS, row_scales, scale_log2, warp)
            for piece in cutlass.range(pieces, unroll=1):
                piece_end = self.range.piece_end(begin_tile, end_tile, seq_len)
                slot = self.range.slot(words, request, begin_tile, seq_len)
                begin, end = self.range.key_span(begin_tile, piece_end, seq_len)
                begin_tile = piece_end
                row_max.fill(-Float32.inf)
                row_sum.fill(0.0)
                rO.fill(0.0)
                if begin < end:
                    # Step 5: the first tile's scores, then in turn the scores of a tile and the values of the one before it.
                    self.load_and_score(cursor, source, sK, sS, rQ, free, current, thread, lane, warp)
                    self.softmax(sS, rP, row_max, row_sum, factor, limits, end, begin, row_scales, lane, warp)
                    self.publish(sP, sFactor, rP, factor, buffer, lane, warp)
                    for key in cutlass.range(begin + keys, end, keys, unroll=1):
                        free, before = before, current
                        current = Int32(0) if current + 1 == self.tile.stages else current + 1
                        self.load_and_score(cursor, source, sK, sS, rQ, free, current, thread, lane, warp)
                        self.softmax(sS, rP, row_max, row_sum, factor, limits, end, key, row_scales, lane, warp)
                        self.accumulate(sK, sP, sFactor, rO, before, buffer, lane, warp)
                        buffer = buffer ^ 1
                        self.publish(sP, sFactor, rP, factor, buffer, lane, warp)
                    self.sum_rows(row_sum, sInverse, value_scale, lane, warp)
                    cute.arch.sync_threads()
                if request < last_request and piece + 1 == pieces:
                    self.load_queries(mQNope, mQRope, rQ, request + 1, row0, warp)
                if begin < end:
                    # Step 6: the last tile's values, and 1 / sum.
                    self.accumulate(sK, sP, sFactor, rO, current, buffer, lane, warp)
                    self.scale_rows(rO, sInverse, lane)
                    free, before = before, current
                    current = Int32(0) if current + 1 == self.tile.stages else current + 1
                    buffer = buffer ^ 1
                self.store(rO, row_max, row_sum, outputs, request, slot, row0, warp)

    @cute.jit
    def row_limits(
        self, limits: cute.Tensor, lens: tuple[cute.Tensor, cute.Tensor | None], request: Int32, seq_len: Int32, row0: Int32, lane: Int32, warp: Int32
    ) -> None:
        """Keys that each of this lane's softmax rows sees."""
        total_len = seq_len
        if cutlass.const_expr(self.problem.needs_total_lens):
            total_len = lens[1][request]
        for step in cutlass.range_constexpr(self.tile.m_tiles):
            token = (row0 + self.tile.softmax_row(lane, warp, step)) // self.problem.num_heads
            limits[step] = self.range.visible_keys(token, seq_len, total_len)

    @cute.jit
    def next_piece(self, cursor: cute.Tensor, source: tuple[cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor]) -> None:
        """Moves the cursor to the next piece with keys, if it is through with its own and there is one."""
        words, _, _, mSeqLens = source
        while cursor[KEY] >= cursor[END] and (cursor[TILE] < cursor[END_TILE] or cursor[REQUEST] < words[2]):
            if cursor[TILE] >= cursor[END_TILE]:
                cursor[REQUEST] = cursor[REQUEST] + 1
                cursor[TILE], cursor[END_TILE] = self.range.tile_span(words, cursor[REQUEST], mSeqLens[cursor[REQUEST]])
            if cursor[TILE] < cursor[END_TILE]:
                seq_len = mSeqLens[cursor[REQUEST]]
                piece_end = self.range.piece_end(cursor[TILE], cursor[END_TILE], seq_len)
                cursor[KEY], cursor[END] = self.range.key_span(cursor[TILE], piece_end, seq_len)
                cursor[TILE] = piece_end

    @cute.jit
    def find_line(self, cursor: cute.Tensor, source: tuple[cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor], thread: Int32) -> None:
        """Looks up the page of this thread's line of the next tile: one tile ahead, so that the loads never wait for the block table."""
        _, _, mTable, _ = source
        line, _, _ = self.tile.copied_line(thread)
        key = cursor[KEY] + line
        cursor[PAGE] = 0
        cursor[PAGE_KEY] = 0
        cursor[BYTES] = 0
        # The table is not read past the last key.
        if key < cursor[END]:
            cursor[PAGE] = mTable[cursor[REQUEST], key // self.problem.page_size]
            cursor[PAGE_KEY] = key % self.problem.page_size
            cursor[BYTES] = COPY_BYTES

    @cute.jit
    def load_tile(
        self, cursor: cute.Tensor, source: tuple[cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor], sK: cute.Tensor, stage: Int32, thread: Int32
    ) -> None:
        """Starts the copies of the cursor's tile and moves on. A thread takes a unit of a line; a group is committed even where nothing is left."""
        if cursor[KEY] < cursor[END]:
            _, mKV, _, _ = source
            chunks_at_once = self.tile.chunks_at_once
            line, unit, first_chunk = self.tile.copied_line(thread)
            gLine = mKV[cursor[PAGE], cursor[PAGE_KEY], None].iterator + (first_chunk * CHUNK + unit * self.tile.unit_columns)
            for i in cutlass.range_constexpr(-(-CHUNKS // chunks_at_once)):
                chunk = first_chunk + i * chunks_at_once
                target = sK[None, unit ^ self.tile.key_swizzle(line), line, chunk, stage].iterator
                # Nine chunks, where two go at once: the second half of the threads sits out the last copy.
                exists = True if cutlass.const_expr((i + 1) * chunks_at_once <= CHUNKS) else chunk < CHUNKS
                if exists:
                    copy_or_zero(target, gLine + i * chunks_at_once * CHUNK, cursor[BYTES])
            cursor[KEY] = cursor[KEY] + self.tile.keys
            if cursor[KEY] >= cursor[END]:
                self.next_piece(cursor, source)
            self.find_line(cursor, source, thread)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def load_queries(self, mQNope: cute.Tensor, mQRope: cute.Tensor, rQ: cute.Tensor, request: Int32, row0: Int32, warp: Int32) -> None:
        """This warp's columns of Q as A fragments: 16 of every chunk, the last chunk from the rope part.

        Rows past the last one repeat it: nothing of them is stored.
        """
        lane = pinned_lane_index()
        load = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.query_dtype, num_bits_per_copy=32)
        for m_tile in cutlass.range_constexpr(self.tile.m_tiles):
            for half in cutlass.range_constexpr(2):
                row = cutlass.min(row0 + m_tile * 16 + half * 8 + lane // 4, self.problem.rows - 1)
                token, head = row // self.problem.num_heads, row % self.problem.num_heads
                # From this lane's pair on, by (element, upper pair, chunk): what is left is static, an offset of the load.
                column = cute.assume(2 * self.tile.query_pair(lane, warp), divby=2)
                view = cute.make_layout((2, 2, CHUNKS - 1), stride=(1, self.tile.upper_columns, CHUNK))
                gNope = cute.make_tensor(mQNope[request, token, head, None].iterator + column, view)
                gRope = cute.make_tensor(mQRope[request, token, head, None].iterator + column, view)
                for chunk in cutlass.range_constexpr(CHUNKS):
                    for upper in cutlass.range_constexpr(2):
                        target = rQ[None, half + 2 * upper, chunk, m_tile]
                        if cutlass.const_expr(chunk < CHUNKS - 1):
                            cute.copy(load, gNope[None, upper, chunk], target)
                        else:
                            cute.copy(load, gRope[None, upper, 0], target)

    @cute.jit
    def load_and_score(
        self,
        cursor: cute.Tensor,
        source: tuple[cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor],
        sK: cute.Tensor,
        sS: cute.Tensor,
        rQ: cute.Tensor,
        free: Int32,
        current: Int32,
        thread: Int32,
        lane: Int32,
        warp: Int32,
    ) -> None:
        """Waits for the tile, refills the free slot, and leaves this warp's part of the scores in shared memory for all."""
        # All but the newest ahead - 1 groups: the tile `current` has arrived.
        cute.arch.cp_async_wait_group(self.ahead - 1)
        # For all threads; and all are through with the tile two before, and with the probabilities of the one before.
        cute.arch.sync_threads()
        self.load_tile(cursor, source, sK, free, thread)
        self.scores(sK, sS, rQ, current, lane, warp)
        cute.arch.sync_threads()

    @cute.jit
    def scores(self, sK: cute.Tensor, sS: cute.Tensor, rQ: cute.Tensor, stage: Int32, lane: Int32, warp: Int32) -> None:
        """This warp's part of S: half of the keys, a quarter of the columns."""
        acc = cute.make_rmem_tensor((4, self.key_blocks, self.tile.m_tiles, self.score_chains), Float32)
        acc.fill(0.0)
        self.multiply_keys(acc, sK, rQ, stage, lane, warp)
        pair = cute.make_rmem_tensor((2,), Float32)
        for m_tile in cutlass.range_constexpr(self.tile.m_tiles):
            for half in cutlass.range_constexpr(2):
                row = m_tile * 16 + half * 8 + lane // 4
                for block in cutlass.range_constexpr(self.key_blocks):
                    for parity in cutlass.range_constexpr(2):
                        pair[parity] = acc[half * 2 + parity, block, m_tile, 0]
                        if cutlass.const_expr(self.score_chains == 2):
                            pair[parity] = pair[parity] + acc[half * 2 + parity, block, m_tile, 1]
                    column = self.tile.score_pair(lane, warp, block) ^ self.tile.score_swizzle(row)
                    cute.autovec_copy(pair, sS[None, column, row, warp % COLUMN_SPLITS])

    @cute.jit
    def multiply_keys(self, acc: cute.Tensor, sK: cute.Tensor, rQ: cute.Tensor, stage: Int32, lane: Int32, warp: Int32) -> None:
        """acc += Q K^T over this warp's columns, 16 of every chunk."""
        load = cute.make_copy_atom(warp_ops.LdMatrix8x8x16bOp(False, 2 * self.key_blocks), self.dtype)
        key, unit = self.tile.score_line(lane, warp)
        for chunk in cutlass.range_constexpr(CHUNKS):
            rK = cute.make_rmem_tensor((4, self.key_blocks), self.dtype)
            cute.copy_atom_call(load, sK[None, unit, key, chunk, stage], cute.make_tensor(rK.iterator, cute.make_layout((4 * self.key_blocks,))))
            self.multiply_chunk(acc, rQ, rK, chunk)

    @cute.jit
    def multiply_chunk(self, acc: cute.Tensor, rQ: cute.Tensor, rK: cute.Tensor, chunk: cutlass.Constexpr) -> None:
        """acc += Q K^T over one k16 step. `rK`: B of every block of eight keys, (4, block)."""
        mma = cute.make_mma_atom(self.mma_op)
        for m_tile in cutlass.range_constexpr(self.tile.m_tiles):
            a = cute.make_tensor(rQ[None, None, chunk, m_tile].iterator, cute.make_layout((8,)))
            for block in cutlass.range_constexpr(self.key_blocks):
                sums = acc[None, block, m_tile, chunk % self.score_chains]
                cute.mma_atom_call(mma, sums, a, rK[None, block], sums)

    @cute.jit
    def softmax(
        self,
        sS: cute.Tensor,
        rP: cute.Tensor,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        factor: cute.Tensor,
        limits: cute.Tensor,
        end: Int32,
        tile_key: Int32,
        row_scales: Float32 | cute.Tensor,
        lane: Int32,
        warp: Int32,
    ) -> None:
        """Probabilities of this lane's keys in each of its rows against the new maximum; `factor` is what older sums and outputs shrink by."""
        lane_keys = self.tile.lane_keys
        lane_key = lane % LANES_PER_ROW * lane_keys
        for step in cutlass.range_constexpr(self.tile.m_tiles):
            row = self.tile.softmax_row(lane, warp, step)
            visible = cutlass.min(limits[step], end) - tile_key - lane_key
            self.read_scores(sS, rP, step, row, lane_key)
            largest = row_max[step]
            scale = row_scales[step] if cutlass.const_expr(self.converts_queries) else row_scales
            for i in cutlass.range_constexpr(lane_keys):
                score = rP[i, step] * scale if i < visible else -Float32.inf
                rP[i, step] = score
            tile_max = rP[0, step]
            for i in cutlass.range_constexpr(1, lane_keys):
                tile_max = cute.arch.fmax(tile_max, rP[i, step])
            for offset in cutlass.range_constexpr(len(ROW_LANES)):
                tile_max = cute.arch.fmax(tile_max, cute.arch.shuffle_sync_bfly(tile_max, offset=ROW_LANES[offset]))
            new_max = cute.arch.fmax(largest, tile_max)
            # A row that has seen no key yet: -inf - -inf would be NaN.
            base = new_max if new_max > -Float32.inf else Float32(0.0)
            factor[step] = cute.math.exp2(largest - base, fastmath=True)
            row_max[step] = new_max
            total = row_sum[step] * factor[step]
            for i in cutlass.range_constexpr(lane_keys):
                p = cute.math.exp2(rP[i, step] - base, fastmath=True)
                rP[i, step] = p
                total += p
            row_sum[step] = total

    @cute.jit
    def read_scores(self, sS: cute.Tensor, rP: cute.Tensor, step: cutlass.Constexpr, row: Int32, lane_key: Int32) -> None:
        """The scores of this lane's keys, added over the four column splits."""
        column = (lane_key // 2) ^ self.tile.score_swizzle(row)
        part = cute.make_rmem_tensor((self.tile.lane_keys,), Float32)
        for split in cutlass.range_constexpr(COLUMN_SPLITS):
            if cutlass.const_expr(self.tile.lane_keys == 2):
                cute.autovec_copy(sS[None, column, row, split], part)
            else:
                part[0] = sS[lane_key % 2, column, row, split]
            for i in cutlass.range_constexpr(self.tile.lane_keys):
                rP[i, step] = part[i] if cutlass.const_expr(split == 0) else rP[i, step] + part[i]

    @cute.jit
    def publish(self, sP: cute.Tensor, sFactor: cute.Tensor, rP: cute.Tensor, factor: cute.Tensor, buffer: Int32, lane: Int32, warp: Int32) -> None:
        """Probabilities and factors to shared memory, for all warps after the next barrier."""
        lane_keys = self.tile.lane_keys
        lane_key = lane % LANES_PER_ROW * lane_keys
        for step in cutlass.range_constexpr(self.tile.m_tiles):
            row = self.tile.softmax_row(lane, warp, step)
            group = cute.make_rmem_tensor((lane_keys,), self.dtype)
            for i in cutlass.range_constexpr(lane_keys):
                p = rP[i, step] * self.weight_scale if cutlass.const_expr(self.weight_scale != 1.0) else rP[i, step]
                group[i] = p.to(self.dtype)
            unit = (lane_key // UNIT) ^ self.tile.weight_swizzle(row)
            cute.autovec_copy(group, sP[None, lane_key % UNIT // lane_keys, unit, row, buffer])
            if lane % LANES_PER_ROW == 0:
                sFactor[row, buffer] = factor[step]

    @cute.jit
    def accumulate(
        self, sK: cute.Tensor, sP: cute.Tensor, sFactor: cute.Tensor, rO: cute.Tensor, stage: Int32, buffer: Int32, lane: Int32, warp: Int32
    ) -> None:
        """rO = factor rO + P V for this warp's chunk of the value columns."""
        lane = self.lane_here(lane)
        self.scale_rows(rO, sFactor[None, buffer], lane)
        load_p = cute.make_copy_atom(warp_ops.LdMatrix8x8x16bOp(False, 4), self.dtype)
        units = cute.make_tensor(
            sP.iterator,
            cute.make_layout((UNIT, self.tile.keys // UNIT, self.tile.rows, 2), stride=(1, UNIT, self.tile.keys, self.tile.keys * self.tile.rows)),
        )
        load_v = cute.make_copy_atom(warp_ops.LdMatrix8x8x16bOp(True, 4), self.dtype)
        for block in cutlass.range_constexpr(self.tile.keys // 16):
            rA = cute.make_rmem_tensor((8, self.tile.m_tiles), self.dtype)
            for m_tile in cutlass.range_constexpr(self.tile.m_tiles):
                row, unit = self.tile.weight_line(lane, m_tile, block)
                cute.copy_atom_call(load_p, units[None, unit, row, buffer], rA[None, m_tile])
            for pair in cutlass.range_constexpr(self.tile.line_units // 2):
                key, unit = self.tile.value_line(lane, block, pair)
                rV = cute.make_rmem_tensor((4, 2), self.dtype)
                cute.copy_atom_call(load_v, sK[None, unit, key, warp, stage], cute.make_tensor(rV.iterator, cute.make_layout((8,))))
                self.multiply_units(rO, rA, rV, pair)

    @cute.jit
    def multiply_units(self, rO: cute.Tensor, rA: cute.Tensor, rV: cute.Tensor, pair: cutlass.Constexpr) -> None:
        """rO += P V for 16 keys and the columns of two units. `rV`: what ldmatrix.trans gave."""
        self.multiply_columns(rO, rA, rV, pair * 2)

    @cute.jit
    def multiply_columns(self, rO: cute.Tensor, rA: cute.Tensor, rB: cute.Tensor, first_block: cutlass.Constexpr) -> None:
        """rO += P V for 16 keys, from one block of eight columns on. `rB`: B of every block, (4, block)."""
        mma = cute.make_mma_atom(self.mma_op)
        for m_tile in cutlass.range_constexpr(self.tile.m_tiles):
            for i in cutlass.range_constexpr(cute.size(rB, mode=[1])):
                sums = cute.make_tensor(rO[None, None, first_block + i, m_tile].iterator, cute.make_layout((4,)))
                cute.mma_atom_call(mma, sums, rA[None, m_tile], rB[None, i], sums)

    @cute.jit
    def scale_rows(self, rO: cute.Tensor, sValues: cute.Tensor, lane: Int32) -> None:
        """Multiplies every output row with its value in shared memory."""
        for m_tile in cutlass.range_constexpr(self.tile.m_tiles):
            for half in cutlass.range_constexpr(2):
                value = sValues[m_tile * 16 + half * 8 + lane // 4]
                for block in cutlass.range_constexpr(VALUE_COLUMNS // 8):
                    for parity in cutlass.range_constexpr(2):
                        rO[parity, half, block, m_tile] = rO[parity, half, block, m_tile] * value

    @cute.jit
    def sum_rows(self, row_sum: cute.Tensor, sInverse: cute.Tensor, value_scale: Float32, lane: Int32, warp: Int32) -> None:
        """Sums over a row's lanes, and value_scale / sum for all warps. A row that sees no key has sum 0: its output becomes 0, its LSE -inf."""
        for step in cutlass.range_constexpr(self.tile.m_tiles):
            total = row_sum[step]
            for offset in cutlass.range_constexpr(len(ROW_LANES)):
                total += cute.arch.shuffle_sync_bfly(total, offset=ROW_LANES[offset])
            row_sum[step] = total
            if lane % LANES_PER_ROW == 0:
                sInverse[self.tile.softmax_row(lane, warp, step)] = Float32(0.0) if total == 0.0 else value_scale * cute.arch.rcp_approx(total)

    @cute.jit
    def store(
        self,
        rO: cute.Tensor,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        outputs: tuple[cute.Tensor, cute.Tensor | None, cute.Tensor, cute.Tensor],
        request: Int32,
        slot: Int32,
        row0: Int32,
        warp: Int32,
    ) -> None:
        """Writes the piece's rows: to `out` where it is a whole request, else to its partial slot."""
        # With a lane that can be hoisted, the addresses of all stores would live across the loop over the tiles.
        lane = pinned_lane_index()
        mOut, mLse, mOutPartial, mLsePartial = outputs
        heads = self.problem.num_heads
        for m_tile in cutlass.range_constexpr(self.tile.m_tiles):
            for half in cutlass.range_constexpr(2):
                row = row0 + m_tile * 16 + half * 8 + lane // 4
                if row < self.problem.rows:
                    if slot == NO_SLOT:
                        self.store_row(rO, mOut[request, row // heads, row % heads, None], m_tile, half, lane, warp)
                    else:
                        self.store_row(rO, mOutPartial[slot, row // heads, row % heads, None], m_tile, half, lane, warp)
        for step in cutlass.range_constexpr(self.tile.m_tiles):
            row = row0 + self.tile.softmax_row(lane, warp, step)
            if lane % LANES_PER_ROW == 0 and row < self.problem.rows:
                lse = row_max[step] + cute.math.log2(row_sum[step], fastmath=True)
                if slot != NO_SLOT:
                    mLsePartial[slot, row // heads, row % heads] = lse
                elif cutlass.const_expr(self.problem.return_lse):
                    mLse[request, row // heads, row % heads] = lse * LN2

    @cute.jit
    def store_row(self, rO: cute.Tensor, gRow: cute.Tensor, m_tile: cutlass.Constexpr, half: cutlass.Constexpr, lane: Int32, warp: Int32) -> None:
        """One row of the fragment: two neighbouring columns a store, four lanes a line of eight."""
        blocks = VALUE_COLUMNS // 8
        view = cute.make_layout((2, 4, blocks, HEAD_DIM_V // VALUE_COLUMNS), stride=(1, 2, 8, VALUE_COLUMNS))
        gPairs = cute.make_tensor(gRow.iterator, view)  # (element, lane of the quad, block of eight columns, warp)
        store = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), gRow.element_type, num_bits_per_copy=2 * gRow.element_type.width)
        pair = cute.make_rmem_tensor((2,), gRow.element_type)
        for block in cutlass.range_constexpr(blocks):
            for parity in cutlass.range_constexpr(2):
                pair[parity] = rO[parity, half, block, m_tile].to(gRow.element_type)
            cute.copy(store, pair, gPairs[None, lane % 4, block, warp])

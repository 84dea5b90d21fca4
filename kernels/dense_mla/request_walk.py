"""What the Hopper forwards share: the walk over a range of the schedule, the pages of its tiles, rows and what each of them sees, the LSE;
and of 16-bit caches the tensor maps and the producer of Q."""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync, warpgroup

from . import softmax
from .named_barrier import NamedBarrierSm90
from .paged_kv import PageTiling
from .problem import HEAD_DIM_QK, TILE_KEYS, DecodeProblem
from .request_range import FIRST_PAGE, FIRST_REQUEST, FIRST_TILE, LAST_END_TILE, LAST_REQUEST, RequestRange
from .schedule import HEADER_WORDS, NO_SLOT, RANGE_WORDS, invariant_piece_tiles
from .torch_types import cutlass_dtype

CHUNK = 64  # columns of K that one barrier and one swizzled TMA box cover: 128 bytes
CHUNKS = HEAD_DIM_QK // CHUNK
PRODUCER_WARPS = 2  # of K, and of Q
LN2 = math.log(2.0)


def k_major(dtype: Any, rows: int, columns: int, stages: int | None = None) -> Any:
    """Shared-memory layout of a K-major operand in 128-byte swizzled blocks, as TMA boxes of 64 columns write it."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    if stages is None:
        return cute.tile_to_shape(atom, (rows, columns), (0, 1))
    return cute.tile_to_shape(atom, (rows, columns, stages), (0, 1, 2))


def query_box(dtype: Any, heads: int, tokens: int) -> Any:
    """One TMA box of Q, [heads, tokens, 64 columns]: rows token x heads + head of a K-major chunk, whatever their number."""
    swizzle = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype).inner
    return cute.make_composed_layout(swizzle, 0, cute.make_layout((heads, tokens, CHUNK), stride=(CHUNK, CHUNK * heads, 1)))


class RequestWalk:
    """Base of the Hopper forwards, for keys in the 64-row side of WGMMA: a subclass with rows there says in `score_row` where they lie."""

    q_stages = 1  # of `load_queries`

    def __init__(self, problem: DecodeProblem):
        self.problem = problem
        self.dtype = cutlass_dtype(problem.kv_dtype)
        self.tile_rows = problem.tile_rows
        self.row_tiles = problem.row_tiles
        self.tiling = PageTiling(problem.page_size)
        self.range = RequestRange(problem)
        self.shared_memory_bytes = 0  # known once traced

    @cute.jit
    def score_row(self, block: cutlass.Constexpr, parity: cutlass.Constexpr, lane: Int32) -> Int32:
        """Row of the tile that a thread's row statistic [parity, block] belongs to."""
        return softmax.row_of(block, parity, lane)

    def tensor_maps(self, mKV: cute.Tensor, mQNope: cute.Tensor, mQRope: cute.Tensor) -> tuple[Any, Any]:
        """TMA of 16-bit keys and queries: atoms of K, of Q's latent and of its rope part, and the tensors of their coordinates.

        A page is the middle mode of K's map, so a box never leaves it: rows past its end arrive as zeros. So do heads and tokens that do not exist.
        """
        load, box_keys = cpasync.CopyBulkTensorTileG2SOp(), self.tiling.box_keys
        gKV = cute.make_tensor(mKV.iterator, cute.select(mKV.layout, mode=[1, 2, 0]))
        maps = [cpasync.make_tiled_tma_atom(load, gKV, k_major(self.dtype, box_keys, CHUNK), (box_keys, CHUNK))]
        heads, tokens = self.problem.tile_heads, self.problem.tile_tokens
        for mQ in (mQNope, mQRope):
            gQ = cute.make_tensor(mQ.iterator, cute.select(mQ.layout, mode=[2, 1, 3, 0]))
            maps.append(cpasync.make_tiled_tma_atom(load, gQ, query_box(self.dtype, heads, tokens), (heads, tokens, CHUNK)))
        return tuple(atom for atom, _ in maps), tuple(tensor for _, tensor in maps)

    @cute.jit
    def range_words(self, mSchedule: cute.Tensor, range_index: Int32) -> cute.Tensor:
        """The words of a range, in memory: for the consumers, who have time to read them where they are needed."""
        return cute.make_tensor(mSchedule.iterator + HEADER_WORDS + range_index * RANGE_WORDS, cute.make_layout((RANGE_WORDS,)))

    @cute.jit
    def early_words(self, mSchedule: cute.Tensor, range_index: Int32) -> cute.Tensor:
        """The words of a range, in registers, read before the wait for the kernel before: for the producers, whose first load waits for them.

        The schedule kernel fences its words before it lets anybody start, and whoever runs between it and this kernel has started behind it: the
        words are in the L2. Past it, in an L1, lines of an older schedule might be left.
        """
        words = cute.make_rmem_tensor((RANGE_WORDS,), Int32)
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) < PRODUCER_WARPS:
            memory = self.range_words(mSchedule, range_index)
            for i in cutlass.range_constexpr(RANGE_WORDS):
                words[i] = cute.arch.load(memory.iterator + i, Int32, cop="cg")
        return words

    @cute.jit
    def tile_span(self, words: cute.Tensor, request: Int32, mSeqLens: cute.Tensor) -> tuple[Int32, Int32]:
        """First and end tile of a request in this range, for the producers: as `RequestRange.tile_span`, with a length read only where it decides."""
        begin = words[FIRST_TILE] if request == words[FIRST_REQUEST] else Int32(0)
        end = words[LAST_END_TILE]
        if request != words[LAST_REQUEST]:
            end = self.tiling.num_tiles(mSeqLens[request])
        return begin, end

    @cute.jit
    def work_span(self, words: cute.Tensor, request: Int32, mSeqLens: cute.Tensor) -> tuple[Int32, Int32, Int32]:
        """Length of a request, and its first and end tile in this range, for the consumers: the tiles that the producers load, whatever the length.

        A length that changes behind the schedule breaks the contract, and the answer is wrong. But who waits for a tile that never comes, or leaves
        one that did, hangs the GPU. The end is no less than the first tile: the consumers count on by their difference.
        """
        seq_len = mSeqLens[request]
        begin, end = self.tile_span(words, request, mSeqLens)
        return seq_len, begin, cutlass.max(begin, end)

    @cute.jit
    def next_stage(self, stage: Int32, phase: Int32, stages: cutlass.Constexpr) -> tuple[Int32, Int32]:
        """The stage after this one in a ring, and the parity of its use: the other one each time round."""
        wrap = stage + 1 == stages
        return Int32(0) if wrap else stage + 1, phase ^ 1 if wrap else phase

    def key_boxes(self, tma: cute.CopyAtom, gKV: cute.Tensor, sK: cute.Tensor, box: tuple[int, int]) -> tuple[Any, Any]:
        """TMA's views of keys: in shared memory [box, box of the tile, line, stage], in the cache [box, tile of the page, line, page]."""
        sBoxes = cute.group_modes(cute.flat_divide(sK, box), 0, 2)
        gBoxes = cute.group_modes(cute.local_tile(gKV, box, (None, None, None)), 0, 2)
        tKsK, tKgK = cpasync.tma_partition(tma, 0, cute.make_layout(1), sBoxes, gBoxes)
        return tKsK, tKgK

    @cute.jit
    def page_of(self, mTable: cute.Tensor, words: cute.Tensor, request: Int32, begin: Int32, tile: Int32) -> Int32:
        """The page of a tile that lies in one page. `begin`: the request's first tile in this range."""
        # The range's first page stands in the schedule: one memory latency less before the first key is on its way.
        page = words[FIRST_PAGE]
        if (request > words[FIRST_REQUEST]) | (tile > begin):
            page = mTable[request, tile // self.tiling.tiles_per_page]
        return page

    def box_has_keys(self, tile: Int32, box: Any, seq_len: Int32) -> Any:
        """Whether a box of a tile of several pages holds keys of the request. Otherwise the table is not read: the box aims past the last page."""
        return tile * TILE_KEYS + box * self.tiling.box_keys < seq_len

    @cute.jit
    def load_queries(
        self,
        tma: tuple[cute.CopyAtom, cute.CopyAtom, cute.CopyAtom],
        gInputs: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        mSeqLens: cute.Tensor,
        words: cute.Tensor,
        sQ: cute.Tensor,
        q_full: cute.Pointer,
        q_empty: cute.Pointer,
        row_tile: Int32,
    ) -> None:
        """Producer of Q, a warp of its own: behind K in the same warp, Q would wait for the block table.

        Rows of the tile past its heads and tokens are never written: what they hold shows in their own columns of S^T and O^T, which nobody stores.
        """
        problem = self.problem
        box = (problem.tile_heads, problem.tile_tokens, CHUNK)
        strides = (CHUNK, CHUNK * problem.tile_heads, 1, CHUNK * self.tile_rows, HEAD_DIM_QK * self.tile_rows)
        sBoxes = cute.group_modes(cute.make_tensor(sQ.iterator, cute.make_layout((*box, CHUNKS, self.q_stages), stride=strides)), 0, 3)
        gNope = cute.group_modes(cute.local_tile(gInputs[1], box, (None, None, None, None)), 0, 3)
        gRope = cute.group_modes(cute.local_tile(gInputs[2], box, (None, None, None, None)), 0, 3)
        tQsQ, tQgN = cpasync.tma_partition(tma[1], 0, cute.make_layout(1), sBoxes, gNope)
        _, tQgR = cpasync.tma_partition(tma[2], 0, cute.make_layout(1), sBoxes, gRope)
        heads, tokens = row_tile % problem.head_tiles, row_tile // problem.head_tiles
        stage, phase = Int32(0), Int32(1)  # a fresh barrier lets a wait for parity 1 pass
        for request in cutlass.range(words[FIRST_REQUEST], words[LAST_REQUEST] + 1, unroll=1):
            begin, end = self.tile_span(words, request, mSeqLens)
            if begin < end:
                cute.arch.mbarrier_wait(q_empty + stage, phase)
                barrier = q_full + stage
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(barrier, problem.tile_heads * problem.tile_tokens * HEAD_DIM_QK * 2)
                for chunk in cutlass.range_constexpr(CHUNKS - 1):
                    cute.copy(tma[1], tQgN[None, heads, tokens, chunk, request], tQsQ[None, chunk, stage], tma_bar_ptr=barrier)
                cute.copy(tma[2], tQgR[None, heads, tokens, 0, request], tQsQ[None, CHUNKS - 1, stage], tma_bar_ptr=barrier)
                stage, phase = self.next_stage(stage, phase, self.q_stages)

    @cute.jit
    def piece(
        self, words: cute.Tensor, request: Int32, begin: Int32, end: Int32, seq_len: Int32, index: Int32
    ) -> tuple[Int32, Int32, Int32]:
        """First tile, end tile and slot of a request's piece `index` in this range; NO_SLOT for a whole request."""
        if cutlass.const_expr(self.problem.batch_invariant):
            begin += index * invariant_piece_tiles(self.tiling.num_tiles(seq_len))
        return begin, self.range.piece_end(begin, end, seq_len), self.range.slot(words, request, begin, seq_len)

    @cute.jit
    def row_limits(
        self,
        limits: cute.Tensor,
        lens: tuple[cute.Tensor, cute.Tensor | None],
        request: Int32,
        seq_len: Int32,
        row_tile: Int32,
        lane: Int32,
    ) -> None:
        """How many of this rank's keys each score row of the thread sees: `DecodeProblem.causal` and `ContextShard.held`, row by row."""
        problem = self.problem
        if cutlass.const_expr(problem.causal and problem.query_len > 1):
            total = lens[1][request] if cutlass.const_expr(problem.needs_total_lens) else seq_len
            for block in cutlass.range_constexpr(limits.shape[1]):
                for parity in cutlass.range_constexpr(2):
                    token, _, _ = self.locate(self.score_row(block, parity, lane), row_tile)
                    limits[parity, block] = self.range.visible_keys(token, seq_len, total)
        else:
            limits.fill(seq_len)

    @cute.jit
    def visible_in_tile(self, visible: cute.Tensor, limits: cute.Tensor, tile: Int32, key0: Int32) -> None:
        """How many keys of a tile each row sees: by its limit, and by the page's end where the page's last tile is short.

        `key0`: the tile's first key.
        """
        for block in cutlass.range_constexpr(visible.shape[1]):
            for parity in cutlass.range_constexpr(2):
                visible[parity, block] = limits[parity, block] - key0
                if cutlass.const_expr(self.tiling.page_size % TILE_KEYS != 0 and self.tiling.pages_per_tile == 1):
                    rest = self.tiling.page_size - tile % self.tiling.tiles_per_page * TILE_KEYS
                    visible[parity, block] = cutlass.min(visible[parity, block], rest)

    @cute.jit
    def locate(self, row: Int32, row_tile: Int32) -> tuple[Int32, Int32, cutlass.Boolean]:
        """Query token and head of a row of the tile, and whether there is such a row."""
        problem = self.problem
        heads, tokens = problem.tile_heads, problem.tile_tokens
        if cutlass.const_expr(tokens == 1):
            token, head = row_tile // problem.head_tiles, row_tile % problem.head_tiles * heads + row
            return token, head, (row < heads) & (head < problem.num_heads)
        token = row_tile * tokens + row // heads
        return token, row % heads, (row < heads * tokens) & (token < problem.query_len)

    @cute.jit
    def sync_warpgroup(self, group: Int32) -> None:
        """Barrier of one consumer warpgroup."""
        cute.arch.barrier(barrier_id=NamedBarrierSm90.WARPGROUP_0 + group, number_of_threads=128)

    @cute.jit
    def store_lse(
        self,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        mLse: cute.Tensor | None,
        mLsePartial: cute.Tensor,
        request: Int32,
        slot: Int32,
        row_tile: Int32,
        lane: Int32,
    ) -> None:
        """Base-2 LSE to the partial slot, natural-log LSE to the caller. -inf for a row that sees no key, whose sum is 0."""
        for block in cutlass.range_constexpr(row_max.shape[1]):
            for parity in cutlass.range_constexpr(2):
                token, head, exists = self.locate(self.score_row(block, parity, lane), row_tile)
                lse = row_max[parity, block] + cute.math.log2(row_sum[parity, block], fastmath=True)
                if exists:
                    if slot != NO_SLOT:
                        mLsePartial[slot, token, head] = lse
                    elif cutlass.const_expr(self.problem.return_lse):
                        mLse[request, token, head] = lse * LN2

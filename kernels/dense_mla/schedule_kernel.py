"""The schedule on the device: one CTA, once a step, from the lengths and the block table that the step has on the device.

The arithmetic and its names are those of schedule.py, which says what the numbers mean; `schedule.plan` is the same in Python integers. What the
merge's CTAs have to do follows from the split requests and is written here too (merge_shares.py): it is the same in every layer of the step.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from .block_scan import block_scan
from .merge_plan import STRANDS_LOG2
from .merge_shares import FIRST_SLOT, PIECES, REQUEST, SPLIT, MergeShares, share_tensors
from .paged_kv import PageTiling
from .problem import DecodeProblem
from .schedule import (
    HEADER_WORDS,
    INVARIANT_PIECES,
    MAX_REQUESTS,
    NO_SLOT,
    RANGE_WORDS,
    WHOLE_SLACK,
    invariant_piece_tiles,
)

THREADS = 1024
WARPS = THREADS // 32


class ScheduleKernel:
    """Writes the schedule buffer.

    [0] split requests, then RANGE_WORDS for each range, SHARE_WORDS for each merge CTA, and SPLIT_WORDS for each split request. What
    depends on the rows of a request is an argument of the launch, because the kernel is shared by problems of different heads: `merge_vectors`, of
    a request, `merge_batch`, pieces of a strand in flight, and `merge_ctas`, the CTAs of the merge.
    """

    def __init__(self, problem: DecodeProblem, dependent_launch: bool = True):
        self.dependent_launch = dependent_launch
        self.tiling = PageTiling(problem.page_size)
        self.batch_invariant = problem.batch_invariant
        self.fixed_cost = problem.fixed_cost
        self.shares = MergeShares(problem.batch_invariant, THREADS)

    @cute.jit
    def __call__(
        self,
        mSeqLens: cute.Tensor,
        mTable: cute.Tensor,
        mSchedule: cute.Tensor,
        num_ranges: Int32,
        merge_vectors: Int32,
        merge_batch: Int32,
        merge_ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel(mSeqLens, mTable, mSchedule, num_ranges, merge_vectors, merge_batch, merge_ctas).launch(
            grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=self.dependent_launch
        )

    @cute.kernel
    def kernel(
        self,
        mSeqLens: cute.Tensor,
        mTable: cute.Tensor,
        mSchedule: cute.Tensor,
        num_ranges: Int32,
        merge_vectors: Int32,
        merge_batch: Int32,
        merge_ctas: Int32,
    ) -> None:
        thread = cute.arch.thread_idx()[0]
        requests = mSeqLens.shape[0]

        @cute.struct
        class Storage:
            starts: cute.struct.MemRange[Int32, MAX_REQUESTS + 1]
            splits_before: cute.struct.MemRange[Int32, 1 if self.batch_invariant else MAX_REQUESTS]
            pieces: cute.struct.MemRange[Int32, self.shares.max_splits]
            strand_counts: cute.struct.MemRange[Int32, STRANDS_LOG2 + 1]
            warp_sums: cute.struct.Align[cute.struct.MemRange[Int32, WARPS], 16]  # read four at a time
            too_long: cute.struct.MemRange[Int32, 1]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        sStarts = storage.starts.get_tensor(cute.make_layout((MAX_REQUESTS + 1,)))
        sSplitsBefore = storage.splits_before.get_tensor(cute.make_layout((MAX_REQUESTS,)))
        sPieces = storage.pieces.get_tensor(cute.make_layout((self.shares.max_splits,)))
        sCounts = storage.strand_counts.get_tensor(cute.make_layout((STRANDS_LOG2 + 1,)))
        sTooLong = storage.too_long.get_tensor(cute.make_layout((1,)))
        sWarpSums = storage.warp_sums.get_tensor(cute.make_layout((WARPS,)))
        if cutlass.const_expr(self.dependent_launch):
            cute.arch.griddepcontrol_wait()

        # Step 1: where each request starts on the line.
        total = Int32(0)
        for base in cutlass.range(0, requests, THREADS, unroll=1):
            request = base + thread
            units = Int32(0)
            if request < requests:
                tiles = self.tiling.num_tiles(mSeqLens[request])
                units = tiles + self.pieces(tiles) * self.fixed_cost if tiles > 0 else Int32(1)
            before, added = block_scan(units, sWarpSums, thread, WARPS)
            if request < requests:
                sStarts[request] = total + before
            total += added
        if thread == 0:
            sStarts[requests] = total
            sTooLong[0] = 0
        if thread <= STRANDS_LOG2:
            sCounts[thread] = 0
        cute.arch.sync_threads()
        quantum = cutlass.max((total + num_ranges - 1) // num_ranges, 1)

        gShares, gSplits = share_tensors(mSchedule, num_ranges, merge_ctas)
        notes = (sPieces, sCounts, merge_batch)
        if cutlass.const_expr(self.batch_invariant):
            splits = self.write_invariant_ranges(mSeqLens, mSchedule, gSplits, notes, sStarts, sWarpSums, requests, num_ranges, quantum, thread)
        else:
            splits = self.write_ranges(
                mSchedule, gSplits, notes, sStarts, sSplitsBefore, sWarpSums, sTooLong, requests, num_ranges, quantum, thread
            )

        # Step 3: what each CTA of the merge has to do.
        self.shares.write(gShares, gSplits, notes, sWarpSums, splits, merge_vectors, merge_ctas, thread)

        # Step 4: the page of each range's first tile. A thread reads what it wrote itself.
        for index in cutlass.range(thread, num_ranges, THREADS, unroll=1):
            words = cute.make_tensor(mSchedule.iterator + HEADER_WORDS + index * RANGE_WORDS, cute.make_layout((RANGE_WORDS,)))
            request, tile = words[0], words[1]
            page = Int32(0)
            if request <= words[2]:
                if tile < self.tiling.num_tiles(mSeqLens[request]):
                    page = mTable[request, self.tiling.first_key(tile) // self.tiling.page_size]
            words[6] = page

        # Step 5: only now may the forward start: it reads its range before it waits for our end, and so does the merge behind it with its share.
        if cutlass.const_expr(self.dependent_launch):
            cute.arch.fence_acq_rel_gpu()
            cute.arch.sync_threads()
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def pieces(self, tiles: Int32) -> Int32:
        """Pieces that pay the fixed cost: those of a request cut by its own length, otherwise one."""
        count = Int32(1)
        if cutlass.const_expr(self.batch_invariant):
            length = invariant_piece_tiles(tiles)
            count = (tiles + length - 1) // length
        return count

    @cute.jit
    def write_invariant_ranges(
        self,
        mSeqLens: cute.Tensor,
        mSchedule: cute.Tensor,
        gSplits: cute.Tensor,
        notes: tuple[cute.Tensor, cute.Tensor, Int32],
        sStarts: cute.Tensor,
        sWarpSums: cute.Tensor,
        requests: Int32,
        num_ranges: Int32,
        quantum: Int32,
        thread: Int32,
    ) -> Int32:
        """Every request cut by its own length; a range takes the pieces that start in it. The number of split requests."""
        split_requests = Int32(0)
        for base in cutlass.range(0, requests, THREADS, unroll=1):
            request = base + thread
            count = Int32(1)
            if request < requests:
                count = self.pieces(self.tiling.num_tiles(mSeqLens[request]))
            before, added = block_scan(Int32(1) if count > 1 else Int32(0), sWarpSums, thread, WARPS)
            if count > 1:
                self.write_split(gSplits, notes, split_requests + before, request, request * INVARIANT_PIECES, count)
            split_requests += added
        if thread == 0:
            mSchedule[0] = split_requests
        for index in cutlass.range(thread, num_ranges, THREADS, unroll=1):
            first, first_piece = self.first_piece(mSeqLens, sStarts, requests, index * quantum)
            end, end_piece = self.first_piece(mSeqLens, sStarts, requests, (index + 1) * quantum)
            last, first_tile, end_tile = end, Int32(0), Int32(0)
            if first < requests:
                first_tile = first_piece * invariant_piece_tiles(self.tiling.num_tiles(mSeqLens[first]))
            if end_piece > 0:
                end_tile = end_piece * invariant_piece_tiles(self.tiling.num_tiles(mSeqLens[end]))
            else:
                last = end - 1
                if last >= 0:
                    end_tile = self.tiling.num_tiles(mSeqLens[last])
            if first == end:
                if first_piece == end_piece:
                    last = first - 1  # idle
            self.write_range(mSchedule, index, first, first_tile, last, end_tile, Int32(NO_SLOT), Int32(NO_SLOT))
        return split_requests

    @cute.jit
    def first_piece(self, mSeqLens: cute.Tensor, sStarts: cute.Tensor, requests: Int32, unit: Int32) -> tuple[Int32, Int32]:
        """Request and piece that start at or after a unit of the line; `requests` and 0 past its end."""
        request, piece = requests, Int32(0)
        if unit < sStarts[requests]:
            found = self.request_at(sStarts, requests, unit)
            tiles = self.tiling.num_tiles(mSeqLens[found])
            stride = invariant_piece_tiles(tiles) + self.fixed_cost
            index = (unit - sStarts[found] + stride - 1) // stride
            fits = index < cutlass.max(self.pieces(tiles), 1)
            request = found if fits else found + 1
            piece = index if fits else Int32(0)
        return request, piece

    @cute.jit
    def write_ranges(
        self,
        mSchedule: cute.Tensor,
        gSplits: cute.Tensor,
        notes: tuple[cute.Tensor, cute.Tensor, Int32],
        sStarts: cute.Tensor,
        sSplitsBefore: cute.Tensor,
        sWarpSums: cute.Tensor,
        sTooLong: cute.Tensor,
        requests: Int32,
        num_ranges: Int32,
        quantum: Int32,
        thread: Int32,
    ) -> Int32:
        """Whole requests where the slack allows it, cuts anywhere otherwise. The number of split requests."""
        # Step 2: may every request stay whole, in the range where it starts?
        for index in cutlass.range(thread, num_ranges, THREADS, unroll=1):
            first = self.first_start(sStarts, requests, index * quantum)
            end = self.first_start(sStarts, requests, (index + 1) * quantum)
            if sStarts[end] - sStarts[first] > quantum + quantum // WHOLE_SLACK:
                sTooLong[0] = 1
        cute.arch.sync_threads()
        splits = Int32(0)
        if sTooLong[0] == 0:
            for index in cutlass.range(thread, num_ranges, THREADS, unroll=1):
                self.write_whole_range(mSchedule, sStarts, requests, index, quantum)
            if thread == 0:
                mSchedule[0] = 0
        else:
            splits = self.write_cut_ranges(mSchedule, gSplits, notes, sStarts, sSplitsBefore, sWarpSums, requests, num_ranges, quantum, thread)
        return splits

    @cute.jit
    def write_cut_ranges(
        self,
        mSchedule: cute.Tensor,
        gSplits: cute.Tensor,
        notes: tuple[cute.Tensor, cute.Tensor, Int32],
        sStarts: cute.Tensor,
        sSplitsBefore: cute.Tensor,
        sWarpSums: cute.Tensor,
        requests: Int32,
        num_ranges: Int32,
        quantum: Int32,
        thread: Int32,
    ) -> Int32:
        """A cut every `quantum` units: the split requests, numbered, and then the ranges, which need the numbers. How many are split."""
        split_requests = Int32(0)
        for base in cutlass.range(0, requests, THREADS, unroll=1):
            request = base + thread
            first_range, last_range = Int32(0), Int32(0)
            if request < requests:
                first_range = self.first_unit(sStarts, request) // quantum
                last_range = (sStarts[request + 1] - 1) // quantum
            before, added = block_scan(Int32(1) if first_range < last_range else Int32(0), sWarpSums, thread, WARPS)
            before += split_requests
            if request < requests:
                sSplitsBefore[request] = before
            if first_range < last_range:
                self.write_split(gSplits, notes, before, request, first_range + before, last_range - first_range + 1)
            split_requests += added
        if thread == 0:
            mSchedule[0] = split_requests
        cute.arch.sync_threads()
        for index in cutlass.range(thread, num_ranges, THREADS, unroll=1):
            self.write_cut_range(mSchedule, sStarts, sSplitsBefore, requests, index, quantum)
        return split_requests

    @cute.jit
    def write_split(
        self, gSplits: cute.Tensor, notes: tuple[cute.Tensor, cute.Tensor, Int32], index: Int32, request: Int32, first_slot: Int32, pieces: Int32
    ) -> None:
        gSplits[REQUEST, index], gSplits[FIRST_SLOT, index], gSplits[PIECES, index], gSplits[SPLIT, index] = request, first_slot, pieces, index
        self.shares.note(notes, index, pieces)

    @cute.jit
    def write_range(
        self,
        mSchedule: cute.Tensor,
        index: Int32,
        first: Int32,
        first_tile: Int32,
        last: Int32,
        end_tile: Int32,
        first_slot: Int32,
        last_slot: Int32,
    ) -> None:
        words = cute.make_tensor(mSchedule.iterator + HEADER_WORDS + index * RANGE_WORDS, cute.make_layout((RANGE_WORDS,)))
        words[0] = first
        words[1] = first_tile
        words[2] = last
        words[3] = end_tile
        words[4] = first_slot
        words[5] = last_slot

    @cute.jit
    def write_whole_range(self, mSchedule: cute.Tensor, sStarts: cute.Tensor, requests: Int32, index: Int32, quantum: Int32) -> None:
        first = self.first_start(sStarts, requests, index * quantum)
        end = self.first_start(sStarts, requests, (index + 1) * quantum)
        end_tile = Int32(0)
        if first < end:
            end_tile = self.tiles(sStarts, end - 1)
        self.write_range(mSchedule, index, first, Int32(0), end - 1, end_tile, Int32(NO_SLOT), Int32(NO_SLOT))

    @cute.jit
    def first_start(self, sStarts: cute.Tensor, requests: Int32, unit: Int32) -> Int32:
        """The first request that starts at or after a unit; `requests` where none does."""
        found = Int32(0)
        if unit > 0:
            found = cutlass.min(self.request_at(sStarts, requests, unit - 1) + 1, requests)
        return found

    @cute.jit
    def tiles(self, sStarts: cute.Tensor, request: Int32) -> Int32:
        """Tiles of a request, from its units: an empty one has a single unit and no tile."""
        units = sStarts[request + 1] - sStarts[request]
        return units - self.fixed_cost if units > 1 else Int32(0)

    @cute.jit
    def first_unit(self, sStarts: cute.Tensor, request: Int32) -> Int32:
        """Unit of a request's first tile; an empty request owns one unit and pays no fixed cost."""
        start = sStarts[request]
        return start + self.fixed_cost if sStarts[request + 1] - start > 1 else start

    @cute.jit
    def request_at(self, sStarts: cute.Tensor, requests: Int32, unit: Int32) -> Int32:
        """The request on whose stretch of the line a unit lies; `requests` for a unit past the end."""
        low, high = Int32(0), requests  # starts[low] <= unit < starts[high + 1]
        while low < high:
            middle = (low + high + 1) // 2
            below = sStarts[middle] <= unit
            low = middle if below else low
            high = high if below else middle - 1
        return low

    @cute.jit
    def write_cut_range(
        self, mSchedule: cute.Tensor, sStarts: cute.Tensor, sSplitsBefore: cute.Tensor, requests: Int32, index: Int32, quantum: Int32
    ) -> None:
        begin = index * quantum
        end = cutlass.min(begin + quantum, sStarts[requests])
        first, first_tile, last, end_tile = Int32(0), Int32(0), Int32(-1), Int32(0)
        first_slot, last_slot = Int32(NO_SLOT), Int32(NO_SLOT)
        if begin < end:
            found_first = self.request_at(sStarts, requests, begin)
            found_last = self.request_at(sStarts, requests, end - 1)
            if self.first_unit(sStarts, found_last) >= end:
                found_last -= 1  # only its fixed cost lies in this range
            if found_first <= found_last:
                first, last = found_first, found_last
                first_unit, last_unit = self.first_unit(sStarts, first), self.first_unit(sStarts, last)
                first_tile = cutlass.max(begin - first_unit, 0)
                end_tile = cutlass.min(end - last_unit, self.tiles(sStarts, last))
                if first_unit // quantum < (sStarts[first + 1] - 1) // quantum:
                    first_slot = index + sSplitsBefore[first]
                if last_unit // quantum < (sStarts[last + 1] - 1) // quantum:
                    last_slot = index + sSplitsBefore[last]
        self.write_range(mSchedule, index, first, first_tile, last, end_tile, first_slot, last_slot)


def fake_arguments() -> tuple[Any, ...]:
    """Arguments for `cute.compile`: batch, number of ranges and what the merge's work depends on vary."""
    seq_lens = make_fake_tensor(Int32, (cute.sym_int(),), (1,))
    table = make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), (cute.sym_int64(), 1))
    schedule = make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=16)
    return seq_lens, table, schedule, *[Int32(1)] * 4, make_fake_stream(use_tvm_ffi_env_stream=True)

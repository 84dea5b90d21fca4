"""The part of the schedule kernel that shares out the merge's work, so that a merge CTA need not work out its own behind the forward.

The arithmetic and its names are those of merge_plan.py, which says what the numbers mean; `merge_plan.merge_shares` is the same in Python integers.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .block_scan import block_scan
from .merge_plan import STRANDS_LOG2, split_blocks
from .problem import MAX_RANGES
from .schedule import HEADER_WORDS, MAX_REQUESTS, RANGE_WORDS, SHARE_WORDS, SPLIT_WORDS

REQUEST, FIRST_SLOT, PIECES, SPLIT, BLOCK, BLOCKS, MOST = range(7)  # words of a share; the first four are those of a split request


@cute.jit
def strands_log2(pieces: Int32, most: Int32, batch: Int32) -> Int32:
    """As many strands as it takes to have all pieces of a row in flight at once, `batch` each, in powers of two; at most 2^most."""
    found = Int32(0)
    for i in cutlass.range_constexpr(STRANDS_LOG2):
        found += Int32(1) if pieces > batch << i else Int32(0)
    return cutlass.min(found, most)


@cute.jit
def share_tensors(mSchedule: cute.Tensor, num_ranges: Int32, num_ctas: Int32) -> tuple[cute.Tensor, cute.Tensor]:
    """Of a schedule buffer, the shares, [SHARE_WORDS, CTAs], and the split requests, [SPLIT_WORDS, splits]."""
    shares = mSchedule.iterator + HEADER_WORDS + num_ranges * RANGE_WORDS
    splits = shares + num_ctas * SHARE_WORDS
    return (
        cute.make_tensor(shares, cute.make_layout((SHARE_WORDS, num_ctas))),
        cute.make_tensor(splits, cute.make_layout((SPLIT_WORDS, MAX_REQUESTS))),
    )


class MergeShares:
    """Takes note of the pieces of every split request, in shared memory, and writes the share of every merge CTA.

    `batch_invariant`: as of `DecodeProblem`. `threads`: of the CTA that this is part of. The notes, here and below, are the pieces, [splits]; the
    split requests by log2 of the strands that they want, [STRANDS_LOG2 + 1], which start as zeros; and the batch of the merge's tile.
    """

    def __init__(self, batch_invariant: bool, threads: int):
        self.batch_invariant = batch_invariant
        self.threads = threads
        self.max_splits = MAX_REQUESTS if batch_invariant else MAX_RANGES  # cut by ranges, fewer requests are split than there are ranges

    @cute.jit
    def note(self, notes: tuple[cute.Tensor, cute.Tensor, Int32], split: Int32, pieces: Int32) -> None:
        """Keeps a split request's pieces, and counts it among those that want as many strands."""
        sPieces, sCounts, batch = notes
        sPieces[split] = pieces
        if cutlass.const_expr(not self.batch_invariant):
            wanted = strands_log2(pieces, Int32(STRANDS_LOG2), batch)
            cute.arch.atomic_add(sCounts.iterator + wanted, Int32(1), sem="relaxed", scope="cta")

    @cute.jit
    def write(
        self,
        gShares: cute.Tensor,
        gSplits: cute.Tensor,
        notes: tuple[cute.Tensor, cute.Tensor, Int32],
        sWarpSums: cute.Tensor,
        splits: Int32,
        vectors: Int32,
        num_ctas: Int32,
        thread: Int32,
    ) -> None:
        """The shares, after all split requests were noted and written. Every thread of the CTA takes part.

        `vectors`: of a request's rows. The notes are used up: the blocks' ends take the pieces' place.
        """
        sPieces, sCounts, batch = notes
        blocks, most = Int32(0), Int32(STRANDS_LOG2)
        if splits > 0:
            cute.arch.sync_threads()  # the notes are there, and the split requests, which are read again
            if cutlass.const_expr(not self.batch_invariant):
                most = self.most_strands_log2(sCounts, vectors, num_ctas)
            for base in cutlass.range(0, splits, self.threads, unroll=1):
                index, needed = base + thread, Int32(0)
                if index < splits:
                    needed = split_blocks(vectors, strands_log2(sPieces[index], most, batch))
                before, added = block_scan(needed, sWarpSums, thread, self.threads // 32)
                if index < splits:
                    sPieces[index] = blocks + before + needed
                blocks += added
            cute.arch.sync_threads()
        # From the last thread down: the first ones have the ranges' pages to look up, and each of the two is a chain of loads.
        for cta in cutlass.range(self.threads - 1 - thread, num_ctas, self.threads, unroll=1):
            self.write_share(gShares, gSplits, sPieces, splits, blocks, most, num_ctas, cta)

    @cute.jit
    def most_strands_log2(self, sCounts: cute.Tensor, vectors: Int32, num_ctas: Int32) -> Int32:
        """Log2 of the most strands with which every block still has a CTA of its own; 0 where the blocks are too many in any case.

        `sCounts`: split requests by log2 of the strands that they want.
        """
        most = Int32(0)
        for log2 in cutlass.range_constexpr(1, STRANDS_LOG2 + 1):
            blocks = Int32(0)
            for wanted in cutlass.range_constexpr(STRANDS_LOG2 + 1):
                blocks += sCounts[wanted] * split_blocks(vectors, min(wanted, log2))
            most = Int32(log2) if blocks <= num_ctas else most  # more strands are never fewer blocks
        return most

    @cute.jit
    def write_share(
        self,
        gShares: cute.Tensor,
        gSplits: cute.Tensor,
        sEnds: cute.Tensor,
        splits: Int32,
        blocks: Int32,
        most: Int32,
        num_ctas: Int32,
        cta: Int32,
    ) -> None:
        """One CTA's share. `sEnds`: the block at which each split request ends. `blocks`: all of them."""
        each, larger = blocks // num_ctas, blocks % num_ctas
        begin = cta * each + cutlass.min(cta, larger)
        count = each + (Int32(1) if cta < larger else Int32(0))
        request, first_slot, pieces, split, first_block = Int32(0), Int32(0), Int32(0), Int32(0), begin
        if count > 0:
            split, first_block = self.split_of(sEnds, splits, begin)
            request, first_slot, pieces = gSplits[REQUEST, split], gSplits[FIRST_SLOT, split], gSplits[PIECES, split]
        gShares[REQUEST, cta], gShares[FIRST_SLOT, cta], gShares[PIECES, cta], gShares[SPLIT, cta] = request, first_slot, pieces, split
        gShares[BLOCK, cta], gShares[BLOCKS, cta], gShares[MOST, cta], gShares[MOST + 1, cta] = begin - first_block, count, most, 0

    @cute.jit
    def split_of(self, sEnds: cute.Tensor, splits: Int32, block: Int32) -> tuple[Int32, Int32]:
        """Which split request a block belongs to, and the request's first block."""
        low, high = Int32(0), splits - 1
        while low < high:
            middle = (low + high) // 2
            beyond = sEnds[middle] <= block
            low = middle + 1 if beyond else low
            high = high if beyond else middle
        first_block = sEnds[low - 1] if low > 0 else Int32(0)
        return low, first_block

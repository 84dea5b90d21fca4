"""Who merges what: the blocks of all split requests laid end to end, shared out evenly among the merge's CTAs.

A block is one CTA's turn of the merge: THREADS threads on one split request, 2^s of them ("strands") for every vector (a few columns of a row),
and so THREADS / 2^s of the request's vectors. A CTA takes a contiguous stretch of the line, so that walking on is a step to the next block or to
the first block of the next split request, and no search. Shares differ by one block at most, and the first CTAs have the larger.

How wide a vector is, and how many pieces of it a strand loads at once, follows from the rows alone (MergeTile): the more rows, the fewer strands
the CTAs have room for, and the more each of them has to have in flight.

The longer a request's list of pieces, the more strands share it. `most`, log2 of the strands that a row may have, is lowered until all blocks
find a CTA at once, if they can; with batch invariance it is not, because the order of a row's sum must not depend on the batch.

The schedule kernel computes the shares once a step (MergeShares in merge_shares.py); `merge_shares` is the same arithmetic in Python integers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from .problem import HEAD_DIM_V
from .schedule import Split

THREADS = 512
LANE_STRANDS_LOG2 = 2  # at most 4 strands in a warp: 8 lanes remain, which read 64 neighbouring bytes or more
WARP_STRANDS_LOG2 = 3
STRANDS_LOG2 = LANE_STRANDS_LOG2 + WARP_STRANDS_LOG2


@dataclass(frozen=True)
class MergeTile:
    """What a thread of the merge has in flight at once: `vector` columns each of `batch` pieces."""

    vector: int
    batch: int

    @classmethod
    def of(cls, rows: int) -> MergeTile:
        """The tile for requests of so many query rows, such that an H200's 132 SMs have all pieces of a long request in flight at once."""
        if rows <= 16:
            return cls(4, 5)  # 32 strands of every vector find a CTA: 160 pieces in flight
        if rows <= 32:
            return cls(8, 5)  # so they do with half the vectors
        # 16 strands at 64 rows: 144 pieces. Not 8: a long request often has 2^n + 1 pieces, whose last would take a second round.
        return cls(8, 9)

    @property
    def row_vectors(self) -> int:
        """Vectors of a row."""
        return HEAD_DIM_V // self.vector


@dataclass(frozen=True)
class MergeShare:
    """The work of one merge CTA: `blocks` blocks of the line, from block `block` of split request number `split` on.

    `request`, `first_slot` and `pieces` are that split request's. Without work, all but `most` is 0.
    """

    request: int
    first_slot: int
    pieces: int
    split: int
    block: int
    blocks: int
    most: int


def strands_log2(pieces: int, most: int, batch: int) -> int:
    """As many strands as it takes to have all pieces of a row in flight at once, `batch` each, in powers of two; at most 2^most."""
    return min(sum(pieces > batch << i for i in range(STRANDS_LOG2)), most)


def split_blocks(vectors: Any, strands_log2: Any) -> Any:
    """Blocks of a split request of so many vectors. Takes Python integers and CuTe Int32 alike."""
    return ((vectors << strands_log2) + (THREADS - 1)) // THREADS


def most_strands_log2(splits: Sequence[Split], rows: int, num_ctas: int) -> int:
    """Log2 of the most strands with which every block still has a CTA of its own; 0 where the blocks are too many in any case."""
    for most in range(STRANDS_LOG2, 0, -1):
        if sum(_blocks(splits, rows, most)) <= num_ctas:
            return most
    return 0


def _blocks(splits: Sequence[Split], rows: int, most: int) -> list[int]:
    """Blocks of every split request."""
    tile = MergeTile.of(rows)
    return [split_blocks(rows * tile.row_vectors, strands_log2(split.pieces, most, tile.batch)) for split in splits]


def merge_shares(splits: Sequence[Split], rows: int, num_ctas: int, batch_invariant: bool = False) -> tuple[MergeShare, ...]:
    """The share of every merge CTA.

    Args:
        splits: split requests of the step's schedule.
        rows: query rows of a request (`DecodeProblem.rows`).
        num_ctas: CTAs of the merge.
        batch_invariant: keep a row's strands to what its own pieces want.
    """
    most = STRANDS_LOG2 if batch_invariant else most_strands_log2(splits, rows, num_ctas)
    starts = list(accumulate(_blocks(splits, rows, most), initial=0))
    each, larger = divmod(starts[-1], num_ctas)

    def share(begin: int, end: int) -> MergeShare:
        if begin == end:
            return MergeShare(0, 0, 0, 0, 0, 0, most)
        index = bisect_right(starts, begin) - 1
        split = splits[index]
        return MergeShare(split.request, split.first_slot, split.pieces, index, begin - starts[index], end - begin, most)

    return tuple(share(begin, end) for begin, end in pairwise(cta * each + min(cta, larger) for cta in range(num_ctas + 1)))

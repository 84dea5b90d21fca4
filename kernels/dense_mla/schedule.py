"""Who works on which keys: all requests' tiles laid end to end, cut into one contiguous range per CTA.

A request of T > 0 tiles takes `fixed_cost` + T units of the line, an empty one a single unit (its output still has to be written).
The line is cut every quantum = ceil(total / num_ranges) units, so no range costs more than one quantum, whatever the batch. A request
that falls into one range is written straight to `out`; one that falls into several is split, and each of its pieces gets a partial slot.

Where every request can stay whole, in the range where it starts, at the price of ranges of up to quantum + quantum / WHOLE_SLACK, it does:
128 requests of 4,096 keys on 132 SMs then need no partials and no merge, which is worth more than perfect balance.

The pieces of a request take consecutive slots. Slot of the piece of request r in range g: g + (split requests before r). Along the line
either g or r grows from piece to piece, so no two pieces share a slot, and there are at most num_ranges - 1 split requests:
slots <= min(requests + num_ranges - 1, 2 * num_ranges).

With batch invariance, where a request is cut depends on its own length alone: every piece but the last has `invariant_piece_tiles`, at most
INVARIANT_PIECES of them, piece i of request r in slot r x INVARIANT_PIECES + i. Ranges then hold whole pieces.

The device computes this once a step (ScheduleKernel in schedule_kernel.py); `plan` is the same arithmetic in Python integers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from .paged_kv import PageTiling
from .problem import FIXED_COST

WHOLE_SLACK = 16  # ranges may exceed the quantum by this fraction of it where that keeps every request whole
HEADER_WORDS = 8  # word 0: split requests; the rest is padding
RANGE_WORDS = 8  # first_request, first_tile, last_request, end_tile, first_slot, last_slot, page of first_tile, 1 of padding
SHARE_WORDS = 8  # of a merge CTA, `merge_plan.MergeShare`: request, first_slot, pieces, split, block, blocks, most, 1 of padding
SPLIT_WORDS = 4  # request, first_slot, pieces, its number in this list: a share begins with a copy of these
NO_SLOT = -1
INVARIANT_PIECES = 32  # at most, of a request cut by its own length
INVARIANT_STEP = 4  # tiles; the length of such a piece is a multiple of it
MAX_REQUESTS = 4096  # of a step; the schedule kernel keeps two words of each in shared memory


@dataclass(frozen=True)
class Range:
    """The work of one CTA: requests first_request to last_request, from tile first_tile of the first up to (not including) tile end_tile of the last.

    `first_slot` and `last_slot` are the partial slots of its first and last request, NO_SLOT where that request is not split.
    The requests between are whole. With batch invariance a piece's slot follows from its request and place, and both are NO_SLOT.
    An idle CTA has last_request < first_request.
    """

    first_request: int
    first_tile: int
    last_request: int
    end_tile: int
    first_slot: int
    last_slot: int


IDLE = Range(0, 0, -1, 0, NO_SLOT, NO_SLOT)


@dataclass(frozen=True)
class Split:
    """A request in several pieces: they lie in slots first_slot to first_slot + pieces - 1, in key order."""

    request: int
    first_slot: int
    pieces: int


@dataclass(frozen=True)
class Schedule:
    """The plan of one step: a range for each CTA, and the requests that the merge has to finish."""

    ranges: tuple[Range, ...]
    splits: tuple[Split, ...]


def invariant_piece_tiles(tiles: Any) -> Any:
    """Tiles of a piece of a request that is cut by its own length: from 4 up, at most 32 pieces. Takes Python integers and CuTe Int32 alike."""
    return (tiles // (INVARIANT_PIECES * INVARIANT_STEP) + 1) * INVARIANT_STEP


def max_slots(num_requests: int, num_ranges: int, batch_invariant: bool = False) -> int:
    """Partial slots that no batch of `num_requests` requests exceeds, whatever their lengths."""
    if batch_invariant:
        return num_requests * INVARIANT_PIECES
    return min(num_requests + num_ranges - 1, 2 * num_ranges) if num_requests else 0


def schedule_words(num_ranges: int, max_requests: int, merge_ctas: int, batch_invariant: bool = False) -> int:
    """int32 words of the device's schedule buffer: header, ranges, shares of the merge's CTAs, split requests, in this order.

    Cut by their own length, all requests may be split; otherwise fewer than there are ranges.
    """
    max_splits = max_requests if batch_invariant else num_ranges
    return HEADER_WORDS + num_ranges * RANGE_WORDS + merge_ctas * SHARE_WORDS + max_splits * SPLIT_WORDS


def plan(
    seq_lens: Sequence[int], page_size: int, num_ranges: int, batch_invariant: bool = False, fixed_cost: int = FIXED_COST
) -> Schedule:
    """Schedule of one step.

    Args:
        seq_lens: keys of each request, >= 0.
        page_size: keys in a page.
        num_ranges: CTAs that share the work (`DecodeProblem.num_ranges`).
        batch_invariant: cut each request by its own length.
        fixed_cost: what starting a request costs, in tiles (`DecodeProblem.fixed_cost`).
    """
    tiling = PageTiling(page_size)
    tiles = [tiling.num_tiles(n) for n in seq_lens]
    if batch_invariant:
        return _invariant(tiles, num_ranges, fixed_cost)
    starts = list(accumulate((t + fixed_cost if t else 1 for t in tiles), initial=0))
    quantum = max(-(-starts[-1] // num_ranges), 1)
    # Requests that start in range g are firsts[g] to firsts[g + 1] - 1.
    firsts = [bisect_left(starts, g * quantum, hi=len(tiles)) for g in range(num_ranges + 1)]
    largest = max(starts[end] - starts[begin] for begin, end in pairwise(firsts))
    if largest <= quantum + quantum // WHOLE_SLACK:
        return _whole(tiles, firsts)
    return _cut(tiles, starts, quantum, num_ranges, fixed_cost)


def _whole(tiles: Sequence[int], firsts: Sequence[int]) -> Schedule:
    """Every request in the range where it starts."""
    return Schedule(
        tuple(
            Range(begin, 0, end - 1, tiles[end - 1], NO_SLOT, NO_SLOT) if begin < end else IDLE
            for begin, end in pairwise(firsts)
        ),
        (),
    )


def _cut(tiles: Sequence[int], starts: Sequence[int], quantum: int, num_ranges: int, fixed_cost: int) -> Schedule:
    """A cut every `quantum` units, wherever it falls."""
    # Unit of a request's first tile; an empty request owns one unit and no tile.
    first_units = [start + (fixed_cost if t else 0) for start, t in zip(starts, tiles)]
    first_range = [unit // quantum for unit in first_units]
    last_range = [(end - 1) // quantum for end in starts[1:]]
    is_split = [first < last for first, last in zip(first_range, last_range)]
    splits_before = list(accumulate(is_split, initial=0))

    def slot(request: int, g: int) -> int:
        return g + splits_before[request] if is_split[request] else NO_SLOT

    def cut_range(g: int) -> Range:
        begin, end = g * quantum, min((g + 1) * quantum, starts[-1])
        # The request with the unit `begin`, and the last one that has a unit of work before `end`.
        first, last = bisect_right(starts, begin) - 1, bisect_right(first_units, end - 1) - 1
        if begin >= end or first > last:
            return IDLE
        first_tile = max(begin - first_units[first], 0)
        return Range(first, first_tile, last, min(end - first_units[last], tiles[last]), slot(first, g), slot(last, g))

    splits = tuple(
        Split(r, slot(r, first_range[r]), last_range[r] - first_range[r] + 1) for r in range(len(tiles)) if is_split[r]
    )
    return Schedule(tuple(cut_range(g) for g in range(num_ranges)), splits)


def _invariant(tiles: Sequence[int], num_ranges: int, fixed_cost: int) -> Schedule:
    """Every request cut by its own length; a range takes the pieces that start in it."""
    lengths = [invariant_piece_tiles(t) for t in tiles]
    counts = [max(-(-t // length), 1) for t, length in zip(tiles, lengths)]
    starts = list(accumulate((t + n * fixed_cost if t else 1 for t, n in zip(tiles, counts)), initial=0))
    quantum = max(-(-starts[-1] // num_ranges), 1)

    def first_piece(unit: int) -> tuple[int, int]:
        """Request and piece that start at or after a unit of the line."""
        if unit >= starts[-1]:
            return len(tiles), 0
        r = bisect_right(starts, unit) - 1
        piece = -(-(unit - starts[r]) // (lengths[r] + fixed_cost))
        return (r, piece) if piece < counts[r] else (r + 1, 0)

    cuts = [first_piece(g * quantum) for g in range(num_ranges + 1)]

    def held(begin: tuple[int, int], end: tuple[int, int]) -> Range:
        if begin == end:
            return IDLE
        last = end[0] if end[1] else end[0] - 1
        end_tile = end[1] * lengths[last] if end[1] else tiles[last]
        return Range(begin[0], begin[1] * lengths[begin[0]], last, end_tile, NO_SLOT, NO_SLOT)

    splits = tuple(Split(r, r * INVARIANT_PIECES, n) for r, n in enumerate(counts) if n > 1)
    return Schedule(tuple(held(begin, end) for begin, end in pairwise(cuts)), splits)

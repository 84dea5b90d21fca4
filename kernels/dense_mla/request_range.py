"""A CTA's range of the schedule's line, request by request and piece by piece, as the device walks it."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .paged_kv import PageTiling
from .problem import DecodeProblem
from .schedule import INVARIANT_PIECES, NO_SLOT, invariant_piece_tiles

# A range's words in the schedule buffer: the fields of `schedule.Range`, and the page of its first tile.
FIRST_REQUEST, FIRST_TILE, LAST_REQUEST, LAST_END_TILE, FIRST_SLOT, LAST_SLOT, FIRST_PAGE = range(7)


class RequestRange:
    """What lies where in a range. `words` are the range's words of the schedule."""

    def __init__(self, problem: DecodeProblem):
        self.problem = problem
        self.tiling = PageTiling(problem.page_size)

    @cute.jit
    def tile_span(self, words: cute.Tensor, request: Int32, seq_len: Int32) -> tuple[Int32, Int32]:
        """First and end tile of a request in this range; equal where it has no key."""
        begin = words[FIRST_TILE] if request == words[FIRST_REQUEST] else Int32(0)
        end = words[LAST_END_TILE]
        if request != words[LAST_REQUEST]:
            end = self.tiling.num_tiles(seq_len)
        return begin, end if seq_len > 0 else begin

    @cute.jit
    def piece_end(self, begin: Int32, end: Int32, seq_len: Int32) -> Int32:
        """End tile of the piece that starts at tile `begin`: the whole span, or a fixed number of tiles where bits must not depend on it."""
        piece = end
        if cutlass.const_expr(self.problem.batch_invariant):
            piece = cutlass.min(begin + invariant_piece_tiles(self.tiling.num_tiles(seq_len)), end)
        return piece

    @cute.jit
    def num_pieces(self, begin: Int32, end: Int32, seq_len: Int32) -> Int32:
        """Results that this CTA owes of a request: one, or one for every fixed piece."""
        count = Int32(1)
        if cutlass.const_expr(self.problem.batch_invariant):
            length = invariant_piece_tiles(self.tiling.num_tiles(seq_len))
            count = cutlass.max((end - begin + length - 1) // length, 1)
        return count

    @cute.jit
    def slot(self, words: cute.Tensor, request: Int32, begin: Int32, seq_len: Int32) -> Int32:
        """Partial slot of the piece that starts at tile `begin`; NO_SLOT for a whole request."""
        slot = Int32(NO_SLOT)
        if cutlass.const_expr(self.problem.batch_invariant):
            tiles = self.tiling.num_tiles(seq_len)
            length = invariant_piece_tiles(tiles)
            if length < tiles:
                slot = request * INVARIANT_PIECES + begin // length
        else:
            if request == words[LAST_REQUEST]:
                slot = words[LAST_SLOT]
            if request == words[FIRST_REQUEST]:
                slot = words[FIRST_SLOT]
        return slot

    @cute.jit
    def key_span(self, begin: Int32, end: Int32, seq_len: Int32) -> tuple[Int32, Int32]:
        """First and end key of tiles `begin` to `end`. The first is a multiple of 16 from the start of its page."""
        return self.tiling.first_key(begin), cutlass.min(self.tiling.first_key(end), seq_len)

    @cute.jit
    def visible_keys(self, token: Int32, seq_len: Int32, total_len: Int32) -> Int32:
        """Of this rank's keys of a request, how many a query token sees: `DecodeProblem.causal` and `ContextShard.held`.

        `total_len`: keys over all ranks, query tokens included.
        """
        problem, context = self.problem, self.problem.context
        count = seq_len
        if cutlass.const_expr(problem.causal and problem.query_len > 1):
            count = cutlass.max(total_len - (problem.query_len - 1) + token, 0)
            if cutlass.const_expr(problem.needs_total_lens):
                round_keys = context.world * context.interleave
                rest = count % round_keys - context.rank * context.interleave
                count = count // round_keys * context.interleave + cutlass.min(cutlass.max(rest, 0), context.interleave)
        return count

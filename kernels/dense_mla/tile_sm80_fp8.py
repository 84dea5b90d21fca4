"""The portable forward's tile of E4M3 keys: which bytes a lane reads, and which operands of mma.sync they are once they have 16 bits.

A key's line of a chunk is 64 bytes, four units of 16. Two codes are one element of ldmatrix, so that a matrix holds 16 columns of eight keys:

- scores: lane (g, q) = (l / 4, l % 4) gets the columns 4q to 4q + 3 of key g. The first two become k = 2q, 2q + 1 of m16n8k16, the others
  k = 2q + 8, 2q + 9: a unit's columns are multiplied in another order, in which Q is loaded as well;
- values (.trans): it gets the columns 2g and 2g + 1 of the keys 2q and 2q + 1. The even bytes are B at column 2g, the odd ones at 2g + 1: a
  unit of 16 columns is two blocks of eight, its even columns and its odd ones, and so it is in the accumulators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from .tile_sm80 import COLUMN_SPLITS, TileSm80


@dataclass(frozen=True)
class TileSm80Fp8(TileSm80):
    """Shape of one CTA's tile of E4M3 keys: 32 of them, which fit four times into the least shared memory of all architectures."""

    key_choices: ClassVar[tuple[int, ...]] = (32,)
    line_units: ClassVar[int] = 4
    upper_columns: ClassVar[int] = 2

    def query_pair(self, lane: Any, warp: Any) -> Any:
        """As of TileSm80: a lane's two pairs are four neighbouring columns."""
        return warp % COLUMN_SPLITS * 8 + lane % 4 * 2

    def score_unit(self, lane: Any, warp: Any) -> tuple[Any, Any, Any]:
        """Key, unit (swizzled) and chunk, 0 or 1 from the first on, that a lane hands to the ldmatrix of two chunks' scores.

        Matrices: the warp's keys 0-7 and 8-15 in one chunk, then in the next. Lanes 0-15 name those of the first chunk.
        """
        key = warp // COLUMN_SPLITS * self.warp_keys + lane % 16
        return key, (warp % COLUMN_SPLITS) ^ self.key_swizzle(key), lane // 16

    def output_columns(self, lane: Any) -> Any:
        """First of four neighbouring columns within a unit that a lane's accumulators of its two blocks hold: the even ones, and the odd ones."""
        return lane % 4 * 4

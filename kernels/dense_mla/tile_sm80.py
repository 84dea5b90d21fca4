"""The tile of the portable forward: how its eight warps and their lanes map to rows, keys and columns, and how much of it fits.

A tile is `keys` keys of all 576 columns against `rows` query rows. The functions of a lane take Python integers and CuTe Int32 alike, so
that the fragments of ldmatrix and mma.sync are checked on the CPU by the very arithmetic that the kernel runs.

ldmatrix: lane l hands in the address of line l % 8 of matrix l / 8; lane (g, q) = (l / 4, l % 4) gets elements 2q and 2q + 1 of line g,
or with .trans elements g of lines 2q and 2q + 1. m16n8k16: lane (g, q) holds of A the rows g and g + 8 at k = 2q, 2q + 1, 2q + 8, 2q + 9, of
B column g at the same k, of the accumulator rows g and g + 8 at columns 2q and 2q + 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from .problem import HEAD_DIM_QK, HEAD_DIM_V

WARPS = 8
THREADS = 32 * WARPS
CHUNK = 64  # columns of one line of shared memory: eight units of 16 bytes, or four of E4M3, swizzled by the line
CHUNKS = HEAD_DIM_QK // CHUNK
UNIT = 8  # 16-bit elements of 16 bytes
UNIT_BYTES = 16
COLUMN_SPLITS = 4  # warps that share the columns of a score: each takes 16 of every 64 and keeps its part of Q in registers
KEY_SPLITS = WARPS // COLUMN_SPLITS
VALUE_COLUMNS = HEAD_DIM_V // WARPS  # of one warp: exactly one chunk
LANES_PER_ROW = 16  # of the softmax
MAX_TILE_ROWS = 32  # Q takes 36 and the output 32 registers of a thread for every 16 rows
# Two tiles of the pipeline are in use (scores of one, values of the one before); with four, two more are under way.
MIN_STAGES = 4
MAX_STAGES = 8


@dataclass(frozen=True)
class TileSm80:
    """Shape of one CTA's tile of 16-bit keys.

    Args:
        rows: query rows, 16 or 32.
        keys: one of `key_choices`: 32, or 16 where shared memory is small.
        stages: tiles of K in shared memory.
    """

    key_choices: ClassVar[tuple[int, ...]] = (32, 16)
    line_units: ClassVar[int] = 8  # of one key's columns of a chunk
    upper_columns: ClassVar[int] = 8  # from a lane's lower pair of columns of Q to its upper one
    rows: int
    keys: int
    stages: int

    @property
    def m_tiles(self) -> int:
        """Blocks of 16 rows: the M of mma.sync."""
        return self.rows // 16

    @property
    def warp_keys(self) -> int:
        """Keys of one warp's scores."""
        return self.keys // KEY_SPLITS

    @property
    def lane_keys(self) -> int:
        """Neighbouring keys of a row that one lane of the softmax holds."""
        return self.keys // LANES_PER_ROW

    @property
    def stage_bytes(self) -> int:
        return self.keys * CHUNKS * self.line_units * UNIT_BYTES

    @property
    def shared_memory_bytes(self) -> int:
        """K; scores by column split in FP32; two buffers of P and of the rescale factors; one of 1 / sum. In multiples of K's alignment."""
        statistics = self.rows * (COLUMN_SPLITS * self.keys * 4 + 2 * self.keys * 2 + 2 * 4 + 4)
        return self.stages * self.stage_bytes + -(-statistics // 1024) * 1024

    @property
    def chunks_at_once(self) -> int:
        """Chunks of a tile that one 16-byte copy of every thread fills."""
        return THREADS // self.line_units // self.keys

    @property
    def unit_columns(self) -> int:
        """Columns of a key in 16 bytes."""
        return CHUNK // self.line_units

    def copied_line(self, thread: Any) -> tuple[Any, Any, Any]:
        """Key, unit (before swizzling) and first chunk of the copies of a thread: a thread for every unit of a line."""
        return thread // self.line_units % self.keys, thread % self.line_units, thread // self.line_units // self.keys

    def key_swizzle(self, key: Any) -> Any:
        """What a key's units are permuted by, so that one unit of eight neighbouring keys touches all banks once."""
        return key // (8 // self.line_units) % self.line_units

    def query_pair(self, lane: Any, warp: Any) -> Any:
        """Lower pair of columns within a chunk that a lane holds of Q, of its warp's sixteen; the other is `upper_columns` further on."""
        return warp % COLUMN_SPLITS * 8 + lane % 4

    def score_pair(self, lane: Any, warp: Any, block: int) -> Any:
        """Pair of keys (before swizzling) that a lane's accumulator holds, in a block of eight of its warp's keys."""
        return (warp // COLUMN_SPLITS * (self.warp_keys // 8) + block) * 4 + lane % 4

    def score_line(self, lane: Any, warp: Any) -> tuple[Any, Any]:
        """Key and unit (swizzled) within a chunk that a lane hands to the ldmatrix of the scores.

        Matrices: keys 0-7 at columns 0-7, at columns 8-15, then keys 8-15. Registers: B of keys 0-7, B of keys 8-15.
        """
        key = (warp // COLUMN_SPLITS) * self.warp_keys + lane % 8
        if self.warp_keys == 16:
            key = key + lane // 16 * 8
        return key, (warp % COLUMN_SPLITS * 2 + lane // 8 % 2) ^ (lane % 8)

    def value_line(self, lane: Any, block: int, pair: int) -> tuple[Any, Any]:
        """Key and unit (swizzled) within the warp's chunk that a lane hands to ldmatrix.trans: 16 keys at two neighbouring units.

        Matrices: keys 0-7 and 8-15 at the first unit, then at the second. Registers: B of the first unit's columns, B of the second's.
        """
        key = block * 16 + lane % 16
        return key, (pair * 2 + lane // 16) ^ self.key_swizzle(key)

    def weight_line(self, lane: Any, m_tile: int, block: int) -> tuple[Any, Any]:
        """Row and unit (swizzled) of P that a lane hands to ldmatrix. Matrices: rows 0-7, 8-15 at keys 0-7, then at keys 8-15: A's registers."""
        row = m_tile * 16 + lane % 16
        return row, (block * 2 + lane // 16) ^ self.weight_swizzle(row)

    def weight_swizzle(self, row: Any) -> Any:
        """What P's 16-byte units are permuted by, so that eight rows of 64 or 32 bytes touch all banks once."""
        units = self.keys // UNIT
        return row // (8 // units) % units

    def score_swizzle(self, row: Any) -> Any:
        """What a row's pairs of FP32 scores are permuted by: four rows of a fragment's 32 bytes touch all banks once."""
        pairs = self.keys // 2
        return row // (16 // pairs) % (pairs // 4) * 4

    def softmax_row(self, lane: Any, warp: Any, step: int) -> Any:
        """Row of the tile that a lane works on in a step of the softmax; 16 rows a step."""
        return step * 16 + warp * 2 + lane // LANES_PER_ROW


Tile = TypeVar("Tile", bound=TileSm80)


def tile_rows(rows: int) -> int:
    """Rows of one CTA for a request of `rows` query rows: as even a share as multiples of 16 up to 32 allow."""
    share = -(-rows // row_tiles(rows))
    return -(-share // 16) * 16


def row_tiles(rows: int) -> int:
    """CTAs that share one range of keys, each with its own rows."""
    return -(-rows // MAX_TILE_ROWS)


def choose_tile(rows: int, shared_memory_limit: int, kind: type[Tile]) -> Tile:
    """The largest tile that still leaves four stages.

    Args:
        rows: query rows of a request.
        shared_memory_limit: bytes that a CTA may have.
        kind: TileSm80, or what extends it for another cache.

    Raises:
        ValueError: not even the smallest tile fits.
    """
    for keys in kind.key_choices:
        tile = kind(tile_rows(rows), keys, 0)
        stages = min((shared_memory_limit - tile.shared_memory_bytes) // tile.stage_bytes, MAX_STAGES)
        if stages >= MIN_STAGES:
            return kind(tile.rows, keys, stages)
    needed = kind(tile_rows(rows), kind.key_choices[-1], MIN_STAGES).shared_memory_bytes
    raise ValueError(f"shared memory of a CTA must be at least {needed} bytes for {rows} query rows, got {shared_memory_limit}")

"""How a tile of 64 E4M3 keys lies in shared memory, and which byte each lane of a warpgroup reads.

Two neighbouring keys of a page are taken as one record of 1,152 bytes = nine lines of 128 bytes. A TMA box is one line of 32 records, so
that every row of it begins at a multiple of 128 bytes; taken key by key (576 bytes = 4.5 lines), every other row would straddle two lines.
Swizzled by 128 bytes, the 16-byte unit u of a line of record r lies in unit u ^ (r % 8).

The columns of a key come in nine groups of 64 bytes, half a line each: group G of an even key is half-line G of its record, of an odd key
half-line 9 + G. That is why a lane has two base offsets, for even and for odd groups, and every group is then a constant away from one.

The methods take Python integers and CuTe Int32 alike (all values >= 0): the tests walk them over a whole tile.
"""

from __future__ import annotations

from typing import Any

from .problem import HEAD_DIM_QK, HEAD_DIM_V, TILE_KEYS

LINE = 128  # bytes of a TMA box's row
RECORD_BYTES = 2 * HEAD_DIM_QK
LINES = RECORD_BYTES // LINE
RECORDS = TILE_KEYS // 2
BOX_BYTES = RECORDS * LINE
TILE_BYTES = TILE_KEYS * HEAD_DIM_QK
GROUPS = HEAD_DIM_QK // 64  # column groups of a key
VALUE_GROUPS = HEAD_DIM_V // 64
HALF_OFFSET = 8 * LINE  # between the two halves of an m64 tile's 16 lines of a warp: 16 keys
KEY_BLOCKS_OFFSET = 16 * LINE  # between the first and the last 32 keys
# Lines whose arrival is announced together: the halves that the scores need next, of even keys and of odd ones.
ARRIVALS = ((4, 0), (5, 1), (6, 2), (7, 3), (8,))


def arrival_of_line(line: Any) -> Any:
    """Index in ARRIVALS of a line."""
    return line % 4 + line // 8 * 4


def arrival_of_group(group: int) -> int:
    """The last arrival that a column group waits for."""
    return (group + 1) // 2


def offset(key: Any, byte: Any) -> Any:
    """Where TMA puts a byte of a key. The 16 bytes from a multiple of 16 on stay together."""
    record, byte = key // 2, key % 2 * HEAD_DIM_QK + byte
    return byte // LINE * BOX_BYTES + record * LINE + ((byte % LINE // 16) ^ (record % 8)) * 16 + byte % 16


def key_of_line(warp: Any, line: Any) -> Any:
    """The key in line 16 warp + line of the products' tile, line < 8; line + 8 of the same warp holds the key 16 further.

    The order makes both halves of a warp's lines swizzle alike.
    """
    return warp // 2 * 32 + warp % 2 * 8 + line


def group_offsets(key: Any, unit: Any) -> tuple[Any, Any]:
    """Offsets of the 16-byte unit `unit` (0 to 3) of column groups 0 and 1 of a key; two groups on, both are BOX_BYTES further."""
    odd, record = key % 2, key // 2
    line, swizzle = record * LINE, record % 8
    even_group = line + odd * (4 * BOX_BYTES) + ((odd * 4 + unit) ^ swizzle) * 16
    odd_group = line + odd * (5 * BOX_BYTES) + (((1 - odd) * 4 + unit) ^ swizzle) * 16
    return even_group, odd_group


def score_offsets(warp: Any, lane: Any) -> tuple[Any, Any]:
    """What a lane reads for the scores, as `group_offsets`: of key line lane / 4, and HALF_OFFSET further, unit lane % 4."""
    return group_offsets(key_of_line(warp, lane // 4), lane % 4)


def value_offsets(warp: Any, lane: Any) -> tuple[Any, Any]:
    """The row that a lane names to ldmatrix.x4.trans for the value columns 16 warp to 16 warp + 15 of a group, as `group_offsets`.

    Its four matrices are the lines 0 to 31 of the products' tile; the other 32 are KEY_BLOCKS_OFFSET further.
    """
    return group_offsets(key_of_line(lane // 16, lane % 8) + lane // 8 % 2 * 16, warp)


def query_offset(row: Any, word: Any, rows: int) -> Any:
    """Where columns 2 word and 2 word + 1 of a group of 64 go in the FP16 Q [rows, 576], K-major, 128-byte swizzle; groups are rows * LINE apart.

    A lane q = lane % 4 reads columns 16 q to 16 q + 15 of a key at once, and word j of them feeds k16 block j: position 16 j + 8 h + 2 q + e
    of the products holds column 16 q + 4 j + 2 h + e.
    """
    return row * LINE + ((word % 8) ^ (row % 8)) * 16 + word // 8 * 4

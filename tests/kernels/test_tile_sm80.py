"""The portable tile on the CPU: the kernel's own lane arithmetic under a model of ldmatrix and mma.sync, against plain matrix products.

The model follows PTX: what a lane's address selects, which elements a lane receives, and which elements of A, B and C a lane holds.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from dense_mla.tile_sm80 import (
    CHUNK,
    CHUNKS,
    COLUMN_SPLITS,
    LANES_PER_ROW,
    MAX_TILE_ROWS,
    MIN_STAGES,
    THREADS,
    UNIT,
    VALUE_COLUMNS,
    WARPS,
    TileSm80,
    choose_tile,
    row_tiles,
    tile_rows,
)

LIMITS = {"SM86, SM89, SM12x": 101_376, "SM80, SM87": 166_912, "SM90, SM10x, SM110": 232_448}
TILES = [TileSm80(rows, keys, 4) for rows in (16, 32) for keys in (16, 32)]
LANES = range(32)
LINES_OF_WARP = [range(8 * phase, 8 * phase + 8) for phase in range(4)]


class SharedMemory:
    """A tile's arrays with the strides of the kernel, in elements: K by (chunk, key, unit), P and the scores by row."""

    def __init__(self, tile: TileSm80):
        self.tile = tile
        self.k = np.full(CHUNKS * tile.keys * CHUNK, np.nan)
        self.p = np.full(tile.rows * tile.keys, np.nan)
        self.s = np.full(COLUMN_SPLITS * tile.rows * tile.keys, np.nan)

    def k_offset(self, key: int, unit: int, chunk: int) -> int:
        return chunk * CHUNK * self.tile.keys + key * CHUNK + unit * UNIT

    def p_offset(self, row: int, unit: int) -> int:
        return row * self.tile.keys + unit * UNIT

    def s_offset(self, row: int, pair: int, split: int) -> int:
        return (split * self.tile.rows + row) * self.tile.keys + 2 * pair

    def load(self, keys: np.ndarray) -> None:
        """The copies of all threads."""
        for thread in range(THREADS):
            line, unit, first_chunk = self.tile.copied_line(thread)
            for chunk in range(first_chunk, CHUNKS, self.tile.chunks_at_once):
                offset = self.k_offset(line, unit ^ self.tile.key_swizzle(line), chunk)
                column = chunk * CHUNK + unit * UNIT
                self.k[offset : offset + UNIT] = keys[line, column : column + UNIT]


def ldmatrix(memory: np.ndarray, offsets: list[int], matrices: int, *, transposed: bool = False) -> np.ndarray:
    """Registers [lane, matrix, 2] of one ldmatrix; `offsets`: what each lane hands in, in elements."""
    registers = np.empty((32, matrices, 2))
    for m in range(matrices):
        matrix = np.stack([memory[offsets[8 * m + i] : offsets[8 * m + i] + 8] for i in range(8)])
        for lane in LANES:
            g, q = divmod(lane, 4)
            registers[lane, m] = matrix[2 * q : 2 * q + 2, g] if transposed else matrix[g, 2 * q : 2 * q + 2]
    return registers


def mma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """m16n8k16: a [lane, 4, 2], b [lane, 2, 2], c [lane, 4], all as a lane's registers."""
    rows, columns = np.empty((16, 16)), np.empty((16, 8))
    for lane in LANES:
        g, q = divmod(lane, 4)
        for register, (row, k) in enumerate(((g, 2 * q), (g + 8, 2 * q), (g, 2 * q + 8), (g + 8, 2 * q + 8))):
            rows[row, k : k + 2] = a[lane, register]
        for register, k in enumerate((2 * q, 2 * q + 8)):
            columns[k : k + 2, g] = b[lane, register]
    product = rows @ columns
    out = c.copy()
    for lane in LANES:
        g, q = divmod(lane, 4)
        out[lane] += [product[g, 2 * q], product[g, 2 * q + 1], product[g + 8, 2 * q], product[g + 8, 2 * q + 1]]
    return out


def query_fragment(tile: TileSm80, queries: np.ndarray, warp: int, chunk: int, m_tile: int) -> np.ndarray:
    a = np.empty((32, 4, 2))
    for lane, half, upper in itertools.product(LANES, range(2), range(2)):
        column = chunk * CHUNK + 2 * tile.query_pair(lane, warp) + tile.upper_columns * upper
        a[lane, half + 2 * upper] = queries[m_tile * 16 + half * 8 + lane // 4, column : column + 2]
    return a


def scores_of_warp(tile: TileSm80, shared: SharedMemory, queries: np.ndarray, warp: int) -> None:
    blocks = tile.warp_keys // 8
    sums = np.zeros((blocks, tile.m_tiles, 32, 4))
    lines = [tile.score_line(lane, warp) for lane in LANES]
    for chunk in range(CHUNKS):
        b = ldmatrix(shared.k, [shared.k_offset(key, unit, chunk) for key, unit in lines], 2 * blocks)
        for block, m_tile in itertools.product(range(blocks), range(tile.m_tiles)):
            a = query_fragment(tile, queries, warp, chunk, m_tile)
            sums[block, m_tile] = mma(a, b[:, 2 * block : 2 * block + 2], sums[block, m_tile])
    for block, m_tile, lane, half in itertools.product(range(blocks), range(tile.m_tiles), LANES, range(2)):
        row = m_tile * 16 + half * 8 + lane // 4
        pair = tile.score_pair(lane, warp, block) ^ tile.score_swizzle(row)
        offset = shared.s_offset(row, pair, warp % COLUMN_SPLITS)
        shared.s[offset : offset + 2] = sums[block, m_tile, lane, 2 * half : 2 * half + 2]


def softmax_elements(tile: TileSm80) -> list[tuple[int, int]]:
    """Row and first key of every lane of every warp and step."""
    return [
        (tile.softmax_row(lane, warp, step), lane % LANES_PER_ROW * tile.lane_keys)
        for step, warp, lane in itertools.product(range(tile.m_tiles), range(WARPS), LANES)
    ]


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_scores(tile: TileSm80) -> None:
    generator = np.random.default_rng(0)
    keys, queries = generator.integers(-8, 8, (tile.keys, 576)), generator.integers(-8, 8, (tile.rows, 576))
    shared = SharedMemory(tile)
    shared.load(keys)
    for warp in range(WARPS):
        scores_of_warp(tile, shared, queries, warp)
    found = np.full((tile.rows, tile.keys), np.nan)
    for row, key in softmax_elements(tile):
        pair = (key // 2) ^ tile.score_swizzle(row)
        for i in range(tile.lane_keys):
            found[row, key + i] = sum(shared.s[shared.s_offset(row, pair, split) + key % 2 + i] for split in range(COLUMN_SPLITS))
    np.testing.assert_array_equal(found, queries @ keys.T)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_values(tile: TileSm80) -> None:
    generator = np.random.default_rng(1)
    keys, weights = generator.integers(-8, 8, (tile.keys, 576)), generator.integers(-8, 8, (tile.rows, tile.keys))
    shared = SharedMemory(tile)
    shared.load(keys)
    for row, key in softmax_elements(tile):
        offset = shared.p_offset(row, (key // UNIT) ^ tile.weight_swizzle(row)) + key % UNIT
        shared.p[offset : offset + tile.lane_keys] = weights[row, key : key + tile.lane_keys]
    out = np.full((tile.rows, 512), np.nan)
    for warp, m_tile, pair in itertools.product(range(WARPS), range(tile.m_tiles), range(VALUE_COLUMNS // 16)):
        sums = np.zeros((2, 32, 4))
        for block in range(tile.keys // 16):
            a = ldmatrix(shared.p, [shared.p_offset(*tile.weight_line(lane, m_tile, block)) for lane in LANES], 4)
            lines = [tile.value_line(lane, block, pair) for lane in LANES]
            b = ldmatrix(shared.k, [shared.k_offset(key, unit, warp) for key, unit in lines], 4, transposed=True)
            for i in range(2):
                sums[i] = mma(a, b[:, 2 * i : 2 * i + 2], sums[i])
        for i, lane, half in itertools.product(range(2), LANES, range(2)):
            row, column = m_tile * 16 + half * 8 + lane // 4, warp * VALUE_COLUMNS + (pair * 2 + i) * 8 + lane % 4 * 2
            out[row, column : column + 2] = sums[i, lane, 2 * half : 2 * half + 2]
    np.testing.assert_array_equal(out, weights @ keys[:, :512])


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_no_bank_conflicts(tile: TileSm80) -> None:
    """Eight lines of an ldmatrix matrix, eight threads of a copy, sixteen lanes of an 8-byte access: each touches every bank at most once."""
    shared = SharedMemory(tile)

    def banks(byte_offsets: list[int], width: int) -> None:
        touched = [(offset + 4 * i) // 4 % 32 for offset in byte_offsets for i in range(width // 4)]
        assert len(set(touched)) == len(touched)

    for warp in range(WARPS):
        for matrix in LINES_OF_WARP[: tile.warp_keys // 4]:
            banks([2 * shared.k_offset(*tile.score_line(lane, warp), 0) for lane in matrix], 16)
        for block in range(tile.warp_keys // 8):
            for half_warp in (range(16), range(16, 32)):
                rows = [lane // 4 for lane in half_warp]
                pairs = [tile.score_pair(lane, warp, block) ^ tile.score_swizzle(row) for lane, row in zip(half_warp, rows)]
                banks([4 * shared.s_offset(row, pair, 0) for row, pair in zip(rows, pairs)], 8)
    for block, matrix in itertools.product(range(tile.keys // 16), LINES_OF_WARP):
        for pair in range(VALUE_COLUMNS // 16):
            banks([2 * shared.k_offset(*tile.value_line(lane, block, pair), 0) for lane in matrix], 16)
        banks([2 * shared.p_offset(*tile.weight_line(lane, 0, block)) for lane in matrix], 16)
    for first in range(0, THREADS, 8):
        lines = [tile.copied_line(thread) for thread in range(first, first + 8)]
        banks([2 * shared.k_offset(line, unit ^ tile.key_swizzle(line), 0) for line, unit, _ in lines], 16)


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("rows", [1, 8, 16, 17, 32, 33, 48, 64, 96, 128, 2048])
def test_chosen_tile_fits_and_covers_the_rows(rows: int, limit: int) -> None:
    tile = choose_tile(rows, limit, TileSm80)
    assert tile.shared_memory_bytes <= limit and tile.stages >= MIN_STAGES
    assert tile.rows == tile_rows(rows) <= MAX_TILE_ROWS and tile.rows % 16 == 0
    assert (row_tiles(rows) - 1) * tile.rows < rows <= row_tiles(rows) * tile.rows
    assert row_tiles(rows) == math.ceil(rows / MAX_TILE_ROWS)
    # Memory-bound decode wants many bytes under way: two tiles are in use, the others travel.
    assert (tile.stages - 2) * tile.stage_bytes >= 36_864


def test_a_gpu_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shared memory of a CTA must be at least \d+ bytes for 16 query rows, got 65536"):
        choose_tile(16, 65_536, TileSm80)

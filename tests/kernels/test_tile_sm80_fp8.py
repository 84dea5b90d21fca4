"""The portable tile of E4M3 keys on the CPU: all codes converted by the kernel's own arithmetic, and its lanes against plain matrix products."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from dense_mla.e4m3_bits import LOWER_PAIR, NANS, SCALE, UPPER_PAIR, even_bytes, nan_codes, odd_bytes
from dense_mla.tile_sm80 import (
    CHUNK,
    CHUNKS,
    COLUMN_SPLITS,
    KEY_SPLITS,
    MAX_TILE_ROWS,
    MIN_STAGES,
    THREADS,
    UNIT,
    UNIT_BYTES,
    VALUE_COLUMNS,
    WARPS,
    choose_tile,
    tile_rows,
)
from dense_mla.tile_sm80_fp8 import TileSm80Fp8
from test_tile_sm80 import LANES, LIMITS, LINES_OF_WARP, ldmatrix, mma, query_fragment

TILES = [TileSm80Fp8(rows, 32, 4) for rows in (16, 32)]
CODES = np.arange(256)
NUMBERS = CODES[CODES & 0x7F != 0x7F]
VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()


def bf16(bits: int) -> float:
    return torch.tensor(bits << 16 & 0xFFFFFFFF, dtype=torch.uint32).view(torch.float32).double().item()


def scaled(word: int) -> list[float]:
    """What the multiplication makes of a word: exact where the products are BF16 numbers themselves."""
    products = [bf16(word & 0xFFFF) * bf16(SCALE & 0xFFFF), bf16(word >> 16 & 0xFFFF) * bf16(SCALE >> 16)]
    assert torch.tensor(products, dtype=torch.float64).bfloat16().tolist() == products
    return products


def permuted(word: int, selector: int) -> int:
    """prmt with 0 as the second word: bytes 0 to 3 of the word, and from 4 on 0."""
    places = [selector >> 4 * i & 0xF for i in range(4)]
    return sum((word >> 8 * place & 0xFF) << 8 * i for i, place in enumerate(places) if place < 4)


def word_of(codes: np.ndarray) -> int:
    return int.from_bytes(bytes(codes.tolist()), "little")


def neighbours(word: int) -> list[float]:
    """The four numbers of `neighbours_to_bf16`."""
    return scaled(odd_bytes(permuted(word, LOWER_PAIR))) + scaled(odd_bytes(permuted(word, UPPER_PAIR)))


def alternate(word: int) -> list[float]:
    """The four numbers of `alternate_to_bf16`."""
    return scaled(even_bytes(word)) + scaled(odd_bytes(word))


@pytest.mark.parametrize("others", [0x00, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("byte", range(4))
def test_every_number_is_converted_exactly(byte: int, others: int) -> None:
    """In every byte of a word, whatever lies beside it. The sign of a zero counts too."""
    for code in NUMBERS.tolist():
        word = word_of(np.where(np.arange(4) == byte, code, others))
        found = neighbours(word)[byte], alternate(word)[byte // 2 + byte % 2 * 2]
        assert found == (VALUES[code], VALUES[code])
        assert np.signbit(found).tolist() == [code >= 0x80] * 2


@pytest.mark.parametrize("others", [0x00, 0x7E, 0x80, 0xFE])
@pytest.mark.parametrize("byte", range(4))
def test_nan_codes_and_no_others_are_found(byte: int, others: int) -> None:
    for code in CODES.tolist():
        word = word_of(np.where(np.arange(4) == byte, code, others))
        assert (nan_codes(word) != 0) == bool(np.isnan(VALUES[code]))


def test_what_takes_the_place_of_a_found_nan_is_nan() -> None:
    assert np.isnan([bf16(NANS & 0xFFFF), bf16(NANS >> 16)]).all()


class SharedMemory:
    """K as the kernel lays it out, one code an element: by (chunk, key, unit)."""

    def __init__(self, tile: TileSm80Fp8, keys: np.ndarray):
        self.tile = tile
        self.k = np.full(tile.stage_bytes, -1)
        for thread in range(THREADS):
            line, unit, first_chunk = tile.copied_line(thread)
            for chunk in range(first_chunk, CHUNKS, tile.chunks_at_once):
                offset, column = self.offset(line, unit ^ tile.key_swizzle(line), chunk), chunk * CHUNK + unit * tile.unit_columns
                assert (self.k[offset : offset + UNIT_BYTES] == -1).all()
                self.k[offset : offset + UNIT_BYTES] = keys[line, column : column + UNIT_BYTES]
        assert (self.k >= 0).all()

    def offset(self, key: int, unit: int, chunk: int) -> int:
        return ((chunk * self.tile.keys + key) * self.tile.line_units + unit) * UNIT_BYTES


def load_words(memory: np.ndarray, offsets: list[int], matrices: int, *, transposed: bool = False) -> np.ndarray:
    """Words [lane, matrix] of one ldmatrix on pairs of codes; `offsets`: what each lane hands in, in bytes."""
    pairs = memory[0::2] + 256 * memory[1::2]
    registers = ldmatrix(pairs, [offset // 2 for offset in offsets], matrices, transposed=transposed).astype(np.int64)
    return registers[..., 0] + 65_536 * registers[..., 1]


def codes_of_tile(tile: TileSm80Fp8, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).choice(NUMBERS, (tile.keys, 576))


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_scores(tile: TileSm80Fp8) -> None:
    keys, queries = codes_of_tile(tile, 0), np.random.default_rng(1).integers(-8, 8, (tile.rows, 576))
    shared = SharedMemory(tile, keys)
    found = np.zeros((tile.rows, tile.keys))
    blocks = tile.warp_keys // 8
    for warp in range(WARPS):
        sums = np.zeros((blocks, tile.m_tiles, 32, 4))
        lanes = [tile.score_unit(lane, warp) for lane in LANES]
        for first in range(0, CHUNKS, 2):
            chunks = min(2, CHUNKS - first)
            offsets = [shared.offset(key, unit, first + (next_chunk if chunks == 2 else 0)) for key, unit, next_chunk in lanes]
            words = load_words(shared.k, offsets, chunks * blocks)
            for i, block, m_tile in itertools.product(range(chunks), range(blocks), range(tile.m_tiles)):
                b = np.array([neighbours(int(word)) for word in words[:, i * blocks + block]]).reshape(32, 2, 2)
                sums[block, m_tile] = mma(query_fragment(tile, queries, warp, first + i, m_tile), b, sums[block, m_tile])
        for block, m_tile, lane, half, parity in itertools.product(range(blocks), range(tile.m_tiles), LANES, range(2), range(2)):
            row, key = m_tile * 16 + half * 8 + lane // 4, 2 * tile.score_pair(lane, warp, block) + parity
            found[row, key] += sums[block, m_tile, lane, 2 * half + parity]
    np.testing.assert_array_equal(found, queries @ VALUES[keys].T)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_code_of_a_key_is_looked_at_for_the_scores(tile: TileSm80Fp8) -> None:
    """A NaN code shows in the operand of the lane that found it: a lane of the key's own column of B, and of no other key."""
    shared = SharedMemory(tile, np.zeros((tile.keys, 576), dtype=int))
    places = np.arange(tile.stage_bytes)
    seen = np.full(tile.stage_bytes, -1)
    for warp, first in itertools.product(range(WARPS), range(0, CHUNKS, 2)):
        chunks = min(2, CHUNKS - first)
        lanes = [tile.score_unit(lane, warp) for lane in LANES]
        for matrix, lane in itertools.product(range(2 * chunks), LANES):
            key, unit, next_chunk = lanes[8 * matrix + lane // 4]
            offset = shared.offset(key, unit, first + (next_chunk if chunks == 2 else 0)) + lane % 4 * 4
            seen[offset : offset + 4] = warp // COLUMN_SPLITS * tile.warp_keys + matrix % 2 * 8 + lane // 4
    np.testing.assert_array_equal(seen, places // (UNIT_BYTES * tile.line_units) % tile.keys)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_values(tile: TileSm80Fp8) -> None:
    keys, weights = codes_of_tile(tile, 2), np.random.default_rng(3).integers(-8, 8, (tile.rows, tile.keys))
    shared = SharedMemory(tile, keys)
    p = np.full(tile.rows * tile.keys, np.nan)
    for row, key in itertools.product(range(tile.rows), range(tile.keys)):
        p[row * tile.keys + ((key // UNIT) ^ tile.weight_swizzle(row)) * UNIT + key % UNIT] = weights[row, key]
    out = np.full((tile.rows, 512), np.nan)
    for warp, pair in itertools.product(range(WARPS), range(tile.line_units // 2)):
        sums = np.zeros((tile.m_tiles, 2, 2, 32, 4))  # m tile, unit of the pair, odd columns, lane
        for block in range(tile.keys // 16):
            lines = [tile.value_line(lane, block, pair) for lane in LANES]
            words = load_words(shared.k, [shared.offset(key, unit, warp) for key, unit in lines], 4, transposed=True)
            b = np.array([[alternate(int(word)) for word in row] for row in words]).reshape(32, 2, 2, 2, 2)  # lane, unit, k half, odd, k
            for m_tile, i, odd in itertools.product(range(tile.m_tiles), range(2), range(2)):
                rows = [tile.weight_line(lane, m_tile, block) for lane in LANES]
                a = ldmatrix(p, [row * tile.keys + unit * UNIT for row, unit in rows], 4)
                sums[m_tile, i, odd] = mma(a, b[:, i, :, odd], sums[m_tile, i, odd])
        for m_tile, i, odd, lane, half in itertools.product(range(tile.m_tiles), range(2), range(2), LANES, range(2)):
            row = m_tile * 16 + half * 8 + lane // 4
            column = warp * VALUE_COLUMNS + (pair * 2 + i) * 16 + tile.output_columns(lane) + odd
            out[row, [column, column + 2]] = sums[m_tile, i, odd, lane, 2 * half : 2 * half + 2]
    np.testing.assert_array_equal(out, weights @ VALUES[keys[:, :512]])


def test_no_bank_conflicts() -> None:
    """Eight lines of an ldmatrix matrix, and eight threads of a copy, touch every bank once."""
    tile = TILES[0]
    shared = SharedMemory(tile, np.zeros((tile.keys, 576), dtype=int))

    def banks(offsets: list[int]) -> None:
        assert len({offset // UNIT_BYTES % 8 for offset in offsets}) == 8

    for matrix in LINES_OF_WARP:
        for warp in range(WARPS):
            banks([shared.offset(key, unit, 0) for key, unit, _ in (tile.score_unit(lane, warp) for lane in matrix)])
        for block, pair in itertools.product(range(tile.keys // 16), range(tile.line_units // 2)):
            banks([shared.offset(*tile.value_line(lane, block, pair), 0) for lane in matrix])
    for first in range(0, THREADS, 8):
        lines = [tile.copied_line(thread) for thread in range(first, first + 8)]
        banks([shared.offset(line, unit ^ tile.key_swizzle(line), 0) for line, unit, _ in lines])


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("rows", [1, 16, 17, 32, 33, 48, 128, 2048])
def test_chosen_tile_fits_everywhere(rows: int, limit: int) -> None:
    tile = choose_tile(rows, limit, TileSm80Fp8)
    assert tile.shared_memory_bytes <= limit and tile.stages >= MIN_STAGES
    assert (tile.rows, tile.keys, tile.stage_bytes) == (tile_rows(rows), 32, 32 * 576) and tile.rows <= MAX_TILE_ROWS
    # Memory-bound decode wants many bytes under way: two tiles are in use, the others travel.
    assert (tile.stages - 2) * tile.stage_bytes >= 36_864
    assert KEY_SPLITS * tile.warp_keys == tile.keys

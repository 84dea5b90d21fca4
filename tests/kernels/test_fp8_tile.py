"""The order in which the FP8 kernel stores, reads and converts: a whole tile walked lane by lane against PTX's fragment layouts. No GPU.

The tile is laid out as TMA does it, by address bits; the lanes read where fp8_tile.py says; what comes out must be K Q^T and V^T P^T.
"""

from __future__ import annotations

import pytest
import torch

from dense_mla import fp8_tile
from dense_mla.fp8_tile import BOX_BYTES, GROUPS, LINE, LINES, TILE_BYTES, VALUE_GROUPS
from dense_mla.paged_kv import PageTiling

KEYS, COLUMNS = 64, 576


def swizzled(address: int) -> int:
    """The 128-byte swizzle: bits 7 to 9 of the address are added to bits 4 to 6."""
    return address ^ (address >> 7 & 7) << 4


def tile_in_shared_memory(keys: torch.Tensor, box_records: int = 32) -> torch.Tensor:
    """What the TMA boxes of a tile leave behind: line after line, of each the rows of every box, swizzled."""
    records = keys.reshape(KEYS // 2, LINES, LINE)
    shared = torch.zeros(TILE_BYTES, dtype=keys.dtype)
    for box in range(KEYS // 2 // box_records):
        for line in range(LINES):
            for row in range(box_records):
                start = line * BOX_BYTES + (box * box_records + row) * LINE
                for unit in range(0, LINE, 16):
                    at = swizzled(start + unit)
                    shared[at : at + 16] = records[box * box_records + row, line, unit : unit + 16]
    return shared


@pytest.fixture(scope="module")
def keys() -> torch.Tensor:
    return torch.randint(-8, 9, (KEYS, COLUMNS), generator=torch.Generator().manual_seed(1), dtype=torch.int64)


@pytest.fixture(scope="module")
def shared(keys: torch.Tensor) -> torch.Tensor:
    return tile_in_shared_memory(keys)


@pytest.mark.parametrize("box_records", [8, 16])
def test_small_pages_fill_a_tile_like_one_box(keys: torch.Tensor, shared: torch.Tensor, box_records: int) -> None:
    assert torch.equal(tile_in_shared_memory(keys, box_records), shared)


def test_every_byte_has_its_place(keys: torch.Tensor, shared: torch.Tensor) -> None:
    places = torch.tensor([[fp8_tile.offset(key, byte) for byte in range(COLUMNS)] for key in range(KEYS)])
    assert torch.equal(shared[places], keys)
    assert places.unique().numel() == TILE_BYTES


def test_every_line_of_the_products_is_one_key() -> None:
    lines = [fp8_tile.key_of_line(warp, line) + 16 * half for warp in range(4) for half in range(2) for line in range(8)]
    assert sorted(lines) == list(range(KEYS))


def key_of(m: int) -> int:
    """The key in line m of the products."""
    return int(fp8_tile.key_of_line(m // 16, m % 8)) + 16 * (m // 8 % 2)


@pytest.mark.parametrize("rows", [8, 16, 24, 32])
def test_scores(keys: torch.Tensor, shared: torch.Tensor, rows: int) -> None:
    q = torch.randint(-8, 9, (rows, COLUMNS), generator=torch.Generator().manual_seed(rows))
    # Q as it is stored, and as the tensor cores read a K-major operand.
    stored = torch.full((GROUPS * rows * LINE // 2,), 10**6)
    for row in range(rows):
        for g in range(GROUPS):
            for word in range(32):
                at = (g * rows * LINE + fp8_tile.query_offset(row, word, rows)) // 2
                stored[at : at + 2] = q[row, 64 * g + 2 * word : 64 * g + 2 * word + 2]
    b = torch.stack([
        torch.stack([stored[swizzled(g * rows * LINE + row * LINE + k * 2) // 2] for g in range(GROUPS) for k in range(64)])
        for row in range(rows)
    ])  # fmt: skip
    assert b.max() < 10**6

    a = torch.full((KEYS, COLUMNS), 10**6)
    for warp in range(4):
        for lane in range(32):
            offsets, (g_line, quad) = fp8_tile.score_offsets(warp, lane), (lane // 4, lane % 4)
            for g in range(GROUPS):
                for half in range(2):
                    at = offsets[g % 2] + g // 2 * BOX_BYTES + half * fp8_tile.HALF_OFFSET
                    unit = shared[at : at + 16].reshape(4, 2, 2)  # word, f16x2 of the word, value
                    for j in range(4):
                        for register in range(2):  # registers half + 2 register of the fragment of block j: k = 8 register + 2 quad + e
                            k = 64 * g + 16 * j + 8 * register + 2 * quad
                            a[16 * warp + 8 * half + g_line, k : k + 2] = unit[j, register]
    assert a.max() < 10**6
    scores = a @ b.T
    assert torch.equal(scores, torch.stack([keys[key_of(m)] for m in range(KEYS)]) @ q.T)


def test_values(keys: torch.Tensor, shared: torch.Tensor) -> None:
    p = torch.randint(0, 9, (KEYS, 8), generator=torch.Generator().manual_seed(3))  # by line of the products, as the scores come out
    a = torch.full((VALUE_GROUPS * 64, KEYS), 10**6)
    for warp in range(4):
        offsets = [fp8_tile.value_offsets(warp, lane) for lane in range(32)]
        for g in range(VALUE_GROUPS):
            for part in range(2):
                for matrix in range(4):
                    at = [offsets[8 * matrix + i][g % 2] + g // 2 * BOX_BYTES + part * fp8_tile.KEY_BLOCKS_OFFSET for i in range(8)]
                    rows = torch.stack([shared[start : start + 16] for start in at])  # 8 keys, 16 columns
                    index = 4 * part + matrix  # of the words of a group: block index // 2, lines 8 (index % 2) on
                    for lane in range(32):
                        line, quad = lane // 4, lane % 4
                        # .trans: byte pair `line` of rows 2 quad and 2 quad + 1; the permute pairs up the same column of both.
                        low, high = (rows[2 * quad : 2 * quad + 2, 2 * line + i] for i in range(2))
                        k = 16 * (index // 2) + 8 * (index % 2) + 2 * quad
                        a[64 * g + 16 * warp + line, k : k + 2] = low
                        a[64 * g + 16 * warp + line + 8, k : k + 2] = high
    assert a.max() < 10**6
    products = a @ p
    expected = torch.stack([keys[key_of(m), :512] for m in range(KEYS)]).T @ p
    # Accumulator lines 16 warp + line and 8 further are stored as the columns 16 warp + 2 line and the next.
    column = [64 * g + 16 * warp + 2 * line + half for g in range(VALUE_GROUPS) for warp in range(4) for half in range(2) for line in range(8)]
    assert torch.equal(products, expected[column])


def test_no_bank_conflicts() -> None:
    """The eight lanes of a phase of a 16-byte access touch all 128 bytes of the banks."""
    for warp in range(4):
        for read in (fp8_tile.score_offsets, fp8_tile.value_offsets):
            for phase in range(4):
                for parity in range(2):
                    units = {read(warp, 8 * phase + i)[parity] // 16 % 8 for i in range(8)}
                    assert len(units) == 8, (read.__name__, warp, phase, parity)


def test_query_words_of_a_warp_touch_every_bank_once() -> None:
    for row in range(32):
        assert {fp8_tile.query_offset(row, word, 32) // 4 % 32 for word in range(32)} == set(range(32))


def test_a_group_waits_for_all_its_lines() -> None:
    arrived: set[int] = set()
    order = [line for lines in fp8_tile.ARRIVALS for line in lines]
    assert sorted(order) == list(range(LINES))
    for index, lines in enumerate(fp8_tile.ARRIVALS):
        assert all(fp8_tile.arrival_of_line(line) == index for line in lines)
    for g in range(GROUPS):
        arrived.update(*fp8_tile.ARRIVALS[: fp8_tile.arrival_of_group(g) + 1])
        needed = {fp8_tile.offset(key, 64 * g) // BOX_BYTES for key in range(KEYS)}
        assert needed <= arrived


@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 80, 944])
def test_boxes_hold_whole_records(page_size: int) -> None:
    assert PageTiling(page_size).box_keys % 2 == 0 and page_size % 2 == 0

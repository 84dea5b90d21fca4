"""How the portable forward walks a range of the schedule, run on the CPU: the producer's and the consumer's steps are the kernel's own code."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32
from cutlass.cute.runtime import make_fake_tensor

from dense_mla.forward_sm80 import BYTES, CURSOR_WORDS, END, END_TILE, KEY, PAGE, PAGE_KEY, REQUEST, TILE, ForwardSm80
from dense_mla.paged_kv import PageTiling
from dense_mla.problem import DecodeProblem
from dense_mla.schedule import INVARIANT_PIECES, NO_SLOT, Range, invariant_piece_tiles, plan

SHARED_MEMORY = {32: 232_448, 16: 101_376}
LENGTHS = [0, 1, 63, 64, 65, 943, 944, 945, 0, 5000, 2000, 40_000, 0]
UNREADABLE = -1
LINE_WORDS = 4  # request, page, key in the page, bytes


class Walk:
    """Host functions over the kernel's methods; `lines` and `tiles` are what they leave behind."""

    def __init__(self, forward: ForwardSm80):
        self.forward = forward

    @cute.jit
    def produce(self, words: cute.Tensor, table: cute.Tensor, lens: cute.Tensor, cursor: cute.Tensor, lines: cute.Tensor) -> None:
        """Every line of every tile that the producer would load, as the kernel's Step 3 and load_tile do."""
        source = (words, words, table, lens)  # the keys themselves are not walked
        count = Int32(0)
        if words[0] <= words[2]:
            cursor[REQUEST] = words[0]
            cursor[TILE], cursor[END_TILE] = self.forward.range.tile_span(words, words[0], lens[words[0]])
            cursor[KEY], cursor[END] = 0, 0
            self.forward.next_piece(cursor, source)
            while cursor[KEY] < cursor[END]:
                for line in cutlass.range(self.forward.tile.keys):
                    self.forward.find_line(cursor, source, line * 8)
                    lines[count, 0], lines[count, 1] = cursor[REQUEST], cursor[PAGE]
                    lines[count, 2], lines[count, 3] = cursor[PAGE_KEY], cursor[BYTES]
                    count += 1
                cursor[KEY] = cursor[KEY] + self.forward.tile.keys
                if cursor[KEY] >= cursor[END]:
                    self.forward.next_piece(cursor, source)
        lines[count, 3] = -1

    @cute.jit
    def consume(self, words: cute.Tensor, lens: cute.Tensor, pieces: cute.Tensor) -> None:
        """Request, first key, end key and slot of every piece, as the kernel's Step 4 does."""
        count = Int32(0)
        for request in cutlass.range(words[0], words[2] + 1, unroll=1):
            begin_tile, end_tile = self.forward.range.tile_span(words, request, lens[request])
            for _ in cutlass.range(self.forward.range.num_pieces(begin_tile, end_tile, lens[request]), unroll=1):
                piece_end = self.forward.range.piece_end(begin_tile, end_tile, lens[request])
                pieces[count, 0] = request
                pieces[count, 3] = self.forward.range.slot(words, request, begin_tile, lens[request])
                pieces[count, 1], pieces[count, 2] = self.forward.range.key_span(begin_tile, piece_end, lens[request])
                begin_tile = piece_end
                count += 1
        pieces[count, 0] = -1


def host_tensor(*shape: object) -> object:
    strides = (1,) if len(shape) == 1 else (shape[1], 1) if isinstance(shape[1], int) else (cute.sym_int64(), 1)
    return make_fake_tensor(Int32, shape, strides, memspace=cute.AddressSpace.generic)


@cache
def walks(page_size: int, keys: int, batch_invariant: bool) -> tuple[Callable[..., None], Callable[..., None]]:
    forward = ForwardSm80(DecodeProblem(16, page_size, batch_invariant=batch_invariant), SHARED_MEMORY[keys], False)
    assert forward.tile.keys == keys
    words, lens, table = host_tensor(6), host_tensor(cute.sym_int()), host_tensor(cute.sym_int(), cute.sym_int())
    lines, pieces = host_tensor(cute.sym_int(), LINE_WORDS), host_tensor(cute.sym_int(), 4)
    options = "--gpu-arch sm_80 --enable-tvm-ffi"
    return (
        cute.compile(Walk(forward).produce, words, table, lens, host_tensor(CURSOR_WORDS), lines, options=options),
        cute.compile(Walk(forward).consume, words, lens, pieces, options=options),
    )


def words_of(r: Range) -> torch.Tensor:
    return torch.tensor([r.first_request, r.first_tile, r.last_request, r.end_tile, r.first_slot, r.last_slot], dtype=torch.int32)


def expected_pieces(r: Range, seq_lens: list[int], page_size: int, batch_invariant: bool) -> Iterator[tuple[int, int, int, int]]:
    tiling = PageTiling(page_size)
    for request in range(r.first_request, r.last_request + 1):
        tiles = tiling.num_tiles(seq_lens[request])
        begin = r.first_tile if request == r.first_request else 0
        end = r.end_tile if request == r.last_request else tiles
        slot = r.first_slot if request == r.first_request else r.last_slot if request == r.last_request else NO_SLOT
        length = invariant_piece_tiles(tiles) if batch_invariant else max(end - begin, 1)
        for first in range(begin, max(end, begin + 1), length):
            if batch_invariant:
                slot = request * INVARIANT_PIECES + first // length if length < tiles else NO_SLOT
            last_key = min(tiling.first_key(min(first + length, end)), seq_lens[request])
            yield request, tiling.first_key(first), last_key, slot


@pytest.mark.parametrize(
    ("page_size", "keys", "batch_invariant"),
    [(16, 16, False), (16, 32, True), (32, 32, False), (64, 32, False), (80, 16, True), (80, 32, True), (528, 16, False), (944, 32, False)],
)
def test_every_key_is_loaded_once_and_in_the_order_of_its_use(page_size: int, keys: int, batch_invariant: bool) -> None:
    produce, consume = walks(page_size, keys, batch_invariant)
    seq_lens = LENGTHS if page_size != 16 else LENGTHS[:10]
    pages = [-(-n // page_size) for n in seq_lens]
    # Page ids name request and page; what lies past a request's last page must not be read.
    table = torch.full((len(seq_lens), max(pages) + 1), UNREADABLE, dtype=torch.int32)
    for request, count in enumerate(pages):
        table[request, :count] = torch.arange(count, dtype=torch.int32) + request * 10_000
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    lines = torch.empty(sum(seq_lens) + 64 * len(seq_lens) * INVARIANT_PIECES, LINE_WORDS, dtype=torch.int32)
    pieces = torch.empty(len(seq_lens) * INVARIANT_PIECES + 1, 4, dtype=torch.int32)
    for num_ranges in (1, 7, 40):
        for r in plan(seq_lens, page_size, num_ranges, batch_invariant).ranges:
            consume(words_of(r), lens, pieces)
            expected = list(expected_pieces(r, seq_lens, page_size, batch_invariant))
            assert [tuple(p) for p in pieces[: len(expected)].tolist()] == expected and pieces[len(expected), 0] == -1
            produce(words_of(r), table, lens, torch.zeros(CURSOR_WORDS, dtype=torch.int32), lines)
            check_lines(lines, expected, keys, page_size)


def check_lines(lines: torch.Tensor, pieces: list[tuple[int, int, int, int]], keys: int, page_size: int) -> None:
    wanted = []
    for request, begin, end, _ in pieces:
        for key in range(begin, begin + -(-(end - begin) // keys) * keys):
            page, page_key = divmod(key, page_size)
            wanted.append([request, request * 10_000 + page, page_key, 16] if key < end else [request, 0, 0, 0])
    found = lines[: len(wanted) + 1]
    assert found[-1, 3] == -1, "another number of lines than the consumer waits for"
    assert found[:-1].tolist() == wanted


def test_an_idle_range_walks_nothing() -> None:
    produce, consume = walks(64, 32, False)
    lines, pieces = torch.zeros(1, LINE_WORDS, dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int32)
    idle, lens = words_of(Range(0, 0, -1, 0, NO_SLOT, NO_SLOT)), torch.tensor([64], dtype=torch.int32)
    produce(idle, torch.zeros(1, 1, dtype=torch.int32), lens, torch.zeros(CURSOR_WORDS, dtype=torch.int32), lines)
    consume(idle, lens, pieces)
    assert lines[0, 3] == -1 and pieces[0, 0] == -1


@pytest.mark.parametrize("query_len", [1, 4, 16])
def test_visible_keys(query_len: int) -> None:
    """The causal rule is the problem's: token t of n sees all keys but the newest n - 1 - t."""
    forward = ForwardSm80(DecodeProblem(16, 64, query_len=query_len), SHARED_MEMORY[32], False)

    @cute.jit
    def visible(token: Int32, seq_len: Int32, found: cute.Tensor) -> None:
        found[0] = forward.range.visible_keys(token, seq_len, seq_len)

    compiled = cute.compile(visible, Int32(0), Int32(0), host_tensor(1), options="--gpu-arch sm_80 --enable-tvm-ffi")
    rng, found = random.Random(0), torch.zeros(1, dtype=torch.int32)
    for _ in range(50):
        token, seq_len = rng.randrange(query_len), rng.randrange(100)
        compiled(token, seq_len, found)
        assert found[0] == max(seq_len - query_len + 1 + token, 0)

"""How the Hopper forwards walk a range of the schedule, run on the CPU: what the producers load is what the consumers use, tile by tile."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32
from cutlass.cute.runtime import make_fake_tensor

from dense_mla.paged_kv import PageTiling
from dense_mla.problem import DecodeProblem
from dense_mla.request_range import FIRST_REQUEST, LAST_REQUEST
from dense_mla.request_walk import RequestWalk
from dense_mla.schedule import INVARIANT_PIECES, NO_SLOT, RANGE_WORDS, Range, invariant_piece_tiles, plan


class Spans:
    """Host function over the walk's methods: of every request, the tiles that are loaded; of every piece, request, tiles and slot."""

    def __init__(self, walk: RequestWalk):
        self.walk = walk

    @cute.jit
    def run(self, words: cute.Tensor, lens: cute.Tensor, loaded: cute.Tensor, pieces: cute.Tensor) -> None:
        count = Int32(0)
        for request in cutlass.range(words[FIRST_REQUEST], words[LAST_REQUEST] + 1, unroll=1):
            loaded[request, 0], loaded[request, 1] = self.walk.tile_span(words, request, lens)
            seq_len, begin, end = self.walk.work_span(words, request, lens)
            for piece in cutlass.range(self.walk.range.num_pieces(begin, end, seq_len), unroll=1):
                pieces[count, 0] = request
                pieces[count, 1], pieces[count, 2], pieces[count, 3] = self.walk.piece(words, request, begin, end, seq_len, piece)
                count += 1
        pieces[count, 0] = -1


def host_tensor(*shape: object) -> object:
    return make_fake_tensor(Int32, shape, (*shape[1:], 1), memspace=cute.AddressSpace.generic)


@cache
def spans(page_size: int, batch_invariant: bool) -> Callable[..., None]:
    walk = RequestWalk(DecodeProblem(16, page_size, batch_invariant=batch_invariant))
    tensors = host_tensor(RANGE_WORDS), host_tensor(cute.sym_int()), host_tensor(cute.sym_int(), 2), host_tensor(cute.sym_int(), 4)
    return cute.compile(Spans(walk).run, *tensors, options="--gpu-arch sm_90a --enable-tvm-ffi")


def walked(r: Range, seq_lens: list[int], page_size: int, batch_invariant: bool) -> tuple[dict[int, range], list[list[int]]]:
    """Tiles of each request that the producers load; request, first tile, end tile and slot of each piece of the consumers."""
    words = torch.tensor([r.first_request, r.first_tile, r.last_request, r.end_tile, r.first_slot, r.last_slot, 0, 0], dtype=torch.int32)
    loaded = torch.empty(len(seq_lens), 2, dtype=torch.int32)
    pieces = torch.empty(len(seq_lens) * (INVARIANT_PIECES + 1) + 5000, 4, dtype=torch.int32)
    spans(page_size, batch_invariant)(words, torch.tensor(seq_lens, dtype=torch.int32), loaded, pieces)
    count = pieces[:, 0].tolist().index(-1)
    return {i: range(*loaded[i].tolist()) for i in range(r.first_request, r.last_request + 1)}, pieces[:count].tolist()


def batch(rng: random.Random) -> list[int]:
    longest = rng.choice([70, 1000, 20_000])
    return [rng.choice([0, rng.randint(0, longest), longest]) for _ in range(rng.randint(1, 40))]


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("page_size", [16, 64, 944])
def test_pieces_and_slots_are_those_of_the_plan(page_size: int, batch_invariant: bool) -> None:
    rng, tiling = random.Random(page_size), PageTiling(page_size)
    for _ in range(40):
        seq_lens = batch(rng)
        tiles, of_request = [tiling.num_tiles(n) for n in seq_lens], [[] for _ in seq_lens]
        schedule = plan(seq_lens, page_size, rng.choice([1, 5, 16, 132]), batch_invariant)
        for r in schedule.ranges:
            for request, *piece in walked(r, seq_lens, page_size, batch_invariant)[1]:
                of_request[request].append(piece)
        splits = {split.request: split for split in schedule.splits}
        for request, pieces in enumerate(of_request):
            assert pieces[0][0] == 0 and pieces[-1][1] == tiles[request] and all(a[1] == b[0] for a, b in pairwise(pieces))
            split = splits.get(request)
            expected = [split.first_slot + i for i in range(split.pieces)] if split else [NO_SLOT]
            assert [slot for _, _, slot in pieces] == expected
            if batch_invariant:
                assert all(end - begin == invariant_piece_tiles(tiles[request]) for begin, end, _ in pieces[:-1])


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("page_size", [16, 64, 944])
def test_what_is_loaded_is_used_whatever_the_lengths_have_become(page_size: int, batch_invariant: bool) -> None:
    """Lengths that change behind `schedule` break the contract. The answer is then anything, but nobody waits for a tile that never comes."""
    rng = random.Random(page_size)
    for _ in range(40):
        planned = batch(rng)
        now = [rng.choice([0, n // 2, n, n + 100]) for n in planned]
        for r in plan(planned, page_size, rng.choice([1, 5, 16, 132]), batch_invariant).ranges:
            loaded, pieces = walked(r, now, page_size, batch_invariant)
            assert all(begin <= end for _, begin, end, _ in pieces), "counted, it would take back tiles of another request"
            for request, tiles in loaded.items():
                used = [tile for i, begin, end, _ in pieces if i == request for tile in range(begin, end)]
                assert used == list(tiles), (planned, now, r, request)

"""The schedule kernel's arithmetic, run on the CPU: its ranges are those of `plan`, also where starting a request costs more than one tile."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32
from cutlass.cute.runtime import make_fake_tensor

from dense_mla.paged_kv import PageTiling
from dense_mla.problem import DecodeProblem
from dense_mla.schedule import HEADER_WORDS, RANGE_WORDS, WHOLE_SLACK, Range, invariant_piece_tiles, plan
from dense_mla.schedule_kernel import ScheduleKernel

FIXED_COSTS = {torch.bfloat16: 1, torch.float8_e4m3fn: 3}
RANGES = [1, 2, 5, 16, 132]


class Ranges:
    """Host functions over the kernel's methods, for one range after the other. `starts`: where each request starts on the line, and its end."""

    def __init__(self, kernel: ScheduleKernel):
        self.kernel = kernel

    @cute.jit
    def whole(self, starts: cute.Tensor, schedule: cute.Tensor, requests: Int32, num_ranges: Int32, quantum: Int32) -> None:
        for index in cutlass.range(num_ranges, unroll=1):
            self.kernel.write_whole_range(schedule, starts, requests, index, quantum)

    @cute.jit
    def cut(
        self, starts: cute.Tensor, splits_before: cute.Tensor, schedule: cute.Tensor, requests: Int32, num_ranges: Int32, quantum: Int32
    ) -> None:
        for index in cutlass.range(num_ranges, unroll=1):
            self.kernel.write_cut_range(schedule, starts, splits_before, requests, index, quantum)

    @cute.jit
    def pieces(self, lens: cute.Tensor, starts: cute.Tensor, found: cute.Tensor, requests: Int32, quantum: Int32) -> None:
        """Request and piece at every multiple of the quantum, with batch invariance."""
        for index in cutlass.range(found.shape[0], unroll=1):
            found[index, 0], found[index, 1] = self.kernel.first_piece(lens, starts, requests, index * quantum)


@cache
def compiled(page_size: int, kv_dtype: torch.dtype) -> tuple[Callable[..., None], ...]:
    def words(*shape: Any) -> Any:
        return make_fake_tensor(Int32, (cute.sym_int(), *shape), (*shape, 1), memspace=cute.AddressSpace.generic)

    ranges, invariant = (
        Ranges(ScheduleKernel(DecodeProblem(1, page_size, kv_dtype=kv_dtype, batch_invariant=flag))) for flag in (False, True)
    )
    assert ranges.kernel.fixed_cost == FIXED_COSTS[kv_dtype]
    one, options = Int32(1), "--gpu-arch sm_90a --enable-tvm-ffi"
    return (
        cute.compile(ranges.whole, words(), words(), one, one, one, options=options),
        cute.compile(ranges.cut, words(), words(), words(), one, one, one, options=options),
        cute.compile(invariant.pieces, words(), words(), words(2), one, one, options=options),
    )


def int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def batch(rng: random.Random) -> list[int]:
    longest = rng.choice([1, 70, 300, 1000, 5000, 20_000])
    return [rng.choice([0, rng.randint(0, longest), longest]) for _ in range(rng.choice([1, 2, 3, rng.randint(1, 200)]))]


@pytest.mark.parametrize("kv_dtype", FIXED_COSTS, ids=str)
@pytest.mark.parametrize("page_size", [16, 64, 944])
def test_whole_and_cut_ranges(page_size: int, kv_dtype: torch.dtype) -> None:
    whole, cut, _ = compiled(page_size, kv_dtype)
    fixed_cost, rng, kinds = FIXED_COSTS[kv_dtype], random.Random(page_size), set()
    for _ in range(400):
        seq_lens, num_ranges = batch(rng), rng.choice(RANGES)
        tiles = [PageTiling(page_size).num_tiles(n) for n in seq_lens]
        starts = list(accumulate((t + fixed_cost if t else 1 for t in tiles), initial=0))
        quantum = max(-(-starts[-1] // num_ranges), 1)
        expected = plan(seq_lens, page_size, num_ranges, fixed_cost=fixed_cost)
        schedule = torch.full((HEADER_WORDS + num_ranges * RANGE_WORDS,), -7, dtype=torch.int32)
        found = schedule[HEADER_WORDS:].view(num_ranges, RANGE_WORDS)[:, :6]
        whole(int32(starts), schedule, len(tiles), num_ranges, quantum)
        longest = max(starts[last + 1] - starts[first] for first, _, last, *_ in found.tolist())
        if longest > quantum + quantum // WHOLE_SLACK:
            split = {s.request for s in expected.splits}
            splits_before = list(accumulate((r in split for r in range(len(tiles) - 1)), initial=0))
            cut(int32(starts), int32(splits_before), schedule, len(tiles), num_ranges, quantum)
        kinds.add(bool(expected.splits))
        for words, r in zip(found.tolist(), expected.ranges, strict=True):
            assert same_range(words, r), (seq_lens, num_ranges, words, r)
    assert kinds == {False, True}


def same_range(words: list[int], r: Range) -> bool:
    if r.last_request < r.first_request:
        return words[2] < words[0]
    return words == [r.first_request, r.first_tile, r.last_request, r.end_tile, r.first_slot, r.last_slot]


@pytest.mark.parametrize("kv_dtype", FIXED_COSTS, ids=str)
@pytest.mark.parametrize("page_size", [16, 64, 944])
def test_ranges_of_requests_cut_by_their_own_length(page_size: int, kv_dtype: torch.dtype) -> None:
    _, _, pieces = compiled(page_size, kv_dtype)
    fixed_cost, rng = FIXED_COSTS[kv_dtype], random.Random(page_size)
    for _ in range(400):
        seq_lens, num_ranges = batch(rng), rng.choice(RANGES)
        tiles = [PageTiling(page_size).num_tiles(n) for n in seq_lens]
        lengths = [invariant_piece_tiles(t) for t in tiles]
        counts = [-(-t // length) for t, length in zip(tiles, lengths)]
        starts = list(accumulate((t + n * fixed_cost if t else 1 for t, n in zip(tiles, counts)), initial=0))
        found = torch.full((num_ranges + 1, 2), -7, dtype=torch.int32)
        pieces(int32(seq_lens), int32(starts), found, len(tiles), max(-(-starts[-1] // num_ranges), 1))
        expected = plan(seq_lens, page_size, num_ranges, batch_invariant=True, fixed_cost=fixed_cost).ranges
        for (begin, end), r in zip(pairwise(found.tolist()), expected, strict=True):
            assert (begin == end) == (r.last_request < r.first_request)
            if begin != end:
                assert (r.first_request, r.first_tile) == (begin[0], begin[1] * lengths[begin[0]])
                assert r.last_request == (end[0] if end[1] else end[0] - 1)
                assert r.end_tile == (end[1] * lengths[end[0]] if end[1] else tiles[r.last_request])

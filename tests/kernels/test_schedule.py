"""The properties that every schedule has, over batches drawn by hypothesis and a few thousand more from a seed."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dense_mla.paged_kv import PageTiling
from dense_mla.problem import FIXED_COST, FIXED_COST_E4M3
from dense_mla.reference import Piece, pieces
from dense_mla.schedule import (
    INVARIANT_PIECES,
    NO_SLOT,
    WHOLE_SLACK,
    Schedule,
    invariant_piece_tiles,
    max_slots,
    plan,
    schedule_words,
)

PAGE_SIZES = [16, 32, 48, 64, 80, 128, 528, 768, 944, 1024]
RANGES = [1, 2, 7, 33, 44, 66, 114, 132]


def check(seq_lens: list[int], page_size: int, num_ranges: int, batch_invariant: bool = False, fixed_cost: int = FIXED_COST) -> Schedule:
    """Assert all properties of one schedule."""
    schedule = plan(seq_lens, page_size, num_ranges, batch_invariant, fixed_cost)
    tiles = [PageTiling(page_size).num_tiles(n) for n in seq_lens]
    work = list(pieces(schedule, tiles, batch_invariant))
    assert len(schedule.ranges) == num_ranges
    walked = Counter((p.request, t) for p in work for t in range(p.first_tile, p.end_tile))
    assert walked == Counter((r, t) for r, n in enumerate(tiles) for t in range(n)), "every tile exactly once"
    assert Counter(p.request for p in work if p.first_tile == p.end_tile) == Counter(r for r, n in enumerate(tiles) if n == 0)
    assert [(p.request, p.first_tile) for p in work] == sorted((p.request, p.first_tile) for p in work)

    slots = [p.slot for p in work if p.slot != NO_SLOT]
    assert len(set(slots)) == len(slots), "two pieces share a slot"
    assert all(0 <= s < max_slots(len(seq_lens), num_ranges, batch_invariant) for s in slots)
    assert max_slots(len(seq_lens), num_ranges) <= 2 * num_ranges

    assert all((p.slot == NO_SLOT) == (p.end_tile - p.first_tile == tiles[p.request]) for p in work)
    for request in {p.request for p in work if p.slot != NO_SLOT}:
        mine = [p.slot for p in work if p.request == request]
        assert mine == list(range(mine[0], mine[0] + len(mine))), "the pieces of a request take consecutive slots, in key order"
    expected = {r: (min(s), len(s)) for r in range(len(tiles)) if (s := [p.slot for p in work if p.request == r and p.slot != NO_SLOT])}
    assert {s.request: (s.first_slot, s.pieces) for s in schedule.splits} == expected
    assert [s.request for s in schedule.splits] == sorted(expected)
    if batch_invariant:
        check_invariance(schedule, work, tiles, num_ranges, fixed_cost)
    else:
        check_balance(schedule, tiles, num_ranges, fixed_cost)
    return schedule


def check_invariance(schedule: Schedule, work: list[Piece], tiles: list[int], num_ranges: int, fixed_cost: int) -> None:
    """Every request cut as it would be alone, no range longer than its share and one piece."""
    for request, count in enumerate(tiles):
        length = invariant_piece_tiles(count)
        cuts = [(p.first_tile, p.end_tile) for p in work if p.request == request]
        assert cuts == [(t, min(t + length, count)) for t in range(0, max(count, 1), length)]
        assert len(cuts) <= INVARIANT_PIECES
    cost = {(p.request, p.first_tile): p.end_tile - p.first_tile + fixed_cost if tiles[p.request] else 1 for p in work}
    quantum = -(-sum(cost.values()) // num_ranges)
    for r in schedule.ranges:
        mine = [cost[p.request, p.first_tile] for p in pieces(Schedule((r,), ()), tiles, True)]
        assert sum(mine) <= quantum + max(mine, default=0)


def check_balance(schedule: Schedule, tiles: list[int], num_ranges: int, fixed_cost: int) -> None:
    """No range costs more than its share of the line, rounded up; where no request is split, WHOLE_SLACK more."""
    total = sum(fixed_cost + t if t else 1 for t in tiles)
    quantum = -(-total // num_ranges)
    slack = quantum // WHOLE_SLACK if not schedule.splits else 0
    for r in schedule.ranges:
        cost = 0
        for p in pieces(Schedule((r,), ()), tiles):
            starts_here = fixed_cost if p.first_tile == 0 else 0
            cost += 1 if tiles[p.request] == 0 else p.end_tile - p.first_tile + starts_here
        # The units of a request's start may lie in the range before that of its first tile: they are no reason for a range to be longer.
        assert cost <= quantum + max(fixed_cost, slack)
        assert sum(p.end_tile - p.first_tile for p in pieces(Schedule((r,), ()), tiles)) <= quantum + slack


lens = st.one_of(st.just(0), st.integers(0, 200), st.sampled_from([1, 63, 64, 65, 943, 944, 945]), st.integers(0, 300_000))


@settings(max_examples=300, deadline=None)
@given(
    seq_lens=st.lists(lens, max_size=200),
    page_size=st.sampled_from(PAGE_SIZES),
    num_ranges=st.sampled_from(RANGES),
    batch_invariant=st.booleans(),
    fixed_cost=st.sampled_from([FIXED_COST, FIXED_COST_E4M3]),
)
def test_any_batch(seq_lens: list[int], page_size: int, num_ranges: int, batch_invariant: bool, fixed_cost: int) -> None:
    check(seq_lens, page_size, num_ranges, batch_invariant, fixed_cost)


def test_three_thousand_random_batches() -> None:
    rng = random.Random(1)
    for number in range(3000):
        batch = rng.randint(0, 4) if number % 3 == 0 else rng.randint(0, 64)
        longest = rng.choice([1, 100, 5000, 20_000])
        seq_lens = [rng.choice([0, rng.randint(0, longest)]) for _ in range(batch)]
        check(seq_lens, rng.choice(PAGE_SIZES), rng.choice(RANGES), number % 2 == 0, (FIXED_COST, FIXED_COST_E4M3)[number // 2 % 2])


@pytest.mark.parametrize("batch", [1, 8, 131, 132, 133, 256, 1024])
def test_requests_of_no_keys_are_spread_and_never_split(batch: int) -> None:
    schedule = check([0] * batch, 64, 132)
    assert not schedule.splits
    assert max(r.last_request - r.first_request + 1 for r in schedule.ranges) == -(-batch // 132)


def test_no_requests_leave_every_cta_idle() -> None:
    assert all(r.last_request < r.first_request for r in check([], 64, 132).ranges)
    assert max_slots(0, 132) == 0


def test_one_long_request_uses_every_cta() -> None:
    schedule = check([1_048_576], 64, 132)
    assert schedule.splits[0].pieces == 132


def test_a_short_request_in_a_long_batch_is_written_straight() -> None:
    schedule = check([100_000, 64, 100_000], 64, 132)
    assert 1 not in {s.request for s in schedule.splits}


@pytest.mark.parametrize(("batch", "whole"), [(128, True), (132, True), (256, True), (192, False), (32, False)])
def test_requests_stay_whole_where_that_costs_next_to_nothing(batch: int, whole: bool) -> None:
    schedule = check([4096] * batch, 64, 132)
    assert whole == (not schedule.splits)


def test_one_cta_splits_nothing() -> None:
    assert not check([5000, 0, 943], 944, 1).splits


def test_the_device_buffer_holds_a_header_a_range_and_a_split_for_each_cta_and_a_share_for_each_of_the_merge() -> None:
    assert schedule_words(66, 256, 132) == 8 + 66 * 12 + 132 * 8
    assert schedule_words(66, 256, 132, batch_invariant=True) == 8 + 66 * 8 + 132 * 8 + 256 * 4


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_tiles_never_straddle_a_page_and_cover_every_key(page_size: int) -> None:
    tiling = PageTiling(page_size)
    for seq_len in [1, 15, 16, 63, 64, 65, page_size - 1, page_size, page_size + 1, 2 * page_size + 1, 5000]:
        starts = [tiling.first_key(t) for t in range(tiling.num_tiles(seq_len))]
        ends = [*starts[1:], seq_len]
        assert starts[0] == 0 and starts[-1] < seq_len
        assert all(0 < b - a <= 64 for a, b in zip(starts, ends))
        if tiling.pages_per_tile == 1:
            assert all(a // page_size == (b - 1) // page_size for a, b in pairwise([*starts, seq_len]))
    assert tiling.num_tiles(0) == 0

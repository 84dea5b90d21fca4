"""The shares of the merge's CTAs: every block of every split request once, in order, evenly; and their strands as the pieces want them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dense_mla.merge_plan import (
    BATCH,
    ROW_VECTORS,
    STRANDS_LOG2,
    THREADS,
    MergeShare,
    merge_shares,
    split_blocks,
    strands_log2,
)
from dense_mla.schedule import INVARIANT_PIECES, Split, plan

H200_SMS = 132


def blocks_in_order(splits: Sequence[Split], rows: int, most: int) -> list[tuple[int, int]]:
    """Split request and block of the whole line, counted out one by one."""
    threads = [(rows * ROW_VECTORS) * 2 ** strands_log2(split.pieces, most) for split in splits]
    return [(index, begin // THREADS) for index, count in enumerate(threads) for begin in range(0, count, THREADS)]


def walk(share: MergeShare, splits: Sequence[Split], rows: int) -> list[tuple[int, int]]:
    """The blocks of a share, by steps to the next block or the next split request alone."""
    index, block, walked = share.split, share.block, []
    for _ in range(share.blocks):
        walked.append((index, block))
        block += 1
        if block == split_blocks(rows, strands_log2(splits[index].pieces, share.most)):
            index, block = index + 1, 0
    return walked


def fitting_strands(splits: Sequence[Split], rows: int, num_ctas: int) -> int:
    """By halving until all blocks are in flight at once."""
    most = STRANDS_LOG2
    while len(blocks_in_order(splits, rows, most)) > num_ctas and most:
        most -= 1
    return most


def check(splits: Sequence[Split], rows: int, num_ctas: int, batch_invariant: bool) -> tuple[MergeShare, ...]:
    shares = merge_shares(splits, rows, num_ctas, batch_invariant)
    most = STRANDS_LOG2 if batch_invariant else fitting_strands(splits, rows, num_ctas)
    assert len(shares) == num_ctas and {share.most for share in shares} == {most}
    assert [each for share in shares for each in walk(share, splits, rows)] == blocks_in_order(splits, rows, most)
    counts = [share.blocks for share in shares]
    assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1, "the first have the larger, so CTA 0 works if any does"
    for share in shares:
        if share.blocks:
            split = splits[share.split]
            assert (share.request, share.first_slot, share.pieces) == (split.request, split.first_slot, split.pieces)
        else:
            assert share == MergeShare(0, 0, 0, 0, 0, 0, most)
    return shares


@st.composite
def split_lists(draw: st.DrawFn, most_pieces: int) -> list[Split]:
    pieces = draw(st.lists(st.one_of(st.integers(2, 12), st.integers(2, most_pieces)), max_size=40))
    return [Split(2 * index, sum(pieces[:index]) + index, count) for index, count in enumerate(pieces)]


@settings(max_examples=150, deadline=None)
@given(
    splits=split_lists(200),
    rows=st.one_of(st.integers(1, 64), st.sampled_from([96, 128])),
    num_ctas=st.sampled_from([1, 2, 7, 78, 132, 264]),
)
def test_any_split_requests(splits: list[Split], rows: int, num_ctas: int) -> None:
    check(splits, rows, num_ctas, False)


@settings(max_examples=50, deadline=None)
@given(splits=split_lists(INVARIANT_PIECES), rows=st.integers(1, 32), num_ctas=st.sampled_from([1, 7, 132]))
def test_any_split_requests_with_batch_invariance(splits: list[Split], rows: int, num_ctas: int) -> None:
    check(splits, rows, num_ctas, True)


@settings(max_examples=100, deadline=None)
@given(
    seq_lens=st.lists(st.integers(0, 20_000), max_size=60),
    heads=st.sampled_from([1, 12, 16, 64]),
    batch_invariant=st.booleans(),
)
def test_schedules(seq_lens: list[int], heads: int, batch_invariant: bool) -> None:
    check(plan(seq_lens, 64, H200_SMS, batch_invariant).splits, heads, H200_SMS, batch_invariant)


@pytest.mark.parametrize(
    ("pieces", "log2"), [(2, 0), (5, 0), (6, 1), (10, 1), (11, 2), (20, 2), (21, 3), (40, 3), (41, 4), (80, 4), (81, 5), (160, 5), (161, 5)]
)
def test_all_pieces_of_a_row_are_in_flight_at_once(pieces: int, log2: int) -> None:
    assert strands_log2(pieces, STRANDS_LOG2) == log2
    assert strands_log2(pieces, 1) == min(log2, 1) and strands_log2(pieces, 0) == 0
    assert pieces <= BATCH << log2 or log2 == STRANDS_LOG2


def test_nothing_to_merge() -> None:
    assert merge_shares((), 16, H200_SMS) == (MergeShare(0, 0, 0, 0, 0, 0, STRANDS_LOG2),) * H200_SMS


def test_one_long_request_fills_the_gpu() -> None:
    """16 rows of 132 pieces: 32 strands for each of 2,048 vectors are 128 CTAs."""
    shares = check(plan([1_048_576], 64, H200_SMS).splits, 16, H200_SMS, False)
    assert [share.blocks for share in shares] == [1] * 128 + [0] * 4


def test_strands_are_halved_until_all_blocks_have_a_cta() -> None:
    """64 rows, 8 requests of 8,192 keys: 17 pieces want four strands, 512 blocks; one strand is 128 blocks."""
    splits = plan([8192] * 8, 64, H200_SMS).splits
    assert len(splits) == 8 and check(splits, 64, H200_SMS, False)[0].most == 0
    assert check(splits, 16, H200_SMS, False)[0].most == STRANDS_LOG2, "a quarter of the rows: all four strands fit"


def test_the_largest_batch_keeps_within_32_bits() -> None:
    """4,096 requests of 2,048 rows and 32 pieces each: 8 strands for every vector."""
    shares = merge_shares([Split(r, 32 * r, 32) for r in range(4096)], 2048, H200_SMS, True)
    assert sum(share.blocks for share in shares) == 4096 * 4096

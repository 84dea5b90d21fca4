"""The shares of the merge's CTAs: every block of every split request once, in order, evenly; and their strands as the pieces want them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dense_mla.merge_plan import (
    STRANDS_LOG2,
    THREADS,
    MergeShare,
    MergeTile,
    merge_shares,
    split_blocks,
    strands_log2,
)
from dense_mla.problem import HEAD_DIM_V
from dense_mla.schedule import INVARIANT_PIECES, Split, plan

H200_SMS = 132


def wanted_strands(pieces: int, rows: int, most: int) -> int:
    return strands_log2(pieces, most, MergeTile.of(rows).batch)


def blocks_in_order(splits: Sequence[Split], rows: int, most: int) -> list[tuple[int, int]]:
    """Split request and block of the whole line, counted out one by one."""
    vectors = rows * HEAD_DIM_V // MergeTile.of(rows).vector
    threads = [vectors * 2 ** wanted_strands(split.pieces, rows, most) for split in splits]
    return [(index, begin // THREADS) for index, count in enumerate(threads) for begin in range(0, count, THREADS)]


def walk(share: MergeShare, splits: Sequence[Split], rows: int) -> list[tuple[int, int]]:
    """The blocks of a share, by steps to the next block or the next split request alone."""
    index, block, walked = share.split, share.block, []
    for _ in range(share.blocks):
        walked.append((index, block))
        block += 1
        if block == split_blocks(rows * MergeTile.of(rows).row_vectors, wanted_strands(splits[index].pieces, rows, share.most)):
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
@given(splits=split_lists(INVARIANT_PIECES), rows=st.integers(1, 64), num_ctas=st.sampled_from([1, 7, 132]))
def test_any_split_requests_with_batch_invariance(splits: list[Split], rows: int, num_ctas: int) -> None:
    check(splits, rows, num_ctas, True)


@settings(max_examples=100, deadline=None)
@given(
    seq_lens=st.lists(st.integers(0, 20_000), max_size=60),
    heads=st.sampled_from([1, 12, 16, 17, 32, 33, 64]),
    batch_invariant=st.booleans(),
)
def test_schedules(seq_lens: list[int], heads: int, batch_invariant: bool) -> None:
    check(plan(seq_lens, 64, H200_SMS, batch_invariant).splits, heads, H200_SMS, batch_invariant)


@pytest.mark.parametrize(("rows", "vector", "batch"), [(1, 4, 5), (16, 4, 5), (17, 8, 5), (32, 8, 5), (33, 8, 9), (64, 8, 9), (2048, 8, 9)])
def test_the_tile_follows_from_the_rows(rows: int, vector: int, batch: int) -> None:
    tile = MergeTile.of(rows)
    assert tile == MergeTile(vector, batch) and tile.row_vectors * vector == HEAD_DIM_V


@pytest.mark.parametrize("batch", [5, 9])
@pytest.mark.parametrize("log2", range(STRANDS_LOG2 + 1))
def test_all_pieces_of_a_row_are_in_flight_at_once(log2: int, batch: int) -> None:
    """As many strands as that takes, and no more; past the largest number of strands there are several rounds."""
    fits = batch * 2**log2
    assert strands_log2(fits, STRANDS_LOG2, batch) == log2
    assert strands_log2(fits + 1, STRANDS_LOG2, batch) == min(log2 + 1, STRANDS_LOG2)
    assert strands_log2(fits, 1, batch) == min(log2, 1) and strands_log2(fits, 0, batch) == 0


@pytest.mark.parametrize(("rows", "num_ranges"), [(16, 132), (17, 132), (32, 132), (33, 132), (48, 132), (64, 132), (96, 66), (128, 66)])
@pytest.mark.parametrize(("requests", "keys"), [(1, 4096), (1, 32_768), (1, 1_048_576), (2, 32_768), (4, 16_384), (8, 8192)])
def test_one_round_of_loads_for_every_cta_of_an_h200(requests: int, keys: int, rows: int, num_ranges: int) -> None:
    splits = plan([keys] * requests, 64, num_ranges).splits
    shares = check(splits, rows, H200_SMS, False)
    assert len(splits) == requests and shares[0].blocks == 1
    for split in splits:
        assert split.pieces <= MergeTile.of(rows).batch * 2 ** wanted_strands(split.pieces, rows, shares[0].most)


def test_nothing_to_merge() -> None:
    assert merge_shares((), 16, H200_SMS) == (MergeShare(0, 0, 0, 0, 0, 0, STRANDS_LOG2),) * H200_SMS


def test_one_long_request_fills_the_gpu() -> None:
    """16 rows of 132 pieces: 32 strands for each of 2,048 vectors are 128 CTAs."""
    shares = check(plan([1_048_576], 64, H200_SMS).splits, 16, H200_SMS, False)
    assert [share.blocks for share in shares] == [1] * 128 + [0] * 4


def test_strands_are_halved_until_all_blocks_have_a_cta() -> None:
    """64 rows, 12 requests of 8,192 keys: 12 pieces want two strands, 192 blocks; one strand is 96 blocks."""
    splits = plan([8192] * 12, 64, H200_SMS).splits
    assert len(splits) == 12 and check(splits, 64, H200_SMS, False)[0].most == 0
    assert check(splits, 33, H200_SMS, False)[0].most == STRANDS_LOG2, "half of the rows: both strands fit"


def test_the_largest_batch_keeps_within_32_bits() -> None:
    """4,096 requests of 2,048 rows and 32 pieces each: 4 strands for every vector."""
    shares = merge_shares([Split(r, 32 * r, 32) for r in range(4096)], 2048, H200_SMS, True)
    assert sum(share.blocks for share in shares) == 4096 * 1024

"""How the schedule kernel writes the merge's shares and how the merge walks them, run on the CPU: the steps are the kernels' own code."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_tensor

from dense_mla.merge import Merge
from dense_mla.merge_plan import STRANDS_LOG2, THREADS, MergeShare, MergeTile, merge_shares, split_blocks, strands_log2
from dense_mla.merge_shares import BLOCKS, MOST, PIECES, MergeShares, share_tensors
from dense_mla.merge_shares import strands_log2 as device_strands_log2
from dense_mla.problem import DecodeProblem
from dense_mla.schedule import HEADER_WORDS, RANGE_WORDS, SHARE_WORDS, SPLIT_WORDS, Split, schedule_words

OPTIONS = "--gpu-arch sm_90a --enable-tvm-ffi"
UNTOUCHED = -7


class HostShares:
    """What the schedule kernel's threads do with the noted pieces, one after the other: `words` is the schedule buffer."""

    def __init__(self, batch_invariant: bool):
        self.shares = MergeShares(batch_invariant, 1024)

    @cute.jit
    def write(
        self,
        words: cute.Tensor,
        pieces: cute.Tensor,
        counts: cute.Tensor,
        splits: Int32,
        num_ranges: Int32,
        vectors: Int32,
        batch: Int32,
        num_ctas: Int32,
    ) -> None:
        for index in cutlass.range(splits):
            wanted = device_strands_log2(pieces[index], Int32(STRANDS_LOG2), batch)
            counts[wanted] = counts[wanted] + 1
        most = Int32(STRANDS_LOG2)
        if cutlass.const_expr(not self.shares.batch_invariant):
            most = self.shares.most_strands_log2(counts, vectors, num_ctas)
        blocks = Int32(0)
        for index in cutlass.range(splits):
            blocks += split_blocks(vectors, device_strands_log2(pieces[index], most, batch))
            pieces[index] = blocks
        gShares, gSplits = share_tensors(words, num_ranges, num_ctas)
        for cta in cutlass.range(num_ctas):
            self.shares.write_share(gShares, gSplits, pieces, splits, blocks, most, num_ctas, cta)


class HostMerge(Merge):
    """Reads the schedule from the host's memory."""

    @cute.jit
    def load_quad(self, pointer: cute.Pointer) -> Any:
        return cute.make_tensor(pointer, cute.make_layout((4,)))


class Walk:
    """Host function over the merge's methods. Of every block of a share: split request's words, block, and each thread's strand and vector."""

    def __init__(self, merge: Merge):
        self.merge = merge

    @cute.jit
    def run(
        self, words: cute.Tensor, num_ranges: Int32, num_ctas: Int32, cta: Int32, walked: cute.Tensor, strands: cute.Tensor, vectors: cute.Tensor
    ) -> None:
        gShares, gSplits = share_tensors(words, num_ranges, num_ctas)
        place = cute.make_rmem_tensor((SHARE_WORDS,), Int32)
        self.merge.load_share(gShares.iterator + cta * SHARE_WORDS, place)
        count = Int32(0)
        while place[BLOCKS] > 0:
            for i in cutlass.range_constexpr(5):
                walked[count, i] = place[i]
            log2 = device_strands_log2(place[PIECES], place[MOST], Int32(self.merge.tile.batch))
            for thread in cutlass.range(THREADS):
                found, _, strands[count, thread], vectors[count, thread] = self.merge.locate(place, thread % 32, thread // 32)
                walked[count, 5] = found
            self.merge.walk_on(gSplits.iterator, place, log2)
            count += 1
        walked[count, 0] = -1


def host_tensor(*shape: object) -> object:
    strides = (1,) if len(shape) == 1 else (shape[1], 1)
    return make_fake_tensor(Int32, shape, strides, memspace=cute.AddressSpace.generic)


@cache
def host_shares(batch_invariant: bool) -> Callable[..., None]:
    words, pieces, counts = host_tensor(cute.sym_int()), host_tensor(cute.sym_int()), host_tensor(STRANDS_LOG2 + 1)
    return cute.compile(HostShares(batch_invariant).write, words, pieces, counts, *[Int32(1)] * 5, options=OPTIONS)


@cache
def host_walk(rows: int) -> Callable[..., None]:
    merge = HostMerge(DecodeProblem(rows, 64), True, 0)
    tensors = [host_tensor(cute.sym_int(), width) for width in (6, THREADS, THREADS)]
    return cute.compile(Walk(merge).run, host_tensor(cute.sym_int()), *[Int32(1)] * 3, *tensors, options=OPTIONS)


def written(splits: Sequence[Split], rows: int, num_ranges: int, num_ctas: int, batch_invariant: bool) -> torch.Tensor:
    """A schedule buffer with the split requests, and the shares as the schedule kernel writes them."""
    words = torch.full((schedule_words(num_ranges, len(splits), num_ctas, batch_invariant=True),), UNTOUCHED, dtype=torch.int32)
    at = HEADER_WORDS + num_ranges * RANGE_WORDS + num_ctas * SHARE_WORDS
    for index, split in enumerate(splits):
        words[at + index * SPLIT_WORDS :][:SPLIT_WORDS] = torch.tensor([split.request, split.first_slot, split.pieces, index])
    pieces = torch.tensor([split.pieces for split in splits] or [0], dtype=torch.int32)
    before = words.clone()
    counts = torch.zeros(STRANDS_LOG2 + 1, dtype=torch.int32)
    tile = MergeTile.of(rows)
    host_shares(batch_invariant)(words, pieces, counts, len(splits), num_ranges, rows * tile.row_vectors, tile.batch, num_ctas)
    begin = at - num_ctas * SHARE_WORDS
    assert torch.equal(words[:begin], before[:begin]) and torch.equal(words[at:], before[at:])
    return words


def random_splits(rng: random.Random, count: int, most_pieces: int) -> list[Split]:
    splits, request, slot = [], 0, 0
    for _ in range(count):
        request, pieces = request + rng.randint(1, 3), rng.randint(2, most_pieces)
        splits.append(Split(request, slot, pieces))
        slot += pieces + rng.randint(0, 2)
    return splits


def check(splits: Sequence[Split], rows: int, num_ranges: int, num_ctas: int, batch_invariant: bool) -> None:
    expected, tile = merge_shares(splits, rows, num_ctas, batch_invariant), MergeTile.of(rows)
    words = written(splits, rows, num_ranges, num_ctas, batch_invariant)
    begin = HEADER_WORDS + num_ranges * RANGE_WORDS
    shares = words[begin : begin + num_ctas * SHARE_WORDS].view(num_ctas, SHARE_WORDS).tolist()
    assert [MergeShare(*share[:7]) for share in shares] == list(expected)

    longest = max(share.blocks for share in expected)
    walked = torch.empty(longest + 1, 6, dtype=torch.int32)
    strands, vectors = (torch.empty(longest + 1, THREADS, dtype=torch.int32) for _ in range(2))
    work: dict[int, list[torch.Tensor]] = {index: [] for index in range(len(splits))}
    for cta, share in enumerate(expected):
        host_walk(rows)(words, num_ranges, num_ctas, cta, walked, strands, vectors)
        assert walked[share.blocks, 0] == -1, "another number of blocks than its share"
        for turn, (request, first_slot, pieces, index, block, log2) in enumerate(walked[: share.blocks].tolist()):
            assert (request, first_slot, pieces) == (splits[index].request, splits[index].first_slot, splits[index].pieces)
            assert block == len(work[index]) and log2 == strands_log2(pieces, share.most, tile.batch)
            work[index].append(vectors[turn] * 2**log2 + strands[turn])
    for split, blocks in zip(splits, work.values(), strict=True):
        # Every strand of every vector of the request once; what lies past its last row is nobody's.
        threads = torch.cat(blocks).sort().values
        assert torch.equal(threads, torch.arange(len(blocks) * THREADS, dtype=torch.int32))
        needed = (rows * tile.row_vectors) << strands_log2(split.pieces, expected[0].most, tile.batch)
        assert needed <= len(threads) < needed + THREADS


@pytest.mark.parametrize("rows", [1, 3, 12, 16, 17, 32, 33, 64])
@pytest.mark.parametrize(("count", "most_pieces"), [(0, 2), (1, 132), (1, 2), (7, 20), (40, 4), (131, 2), (30, 160)])
def test_every_strand_of_every_split_request(count: int, most_pieces: int, rows: int) -> None:
    rng = random.Random(count * rows)
    for num_ctas in (132, 7):
        check(random_splits(rng, count, most_pieces), rows, rng.choice([1, 44, 131]), num_ctas, False)


@pytest.mark.parametrize("rows", [1, 12, 24, 48])
@pytest.mark.parametrize("count", [0, 1, 90])
def test_every_strand_with_batch_invariance(count: int, rows: int) -> None:
    check(random_splits(random.Random(count), count, 32), rows, 132, 132, True)


def test_lanes_and_warps_of_a_row_are_neighbours() -> None:
    """add_lanes and add_warps rely on it: 32 strands of a vector are lanes 8 apart, in warps side by side."""
    words = written([Split(0, 0, 132)], 16, 1, 132, False)
    walked, strands, vectors = torch.empty(2, 6, dtype=torch.int32), *torch.empty(2, 2, THREADS, dtype=torch.int32)
    host_walk(16)(words, 1, 132, 5, walked, strands, vectors)
    threads = torch.arange(THREADS)
    warp, lane = threads // 32, threads % 32
    assert walked[0, 5] == STRANDS_LOG2
    assert torch.equal(strands[0], (warp % 8 * 4 + lane // 8).int())
    assert torch.equal(vectors[0], (5 * 16 + warp // 8 * 8 + lane % 8).int())


class Pieces:
    """Host function over the merge's loads: the values of one row's pieces, as its sums see them."""

    def __init__(self, merge: Merge):
        self.merge = merge

    @cute.jit
    def run(self, partials: cute.Tensor, lses: cute.Tensor, first: Int32, pieces: Int32, row: Int32, column: Int32, found: cute.Tensor) -> None:
        tile = self.merge.tile
        lse = cute.make_rmem_tensor((tile.batch,), Float32)
        loaded = self.merge.empty_columns()
        self.merge.load_pieces(partials, lses, lse, loaded, first, pieces, row, column, Int32(1), Int32(2))
        for i in cutlass.range_constexpr(tile.batch):
            found[i, tile.vector] = lse[i]
            if lse[i] > -Float32.inf:
                for j in cutlass.range_constexpr(tile.vector):
                    found[i, j] = self.merge.value(loaded, j, i)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [3, 20, 40])
def test_every_column_of_every_piece_is_loaded(rows: int, dtype: torch.dtype) -> None:
    """Strand 1 of 2, with one piece less than a round holds: columns in their order, and weight 0 past the end."""
    merge, tile, first = HostMerge(DecodeProblem(rows, 64, dtype), True, 0), MergeTile.of(rows), 2
    slots = first + 2 * tile.batch
    partials, lses = torch.randn(slots, rows, 512).to(dtype), torch.randn(slots, rows)
    host = cute.AddressSpace.generic
    arguments = (
        make_fake_tensor(merge.partial_dtype, partials.shape, partials.stride(), memspace=host, assumed_align=16),
        make_fake_tensor(Float32, lses.shape, lses.stride(), memspace=host),
        *[Int32(1)] * 4,
        make_fake_tensor(Float32, (tile.batch, tile.vector + 1), (tile.vector + 1, 1), memspace=host),
    )
    found = torch.full((tile.batch, tile.vector + 1), float("nan"))
    last = tile.row_vectors - 1
    cute.compile(Pieces(merge).run, *arguments, options=OPTIONS)(partials, lses, first, 2 * tile.batch - 1, rows - 1, last, found)
    taken = slice(first + 1, first + 2 * tile.batch - 1, 2)
    assert torch.equal(found[:-1, :-1], partials[taken, rows - 1, -tile.vector :].float())
    assert torch.equal(found[:-1, -1], lses[taken, rows - 1]) and found[-1, -1] == -float("inf")

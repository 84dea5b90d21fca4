"""Context ranks merged by vLLM's own code, of the reference on the CPU and of the kernels on a GPU: together they are the undivided answer."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import cases
import context_merge
from context_merge import MERGES, RankAnswer, RankGroup, merged_by_vllm, on_every_rank
from dense_mla.reference import decode, relative_l2
from steps import DEVICE, DTYPES
from steps import decode as decode_on_gpu

# Every rank's answer is rounded to BF16 once, weighted and rounded again, and a ring rounds each of its sums.
BOUND = {2: 3e-3, 8: 4e-3}
NUM_RANGES = 132
LENS = (1, 3, 70, 2000, 0)  # most of 8 ranks hold no key of the first ones, and no rank has one of the last
SHAPES = [(2, 1), (2, 4), (8, 1), (8, 4)]  # world, query_len

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: its merge is what is tested")


def by_reference(case: cases.Case, partial_dtype: torch.dtype) -> RankAnswer:
    problem = case.problem(partial_dtype, return_lse=True)
    total_lens = case.total_lens if problem.needs_total_lens else None
    cache = (case.kv_cache, case.block_table, case.seq_lens)
    return RankAnswer(*decode(problem, case.q, *cache, scale=case.scale, num_ranges=NUM_RANGES, total_lens=total_lens), case.seq_lens)


def by_kernels(case: cases.Case, partial_dtype: torch.dtype) -> RankAnswer:
    step = decode_on_gpu(case, partial_dtype)
    assert step.lse is not None
    return RankAnswer(step.result.contiguous(), step.lse, case.seq_lens)


def assert_undivided(merged: torch.Tensor, whole: cases.Case, world: int) -> None:
    assert merged.dtype == torch.bfloat16 and merged.shape == whole.expected_out.shape
    nothing = whole.expected_lse == -math.inf
    assert nothing.any() and (merged[nothing] == 0).all()
    assert relative_l2(merged, whole.expected_out) < BOUND[world]


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, int, torch.dtype], tuple[torch.Tensor, cases.Case]]:
    """Each case merged with Triton's interpreter, all in one process, beside the undivided case."""
    names, inputs = [], []
    for world, query_len in SHAPES:
        whole, ranks = cases.context_shards(LENS, world, 1, heads=world, query_len=query_len)
        assert any(0 in rank.seq_lens[:-1] for rank in ranks), "no shard is empty"
        for dtype in DTYPES:
            answers = [by_reference(rank, dtype) for rank in ranks]
            names += [((merge, world, query_len, dtype), whole) for merge in MERGES]
            inputs += [(merge, [(answer.out, answer.lse, answer.seq_lens) for answer in answers], query_len) for merge in MERGES]
    folder = tmp_path_factory.mktemp("merge")
    torch.save(inputs, folder / "cases.pt")
    program = [sys.executable, str(Path(context_merge.__file__)), str(folder / "cases.pt"), str(folder / "merged.pt")]
    done = subprocess.run(program, env={**os.environ, **context_merge.INTERPRETED}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    merged = torch.load(folder / "merged.pt")
    return {name: (out, whole) for (name, whole), out in zip(names, merged)}


@needs_vllm
@pytest.mark.parametrize("partial_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("world", "query_len"), SHAPES)
@pytest.mark.parametrize("merge", MERGES)
def test_reference_ranks(
    interpreted: dict[tuple[str, int, int, torch.dtype], tuple[torch.Tensor, cases.Case]],
    merge: str, world: int, query_len: int, partial_dtype: torch.dtype,
) -> None:  # fmt: skip
    """Faults 56 and 60. vLLM's Triton kernels take the LSE for a natural logarithm; they mask empty shards themselves."""
    merged, whole = interpreted[merge, world, query_len, partial_dtype]
    assert_undivided(merged, whole, world)


@pytest.mark.gpu
@needs_vllm
@pytest.mark.parametrize("partial_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("world", "query_len"), SHAPES)
@pytest.mark.parametrize("merge", MERGES)
def test_kernel_ranks(merge: str, world: int, query_len: int, partial_dtype: torch.dtype) -> None:
    """12 heads on each rank, as the kernels see them: 24 and 96."""
    whole, ranks = cases.context_shards([*LENS, 5000], world, 1, DEVICE, heads=12 * world, query_len=query_len)
    assert_undivided(merged_by_vllm(merge, [by_kernels(rank, partial_dtype) for rank in ranks], query_len), whole, world)


@needs_vllm
def test_a_base_two_lse_would_show() -> None:
    """With every LSE in base 2 the merge is far from the undivided answer, or these tests would hold no convention."""
    whole, ranks = cases.context_shards([70, 2000], 2, 16, heads=2)
    answers = [by_reference(rank, torch.float32) for rank in ranks]
    from vllm.v1.attention.ops.dcp import _lse_weighted_combine

    for base, off in ((1.0, False), (math.log2(math.e), True)):
        taken = [replace(answer, lse=answer.lse * base) for answer in answers]
        outs, lses = torch.stack([answer.out for answer in taken]).float(), torch.stack([answer.lse for answer in taken])
        assert (relative_l2(_lse_weighted_combine(outs, lses), whole.expected_out) > BOUND[2]) == off


def test_collectives_over_threads() -> None:
    """What the stand-in group hands over, and that a rank that fails leaves no other waiting."""

    def collect(group: RankGroup) -> torch.Tensor:
        own = torch.arange(4.0) + 10 * group.rank_in_group
        received = torch.empty(4)
        group.all_to_all(received, own)
        return torch.cat([group.all_gather(own[:1], 0), group.reduce_scatter(own, 0), received])

    first, second = on_every_rank(2, collect)
    assert first.tolist() == [0, 10, 10, 12, 0, 1, 10, 11]
    assert second.tolist() == [0, 10, 14, 16, 2, 3, 12, 13]

    def fail(group: RankGroup) -> torch.Tensor:
        if group.rank_in_group == 1:
            raise ValueError("no")
        return group.all_gather(torch.zeros(1), 0)

    with pytest.raises(ValueError, match=r"^no$"):
        on_every_rank(2, fail)

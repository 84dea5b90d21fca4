"""Ranks of a deployment as far as no GPU or one shows them: shares of the heads, processes side by side on a GPU, a GPU that is not there."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import cases
from dense_mla import compiled
from dense_mla.decoder import DenseMLADecoder
from dense_mla.problem import DecodeProblem
from dense_mla.reference import decode
from steps import DEVICE, DTYPES, Step, captured
from steps import decode as decode_on_gpu

HEADS = 12
NUM_RANGES = 132
ROUNDS = 200
SPAWN = multiprocessing.get_context("spawn")  # as vLLM starts its workers


def shares(whole: cases.Case, world: int) -> list[cases.Case]:
    """What each rank of tensor parallelism decodes: its heads, all keys."""
    assert isinstance(whole.q, torch.Tensor)
    parts = (tensor.chunk(world, 1) for tensor in (whole.q, whole.expected_out, whole.expected_lse))
    return [replace(whole, name=f"rank {rank}", q=q, expected_out=out, expected_lse=lse) for rank, (q, out, lse) in enumerate(zip(*parts))]


@pytest.mark.parametrize("partial_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("query_len", [1, 4])
def test_shares_of_the_heads_are_the_undivided_answer(query_len: int, partial_dtype: torch.dtype) -> None:
    """Each rank alone, and all heads put together again."""
    whole = cases.gaussian([0, 1, 65, 3000], heads=2 * HEADS, query_len=query_len)
    outs, lses = [], []
    for case in shares(whole, 2):
        problem = case.problem(partial_dtype, return_lse=True)
        out, lse = decode(problem, case.q, case.kv_cache, case.block_table, case.seq_lens, scale=case.scale, num_ranges=NUM_RANGES)
        case.check(out, lse, partial_dtype)
        outs.append(out)
        lses.append(lse)
    whole.check(torch.cat(outs, 1), torch.cat(lses, 1), partial_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("partial_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("query_len", [1, 4])
def test_shares_of_the_heads_by_the_kernels(query_len: int, partial_dtype: torch.dtype) -> None:
    whole = cases.gaussian([0, 1, 65, 5000], DEVICE, heads=2 * HEADS, query_len=query_len)
    steps = [decode_on_gpu(case, partial_dtype) for case in shares(whole, 2)]
    whole.check(torch.cat([step.result for step in steps], 1), torch.cat([step.lse for step in steps if step.lse is not None], 1), partial_dtype)


def decode_beside_another(cache_dir: Path | None, barrier: Any, results: Any) -> None:
    """A worker: it prepares, then decodes the same step again and again, eager and in a graph, and sends the bits, all the same.

    `barrier` is passed before the kernels are prepared and before the first step, by all workers together.
    """
    case = cases.gaussian([0, 1, 64, 5000, 20_000], DEVICE, heads=HEADS)
    barrier.wait(120)
    DenseMLADecoder.prepare(case.problem(torch.bfloat16, return_lse=True), DEVICE, max_requests=1, cache_dir=cache_dir)
    step = Step.of(case, torch.bfloat16)  # with the kernels that this process has by now
    step.plan()
    step.run()
    graph = captured(step)
    torch.cuda.synchronize()
    barrier.wait(120)
    first = None
    for round_ in range(ROUNDS):
        step.out.fill_(torch.nan)
        (graph.replay if round_ % 2 else lambda: (step.plan(), step.run()))()
        bits = step.result.contiguous().view(torch.int16).cpu()
        first = bits if first is None else first
        assert torch.equal(bits, first), f"round {round_} has other bits"
    step.check()
    took = compiled.preparation()
    results.put((took.compiled, took.loaded, first.numpy() if first is not None else None))


def at_once(count: int, work: Callable[..., None], *arguments: Any) -> list[Any]:
    """Results of `count` processes that run `work(*arguments, barrier, results)` at the same time."""
    barrier, results = SPAWN.Barrier(count), SPAWN.Queue()
    processes = [SPAWN.Process(target=work, args=(*arguments, barrier, results)) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        found = [results.get(timeout=200) for _ in processes]
        for process in processes:
            process.join(60)
    finally:
        for process in processes:
            process.kill()
    assert [process.exitcode for process in processes] == [0] * count
    return found


@pytest.mark.gpu
def test_two_processes_on_one_gpu(tmp_path: Path) -> None:
    """They prepare at the same time, from one folder of kernels, and decode at the same time: the bits are a lone process's."""
    ((_, _, alone),) = at_once(1, decode_beside_another, None)
    found = at_once(2, decode_beside_another, tmp_path / "cache")
    assert sum(times for times, _, _ in found) == sum(times for _, times, _ in found) == 3, "each kernel is compiled once and loaded once"
    assert all((bits == alone).all() for _, _, bits in found)


def prepare_on(index: int, barrier: Any, results: Any) -> None:
    """A worker that was given a GPU."""
    try:
        DenseMLADecoder.prepare(DecodeProblem(HEADS, 64), torch.device("cuda", index), max_requests=8)
    except Exception as error:
        results.put((type(error).__name__, str(error)))
    else:
        results.put(("nothing", ""))


def test_a_spawned_worker_whose_gpu_is_not_there_says_so() -> None:
    """The first index beyond this machine's GPUs, in a process as vLLM starts one for a rank."""
    devices = torch.cuda.device_count()
    (said,) = at_once(1, prepare_on, devices)
    assert said == ("ValueError", f"device must be one of the {devices} CUDA devices that this process sees, got cuda:{devices}")

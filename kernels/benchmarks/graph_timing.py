"""Times of device work between CUDA events, with the queue kept full: no sample waits for the host.

Several kernels are timed in rounds, each once a round and in another order every time: a GPU at its power limit lowers its clock, and a kernel
pays for the heat of the one before it. In a fixed order that would always be the same one.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Sequence

import torch

WARM_UP_SECONDS = 0.1  # the clock rises only under load
BUDGET_SECONDS = 0.35
LEAST_SAMPLES = 20
TIMING = "in rounds: one graph replay of every kernel, in another order every round"
ORDER_SEED = 1


def capture(calls: Iterable[Callable[[], None]]) -> torch.cuda.CUDAGraph:
    """One graph that makes the calls in order. Each must have run before: nothing may compile here."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def time_launches(launch: Callable[[], None], samples: int) -> list[float]:
    """Microseconds of each of `samples` launches, queued behind `WARM_UP_SECONDS` of the same work."""
    return time_in_rounds([launch], samples, samples)[0]


def time_in_rounds(
    launches: Sequence[Callable[[], None]],
    samples: int,
    least: int = LEAST_SAMPLES,
    budget_s: float = BUDGET_SECONDS,
    meanwhile: Callable[[], None] | None = None,
) -> list[list[float]]:
    """Microseconds of each launch, a list for each of `launches`, queued behind `WARM_UP_SECONDS` of the same rounds.

    Args:
        launches: what to time; one round is each of them once, in a random order of its own.
        samples: rounds, as far as they fit into `budget_s`; `least` in any case.
        meanwhile: called once everything is queued, while the device is still at it.
    """
    once = _seconds_of_round(launches)
    for _ in range(min(int(WARM_UP_SECONDS / once), 200)):
        for launch in launches:
            launch()
    rounds = max(least, min(samples, int(budget_s / once)))
    shuffle = random.Random(ORDER_SEED)
    order = [position for _ in range(rounds) for position in shuffle.sample(range(len(launches)), len(launches))]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(order) + 1)]
    events[0].record()
    for position, event in zip(order, events[1:], strict=True):
        launches[position]()
        event.record()
    if meanwhile is not None:
        meanwhile()
    torch.cuda.synchronize()
    times: list[list[float]] = [[] for _ in launches]
    for position, (before, after) in zip(order, itertools.pairwise(events), strict=True):
        times[position].append(before.elapsed_time(after) * 1e3)
    return times


def sm_clock_mhz() -> int | None:
    """The clock of the SMs now, where the driver tells."""
    try:
        return torch.cuda.clock_rate()
    except Exception:  # without nvidia-ml-py, or in a container that hides it: every kind of error
        return None


def _seconds_of_round(launches: Sequence[Callable[[], None]]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(2):
        for launch in launches:
            launch()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / 2

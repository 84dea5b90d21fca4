"""Times of device work between CUDA events, with the queue kept full: no sample waits for the host."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable

import torch

WARM_UP_SECONDS = 0.1  # the clock rises only under load


def capture(calls: Iterable[Callable[[], None]]) -> torch.cuda.CUDAGraph:
    """One graph that makes the calls in order. Each must have run before: nothing may compile here."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def time_launches(launch: Callable[[], None], samples: int) -> list[float]:
    """Microseconds of each of `samples` launches, queued behind `WARM_UP_SECONDS` of the same work."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(2):
        launch()
    torch.cuda.synchronize()
    once = (time.perf_counter() - start) / 2
    for _ in range(min(int(WARM_UP_SECONDS / once) + 1, 200)):
        launch()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(samples + 1)]
    events[0].record()
    for event in events[1:]:
        launch()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) * 1e3 for before, after in itertools.pairwise(events)]

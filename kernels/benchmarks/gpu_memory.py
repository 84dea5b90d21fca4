"""What the driver says about GPUs while something else runs, memory in use and processes: no CUDA context of the watcher's own is in it."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Sequence
from types import TracebackType

INTERVAL_SECONDS = 1.0
APPS_QUERY = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader")
QUERY = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")


class MemoryWatch:
    """Samples (seconds since the start, MiB in use on all GPUs) for as long as the `with` block lasts. None where there is no nvidia-smi."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, int]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        begin = time.monotonic()
        while True:
            with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
                self.samples.append((time.monotonic() - begin, used_mib()))
            if self._ended.wait(INTERVAL_SECONDS):
                return


def used_mib() -> int:
    """MiB in use on all GPUs."""
    text = subprocess.run(QUERY, capture_output=True, text=True, check=True, timeout=20).stdout
    return sum(int(line) for line in text.splitlines())


def growth_mib(samples: Sequence[tuple[float, int]]) -> int | None:
    """MiB by which the most of the last three quarters exceeds the most of the first, the warm-up; None for fewer than 4 samples."""
    if len(samples) < 4:
        return None
    first = max(1, len(samples) // 4)
    return max(0, max(used for _, used in samples[first:]) - max(used for _, used in samples[:first]))


def processes_by_gpu() -> dict[str, list[int]]:
    """Ids of the processes that compute on each GPU, by the GPU's UUID. Empty where the driver does not tell: in some containers, or without it."""
    found: dict[str, list[int]] = {}
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        for line in subprocess.run(APPS_QUERY, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines():
            gpu, process = line.split(",")
            found.setdefault(gpu.strip(), []).append(int(process))
    return found

"""What a measurement writes down: the run's facts, its rows, and what failed. One JSON object a file, under docs/evidence/."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.graph_timing import TIMING

ROOT = Path(__file__).resolve().parents[2]
EVIDENCE_DIR = ROOT / "docs" / "evidence"
COMMIT_VARIABLE = "DENSE_MLA_COMMIT"
DIRTY_VARIABLE = "DENSE_MLA_DIRTY"
# Where the answer goes and where the source came from: no part of what was measured, and different on every machine.
UNRECORDED_OPTIONS = ("--json", "--commit", "--dirty", "--reuse")


@dataclass(frozen=True)
class RunFacts:
    """Who measured what, where. `None` is a fact that the machine does not tell."""

    command: str
    commit: str
    dirty: bool
    gpu: str
    driver: str | None
    torch: str
    vllm: str | None
    cutlass_dsl: str | None
    date: str

    @property
    def source(self) -> str:
        """The commit, and whether that is all of it."""
        return source_text(self.commit, self.dirty)


@dataclass(frozen=True)
class DecodeRow:
    """One kernel at one shape.

    Attributes:
        kernel: `dense_mla`, `dense_mla+schedule` (the schedule kernel launched before every call), `dense_mla+planned` (captured for longer
            requests, see `planned_for`), `dense_mla+invariant` (batch-invariant cuts), `dense_mla+forward` (no merge), `dense_mla+sm80` (the
            portable kernel), the peer's vLLM name or `B12X`.
        context: keys of the longest request; `keys` is the sum over the batch.
        planned_for: keys of the longest request that the capture allowed for.
        us_samples: microseconds a call, one sample a graph replay; `us` is their median.
        GBps: KV bytes of the batch / `us`.
        relative_l2: of the worst request of the timed buffers, against softmax attention in FP64. `None` for a forward alone that leaves split
            requests open: it has no answer.
        floor_us: KV bytes of the batch / the read ceiling.
        caches: distinct KV caches that the calls of a replay rotate over; `calls` is how many calls that is, fewer for a slow kernel.
        sm_clock_mhz: clock of the SMs while the shape was timed; the same for all kernels of a shape, which were timed in the same rounds.
    """

    kernel: str
    shape: str
    heads: int
    query_len: int
    batch: int
    context: int
    keys: int
    page_size: int
    kv_dtype: str
    partial_dtype: str | None
    planned_for: int
    us_samples: tuple[float, ...]
    us: float
    GBps: float
    relative_l2: float | None
    floor_us: float
    caches: int
    calls: int
    sm_clock_mhz: int | None


@dataclass(frozen=True)
class Failure:
    """A kernel that has no time at a shape, and why."""

    kernel: str
    shape: str
    heads: int
    page_size: int
    partial_dtype: str | None
    error: str


@dataclass
class DecodeEvidence:
    """The file of one bench_decode run. `not_run` names what is still to be run or was left out: an unfinished run never looks like a whole one."""

    facts: RunFacts
    read_ceiling_GBps: float
    rows: list[DecodeRow] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """One flat object: the facts, the ceiling, the rows."""
        return asdict(self.facts) | {
            "read_ceiling_GBps": round(self.read_ceiling_GBps, 1),
            "timing": TIMING,
            "rows": [asdict(row) for row in self.rows],
            "failures": [asdict(failure) for failure in self.failures],
            "not_run": self.not_run,
        }


def collect_facts(commit: str | None, dirty: str | None) -> RunFacts:
    """Facts of this process on the current CUDA device. `commit` and `dirty` ("yes", "no") as the caller gave them.

    Raises:
        ValueError: there is no CUDA device, or the commit is neither given nor readable from git.
    """
    if not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here to measure")
    revision, is_dirty = source_state(commit, dirty)
    return RunFacts(
        command=recorded_command(sys.argv),
        commit=revision,
        dirty=is_dirty,
        gpu=torch.cuda.get_device_name(),
        driver=_driver_version(),
        torch=torch.__version__,
        vllm=_version("vllm"),
        cutlass_dsl=_version("nvidia-cutlass-dsl"),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def recorded_command(argv: Sequence[str]) -> str:
    """The command line as it is written down: from the project's root, without the options that only say where things are."""
    script, *rest = argv
    path = Path(script).resolve()
    kept = [str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name]
    skip = False
    for argument in rest:
        option, has_value = argument.split("=")[0], "=" in argument
        if not skip and option not in UNRECORDED_OPTIONS:
            kept.append(argument)
        skip = not skip and option in UNRECORDED_OPTIONS and not has_value
    return shlex.join(["python", *kept])


def source_state(commit: str | None, dirty: str | None) -> tuple[str, bool]:
    """Commit of the measured source and whether it had uncommitted changes: from the caller, the environment or git, in this order."""
    commit = commit or os.environ.get(COMMIT_VARIABLE)
    dirty = dirty or os.environ.get(DIRTY_VARIABLE)
    if commit:
        if dirty not in ("yes", "no"):
            raise ValueError(f"--dirty (or {DIRTY_VARIABLE}) must be yes or no where the commit is given, got {dirty!r}")
        return commit, dirty == "yes"
    if not (ROOT / ".git").exists():
        raise ValueError(
            f"no .git at the project's root to read the commit from: give --commit and --dirty (or {COMMIT_VARIABLE} and {DIRTY_VARIABLE})"
        )
    # Evidence is an output: writing it does not make the measured source dirty.
    changes = _git("status", "--porcelain", "--", ".", ":(exclude)docs/evidence")
    return _git("rev-parse", "HEAD"), bool(changes)


def source_text(commit: str, dirty: bool) -> str:
    """A commit as it is written beside what it made."""
    return f"{commit[:12]}{', with uncommitted changes' if dirty else ''}"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write whole or not at all: a run that is stopped leaves the last complete state. NaN and infinity are refused."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".part")
    scratch.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    scratch.replace(path)


def error_text(error: BaseException, limit: int = 600) -> str:
    """Type and message of an exception on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:limit]


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"git cannot tell the commit ({done.stderr.strip()}): give --commit and --dirty")
    return done.stdout.strip()


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver_version() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    if path.exists() and (found := re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", path.read_text())):
        return found[1]
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None

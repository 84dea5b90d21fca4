"""One kernel under Nsight Compute, and the numbers on its details page."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

# The second launch of a forward: the first one may find cold instruction caches. The clocks are left as they are.
OPTIONS = "--clock-control none --section SourceCounters --section WarpStateStats --section SpeedOfLight -k regex:orward -s 1 -c 1"
PROFILER = f"ncu {OPTIONS}"
LIMIT_S = 300
NO_PERMISSION = "ERR_NVGPUCTRPERM"
# Names in the evidence: the section and the name on the details page, and what one of its units is in ours.
METRICS: dict[str, tuple[str, str, dict[str, float]]] = {
    "elapsed_cycles": ("GPU Speed Of Light Throughput", "Elapsed Cycles", {"cycle": 1}),
    "sm_active_cycles": ("GPU Speed Of Light Throughput", "SM Active Cycles", {"cycle": 1}),
    "sm_frequency_GHz": ("GPU Speed Of Light Throughput", "SM Frequency", {"Ghz": 1, "Mhz": 1e-3}),
    "duration_us": ("GPU Speed Of Light Throughput", "Duration", {"ns": 1e-3, "us": 1, "ms": 1e3}),
    "compute_throughput_percent": ("GPU Speed Of Light Throughput", "Compute (SM) Throughput", {"%": 1}),
    "memory_throughput_percent": ("GPU Speed Of Light Throughput", "Memory Throughput", {"%": 1}),
    "dram_throughput_percent": ("GPU Speed Of Light Throughput", "DRAM Throughput", {"%": 1}),
    "l1_throughput_percent": ("GPU Speed Of Light Throughput", "L1/TEX Cache Throughput", {"%": 1}),
    "l2_throughput_percent": ("GPU Speed Of Light Throughput", "L2 Cache Throughput", {"%": 1}),
    "cycles_per_issued_instruction": ("Warp State Statistics", "Warp Cycles Per Issued Instruction", {"cycle": 1}),
}


class NoProfileError(Exception):
    """Nsight Compute gave no profile; the message is one line that says why."""


def require_profiler(ncu: str) -> str:
    """Path of Nsight Compute's program.

    Raises:
        NoProfileError: there is none, or no GPU.
    """
    path = shutil.which(ncu)
    if path is None:
        raise NoProfileError(f"no program {ncu}: install Nsight Compute, give its place with --ncu, or condense an export with --csv")
    if not torch.cuda.is_available():
        raise NoProfileError("no CUDA device to profile on: condense an export with --csv")
    return path


def profiled_pages(ncu: str, command: Sequence[str]) -> tuple[str, str]:
    """Runs a command under Nsight Compute and gives the source page, as CSV, and the details page, as text, of its forward kernel.

    Raises:
        NoProfileError: Nsight Compute may not profile, failed, or profiled nothing.
    """
    path = require_profiler(ncu)
    with tempfile.TemporaryDirectory(prefix="profile_") as folder:
        report = Path(folder) / "kernel.ncu-rep"
        printed = _run([path, *OPTIONS.split(), "-f", "-o", str(report), *command])
        if not report.exists():
            raise NoProfileError(f"ncu wrote no report: {_last_line(printed)}")
        return _run([path, "-i", str(report), "--page", "source", "--csv"]), _run([path, "-i", str(report), "--page", "details"])


def _run(command: Sequence[str]) -> str:
    """What a command prints."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise NoProfileError(f"ncu was not through after {LIMIT_S} s") from error
    if NO_PERMISSION in done.stdout + done.stderr:
        raise NoProfileError(f"no permission to read the GPU's performance counters ({NO_PERMISSION}): ask the administrator, or run as root")
    if done.returncode:
        raise NoProfileError(f"ncu ended with status {done.returncode}: {_last_line(done.stdout + done.stderr)}")
    return done.stdout


def _last_line(printed: str) -> str:
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.startswith("==ERROR==")), lines[-1] if lines else "it printed nothing")


def read_metrics(details: str) -> dict[str, float]:
    """The numbers of `METRICS` on a details page, as `ncu --page details` prints it: lines of name, unit and value in sections.

    Raises:
        ValueError: a number is not there, or in a unit that is not known.
    """
    section, values = "", dict[tuple[str, str], tuple[str, str]]()
    for line in details.splitlines():
        if found := re.fullmatch(r"\s*Section: (.*?)\s*", line):
            section = found[1]
        elif len(parts := re.split(r"\s{2,}", line.strip())) == 3:
            values.setdefault((section, parts[0]), (parts[1], parts[2]))
    metrics = {}
    for name, (section, label, units) in METRICS.items():
        if (section, label) not in values:
            raise ValueError(f"details page must have {label} in section {section}")
        unit, value = values[section, label]
        if unit not in units:
            raise ValueError(f"{label} must be in {' or '.join(units)}, got {unit}")
        metrics[name] = round(float(value.replace(",", "")) * units[unit], 4)
    return metrics

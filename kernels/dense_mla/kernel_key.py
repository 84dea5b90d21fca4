"""Under which key a compiled kernel is kept: everything that decides its object file."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from dataclasses import asdict
from functools import cache
from importlib import metadata
from pathlib import Path

from .problem import DecodeProblem

DISTRIBUTIONS = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-core", "apache-tvm-ffi")
# What names a processor and its instructions in Linux's list, on x86 and on ARM.
CPU_FIELDS = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features")


def kernel_key(name: str, problem: DecodeProblem, target: str, options: str, forced: str | None = None) -> str:
    """Key of one kernel, 64 hexadecimal digits.

    Args:
        name: class of the kernel.
        problem: the facts that it is traced with; all of them count.
        target: architecture that it is compiled for, such as sm_90a.
        options: of cute.compile.
        forced: the kernel that the caller asked for, or None where the architecture chose.
    """
    facts = {"kernel": name, "problem": asdict(problem), "target": target, "options": options, "forced": forced}
    return hashlib.sha256(json.dumps(facts | _environment(), sort_keys=True, default=str).encode()).hexdigest()


def _environment() -> dict[str, object]:
    """What decides an object file beside the kernel's facts, the same for all kernels of a process."""
    return {
        "sources": SOURCES,
        "versions": _versions(),
        "toolkit": toolkit(),
        "python": sys.version_info[:2],
        "cpu": _cpu(),
        # Of these, the DSL takes its optimisation level, line numbers and more.
        "dsl": {name: value for name, value in os.environ.items() if name.startswith("CUTE_DSL_")},
    }


def sources_digest() -> str:
    """SHA-256 over the names and bytes of this package's files, as they are on the disk now."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        text = path.read_bytes()
        digest.update(f"{path.name} {len(text)}\n".encode() + text)
    return digest.hexdigest()


# Taken when the package is imported, so that an edit under a running process is not filed under the edited files' key.
SOURCES = sources_digest()


@cache
def toolkit() -> str:
    """The CUDA toolkit that the DSL chose for this machine's driver, such as cu13. Imports CuTe."""
    from cutlass.cute.runtime import find_runtime_libraries

    return ", ".join(Path(path).parent.parent.name for path in find_runtime_libraries(enable_tvm_ffi=False))


@cache
def _versions() -> dict[str, str | None]:
    return {name: _version(name) for name in (*DISTRIBUTIONS, f"nvidia-cutlass-dsl-libs-{toolkit()}")}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@cache
def _cpu() -> dict[str, str]:
    """The processor: LLVM compiles the launch code for it and its instructions alone, AVX-512 among them where there is."""
    found = {"machine": platform.machine()}
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    except OSError:
        return found | {"processor": platform.processor()}
    fields = (line.partition(":") for line in first.splitlines())
    return found | {name.strip(): " ".join(sorted(value.split())) for name, _, value in fields if name.strip() in CPU_FIELDS}

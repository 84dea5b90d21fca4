"""`vllm-dense-mla check`: what a bug report needs to say about a machine, and whether the decode is right on it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from dense_mla import DecodeProblem, unsupported_reason
from dense_mla.arch import ARCHITECTURES, capability_name, compile_target, forward_class, ran_on
from dense_mla.kernel_cache import cache_contents
from dense_mla.problem import PARTIAL_DTYPES

from . import __version__
from .self_test import SELF_TESTS, answer

if TYPE_CHECKING:
    from .settings import DenseMLASettings

Status = Literal["ok", "failed", "not run"]

VLLM_SERIES = "0.33"
DISTRIBUTIONS = ("vllm", "torch", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-python")
LEAST_SHARE = 0.5  # of the read bandwidth; less than half says that something else has the GPU, or that its clocks are held down
VARIABLES = ("VLLM_PLUGINS", "VLLM_BATCH_INVARIANT")  # of vLLM's that decide whether this backend runs


@dataclass(frozen=True)
class Check:
    """One line of the report, or a few: what was looked at and how it came out."""

    name: str
    status: Status
    text: str
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """All checks of a machine."""

    checks: tuple[Check, ...]

    @property
    def is_well(self) -> bool:
        """Whether every check ran and none failed."""
        return all(check.status == "ok" for check in self.checks)

    def __str__(self) -> str:
        lines: list[str] = []
        for check in self.checks:
            first, *rest = check.text.splitlines()
            lines += [f"{check.name:10}{check.status:9}{first}", *(f"{'':19}{line}" for line in rest)]
        return "\n".join([*lines, "", self._verdict()])

    def to_json(self) -> str:
        """One object: `ok`, and each check with its values."""
        checks = [{"name": check.name, "status": check.status, "text": check.text, **check.values} for check in self.checks]
        return json.dumps({"ok": self.is_well, "checks": checks}, indent=1)

    def _verdict(self) -> str:
        bad = [f"{check.name} {check.status}" for check in self.checks if check.status != "ok"]
        return f"Not well: {', '.join(bad)}. docs/troubleshooting.md has the cures." if bad else "All is well."


def collect_report() -> Report:
    """Run every check on this machine. A check that raises has failed; the others still run."""
    parts: dict[str, Callable[[], Check]] = {
        "versions": _check_versions,
        "plugin": _check_plugin,
        "GPUs": _check_gpus,
        "kernels": _check_kernels,
        "settings": _check_settings,
        "self-test": _check_answers,
        "bandwidth": _check_bandwidth,
    }
    return Report(tuple(_guarded(name, part) for name, part in parts.items()))


def _guarded(name: str, part: Callable[[], Check]) -> Check:
    try:
        return part()
    except Exception as error:  # a report is for machines where anything may be broken
        return Check(name, "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")


def _check_versions() -> Check:
    versions = {name: _version(name) for name in DISTRIBUTIONS}
    facts = {"vllm-dense-mla": __version__, **versions, "python": platform.python_version(), "CUDA of torch": torch.version.cuda}
    facts["driver"] = driver_version()
    words = [f"{name} {version or 'missing'}" for name, version in facts.items() if name != "driver"]
    driver = f"driver {facts['driver'] or 'none'}, {platform.system()} {platform.machine()}"
    text = "\n".join((", ".join(words[:4]), ", ".join(words[4:]), driver))
    missing = [name for name in DISTRIBUTIONS if versions[name] is None]
    if missing:
        return Check("versions", "failed", f"{text}\nmissing: {', '.join(missing)}", {"versions": facts})
    if not str(versions["vllm"]).startswith(VLLM_SERIES + "."):
        return Check("versions", "failed", f"{text}\nvLLM must be {VLLM_SERIES}, got {versions['vllm']}", {"versions": facts})
    return Check("versions", "ok", text, {"versions": facts})


def _check_plugin() -> Check:
    """Whether vLLM finds the entry point, is allowed to load it, and gets the backend from it."""
    import vllm_dense_mla

    points = [point for point in importlib.metadata.entry_points(group="vllm.general_plugins") if point.value == "vllm_dense_mla:register"]
    if not points:
        return Check("plugin", "failed", "vLLM finds no entry point of vllm-dense-mla: install it into the environment that vLLM is in")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and points[0].name not in allowed.split(","):
        return Check("plugin", "failed", f"VLLM_PLUGINS must list {points[0].name}, got {allowed!r}: vLLM does not load the plugin")
    vllm_dense_mla.register()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    member = AttentionBackendEnum["DENSE_MLA"]
    return Check("plugin", "ok", f"{member.name} is {member.get_class().__module__}.{member.get_class().__qualname__}")


def _check_gpus() -> Check:
    gpus = [_gpu(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    if not gpus:
        return Check("GPUs", "failed", f"no CUDA device ({_no_cuda_reason()}): the kernels cannot run here, everything else can", {"gpus": []})
    text = "\n".join(
        f"{gpu['index']}: {gpu['name']}, compute capability {gpu['capability']}, {gpu['sms']} SMs, "
        f"{gpu['memory_GiB']:.1f} GiB ({gpu['free_GiB']:.1f} free)"
        for gpu in gpus
    )
    return Check("GPUs", "ok", text, {"gpus": gpus})


def _check_kernels() -> Check:
    """Every kernel that this version has: the GPUs here that run it, or why none does, and which of them are the first of their kind."""
    here = {index: torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())} if torch.cuda.is_available() else {}
    lines = [_kernel_line(name, capabilities, here) for name, capabilities in kernel_table().items()]
    refused = {index: reason for index, capability in here.items() if (reason := unsupported_reason(capability)) is not None}
    lines += [f"GPU {index}: {reason}" for index, reason in refused.items()]
    served = {index: capability for index, capability in here.items() if index not in refused}
    first_of_kind = {index: each for index, each in served.items() if ran_on(each) is None}
    lines += [
        f"GPU {index}: compiled for compute capability {capability_name(each)} and never run on such a GPU: the self-test below has to show it"
        for index, each in first_of_kind.items()
    ]
    values = {
        "kernels": {str(index): f"{', '.join(kernel_names(each))} for {compile_target(each)}" for index, each in served.items()},
        "compiled_only": list(first_of_kind),
    }
    status: Status = "failed" if refused else "ok" if here else "not run"
    return Check("kernels", status, "\n".join(lines), values)


def kernel_table() -> dict[str, list[tuple[int, int]]]:
    """The forward kernels, by name, and the compute capabilities that each serves."""
    table: dict[str, list[tuple[int, int]]] = {}
    for capability in ARCHITECTURES:
        for name in kernel_names(capability) if unsupported_reason(capability) is None else ():
            table.setdefault(name, []).append(capability)
    return table


def kernel_names(capability: tuple[int, int]) -> list[str]:
    """The forward kernels of a supported capability: for few rows and for many, and for what caches there are."""
    return list(dict.fromkeys(name for problem in SELF_TESTS if (name := _kernel_of(capability, problem)) is not None))


def _kernel_of(capability: tuple[int, int], problem: DecodeProblem) -> str | None:
    try:
        return forward_class(capability, problem).__name__
    except ValueError:  # not every GPU has a kernel for every cache
        return None


def _kernel_line(name: str, capabilities: list[tuple[int, int]], here: dict[int, tuple[int, int]]) -> str:
    served = ", ".join(map(capability_name, capabilities))
    runs_on = [str(index) for index, capability in here.items() if capability in capabilities]
    if runs_on:
        return f"{name} runs on GPU {', '.join(runs_on)}"
    why = "no GPU of that kind is here" if here else "no GPU is here"
    return f"{name} does not run: it needs compute capability {served}, and {why}"


def _check_settings() -> Check:
    from .registration import CACHE_DIR_VARIABLE, PARTIAL_DTYPE_VARIABLE
    from .settings import load_settings

    settings = load_settings()
    lines = [f"partial dtype {settings.partial_dtype} ({settings.partial_dtype_source})"]
    values: dict[str, dict[str, Any]] = {PARTIAL_DTYPE_VARIABLE: {"value": settings.partial_dtype, "source": settings.partial_dtype_source}}
    cache_line, values[CACHE_DIR_VARIABLE] = _kernel_cache(settings)
    lines.append(cache_line)
    lines += [f"{name} {os.environ[name]!r} (environment)" if name in os.environ else f"{name} not set" for name in VARIABLES]
    values |= {name: {"value": os.environ[name], "source": "environment"} for name in VARIABLES if name in os.environ}
    return Check("settings", "ok", "\n".join(lines), {"settings": values})


def _kernel_cache(settings: DenseMLASettings) -> tuple[str, dict[str, Any]]:
    """Where compiled kernels are kept and how many there are, as a line and as values."""
    folder, place, source = settings.cache_folder, settings.cache_place, settings.cache_dir_source
    line, values = f"kernel cache {place} ({source})", {"value": place, "source": source}
    if folder is None:
        return line, values
    contents = cache_contents(folder)
    values |= asdict(contents)
    # The server's words, so that they are found in the documentation.
    if contents.refusal is not None:
        return f"{line} is not used: {contents.refusal}", values
    line += f": {contents.entries} kernels of {contents.bytes:,} bytes"
    if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
        line += "; it cannot be written: kernels that it lacks are compiled and not kept"
    return line, values


def _check_answers() -> Check:
    """One ragged batch for each problem and partial dtype against FP64, with NaN wherever no request may read."""
    device = supported_gpu()
    results = [[answer(replace(problem, partial_dtype=dtype), device) for dtype in PARTIAL_DTYPES] for problem in SELF_TESTS]
    how = f"the kernels on {torch.cuda.get_device_name(device)} (GPU {device.index})" if device else "the torch reference on the CPU: no kernel ran"
    lines = [f"{how}; error against FP64 in units of a rounding to BF16"]
    for problem, rows in zip(SELF_TESTS, results, strict=True):
        errors = ", ".join(f"{each['partial_dtype']} partials {each['error']:.2f} (at most {each['bound']})" for each in rows)
        cache = ", FP8 cache" if problem.needs_k_scale else ""
        lines.append(f"{problem.num_heads} heads, pages of {problem.page_size}{cache}: {errors}")
    flat = list(chain.from_iterable(results))
    right = all(each["error"] <= each["bound"] for each in flat)  # NaN is not
    path = "kernels" if device else "reference"
    return Check("self-test", "ok" if right else "failed", "\n".join(lines), {"path": path, "results": flat})


def _check_bandwidth() -> Check:
    device = supported_gpu()
    if device is None:
        return Check("bandwidth", "not run", "no GPU that the kernels support")
    from .read_bandwidth import DECODE_KEYS, DECODE_REQUESTS, measure_decode, measure_read
    from .settings import load_settings

    problem = replace(SELF_TESTS[0], partial_dtype=load_settings().torch_dtype)
    read, decode = measure_read(device), measure_decode(problem, device)
    share = decode / read
    batch = f"{DECODE_REQUESTS} requests of {DECODE_KEYS:,} keys, {problem.num_heads} heads"
    text = f"read {read:,.0f} GB/s; decode {decode:,.0f} GB/s of keys, {share:.0%} of that ({batch})"
    values = {"read_GBps": round(read, 1), "decode_GBps": round(decode, 1), "share": round(share, 3)}
    if share < LEAST_SHARE:
        return Check("bandwidth", "failed", f"{text}\nthe decode must reach {LEAST_SHARE:.0%}: is something else running on this GPU?", values)
    return Check("bandwidth", "ok", text, values)


def supported_gpu() -> torch.device | None:
    """The first GPU that has kernels."""
    indices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return next((torch.device("cuda", i) for i in indices if unsupported_reason(torch.cuda.get_device_capability(i)) is None), None)


def driver_version() -> str | None:
    """Version of NVIDIA's driver, or None where there is none."""
    module = Path("/proc/driver/nvidia/version")
    if module.exists() and (found := re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", module.read_text())):
        return found[1]
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def _no_cuda_reason() -> str:
    """Why torch has no CUDA: no driver, one that is too old, no device shown to it."""
    try:
        torch.cuda.init()
    except Exception as error:  # torch raises AssertionError and RuntimeError, by the cause
        return " ".join(str(error).split()).split(". ")[0].rstrip(".")
    return "torch counts none"


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return {
        "index": index,
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "sms": properties.multi_processor_count,
        "memory_GiB": round(total / 2**30, 1),
        "free_GiB": round(free / 2**30, 1),
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None

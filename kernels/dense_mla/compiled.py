"""Compiled kernels, once per device for the whole process, and from a cache on disk where another process compiled them before."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .arch import architecture, build_forward, unsupported_reason
from .kernel_cache import KernelCache
from .kernel_key import kernel_key
from .problem import WHOLE_CONTEXT, DecodeProblem

LOG2_E = math.log2(math.e)
# cute.compile keeps its state in one global object: two threads in it at once abort the process.
_COMPILE_LOCK = threading.Lock()


@dataclass(frozen=True)
class CompiledKernels:
    """The three launches of a problem on one device. Each is a callable over torch tensors that uses the current stream.

    `row_tiles`: CTAs that share one range of keys; the portable kernel holds fewer rows a CTA than the Hopper ones.
    """

    schedule: Callable[..., Any]
    forward: Callable[..., Any]
    merge: Callable[..., Any]
    row_tiles: int


@dataclass(frozen=True)
class KernelSource:
    """One kernel that is not compiled yet.

    `problem` has the facts that it depends on, and one fixed value for each of the others: what compares equal compiles to the same kernel.
    """

    problem: DecodeProblem
    function: Any
    arguments: Callable[[], tuple[Any, ...]]

    @property
    def name(self) -> str:
        """The kernel's class."""
        return type(self.function).__name__

    def compile(self, options: str) -> Any:
        """What cute.compile makes of it."""
        import cutlass.cute as cute

        return cute.compile(self.function, *self.arguments(), options=options)


def schedule_problem(problem: DecodeProblem) -> DecodeProblem:
    """What the schedule kernel is compiled for: pages, how requests may be cut, and what starting one costs."""
    kv_dtype = problem.kv_dtype if problem.needs_k_scale else torch.bfloat16
    return DecodeProblem(1, problem.page_size, kv_dtype=kv_dtype, batch_invariant=problem.batch_invariant)


def merge_problem(problem: DecodeProblem) -> DecodeProblem:
    """What the merge kernel is compiled for: everything about the rows, and nothing about the keys."""
    return replace(problem, page_size=64, kv_dtype=problem.query_dtype, causal=True, context=WHOLE_CONTEXT)


def kernel_sources(problem: DecodeProblem, capability: tuple[int, int], kernel: str | None = None) -> tuple[KernelSource, KernelSource, KernelSource]:
    """Schedule, forward and merge of a problem. Imports CuTe and compiles nothing; errors as of `compile_kernels`."""
    facts = architecture(capability)
    forward = build_forward(capability, problem, kernel)
    from . import forward_sm90, merge, schedule_kernel

    planned, merged = schedule_problem(problem), merge_problem(problem)
    return (
        KernelSource(planned, schedule_kernel.ScheduleKernel(planned, facts.dependent_launch), schedule_kernel.fake_arguments),
        KernelSource(problem, forward, partial(forward_sm90.fake_arguments, problem)),
        KernelSource(merged, merge.Merge(merged, facts.dependent_launch, facts.shared_memory_limit), partial(merge.fake_arguments, merged)),
    )


def compile_options(capability: tuple[int, int], *extra: str) -> str:
    """Options of cute.compile for a capability."""
    return " ".join((f"--gpu-arch {architecture(capability).target}", "--enable-tvm-ffi", *extra))


def compile_kernels(
    problem: DecodeProblem, capability: tuple[int, int], *extra_options: str, kernel: str | None = None
) -> CompiledKernels:
    """Compiles the kernels of a problem; needs no GPU and no cache.

    Args:
        extra_options: further options of cute.compile, such as "--keep-cubin".
        kernel: as in `arch.forward_class`.

    Raises:
        ValueError: `capability` has no kernel, or no such one.
    """
    options = compile_options(capability, *extra_options)
    with _COMPILE_LOCK:
        sources = kernel_sources(problem, capability, kernel)
        schedule, forward, merge = [source.compile(options) for source in sources]
    return CompiledKernels(schedule, forward, merge, sources[1].function.row_tiles)


@dataclass(frozen=True)
class Preparation:
    """What preparing kernels took in this process so far: those compiled, those loaded from the cache, and seconds, waiting included."""

    compiled: int = 0
    loaded: int = 0
    seconds: float = 0.0


class _Prepared:
    """The kernels of this process. Problems that differ in nothing that a kernel depends on share it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.problems: dict[tuple[Any, ...], CompiledKernels] = {}
        self.kernels: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self.preparation = Preparation()

    def prepare(
        self, problem: DecodeProblem, device_index: int, capability: tuple[int, int], kernel: str | None, cache: KernelCache | None
    ) -> CompiledKernels:
        start = time.perf_counter()
        with _COMPILE_LOCK:  # loading goes through the DSL's global object too
            sources = kernel_sources(problem, capability, kernel)
            schedule, forward, merge = [self._kernel(source, device_index, capability, kernel, cache) for source in sources]
        seconds = self.preparation.seconds + time.perf_counter() - start
        self.preparation = replace(self.preparation, seconds=seconds)
        return CompiledKernels(schedule, forward, merge, sources[1].function.row_tiles)

    def _kernel(
        self, source: KernelSource, device_index: int, capability: tuple[int, int], forced: str | None, cache: KernelCache | None
    ) -> Callable[..., Any]:
        known = source.name, source.problem, device_index, capability, forced
        if known not in self.kernels:
            self.kernels[known] = self._fetch(source, capability, forced, cache)
        return self.kernels[known]

    def _fetch(self, source: KernelSource, capability: tuple[int, int], forced: str | None, cache: KernelCache | None) -> Callable[..., Any]:
        options, target, loaded = compile_options(capability), architecture(capability).target, False
        key = cache.key(partial(kernel_key, source.name, source.problem, target, options, forced)) if cache is not None else None
        if cache is None or key is None:
            kernel = source.compile(options)
        else:
            kernel, loaded = cache.fetch(source.name, key, partial(source.compile, options))
        self.preparation = replace(
            self.preparation, compiled=self.preparation.compiled + (not loaded), loaded=self.preparation.loaded + loaded
        )
        return kernel  # type: ignore[no-any-return]


_PREPARED = _Prepared()


def preparation() -> Preparation:
    """What preparing kernels took in this process so far."""
    return _PREPARED.preparation


def prepared_kernels(
    problem: DecodeProblem, device: torch.device, kernel: str | None = None, cache_dir: Path | None = None
) -> CompiledKernels:
    """The kernels of a problem for `device`, loaded from the cache or compiled on the first call.

    Args:
        cache_dir: folder of the cache, an absolute path, or None for no cache; of no effect on what this process has already.

    Raises:
        ValueError: the device has no kernel, or none that fits its shared memory, or `cache_dir` is not absolute.
        RuntimeError: called for a new problem while a CUDA graph is captured.
    """
    capability = torch.cuda.get_device_capability(device)
    reason = unsupported_reason(capability)
    if reason is not None:
        raise ValueError(reason)
    if cache_dir is not None and not cache_dir.is_absolute():
        raise ValueError(f"cache_dir must be an absolute path, got {str(cache_dir)!r}")
    known = problem, device.index, capability, kernel
    with _PREPARED.lock:  # a second thread waits for the first, and finds its kernels
        if known not in _PREPARED.problems:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("DenseMLADecoder.prepare must run before CUDA graph capture: it compiles and loads kernels")
            cache = None if cache_dir is None else KernelCache.open(cache_dir)
            _PREPARED.problems[known] = _PREPARED.prepare(problem, device.index, capability, kernel, cache)
        return _PREPARED.problems[known]

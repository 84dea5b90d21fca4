"""Compiled kernels, once per problem and device for the whole process."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from .arch import architecture, build_forward, unsupported_reason
from .problem import DecodeProblem

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


def compile_kernels(
    problem: DecodeProblem, capability: tuple[int, int], *extra_options: str, kernel: str | None = None
) -> CompiledKernels:
    """Compiles the kernels of a problem; needs no GPU.

    Args:
        extra_options: further options of cute.compile, such as "--keep-cubin".
        kernel: as in `arch.forward_class`.

    Raises:
        ValueError: `capability` has no kernel, or no such one.
    """
    facts = architecture(capability)
    import cutlass.cute as cute

    from . import forward_sm90, merge, schedule_kernel

    options = " ".join((f"--gpu-arch {facts.target}", "--enable-tvm-ffi", *extra_options))
    dependent = facts.dependent_launch
    with _COMPILE_LOCK:
        forward = build_forward(capability, problem, kernel)
        return CompiledKernels(
            cute.compile(schedule_kernel.ScheduleKernel(problem, dependent), *schedule_kernel.fake_arguments(), options=options),
            cute.compile(forward, *forward_sm90.fake_arguments(problem), options=options),
            cute.compile(merge.Merge(problem, dependent), *merge.fake_arguments(problem), options=options),
            forward.row_tiles,
        )


_PREPARE_LOCK = threading.Lock()


@cache
def _prepared(problem: DecodeProblem, device_index: int, capability: tuple[int, int], kernel: str | None) -> CompiledKernels:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("DenseMLADecoder.prepare must run before CUDA graph capture: it compiles and loads kernels")
    return compile_kernels(problem, capability, kernel=kernel)


def prepared_kernels(problem: DecodeProblem, device: torch.device, kernel: str | None = None) -> CompiledKernels:
    """The kernels of a problem for `device`, compiled on the first call.

    Raises:
        ValueError: the device has no kernel.
        RuntimeError: called for a new problem while a CUDA graph is captured.
    """
    capability = torch.cuda.get_device_capability(device)
    reason = unsupported_reason(capability)
    if reason is not None and kernel is None:
        raise ValueError(reason)
    # functools.cache lets two threads compute the same entry; the lock makes the second one wait.
    with _PREPARE_LOCK:
        return _prepared(problem, device.index, capability, kernel)

"""Which GPUs have kernels, and which one runs. The only place that compares compute capabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .problem import DecodeProblem

WIDE_ROWS = 32  # rows of a CTA above which the Hopper kernel for many rows is the faster one
KERNELS = ("sm90", "sm80")


@dataclass(frozen=True)
class Architecture:
    """What the kernels have to know of a compute capability.

    Attributes:
        target: what to compile for.
        shared_memory_limit: bytes that a CTA may have.
        dependent_launch: whether there is griddepcontrol.
    """

    target: str
    shared_memory_limit: int
    dependent_launch: bool


HOPPER = (9, 0)
ARCHITECTURES = {
    (8, 0): Architecture("sm_80", 166_912, False),
    (8, 6): Architecture("sm_86", 101_376, False),
    (8, 7): Architecture("sm_87", 166_912, False),
    (8, 9): Architecture("sm_89", 101_376, False),
    HOPPER: Architecture("sm_90a", 232_448, True),
    (10, 0): Architecture("sm_100a", 232_448, True),
    (10, 3): Architecture("sm_103a", 232_448, True),
    (11, 0): Architecture("sm_110a", 232_448, True),
    (12, 0): Architecture("sm_120a", 101_376, True),
    (12, 1): Architecture("sm_121a", 101_376, True),
}


# Where the kernels passed their tests on hardware. The portable kernels compile for the others and may be forced; they are not chosen there.
VERIFIED = (HOPPER,)
# KV caches that models were served with, on all of VERIFIED. The Hopper kernel of E4M3 caches has passed its tests; that is not enough to offer it.
VERIFIED_KV_DTYPES = (torch.bfloat16, torch.float16)


def unsupported_reason(capability: tuple[int, int]) -> str | None:
    """Why a compute capability is not served, or None where it is."""
    if capability in VERIFIED:
        return None
    here, supported = f"{capability[0]}.{capability[1]}", ", ".join(f"{major}.{minor}" for major, minor in VERIFIED)
    why = "its portable kernel has not passed its tests yet" if capability in ARCHITECTURES else "there is no kernel for it"
    return f"compute capability {here} is not supported: {why}; supported: {supported} (H100, H200)"


def architecture(capability: tuple[int, int]) -> Architecture:
    """Facts of a capability that kernels compile for.

    Raises:
        ValueError: there is none.
    """
    if capability not in ARCHITECTURES:
        raise ValueError(unsupported_reason(capability))
    return ARCHITECTURES[capability]


def compile_target(capability: tuple[int, int]) -> str:
    """Architecture name to compile for; ValueError where there is no kernel."""
    return architecture(capability).target


def forward_class(capability: tuple[int, int], problem: DecodeProblem | None = None, kernel: str | None = None) -> type[Any]:
    """The forward kernel's class. Imports CuTe.

    Args:
        problem: decides between the kernels of an architecture, by its cache and its rows; without one, the class for a few rows of 16 bits.
        kernel: "sm80" forces the portable kernel; by default each GPU runs the fastest that it has.

    Raises:
        ValueError: no kernel for this capability, or no such kernel on it.
    """
    architecture(capability)
    if kernel not in (None, *KERNELS):
        raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, got {kernel}")
    if kernel == "sm90" and capability != HOPPER:
        raise ValueError(f"kernel sm90 needs compute capability 9.0, got {capability[0]}.{capability[1]}")
    fp8 = problem is not None and problem.needs_k_scale
    if _is_portable(capability, kernel):
        from .forward_sm80 import ForwardSm80
        from .forward_sm80_fp8 import ForwardSm80Fp8

        return ForwardSm80Fp8 if fp8 else ForwardSm80
    if fp8:
        from .forward_sm90_fp8 import ForwardSm90Fp8

        return ForwardSm90Fp8
    if problem is not None and problem.tile_rows > WIDE_ROWS:
        from .forward_sm90_wide import ForwardSm90Wide

        return ForwardSm90Wide
    from .forward_sm90 import ForwardSm90

    return ForwardSm90


def build_forward(capability: tuple[int, int], problem: DecodeProblem, kernel: str | None = None) -> Any:
    """The forward kernel of a problem, not compiled; ValueError as `forward_class`, or where its tile does not fit the shared memory."""
    facts = architecture(capability)
    forward = forward_class(capability, problem, kernel)
    if _is_portable(capability, kernel):
        return forward(problem, facts.shared_memory_limit, facts.dependent_launch)
    return forward(problem)


def _is_portable(capability: tuple[int, int], kernel: str | None) -> bool:
    return kernel == "sm80" or capability != HOPPER

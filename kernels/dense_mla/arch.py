"""Which GPUs have kernels, and which one runs. The only place that compares compute capabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
        converts_e4m3: whether there is an instruction from E4M3 to FP16.
    """

    target: str
    shared_memory_limit: int
    dependent_launch: bool
    converts_e4m3: bool


HOPPER = (9, 0)
ARCHITECTURES = {
    (8, 0): Architecture("sm_80", 166_912, False, False),
    (8, 6): Architecture("sm_86", 101_376, False, False),
    (8, 7): Architecture("sm_87", 166_912, False, False),
    (8, 9): Architecture("sm_89", 101_376, False, True),
    HOPPER: Architecture("sm_90a", 232_448, True, True),
    (10, 0): Architecture("sm_100a", 232_448, True, True),
    (10, 3): Architecture("sm_103a", 232_448, True, True),
    (11, 0): Architecture("sm_110a", 232_448, True, True),
    (12, 0): Architecture("sm_120a", 101_376, True, True),
    (12, 1): Architecture("sm_121a", 101_376, True, True),
}


# GPUs on which each kernel passed its tests. Whatever is not here was compiled for that capability and never run on it: it is served all the
# same, and everything that speaks of a GPU says so by this table.
RAN_ON: dict[tuple[int, int], dict[str, str]] = {HOPPER: {"sm90": "NVIDIA H200", "sm80": "NVIDIA H200"}}


def unsupported_reason(capability: tuple[int, int]) -> str | None:
    """Why a compute capability is not served, or None where it is."""
    if capability in ARCHITECTURES:
        return None
    supported = ", ".join(map(capability_name, ARCHITECTURES))
    return f"compute capability {capability_name(capability)} is not supported: there is no kernel for it; supported: {supported}"


def capability_name(capability: tuple[int, int]) -> str:
    """As NVIDIA writes it: 9.0."""
    return f"{capability[0]}.{capability[1]}"


def chosen_kernel(capability: tuple[int, int]) -> str:
    """Which of KERNELS a GPU with kernels runs by itself: the fastest that it has."""
    return "sm90" if capability == HOPPER else "sm80"


def ran_on(capability: tuple[int, int], kernel: str | None = None) -> str | None:
    """The GPU of this capability that a kernel (by default the one that runs there) passed its tests on; None: it was compiled only."""
    return RAN_ON.get(capability, {}).get(kernel or chosen_kernel(capability))


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
        raise ValueError(f"kernel sm90 needs compute capability 9.0, got {capability_name(capability)}")
    fp8 = problem is not None and problem.needs_k_scale
    if (kernel or chosen_kernel(capability)) == "sm80":
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
    if (kernel or chosen_kernel(capability)) == "sm80":
        conversion = {"converts_e4m3": facts.converts_e4m3} if problem.needs_k_scale else {}
        return forward(problem, facts.shared_memory_limit, facts.dependent_launch, **conversion)
    return forward(problem)

"""Which GPUs have kernels. The only place that compares compute capabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .forward_sm90 import ForwardSm90

_TARGETS = {(9, 0): "sm_90a"}


def unsupported_reason(capability: tuple[int, int]) -> str | None:
    """Why there is no kernel for a compute capability, or None where there is one."""
    if capability in _TARGETS:
        return None
    supported = ", ".join(f"{major}.{minor}" for major, minor in _TARGETS)
    return f"compute capability {capability[0]}.{capability[1]} has no dense MLA kernel; supported: {supported} (H100, H200)"


def compile_target(capability: tuple[int, int]) -> str:
    """Architecture name to compile for.

    Raises:
        ValueError: no kernel for this capability.
    """
    reason = unsupported_reason(capability)
    if reason is not None:
        raise ValueError(reason)
    return _TARGETS[capability]


def forward_class(capability: tuple[int, int]) -> type[ForwardSm90]:
    """The forward kernel of a supported capability. Imports CuTe."""
    compile_target(capability)
    from .forward_sm90 import ForwardSm90

    return ForwardSm90

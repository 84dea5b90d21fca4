"""Prepared split-KV kernels for MLA decode: torch and CuTe DSL, no vLLM.

`DenseMLADecoder` is the door to the kernels. It is imported on first use, because CUTLASS takes seconds to import: sizing a workspace and
running the reference need torch alone, on any machine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .problem import DecodeProblem
from .workspace import WorkspaceSize, workspace_size

if TYPE_CHECKING:
    from .arch import unsupported_reason
    from .decoder import DenseMLADecoder

__all__ = ["DecodeProblem", "DenseMLADecoder", "WorkspaceSize", "unsupported_reason", "workspace_size"]

_LAZY = {"DenseMLADecoder": ".decoder", "unsupported_reason": ".arch"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name], __name__), name)

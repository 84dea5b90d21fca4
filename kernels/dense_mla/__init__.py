"""Prepared split-KV kernels for MLA decode: torch and CuTe DSL, no vLLM.

`DenseMLADecoder` is the door to the kernels. Importing the package imports no CUTLASS, which takes seconds: preparing kernels does. Sizing a
workspace and running the reference need torch alone.
"""

from .arch import unsupported_reason
from .decoder import DenseMLADecoder
from .problem import DecodeProblem
from .workspace import WorkspaceSize, workspace_size

__all__ = ["DecodeProblem", "DenseMLADecoder", "WorkspaceSize", "unsupported_reason", "workspace_size"]

"""torch's element types in CuTe's words."""

from typing import Any

import cutlass
import torch

_CUTLASS_DTYPES: dict[torch.dtype, Any] = {
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
    torch.float32: cutlass.Float32,
    torch.float8_e4m3fn: cutlass.Float8E4M3FN,
}


def cutlass_dtype(dtype: torch.dtype) -> Any:
    """The CuTe numeric type that stores `dtype`."""
    return _CUTLASS_DTYPES[dtype]

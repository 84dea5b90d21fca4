"""Asynchronous copies of 16 bytes from global to shared memory, on every architecture from SM80 on."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import dsl_user_op

COPY_BYTES = 16


@dsl_user_op
def copy_or_zero(target: cute.Pointer, source: cute.Pointer, num_bytes: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """cp.async of 16 bytes past L1. With `num_bytes` 0 nothing is read, wherever `source` points, and the target is filled with zeros."""
    nvvm.cp_async_shared_global(
        target.to_llvm_ptr(loc=loc, ip=ip),
        source.to_llvm_ptr(loc=loc, ip=ip),
        COPY_BYTES,
        nvvm.LoadCacheModifierKind.CG,
        cp_size=Int32(num_bytes).ir_value(loc=loc, ip=ip),
        loc=loc,
        ip=ip,
    )

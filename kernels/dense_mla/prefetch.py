"""Prefetches that no cached copy can go stale by."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def prefetch_l2(pointer: cute.Pointer, *, loc: Any = None, ip: Any = None) -> None:
    """Ask for the line at a global address in L2, and so for its translation. L1 stays as it is: what is written meanwhile will be seen."""
    address = Int64(pointer.toint(loc=loc, ip=ip)).ir_value(loc=loc, ip=ip)
    llvm.inline_asm(
        None, [address], "prefetch.global.L2 [$0];", "l",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip

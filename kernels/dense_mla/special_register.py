"""Values that the optimiser must take as they are, and where they stand."""

from typing import Any

from cutlass import Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def pinned_lane_index(*, loc: Any = None, ip: Any = None) -> Int32:
    """Lane of the thread, opaque to the optimiser: what depends on it is computed here and not hoisted out of the loops around it."""
    lane = llvm.inline_asm(
        T.i32(), [], "mov.u32 $0, %laneid;", "=r",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip
    return Int32(lane)


@dsl_user_op
def pinned(value: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """The value itself, opaque to the optimiser."""
    operand = value.ir_value(loc=loc, ip=ip)
    word = llvm.inline_asm(
        T.i32(), [operand], "mov.b32 $0, $1;", "=r,r",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip
    return Int32(word)

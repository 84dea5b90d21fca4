"""E4M3 bytes in shared memory to FP16 operands in registers, and BF16 queries to FP16: single instructions that CuTe has no word for.

All addresses are 32-bit shared-memory addresses. An "f16x2 word" is two FP16 values in a Uint32, the first in the lower half.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

MEMORY = "~{memory}"
Q_EXPONENT = 14  # a row's largest value of Q is brought into [2^14, 2^15)
LOWEST_PAIR = 0xDF00DF00  # -448, the least E4M3 number, as two FP16 values


def _asm(results: int, text: str, constraints: str, operands: list[Any], loc: Any, ip: Any, *, effects: bool) -> Any:
    """Inline PTX with `results` 32-bit results: None, a word, or a list of words."""
    kinds = {0: lambda: None, 1: T.i32}
    kind = kinds[results]() if results in kinds else llvm.StructType.get_literal([T.i32()] * results)
    values = [operand.ir_value(loc=loc, ip=ip) for operand in operands]
    out = llvm.inline_asm(
        kind, values, text, constraints,
        has_side_effects=effects, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip
    if results < 2:
        return Uint32(out) if results else None
    return [Uint32(llvm.extractvalue(T.i32(), out, [i], loc=loc, ip=ip)) for i in range(results)]


@dsl_user_op
def load_word(address: Int32, offset: int = 0, *, loc: Any = None, ip: Any = None) -> Uint32:
    return _asm(1, f"ld.shared.b32 $0, [$1 + {offset}];", f"=r,r,{MEMORY}", [Int32(address)], loc, ip, effects=True)


@dsl_user_op
def store_word(address: Int32, word: Uint32, offset: int = 0, *, loc: Any = None, ip: Any = None) -> None:
    _asm(0, f"st.shared.b32 [$0 + {offset}], $1;", f"r,r,{MEMORY}", [Int32(address), Uint32(word)], loc, ip, effects=True)


@dsl_user_op
def load_unit(address: Int32, offset: int = 0, *, loc: Any = None, ip: Any = None) -> list[Uint32]:
    """Four words from a multiple of 16 bytes."""
    text = f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4 + {offset}];"
    return _asm(4, text, f"=r,=r,=r,=r,r,{MEMORY}", [Int32(address)], loc, ip, effects=True)


@dsl_user_op
def clear_unit(address: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Sixteen bytes of zeros."""
    _asm(0, "st.shared.v4.b32 [$0], {$1, $1, $1, $1};", f"r,r,{MEMORY}", [Int32(address), Uint32(0)], loc, ip, effects=True)


@dsl_user_op
def load_transposed(address: Int32, offset: int = 0, *, loc: Any = None, ip: Any = None) -> list[Uint32]:
    """ldmatrix.x4.trans on pairs of bytes: lane (g, q) gets bytes 2g, 2g + 1 of row 2q and then of row 2q + 1, of each of four matrices."""
    text = f"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$0, $1, $2, $3}}, [$4 + {offset}];"
    return _asm(4, text, f"=r,=r,=r,=r,r,{MEMORY}", [Int32(address)], loc, ip, effects=True)


@dsl_user_op
def e4m3_to_f16(word: Uint32, *, loc: Any = None, ip: Any = None) -> list[Uint32]:
    """Four E4M3 bytes to two f16x2 words, bytes 0, 1 and bytes 2, 3. Exact; NaN stays NaN."""
    text = "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }"
    return _asm(2, text, "=r,=r,r", [Uint32(word)], loc, ip, effects=False)


@dsl_user_op
def swap_middle_bytes(word: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Bytes 0, 1, 2, 3 to 0, 2, 1, 3: (key, column) pairs of two keys to pairs of the same column."""
    return _asm(1, "prmt.b32 $0, $1, $1, 0x3120;", "=r,r", [Uint32(word)], loc, ip, effects=False)


@dsl_user_op
def numbers_only(word: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """An f16x2 word of E4M3 numbers with NaN made -448: of a number and NaN, the maximum is the number."""
    return _asm(1, "max.f16x2 $0, $1, $2;", "=r,r,r", [Uint32(word), Uint32(LOWEST_PAIR)], loc, ip, effects=False)


@dsl_user_op
def power_of_two(exponent_bits: Int32, *, loc: Any = None, ip: Any = None) -> Float32:
    """2^(exponent_bits - 127), exponent_bits from 1 to 254."""
    out = llvm.inline_asm(
        T.f32(), [Int32(exponent_bits).ir_value(loc=loc, ip=ip)], "{ .reg .b32 b; shl.b32 b, $1, 23; mov.b32 $0, b; }", "=f,r",
        has_side_effects=False, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip
    return Float32(out)


@dsl_user_op
def scaled_bf16_to_f16(word: Uint32, factor: Float32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Two BF16 values times a factor, as an f16x2 word."""
    text = (
        "{ .reg .f32 l, h; .reg .b32 a, b; shl.b32 a, $1, 16; and.b32 b, $1, 0xffff0000; mov.b32 l, a; mov.b32 h, b; "
        "mul.rn.f32 l, l, $2; mul.rn.f32 h, h, $2; cvt.rn.f16x2.f32 $0, h, l; }"
    )
    return _asm(1, text, "=r,r,f", [Uint32(word), Float32(factor)], loc, ip, effects=False)


def larger_magnitude(top: Uint32, word: Uint32) -> Uint32:
    """The largest of a magnitude and those of two BF16 values, which order like the integers that they are made of."""
    return cutlass.max(top, cutlass.max(word & 0x7FFF, word >> 16 & 0x7FFF))


def query_exponent(top: Uint32) -> Int32:
    """Exponent field of a row's largest magnitude. Rows of denormals: as if of the smallest exponents."""
    return cutlass.max(Int32(top >> 7), Q_EXPONENT + 1)


def query_shrink(exponent: Int32) -> Float32:
    """What brings a row of that exponent into FP16."""
    return power_of_two(254 + Q_EXPONENT - exponent)


def query_growth(exponent: Int32) -> Float32:
    """What its scores are then too small by."""
    return power_of_two(exponent - Q_EXPONENT)

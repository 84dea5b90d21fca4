"""E4M3 codes to BF16 by integer arithmetic and one multiplication: exact for all 254 numbers, on every architecture from SM80 on.

E4M3 is a sign, four bits of exponent (bias 7) and three of mantissa. Moved into BF16's fields (bias 127) they are the number times 2^-120,
denormals included, and the product with 2^120 is exact in BF16. Only NaN (all seven bits set) becomes a number, 480, and is looked for apart.

For the GPUs below SM89, which have no instruction for it. From there on there is one to FP16, and the kernel multiplies in FP16.
The functions over words take Python integers and CuTe Uint32 alike: the tests walk all codes through them.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

SIGNS = 0x80008000
FIELDS = 0x07F007F0  # exponents and mantissas of two BF16 values, in the bits that an E4M3 number fills
SCALE = 0x7B807B80  # 2^120, twice
MINUS_ZEROS = 0x80008000
NANS = 0x7FFF7FFF
CODES, ONES, CARRIES = 0x7F7F7F7F, 0x01010101, 0x80808080
# Permutes that put bytes 0 and 1, or 2 and 3, where `odd_bytes` takes them from.
LOWER_PAIR, UPPER_PAIR = 0x1404, 0x3424


def odd_bytes(word: Any) -> Any:
    """Bytes 1 and 3 of a word of four codes as two BF16 values, 2^-120 times too small."""
    kind = type(word)
    return (word & kind(SIGNS)) | ((word >> kind(4)) & kind(FIELDS))


def even_bytes(word: Any) -> Any:
    """Bytes 0 and 2, likewise."""
    return odd_bytes(word << type(word)(8))


def nan_codes(word: Any) -> Any:
    """Not 0 exactly where one of the four codes is NaN: 0x7F alone, of either sign, carries into its eighth bit."""
    kind = type(word)
    return ((word & kind(CODES)) + kind(ONES)) & kind(CARRIES)


@dsl_user_op
def scaled_up(word: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Two BF16 values times 2^120. SM80 has no BF16 product without a sum: with -0, which keeps the sign of a zero."""
    operands = [Uint32(value).ir_value(loc=loc, ip=ip) for value in (word, SCALE, MINUS_ZEROS)]
    out = llvm.inline_asm(
        T.i32(), operands, "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r",
        has_side_effects=False, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip
    return Uint32(out)


def neighbours_to_bf16(word: Uint32) -> tuple[Uint32, Uint32]:
    """Bytes 0 and 1 of four codes, and bytes 2 and 3, as two words of two BF16 values each."""
    pairs = [cute.arch.prmt(word, Uint32(0), Uint32(selector)) for selector in (LOWER_PAIR, UPPER_PAIR)]
    return scaled_up(odd_bytes(Uint32(pairs[0]))), scaled_up(odd_bytes(Uint32(pairs[1])))


def alternate_to_bf16(word: Uint32) -> tuple[Uint32, Uint32]:
    """Bytes 0 and 2 of four codes, and bytes 1 and 3."""
    return scaled_up(even_bytes(word)), scaled_up(odd_bytes(word))

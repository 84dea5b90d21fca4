"""PTX on the CPU: a kernel's text as instructions, and what each of them computes in the lanes that run it.

Registers are numpy arrays, an element a thread. Only what the kernels' PTX uses is here: anything else is refused by name. The approximate
functions (ex2, lg2, rcp) are exact here; products of matrices are summed in FP64 and rounded once.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray
WARP = 32
TYPES = {
    "s8": np.int8, "b16": np.uint16, "u16": np.uint16, "s16": np.int16, "b32": np.uint32, "u32": np.uint32, "s32": np.int32,
    "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f32": np.float32,
}  # fmt: skip
REGISTER_TYPES = {"%p": np.dtype(bool), "%rs": np.dtype(np.uint16), "%r": np.dtype(np.uint32), "%rd": np.dtype(np.uint64)}


class Fault(Exception):
    """What a GPU would do wrong, or PTX leaves open: an access out of bounds, a race, a barrier that not all threads meet."""


@dataclass(frozen=True)
class Instruction:
    """One instruction. `guard`: the predicate register that it runs under, and whether negated. `operands`: a list for one in braces."""

    opcode: tuple[str, ...]
    operands: tuple[str | list[str], ...]
    guard: tuple[str, bool] | None
    text: str


@dataclass(frozen=True)
class Program:
    """The kernel of a PTX module.

    `registers`: how many of each kind are declared. `parameters`: bytes of each. `threads`: of a CTA.
    """

    instructions: list[Instruction]
    labels: dict[str, int]
    registers: dict[str, int]
    parameters: list[int]
    threads: int

    @classmethod
    def parse(cls, text: str) -> Program:
        """The text of a module with one kernel."""
        head, body = re.sub(r"//.*", "", text).split("\n{", 1)
        declared = re.findall(r"\.param (?:\.align \d+ )?\.(\w+) \w+(?:\[(\d+)\])?", head)
        parameters = [int(count) if count else np.dtype(TYPES[kind]).itemsize for kind, count in declared]
        threads = re.search(r"\.reqntid (\d+), 1, 1", head)
        assert threads is not None
        registers = {kind: int(count) for kind, count in re.findall(r"\.reg \.\w+\s+(%\w+)<(\d+)>;", body)}
        body = without_scopes(body.rsplit("}", 1)[0], registers)
        instructions: list[Instruction] = []
        labels: dict[str, int] = {}
        for statement in re.sub(r"\.(?:reg|pragma) [^;]*;", "", body).replace(":\n", ":;").split(";"):
            line = " ".join(statement.split())
            if line.endswith(":"):
                labels[line[:-1]] = len(instructions)
            elif line:
                instructions.append(instruction(line))
        return cls(instructions, labels, registers, parameters, int(threads[1]))


def without_scopes(body: str, registers: dict[str, int]) -> str:
    """The text with the registers of inner scopes as more of the kernel's, which are added to `registers`.

    All scopes share them: what is written in one is read in the same one.
    """
    kinds = {"b16": "%rs", "b32": "%r", "f32": "%r"}
    declared = dict.fromkeys(kinds.values(), 0) | registers

    def flat(scope: re.Match[str]) -> str:
        text, taken = scope[1], dict(declared)
        for kind, names in re.findall(r"\.reg \.(\w+) ([^;]*);", text):
            for local in names.split(", "):
                bank = kinds[kind]
                text = re.sub(rf"(?<![\w.%]){local}(?!\w)", f"{bank}{taken[bank]}", text)
                taken[bank] += 1
        for bank, count in taken.items():
            registers[bank] = max(registers.get(bank, 0), count)
        return re.sub(r"\.reg [^;]*;", "", text)

    return re.sub(r"\{\s*(\.reg (?:[^{}]|\{[^{}]*\})*;)\s*\}", flat, body)


def instruction(line: str) -> Instruction:
    """One statement, without its semicolon."""
    found = re.fullmatch(r"(?:@(!?)(%p\d+) )?(\S+)(?: (.*))?", line)
    assert found is not None, line
    negated, predicate, opcode, rest = found.groups()
    operands = tuple(
        re.findall(r"[^{},\s]+", operand) if operand.startswith("{") else operand for operand in re.findall(r"{[^}]*}|\[[^]]*\]|[^,\s]+", rest or "")
    )
    return Instruction(tuple(opcode.split(".")), operands, (predicate, bool(negated)) if predicate else None, line)


class Registers:
    """All registers of a CTA's threads. `lanes` below: indices of the threads that run an instruction."""

    def __init__(self, program: Program, special: dict[str, Array]):
        self.values = dict(special)
        for kind, count in program.registers.items():
            self.values |= {f"{kind}{i}": np.zeros(program.threads, REGISTER_TYPES[kind]) for i in range(count)}

    def read(self, operand: str, kind: str, lanes: Array) -> Array:
        """A register or a constant as values of a PTX type; the lower bits of a wider one."""
        if kind == "pred":
            return self.values[operand][lanes] if operand.startswith("%") else np.full(len(lanes), operand != "0")
        dtype = np.dtype(TYPES[kind])
        if operand not in self.values:
            return np.full(len(lanes), constant(operand, dtype))
        bits = self.values[operand][lanes]
        return (bits if bits.itemsize == dtype.itemsize else bits.astype(f"u{dtype.itemsize}")).view(dtype)

    def write(self, operand: str, values: Array, lanes: Array) -> None:
        if operand != "_":
            register = self.values[operand]
            register[lanes] = values if register.dtype == bool else values.view(register.dtype)


def constant(operand: str, dtype: np.dtype) -> Array:
    if operand.startswith("0f"):
        return np.array(int(operand[2:], 16), np.uint32).view(dtype)
    if operand.startswith("__"):  # the start of dynamic shared memory
        return np.array(0, dtype)
    return np.array(int(operand, 0) % 2 ** (8 * dtype.itemsize), f"u{dtype.itemsize}").view(dtype)


def bf16_to_float(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float_to_bf16(values: Array) -> Array:
    """Round to nearest even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return np.where(np.isnan(values), 0x7FFF, bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1)) >> np.uint64(16)).astype(np.uint16)


def e4m3_to_float(codes: Array) -> Array:
    """A sign, four bits of exponent and three of mantissa; the largest of each sign is NaN."""
    exponent, mantissa = codes >> 3 & 0xF, codes & 7
    magnitudes = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent.astype(np.float64) - 10), mantissa * 2.0**-9)
    return np.where(codes & 0x7F == 0x7F, np.nan, np.where(codes & 0x80, -magnitudes, magnitudes)).astype(np.float32)


def f16_to_float(bits: Array) -> Array:
    return bits.view(np.float16).astype(np.float32)


def float_to_f16(values: Array) -> Array:
    return values.astype(np.float16).view(np.uint16)


def halves(words: Array, to_float: Callable[[Array], Array]) -> Array:
    """Words of two 16-bit numbers as [word, 2]."""
    return to_float(np.ascontiguousarray(words).view(np.uint16)).reshape(-1, 2)


def words_of(lower: Array, upper: Array) -> Array:
    return lower.astype(np.uint32) | upper.astype(np.uint32) << np.uint32(16)


def quotient(a: Array, b: Array) -> Array:
    """Towards zero."""
    if not b.all():
        raise Fault("division by zero")
    wide = np.abs(a.astype(np.int64)) // np.abs(b.astype(np.int64))
    return (wide * np.sign(a).astype(np.int64) * np.sign(b).astype(np.int64)).astype(a.dtype)


def shift(a: Array, bits: Array, left: bool) -> Array:
    """A shift by a whole word and more gives 0, or the sign."""
    width = 8 * a.itemsize
    near = np.minimum(bits, width - 1).astype(a.dtype)
    far = np.zeros_like(a) if left or a.dtype.kind == "u" else a >> a.dtype.type(width - 1)
    return np.where(bits < width, a << near if left else a >> near, far).astype(a.dtype)


def widened(a: Array, b: Array) -> Array:
    wide = np.dtype(f"{a.dtype.kind}{2 * a.itemsize}")
    return a.astype(wide) * b.astype(wide)


BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add, "sub": np.subtract, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "mul": np.multiply, "mul.lo": np.multiply,
    "mul.wide": widened, "mul.hi": lambda a, b: (widened(a, b) >> 8 * a.itemsize).astype(a.dtype),
    "min": np.fmin, "max": np.fmax, "div": quotient, "rem": lambda a, b: a - quotient(a, b) * b,
}  # fmt: skip
# What the names say; the unordered ones are true of NaN.
COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "ne": lambda a, b: (a < b) | (a > b), "neu": np.not_equal,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[[Array], Array]] = {"ex2": np.exp2, "lg2": np.log2, "rcp": np.reciprocal, "neg": np.negative, "not": np.invert}


def permuted(low: Array, high: Array, selector: Array) -> Array:
    """prmt: four bytes of eight, by the nibbles of the selector."""
    source = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(low)
    for i in range(4):
        place = selector >> np.uint32(4 * i) & np.uint32(0xF)
        if (place > 7).any():
            raise Fault("prmt that repeats a sign is not modelled")
        result |= (source >> place.astype(np.uint64) * np.uint64(8) & np.uint64(0xFF)).astype(np.uint32) << np.uint32(8 * i)
    return result


def compute(registers: Registers, op: Instruction, lanes: Array) -> None:
    """Runs an instruction that touches registers alone, each lane for itself."""
    name, kind, args = op.opcode[0], op.opcode[-1], op.operands

    def read(place: int, of: str = kind) -> Array:
        operand = args[place]
        assert isinstance(operand, str)
        return registers.read(operand, of, lanes)

    def result() -> Array:
        longer = f"{name}.{op.opcode[1]}"
        if name == "fma" and kind == "bf16x2":
            a, b, c = (halves(read(place, "b32"), bf16_to_float).astype(np.float64) for place in (1, 2, 3))
            rounded = float_to_bf16(a * b + c)
            return words_of(rounded[:, 0], rounded[:, 1])
        if name == "max" and kind == "f16x2":  # of a number and NaN, the number
            larger = float_to_f16(np.fmax(*(halves(read(place, "b32"), f16_to_float) for place in (1, 2))))
            return words_of(larger[:, 0], larger[:, 1])
        if name in ("fma", "mad") and op.opcode[1] != "wide":
            if kind != "f32":
                return read(1) * read(2) + read(3)
            return (read(1).astype(np.float64) * read(2) + read(3)).astype(np.float32)
        if name == "mad":
            product = widened(read(1), read(2))
            return product + read(3, f"{kind[0]}64").astype(product.dtype)
        if name in ("shl", "shr"):
            return shift(read(1), read(2, "u32"), name == "shl")
        if name in BINARY or longer in BINARY:
            return BINARY[longer if longer in BINARY else name](read(1), read(2))
        if name == "setp":
            return COMPARISONS[op.opcode[1]](read(1), read(2))
        if name == "selp":
            return np.where(read(3, "pred"), read(1), read(2))
        if name == "prmt":
            return permuted(read(1), read(2), read(3))
        if name in FUNCTIONS:
            return FUNCTIONS[name](read(1)).astype(read(1).dtype)
        if name == "mov" and isinstance(args[1], list):
            lower, upper = (registers.read(part, "b16" if kind == "b32" else "b32", lanes) for part in args[1])
            return words_of(lower, upper) if kind == "b32" else lower.astype(np.uint64) | upper.astype(np.uint64) << np.uint64(32)
        if name == "mov":
            return read(1)
        if name == "cvt":
            return converted(op, read)
        raise Fault(f"not modelled: {op.text}")

    if name == "mov" and isinstance(args[0], list):
        parts = np.ascontiguousarray(read(1)).view("u2" if kind == "b32" else "u4").reshape(-1, 2)
        for i, register in enumerate(args[0]):
            registers.write(register, np.ascontiguousarray(parts[:, i]), lanes)
    else:
        assert isinstance(args[0], str)
        registers.write(args[0], result(), lanes)


def converted(op: Instruction, read: Callable[..., Array]) -> Array:
    to, source = op.opcode[-2], op.opcode[-1]
    if to == "bf16x2":  # the first source is the upper half
        return words_of(float_to_bf16(read(2)), float_to_bf16(read(1)))
    if to == "bf16":
        return float_to_bf16(read(1))
    if source == "e4m3x2":  # the lower byte is the lower half
        codes = read(1, "b16")
        return words_of(float_to_f16(e4m3_to_float(codes & 0xFF)), float_to_f16(e4m3_to_float(codes >> 8)))
    if to == "f16x2":
        return words_of(float_to_f16(read(2)), float_to_f16(read(1)))
    if to == "f16":
        return float_to_f16(read(1))
    if source in ("bf16", "f16"):
        bits = read(1, "b16")
        return bf16_to_float(bits) if source == "bf16" else f16_to_float(bits)
    return read(1).astype(TYPES[to])

"""A CTA of a kernel's PTX on the CPU, with what a GPU does not tell: races in shared memory, and every access out of bounds.

The threads run together where they stand at the same instruction, and those furthest behind first. That is one order of many, so races are not
looked for in what comes out: between two barriers, no byte of shared memory may be written by one thread and touched by another, and where an
asynchronous copy is on its way, nobody may touch anything. A copy counts as under way from its instruction to the barrier behind its wait. Atomic
additions do not race with each other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ptx import WARP, Array, Fault, Instruction, Program, Registers, bf16_to_float, compute, f16_to_float, halves

POISON = 0xFF  # NaN in every format
COPY_BYTES = 16
NOBODY, SEVERAL = -1, -2


@dataclass
class GlobalMemory:
    """Arrays at addresses far apart: what lies between them faults."""

    bases: list[int] = field(default_factory=list)
    arrays: list[Array] = field(default_factory=list)

    def place(self, array: Array, address: int | None = None) -> int:
        """Maps a contiguous array, at addresses above all others'. Returns its address."""
        base = (len(self.bases) + 1) << 36 if address is None else address
        assert not self.bases or base >= self.bases[-1] + self.arrays[-1].size
        self.bases.append(base)
        self.arrays.append(array.reshape(-1).view(np.uint8))
        return base

    def access(self, addresses: Array, num_bytes: int, data: Array | None = None) -> Array:
        """[access, num_bytes] of each address, or those stored."""
        if (addresses % num_bytes).any():
            raise Fault(f"global access of {num_bytes} bytes at an address that is no multiple of it")
        found = np.empty((len(addresses), num_bytes), np.uint8)
        owners = np.searchsorted(np.array(self.bases), addresses, side="right") - 1
        for owner in np.unique(owners):
            of_it = owners == owner
            offsets = addresses[of_it] - self.bases[owner]
            if owner < 0 or offsets.max() + num_bytes > self.arrays[owner].size:
                raise Fault(f"global access out of bounds at address {addresses[of_it].max():#x}")
            places = offsets[:, None] + np.arange(num_bytes)
            if data is None:
                found[of_it] = self.arrays[owner][places]
            else:
                self.arrays[owner][places] = data[of_it]
        return found


class SharedMemory:
    """Bytes, and who touched each pair of them since the last barrier: a thread, several, or nobody."""

    def __init__(self, num_bytes: int, threads: int):
        self.data = np.full(num_bytes, POISON, np.uint8)
        self.readers, self.writers = (np.full(num_bytes // 2, NOBODY) for _ in range(2))
        self.under_way = np.zeros(num_bytes // 2, bool)
        self.landed, self.added = (np.zeros(num_bytes // 2, bool) for _ in range(2))  # since the last barrier: by a copy, by an atomic addition
        self.copies: list[tuple[Array, Array, Array, Array]] = []  # threads, each one's group, addresses, bytes
        self.groups = np.zeros(threads, np.int64)  # that each thread has committed

    def places(self, addresses: Array, num_bytes: int) -> Array:
        if (addresses % num_bytes).any() or (addresses < 0).any() or (addresses + num_bytes > self.data.size).any():
            raise Fault(f"shared access of {num_bytes} bytes out of bounds or misaligned")
        return addresses[:, None] + np.arange(num_bytes)

    def touch(self, touched: Array, places: Array, threads: Array) -> None:
        """Notes an access in `readers` or `writers`; a fault where it may meet another one."""
        pairs, owners = places[:, ::2] // 2, threads[:, None]
        before = touched[pairs]
        touched[pairs] = owners
        several = (touched[pairs] != owners) | ((before != NOBODY) & (before != owners))
        touched[pairs[several]] = SEVERAL
        if (self.under_way[pairs] | self.landed[pairs]).any():
            raise Fault("shared memory touched while an asynchronous copy to it is under way")
        read, written = self.readers[pairs], self.writers[pairs]
        raced = (written == SEVERAL) | ((written != NOBODY) & (read != NOBODY) & (written != read)) | self.added[pairs]
        if raced.any():
            raise Fault("race in shared memory: two threads touch it between two barriers, and one of them writes")

    def load(self, addresses: Array, num_bytes: int, threads: Array) -> Array:
        places = self.places(addresses, num_bytes)
        self.touch(self.readers, places, threads)
        return self.data[places]

    def store(self, addresses: Array, data: Array, threads: Array) -> None:
        """Threads that store the same value at one place in one instruction do not race: a flag that any of them sets."""
        if len(np.unique(addresses)) < len(addresses):
            _, kept = np.unique(np.column_stack((addresses, data)), axis=0, return_index=True)
            addresses, data, threads = addresses[kept], data[kept], threads[kept]
        places = self.places(addresses, data.shape[1])
        self.touch(self.writers, places, threads)
        self.data[places] = data

    def add(self, addresses: Array, values: Array) -> Array:
        """Atomic additions of words, one after another. What each of them found."""
        places = self.places(addresses, values.itemsize)
        if any((touched[places // 2] != NOBODY).any() for touched in (self.readers, self.writers)):
            raise Fault("race in shared memory: an atomic addition and another access between two barriers")
        self.added[places // 2] = True
        found = np.empty_like(values)
        for i, place in enumerate(places):
            found[i] = self.data[place].view(values.dtype)[0]
            self.data[place] = (found[i : i + 1] + values[i]).view(np.uint8)
        return found

    def copy(self, addresses: Array, data: Array, threads: Array) -> None:
        """Starts copies; nothing of them is there before their wait."""
        places = self.places(addresses, COPY_BYTES)
        self.touch(self.writers, places, threads)
        self.under_way[places // 2] = True
        self.copies.append((threads, self.groups[threads], addresses, data))

    def commit(self, threads: Array) -> None:
        self.groups[threads] += 1

    def wait(self, newest: int, threads: Array) -> None:
        """Completes all groups of the threads but the newest ones."""
        complete = np.full_like(self.groups, -1)
        complete[threads] = self.groups[threads] - newest
        copies, self.copies = self.copies, []
        for owners, groups, addresses, data in copies:
            done = groups < complete[owners]
            places = self.places(addresses[done], COPY_BYTES)
            self.data[places] = data[done]
            self.under_way[places // 2], self.landed[places // 2] = False, True
            if not done.all():
                self.copies.append((owners[~done], groups[~done], addresses[~done], data[~done]))

    def barrier(self) -> None:
        self.readers[:], self.writers[:], self.landed[:], self.added[:] = NOBODY, NOBODY, False, False


class Cta:
    """One CTA.

    Args:
        program: the kernel.
        memory: what its pointers lead to.
        arguments: bytes of each parameter.
        block: x and y of the CTA.
        shared_memory_bytes: of dynamic shared memory.
    """

    def __init__(self, program: Program, memory: GlobalMemory, arguments: Sequence[bytes], block: tuple[int, int], shared_memory_bytes: int):
        assert [len(argument) for argument in arguments] == program.parameters
        self.program, self.memory, self.arguments = program, memory, arguments
        threads = np.arange(program.threads, dtype=np.uint32)
        special = {"%tid.x": threads, "%laneid": threads % WARP} | {f"%ctaid.{axis}": np.full_like(threads, i) for axis, i in zip("xy", block)}
        self.registers = Registers(program, special)
        self.shared = SharedMemory(shared_memory_bytes, program.threads)

    def run(self) -> None:
        """To the end of all threads. Raises Fault."""
        fronts = {0: np.arange(self.program.threads)}  # threads by the instruction where they stand
        waiting: dict[int, Array] = {}
        with np.errstate(all="ignore"):
            while fronts or waiting:
                if not fronts:
                    (at, lanes), *others = waiting.items()
                    if others or len(lanes) != self.program.threads:
                        raise Fault("a barrier that not all threads meet")
                    self.shared.barrier()
                    fronts, waiting = {at + 1: lanes}, {}
                at = min(fronts)
                lanes, op = fronts.pop(at), self.program.instructions[at]
                if op.guard is not None:
                    register, negated = op.guard
                    runs = self.registers.values[register][lanes] ^ negated
                    self.join(fronts, at + 1, lanes[~runs])
                    lanes = lanes[runs]
                if len(lanes) == 0 or op.opcode[0] == "ret":
                    continue
                if op.opcode[0] == "bra":
                    self.join(fronts, self.program.labels[str(op.operands[-1])], lanes)
                elif op.opcode[0] == "bar":
                    self.join(waiting, at, lanes)
                else:
                    self.step(op, lanes)
                    self.join(fronts, at + 1, lanes)
        if self.shared.copies:
            raise Fault("asynchronous copies under way at the end")

    def join(self, fronts: dict[int, Array], at: int, lanes: Array) -> None:
        if len(lanes):
            fronts[at] = np.sort(np.concatenate((fronts[at], lanes))) if at in fronts else lanes

    def step(self, op: Instruction, lanes: Array) -> None:
        name = op.opcode[0]
        if op.opcode[:2] == ("ld", "param"):
            self.load_parameter(op, lanes)
        elif name in ("ld", "st"):
            self.move(op, lanes)
        elif op.opcode == ("atom", "shared", "cta", "add", "u32"):
            found = self.shared.add(self.addresses(op.operands[1], lanes), self.registers.read(str(op.operands[2]), "u32", lanes))
            self.registers.write(str(op.operands[0]), found, lanes)
        elif name == "cp":
            self.copy(op, lanes)
        elif name in ("ldmatrix", "mma", "shfl"):
            if (np.bincount(lanes // WARP) % WARP).any():
                raise Fault(f"not all lanes of a warp meet at {op.text}")
            {"ldmatrix": self.load_matrices, "mma": self.multiply, "shfl": self.shuffle}[name](op, lanes)
        elif name not in ("griddepcontrol", "fence"):  # CTAs run one after another
            compute(self.registers, op, lanes)

    def addresses(self, operand: str | list[str], lanes: Array) -> Array:
        found = re.fullmatch(r"\[(\w+|%\w+)(?:\+(-?\d+))?\]", str(operand))
        assert found is not None, operand
        bits = self.registers.values[found[1]][lanes] if found[1].startswith("%") else np.zeros(len(lanes), np.uint32)
        return bits.astype(np.int64) + int(found[2] or 0)

    def load_parameter(self, op: Instruction, lanes: Array) -> None:
        found = re.fullmatch(r"\[\w+_param_(\d+)(?:\+(\d+))?\]", str(op.operands[1]))
        assert found is not None, op.text
        width, offset = int(op.opcode[-1][1:]) // 8, int(found[2] or 0)
        value = int.from_bytes(self.arguments[int(found[1])][offset : offset + width], "little")
        self.registers.write(str(op.operands[0]), np.full(len(lanes), value, f"u{width}"), lanes)

    def move(self, op: Instruction, lanes: Array) -> None:
        """Loads and stores, of one register or several."""
        loads, is_global, width = op.opcode[0] == "ld", op.opcode[1] == "global", int(op.opcode[-1][1:]) // 8
        operand, address = op.operands if loads else op.operands[::-1]
        registers = operand if isinstance(operand, list) else [operand]
        addresses, num_bytes = self.addresses(address, lanes), width * len(registers)
        if loads:
            data = self.memory.access(addresses, num_bytes) if is_global else self.shared.load(addresses, num_bytes, lanes)
            for i, register in enumerate(registers):
                self.registers.write(register, np.ascontiguousarray(data[:, i * width : (i + 1) * width]).view(f"u{width}")[:, 0], lanes)
            return
        values = [np.ascontiguousarray(self.registers.read(register, op.opcode[-1], lanes)) for register in registers]
        data = np.concatenate([value.view(np.uint8).reshape(-1, width) for value in values], 1)
        if is_global:
            self.memory.access(addresses, num_bytes, data)
        else:
            self.shared.store(addresses, data, lanes)

    def copy(self, op: Instruction, lanes: Array) -> None:
        if op.opcode[2] == "commit_group":
            self.shared.commit(lanes)
        elif op.opcode[2] == "wait_group":
            self.shared.wait(int(str(op.operands[0])), lanes)
        else:
            assert op.operands[2] == str(COPY_BYTES)
            data = np.zeros((len(lanes), COPY_BYTES), np.uint8)
            reads = self.registers.read(str(op.operands[3]), "u32", lanes) != 0
            data[reads] = self.memory.access(self.addresses(op.operands[1], lanes)[reads], COPY_BYTES)
            self.shared.copy(self.addresses(op.operands[0], lanes), data, lanes)

    def load_matrices(self, op: Instruction, lanes: Array) -> None:
        """Lanes 8m to 8m + 7 of a warp name the lines of matrix m; lane l gets elements 2l and 2l + 1 of it, or of its transpose."""
        lines = self.addresses(op.operands[1], lanes).reshape(-1, WARP)
        threads = lanes.reshape(-1, WARP)
        for m, register in enumerate(op.operands[0]):
            of_it = slice(8 * m, 8 * m + 8)
            data = self.shared.load(lines[:, of_it].reshape(-1), COPY_BYTES, threads[:, of_it].reshape(-1)).view(np.uint16).reshape(-1, 8, 8)
            data = data.transpose(0, 2, 1) if "trans" in op.opcode else data
            self.registers.write(register, np.ascontiguousarray(data).view(np.uint32).reshape(-1), lanes)

    def multiply(self, op: Instruction, lanes: Array) -> None:
        """m16n8k16: lane (g, q) = (l / 4, l % 4) holds of A rows g, g + 8 at k 2q and 2q + 8, of B column g, of C and D rows g and g + 8."""
        g, q = np.divmod(np.arange(WARP), 4)
        to_float = bf16_to_float if op.opcode[-2] == "bf16" else f16_to_float
        warps = len(lanes) // WARP
        a, b, c = np.empty((warps, 16, 16)), np.empty((warps, 16, 8)), np.empty((warps, 16, 8))
        for i, register in enumerate(op.operands[1]):
            pair = halves(self.registers.read(register, "b32", lanes), to_float).reshape(warps, WARP, 2)
            for k in range(2):
                a[:, g + i % 2 * 8, 2 * q + i // 2 * 8 + k] = pair[..., k]
        for i, register in enumerate(op.operands[2]):
            pair = halves(self.registers.read(register, "b32", lanes), to_float).reshape(warps, WARP, 2)
            for k in range(2):
                b[:, 2 * q + i * 8 + k, g] = pair[..., k]
        for i, register in enumerate(op.operands[3]):
            c[:, g + i // 2 * 8, 2 * q + i % 2] = self.registers.read(register, "f32", lanes).reshape(warps, WARP)
        d = (a @ b + c).astype(np.float32)
        for i, register in enumerate(op.operands[0]):
            self.registers.write(register, np.ascontiguousarray(d[:, g + i // 2 * 8, 2 * q + i % 2]).reshape(-1), lanes)

    def shuffle(self, op: Instruction, lanes: Array) -> None:
        """A lane's source; `up` keeps a lane's own value where there is none."""
        lane, by = np.arange(WARP), int(str(op.operands[2]))
        source = {"bfly": lane ^ by, "up": np.where(lane >= by, lane - by, lane), "idx": np.full(WARP, by)}[op.opcode[2]]
        values = self.registers.read(str(op.operands[1]), "b32", lanes).reshape(-1, WARP)
        self.registers.write(str(op.operands[0]).split("|")[0], np.ascontiguousarray(values[:, source]).reshape(-1), lanes)

"""Samples of the program counter, as Nsight Compute's source page holds them, sorted by which warps took them and what they waited for.

Nothing is known of a kernel but its SASS, so the rules read instructions. They suit the SM90 forwards: producer warps give registers away,
consumer warps take them. All orders are orders of addresses.

Roles, from the control flow. Its edges: the next instruction, unless there is an unconditional BRA, EXIT or RET; and every code address that an
instruction names.

    consumer   reached from USETMAXREG.TRY_ALLOC only
    producer   reached from USETMAXREG.DEALLOC only
    idle       UCGABAR_WAIT and EXIT where producers get to: producer warps without work from their start, the others from their end. Consumers
               that wait for the last CTA of their cluster are among them: the samples do not say which warp took them.
    all        reached from both or from neither: start and end of every warp, and the whole of a kernel without these roles

Classes. An mbarrier wait is every SYNCS.PHASECHK, after each of them the first instruction that its predicate guards (there the warp stands
while the wait is pending), and the loop out of line that such a branch leads to, up to its unconditional BRA back.

    keys             a consumer's mbarrier wait: k_full
    rare_waits       the same, run less than half as often as the most frequent HGMMA: for queries, and once a request for the keys of its end
    stage_order      the same, at an address expression where consumers themselves arrive: not what the TMA delivers, but what they gave back
    free_stages      a producer's mbarrier wait
    value_products   WARPGROUP.DEPBAR, where the youngest group of HGMMA (each ends with gsb0) that it waits for reads an operand transposed
                     (.tnspA, .tnspB): values lie in memory as keys do, and a product with them needs the other order
    score_products   WARPGROUP.DEPBAR, where it reads none
    barriers         BAR, and on any other instruction but WARPGROUP and UCGABAR_WAIT the samples whose reason is stall_barrier: a warp that
                     waits at a BAR.SYNC.DEFER_BLOCKING stands at one of the next instructions
    product_issue    HGMMA, WARPGROUP.ARRIVE, and a DEPBAR with no group to wait for since the last one that left none pending
    key_conversion   F2FP from E4M3
    other            the rest
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ROLES = ("consumer", "producer", "idle", "all")
CLASSES = (
    "keys", "rare_waits", "stage_order", "free_stages", "value_products", "score_products", "barriers", "product_issue", "key_conversion", "other",
)  # fmt: skip
UNNAMED = "unnamed"  # samples whose reason the export has no column for: of an HGMMA, that the tensor cores are taken
JUMPS = ("BRA", "EXIT", "RET")
INSTRUCTION = re.compile(r"(?:@(?P<guard>!?U?P\w+)\s+)?(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>.*)")


@dataclass(frozen=True)
class Instruction:
    """One line of the export: `samples` of the program counter, how often a warp `executed` it, and the samples by stall reason."""

    address: int
    text: str
    guard: str | None
    opcode: str
    operands: str
    samples: int
    executed: int
    stalls: dict[str, int]

    @property
    def falls_through(self) -> bool:
        """Whether a warp can go on to the next instruction."""
        conditional = self.guard is not None or "," in self.operands
        return conditional or self.opcode.split(".")[0] not in JUMPS


@dataclass(frozen=True)
class SampledCode:
    """A kernel's instructions in order of address, each with its role and its class."""

    kernel: str
    code: tuple[Instruction, ...]
    roles: tuple[str, ...]
    classes: tuple[str, ...]

    @classmethod
    def of_export(cls, text: str) -> SampledCode:
        """Reads what `ncu -i REPORT --page source --csv` prints of one kernel.

        Raises:
            ValueError: there is no such table, one of several kernels, a column is missing, or a line is broken.
        """
        kernel, code = read_source_page(text)
        roles = instruction_roles(code)
        return cls(kernel, code, roles, instruction_classes(code, roles))

    @property
    def samples(self) -> int:
        """Samples of all warps."""
        return sum(instruction.samples for instruction in self.code)

    def samples_by_role(self) -> dict[str, int]:
        """Samples of every role."""
        counts = Counter[str]()
        for instruction, role in zip(self.code, self.roles):
            counts[role] += instruction.samples
        return {role: counts[role] for role in ROLES}

    def samples_by_class(self, role: str) -> dict[str, int]:
        """Samples of one role in every class."""
        counts = Counter[str]()
        for instruction, its_role, its_class in zip(self.code, self.roles, self.classes):
            if its_role == role:
                at_barrier = _samples_at_barrier(instruction)
                counts["barriers"] += at_barrier
                counts[its_class] += instruction.samples - at_barrier
        return {name: counts[name] for name in CLASSES}

    def main_class(self, index: int) -> str:
        """The class of most of an instruction's samples."""
        instruction = self.code[index]
        return "barriers" if 2 * _samples_at_barrier(instruction) > instruction.samples else self.classes[index]

    def readable(self, index: int) -> str:
        """An instruction's text with `#index` for the code addresses in it."""
        places = _places(self.code)

        def place(found: re.Match[str]) -> str:
            value = int(found[0], 16)
            return f"#{places[value]}" if value in places else found[0]

        return re.sub(r"0x[0-9a-f]+", place, self.code[index].text)


def read_source_page(text: str) -> tuple[str, tuple[Instruction, ...]]:
    """The kernel's name and its instructions, in order of address."""
    rows = [row for row in csv.reader(text.splitlines()) if row]
    heads = [i for i, row in enumerate(rows) if row[:2] == ["Address", "Source"]]
    if len(heads) != 1:
        raise ValueError(f"export must hold the source page of one kernel, got {len(heads)}")
    names = {name: column for column, name in reversed(list(enumerate(rows[heads[0]])))}
    reasons = {name.removeprefix("stall_"): column for name, column in names.items() if re.fullmatch(r"stall_\w+", name)}
    if missing := [name for name in ("# Samples", "Instructions Executed") if name not in names]:
        raise ValueError(f"export must have the columns # Samples and Instructions Executed, lacks {', '.join(missing)}")
    kernel = next((row[1] for row in rows[: heads[0]] if row[:1] == ["Kernel Name"]), "")
    code = [_instruction(row, names, reasons) for row in rows[heads[0] + 1 :]]
    return kernel, tuple(sorted(code, key=lambda instruction: instruction.address))


def _instruction(row: Sequence[str], names: dict[str, int], reasons: dict[str, int]) -> Instruction:
    """One line of the table; `names` and `reasons` are the columns."""
    try:
        text = " ".join(row[1].split())
        found = INSTRUCTION.fullmatch(text)
        if found is None:
            raise ValueError
        samples, executed = int(row[names["# Samples"]]), int(row[names["Instructions Executed"]])
        stalls = {reason: int(row[column]) for reason, column in reasons.items()}
        stalls[UNNAMED] = samples - sum(stalls.values())
        return Instruction(int(row[0], 16), text, found["guard"], found["opcode"], found["operands"], samples, executed, stalls)
    except (ValueError, IndexError) as error:
        raise ValueError(f"export must have an instruction and its counts in every line, got {','.join(row)[:80]!r}") from error


def instruction_roles(code: Sequence[Instruction]) -> tuple[str, ...]:
    """Which warps run an instruction."""
    consumers = _reached(code, "USETMAXREG.TRY_ALLOC")
    producers = _reached(code, "USETMAXREG.DEALLOC")
    roles = []
    for i, instruction in enumerate(code):
        if i in producers and instruction.opcode in ("UCGABAR_WAIT", "EXIT"):
            roles.append("idle")
        else:
            roles.append({(True, False): "consumer", (False, True): "producer"}.get((i in consumers, i in producers), "all"))
    return tuple(roles)


def instruction_classes(code: Sequence[Instruction], roles: Sequence[str]) -> tuple[str, ...]:
    """What a warp does or waits for at an instruction."""
    classes = [_class_of(code, i) for i in range(len(code))]
    often = max((instruction.executed for instruction in code if instruction.opcode.startswith("HGMMA")), default=0) / 2
    arrivals = {
        _address(instruction)
        for instruction, role in zip(code, roles)
        if role == "consumer" and instruction.opcode.startswith("SYNCS.ARRIVE") and ".RED" not in instruction.opcode
    }
    assigned: set[int] = set()
    for start, members in _mbarrier_waits(code):
        # A loop out of line comes after the wait that leads to it, and has its class already.
        if roles[start] not in ("consumer", "producer") or start in assigned:
            continue
        name = "keys"
        if roles[start] == "producer":
            name = "free_stages"
        elif _address(code[start]) in arrivals:
            name = "stage_order"
        elif code[start].executed < often:
            name = "rare_waits"
        for i in members - assigned:
            classes[i] = name
        assigned |= members
    return tuple(classes)


def _class_of(code: Sequence[Instruction], index: int) -> str:
    """The class of an instruction that is no mbarrier wait."""
    opcode = code[index].opcode
    if opcode.startswith("WARPGROUP.DEPBAR"):
        return _awaited_products(code, index)
    if opcode.split(".")[0] == "BAR":
        return "barriers"
    if opcode.startswith(("HGMMA", "WARPGROUP.ARRIVE")):
        return "product_issue"
    return "key_conversion" if opcode.startswith("F2FP") and ".E4M3" in opcode else "other"


def _awaited_products(code: Sequence[Instruction], index: int) -> str:
    """Of a DEPBAR that leaves N groups pending, what the group before the last N multiplies."""
    left = _groups_left(code[index])
    groups = -1  # that have begun, from the DEPBAR backwards
    for instruction in reversed(code[:index]):
        if instruction.opcode.startswith("WARPGROUP.DEPBAR") and _groups_left(instruction) == 0:
            break
        if instruction.opcode.startswith("HGMMA"):
            groups += "gsb0" in instruction.operands
            if groups == left:
                return "value_products" if ".tnsp" in instruction.operands else "score_products"
    return "product_issue"


def _groups_left(depbar: Instruction) -> int:
    """Groups that a DEPBAR leaves pending."""
    return int(depbar.operands.split(",")[-1].strip(), 16)


def _mbarrier_waits(code: Sequence[Instruction]) -> Iterable[tuple[int, set[int]]]:
    """The index of every PHASECHK, and the instructions that belong to its wait."""
    places = _places(code)
    for i, instruction in enumerate(code):
        if not instruction.opcode.startswith("SYNCS.PHASECHK"):
            continue
        predicate = instruction.operands.split(",")[0]
        members = {i}
        standing = next((j for j in range(i + 1, len(code)) if (code[j].guard or "").lstrip("!") == predicate), None)
        if standing is not None:
            members.add(standing)
            for target in _targets(code[standing], places) if code[standing].opcode == "BRA" else ():
                members |= _loop_out_of_line(code, target, standing)
        yield i, members


def _loop_out_of_line(code: Sequence[Instruction], target: int, branch: int) -> set[int]:
    """From a branch's target behind it to the unconditional BRA, if a wait is in between."""
    end = next((j for j in range(target, len(code)) if not code[j].falls_through), len(code) - 1)
    loop = range(target, end + 1)
    return set(loop) if target > branch and any(code[j].opcode.startswith("SYNCS.PHASECHK") for j in loop) else set()


def _reached(code: Sequence[Instruction], opcode: str) -> set[int]:
    """What control can get to from the instructions whose opcode starts so."""
    places = _places(code)
    reached: set[int] = set()
    todo = [i for i, instruction in enumerate(code) if instruction.opcode.startswith(opcode)]
    while todo:
        i = todo.pop()
        if i in reached:
            continue
        reached.add(i)
        todo.extend(_targets(code[i], places))
        if code[i].falls_through and i + 1 < len(code):
            todo.append(i + 1)
    return reached


def _places(code: Sequence[Instruction]) -> dict[int, int]:
    return {instruction.address: i for i, instruction in enumerate(code)}


def _targets(instruction: Instruction, places: dict[int, int]) -> list[int]:
    """Indices of the code addresses that an instruction names."""
    values = (int(text, 16) for text in re.findall(r"0x[0-9a-f]+", instruction.operands))
    return [places[value] for value in values if value in places]


def _address(instruction: Instruction) -> str:
    """The bracketed address expression of a memory or mbarrier instruction."""
    found = re.search(r"\[[^]]*\]", instruction.operands)
    return found[0] if found else ""


def _samples_at_barrier(instruction: Instruction) -> int:
    """Samples that belong to a BAR, though they stand at the instruction behind it."""
    if instruction.opcode.startswith(("WARPGROUP", "UCGABAR_WAIT")):
        return 0
    return instruction.stalls.get("barrier", 0)

"""The two products of a tile of E4M3 keys: bytes from shared memory to FP16 operands in registers to WGMMA, one column group after the other.

Loads run ahead of the conversion, and products behind it, by the same number of groups. Plain functions, unrolled while the kernel is traced.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Float16, Uint32
from cutlass.cute.nvgpu import warpgroup

from .fp8_convert import e4m3_to_f16, load_transposed, load_unit, swap_middle_bytes
from .fp8_tile import BOX_BYTES, GROUPS, HALF_OFFSET, KEY_BLOCKS_OFFSET, VALUE_GROUPS, arrival_of_group

BLOCKS = 4  # k16 steps of a group: of 64 columns for the scores, of 64 keys for the values


def operand(words: list[Any], mma: Any) -> Any:
    """A operand of 64 x 64 in registers: four f16x2 words for each k16 step."""
    registers = cute.make_rmem_tensor((4 * BLOCKS,), Uint32)
    for i, word in enumerate(words):
        registers[i] = word
    return cute.make_tensor(cute.recast_ptr(registers.iterator, dtype=Float16), cute.make_layout(mma.partition_shape_A((64, 16 * BLOCKS))))


def multiply_keys(mma: Any, acc: Any, tSrQ: Any, addresses: list[Any], full: Any, phase: Any, groups_ahead: int) -> None:
    """acc = K Q^T, following the arrival of the tile.

    Args:
        tSrQ: Q in shared memory, (MMA, 1, 36 k16 steps).
        addresses: this lane's `score_offsets` in the tile, as shared-memory addresses.
        full, phase: the stage's barriers, one for each of ARRIVALS.
        groups_ahead: groups loaded before their turn, and products in flight.
    """
    arrived = -1

    def load(g: int) -> list[Any]:
        nonlocal arrived
        while arrived < arrival_of_group(g):
            arrived += 1
            cute.arch.mbarrier_wait(full + arrived, phase)
        at = g // 2 * BOX_BYTES
        return [load_unit(addresses[g % 2], at), load_unit(addresses[g % 2], at + HALF_OFFSET)]

    units = [load(g) for g in range(groups_ahead)]
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, False)
    for g in range(GROUPS):
        if g + groups_ahead < GROUPS:
            units.append(load(g + groups_ahead))
        words = []
        for block in range(BLOCKS):
            (a0, a2), (a1, a3) = (e4m3_to_f16(unit[block]) for unit in units[g])
            words += [a0, a1, a2, a3]
        tSrK = operand(words, mma)
        warpgroup.fence()
        for block in range(BLOCKS):
            cute.gemm(atom, acc, tSrK[None, None, block], tSrQ[None, None, BLOCKS * g + block], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        warpgroup.wait_group(groups_ahead if g < GROUPS - 1 else 0)


def load_values(addresses: list[Any], g: int) -> list[Any]:
    """Byte pairs of all 64 keys of this warp's 16 value columns of a group: eight words. `addresses`: from `value_offsets`."""
    at = g // 2 * BOX_BYTES
    first: list[Any] = load_transposed(addresses[g % 2], at)
    return first + load_transposed(addresses[g % 2], at + KEY_BLOCKS_OFFSET)


def multiply_values(mma: Any, acc_o: Any, tOrP: Any, addresses: list[Any], ahead: list[Any]) -> None:
    """acc_o += V^T P^T, 64 value columns at a time. `ahead`: `load_values` of the first groups; as many are kept ahead."""
    groups_ahead, pairs = len(ahead), list(ahead)
    shape = cute.make_layout(mma.partition_shape_C((64, mma.op.shape_mnk[1])))
    for g in range(VALUE_GROUPS):
        if g + groups_ahead < VALUE_GROUPS:
            pairs.append(load_values(addresses, g + groups_ahead))
        words = []
        for pair in pairs[g]:
            words += e4m3_to_f16(swap_middle_bytes(pair))
        tOrV = operand(words, mma)
        acc = cute.make_tensor(acc_o.iterator + g * cute.size(shape), shape)
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.fence()
        for block in range(BLOCKS):
            cute.gemm(atom, acc, tOrV[None, None, block], tOrP[None, None, block], acc)
        warpgroup.commit_group()
        warpgroup.wait_group(groups_ahead if g < VALUE_GROUPS - 1 else 0)

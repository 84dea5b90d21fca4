"""End of a piece in the Hopper E4M3 forward: the consumer warpgroups add up their outputs in shared memory and write the rows.

Two of them own 256 value columns each, a "side", and get the others' parts of it through the piece's last stage, which goes back to the
producer only then. A third one hands over both sides and writes nothing.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from . import softmax
from .fp8_tile import TILE_BYTES, VALUE_GROUPS
from .named_barrier import NamedBarrierSm90
from .problem import HEAD_DIM_V, DecodeProblem
from .request_walk import RequestWalk
from .schedule import NO_SLOT
from .softmax import P_SHIFT
from .special_register import pinned, pinned_lane_index

SIDES = 2  # warpgroups that own columns of the output
QUAD_BYTES = 128 * 16  # four accumulator registers of every thread of a warpgroup
ROW_BYTES = 32 * 16  # of the output that a warp stores at once


class OutputSm90Fp8(RequestWalk):
    """Base of the E4M3 forward: its consumer warpgroups, their barriers, and what they do once the tiles of a piece are done."""

    def __init__(self, problem: DecodeProblem, consumers: int):
        super().__init__(problem)
        assert SIDES <= consumers <= SIDES + 1
        self.consumers = consumers
        self.consumer_warps = 4 * consumers
        self.row_blocks = self.tile_rows // 8
        # What one warpgroup gives another at the end of a piece, in value groups at once: both sides share one stage.
        self.exchanged_groups = VALUE_GROUPS // 2 if self.tile_rows <= 16 else VALUE_GROUPS // 4

    def group_values(self, storage: Any, group: Any) -> cute.Tensor:
        """One value of each warp of a warpgroup and each row: maxima of a tile, sums of a piece."""
        rows = self.tile_rows
        return cute.make_tensor(storage.warp_values.data_ptr() + group * (4 * rows), cute.make_layout((4, rows), stride=(rows, 1)))

    def sync_consumers(self) -> None:
        cute.arch.barrier(barrier_id=NamedBarrierSm90.CONSUMERS, number_of_threads=128 * self.consumers)

    def owns_side(self, group: Any) -> Any:
        """Whether a warpgroup is one of the two that own columns of the output."""
        return group < SIDES if self.consumers > SIDES else True

    def sync_sides(self) -> None:
        cute.arch.barrier(barrier_id=NamedBarrierSm90.SIDES, number_of_threads=128 * SIDES)

    @cute.jit
    def finish_piece(
        self,
        storage: cutlass.Constexpr,
        rO: cute.Tensor,
        statistics: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        outputs: tuple[cute.Tensor, cute.Tensor | None, cute.Tensor, cute.Tensor],
        k_scale: Float32,
        request: Int32,
        slot: Int32,
        tiles: Int32,
        last_stage: Int32,
        row_tile: Int32,
        group: Int32,
        warp_index: Int32,
    ) -> None:
        """Adds up the warpgroups' parts of a piece, normalised, and writes them: to `out` where the request is whole, else to a slot.

        A piece of one tile is the first warpgroup's alone, one of two has nothing of the third, and one without tiles is all zeros, with LSE -inf.
        """
        lane, warp_index = pinned_lane_index(), cute.arch.make_warp_uniform(pinned(warp_index))
        mOut, mLse, mOutPartial, mLsePartial = outputs
        row_max, row_sum, factor = statistics
        if tiles > 0:
            self.weigh(storage, statistics, k_scale, group, warp_index, lane)
            softmax.scale_output(rO, factor)
            if cutlass.const_expr(self.consumers > SIDES):
                if tiles > SIDES:
                    self.hand_over(storage, rO, last_stage, group, warp_index, lane)
            if self.owns_side(group):
                if tiles > 1:
                    self.exchange(storage, rO, last_stage, group, warp_index, lane)
            for side in cutlass.range_constexpr(SIDES):
                owner = Int32(side)
                if tiles == 1:
                    owner = Int32(0)
                if group == owner:
                    if slot == NO_SLOT:
                        self.store_side(storage, rO, mOut[request, None, None, None], side, last_stage, row_tile, group, warp_index, lane)
                    else:
                        self.store_side(storage, rO, mOutPartial[slot, None, None, None], side, last_stage, row_tile, group, warp_index, lane)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(storage.empty.data_ptr() + last_stage)
        elif slot == NO_SLOT:
            if self.owns_side(group):
                self.store_zeros(mOut[request, None, None, None], row_tile, group * 4 + warp_index, lane)
        if warp_index + 4 * group == 0:
            if lane < 4:
                self.store_lse(row_max, row_sum, mLse, mLsePartial, request, slot, row_tile, lane)

    @cute.jit
    def weigh(
        self,
        storage: cutlass.Constexpr,
        statistics: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        k_scale: Float32,
        group: Int32,
        warp_index: Int32,
        lane: Int32,
    ) -> None:
        """Maxima and sums over all warpgroups, and what this one's output has to be multiplied with."""
        row_max, row_sum, factor = statistics
        softmax.publish_sum(row_sum, self.group_values(storage, group), warp_index, lane)
        group_max = storage.group_max.get_tensor(cute.make_layout((self.tile_rows, self.consumers)))
        if warp_index == 0:
            if lane < 4:
                for block in cutlass.range_constexpr(self.row_blocks):
                    for parity in cutlass.range_constexpr(2):
                        group_max[block * 8 + lane * 2 + parity, group] = row_max[parity, block]
        self.sync_consumers()
        for block in cutlass.range_constexpr(self.row_blocks):
            for parity in cutlass.range_constexpr(2):
                row = softmax.row_of(block, parity, lane)
                top = group_max[row, 0]
                for other in cutlass.range_constexpr(1, self.consumers):
                    top = cute.arch.fmax(top, group_max[row, other])
                total = Float32(0.0)
                for other in cutlass.range_constexpr(self.consumers):  # in this order in all warpgroups: they divide by the same sum
                    sums = self.group_values(storage, other)
                    part = sums[0, row] + sums[1, row] + sums[2, row] + sums[3, row]
                    total += part * cute.math.exp2(group_max[row, other] - top, fastmath=True)
                inverse = Float32(0.0) if total == 0.0 else cute.arch.rcp_approx(total)
                factor[parity, block] = cute.math.exp2(row_max[parity, block] - top, fastmath=True) * inverse * k_scale
                row_sum[parity, block] = total * 2.0**-P_SHIFT
                row_max[parity, block] = top

    def side_pointer(self, storage: Any, stage: Any, side: int, dtype: Any) -> Any:
        """The part of a stage through which one warpgroup's 256 columns pass: TILE_BYTES / 2 at most."""
        part = self.row_blocks * self.exchanged_groups * QUAD_BYTES
        assert SIDES * part <= TILE_BYTES and part >= self.tile_rows * ROW_BYTES
        return cute.recast_ptr(storage.K.data_ptr() + (stage * TILE_BYTES + side * part), dtype=dtype).align(16)

    @cute.jit
    def hand_over(
        self, storage: cutlass.Constexpr, rO: cute.Tensor, stage: Int32, group: Int32, warp_index: Int32, lane: Int32
    ) -> None:
        """Adds the third warpgroup's part of both sides to their owners'. All are done with the stage: the barrier of the sums lies behind.

        A side's part lies where its owner writes next, in `exchange`: a thread overwrites what it has read itself, so no barrier stands between.
        """
        assert self.exchanged_groups == VALUE_GROUPS // SIDES  # a whole side at once
        thread = warp_index * 32 + lane
        for side in cutlass.range_constexpr(SIDES):
            if group == SIDES:
                self.give_quads(rO, self.passed_quads(storage, stage, 1 - side), side * self.exchanged_groups, thread)
        cute.arch.fence_proxy("async.shared", space="cta")  # TMA writes here next
        self.sync_consumers()
        for side in cutlass.range_constexpr(SIDES):
            if group == side:
                self.add_quads(rO, self.passed_quads(storage, stage, 1 - side), side * self.exchanged_groups, thread)

    @cute.jit
    def exchange(
        self, storage: cutlass.Constexpr, rO: cute.Tensor, stage: Int32, group: Int32, warp_index: Int32, lane: Int32
    ) -> None:
        """Adds the other owner's part of this one's 256 value columns. Both are done with the stage: the barrier of the sums lies behind."""
        thread, groups = warp_index * 32 + lane, VALUE_GROUPS // SIDES
        for step in cutlass.range_constexpr(groups // self.exchanged_groups):
            if cutlass.const_expr(step > 0):
                self.sync_sides()
            for side in cutlass.range_constexpr(SIDES):
                if group != side:
                    self.give_quads(rO, self.passed_quads(storage, stage, side), side * groups + step * self.exchanged_groups, thread)
            cute.arch.fence_proxy("async.shared", space="cta")  # TMA writes here next
            self.sync_sides()
            for side in cutlass.range_constexpr(SIDES):
                if group == side:
                    self.add_quads(rO, self.passed_quads(storage, stage, side), side * groups + step * self.exchanged_groups, thread)
        self.sync_warpgroup(group)  # the output takes the place of what has been read

    def passed_quads(self, storage: Any, stage: Any, place: int) -> Any:
        """What passes through one part of a stage: [4 registers, 128 threads, quads]."""
        layout = cute.make_layout((4, 128, self.row_blocks * self.exchanged_groups), stride=(1, 4, 512))
        return cute.make_tensor(self.side_pointer(storage, stage, place, Float32), layout)

    def give_quads(self, rO: Any, sX: Any, first_group: int, thread: Any) -> None:
        """`exchanged_groups` value groups of the output, from `first_group` on, to `passed_quads`."""
        quad, first = cute.make_rmem_tensor((4,), Float32), first_group * self.row_blocks
        for i in range(sX.shape[2]):
            for j in range(4):
                quad[j] = rO[4 * (first + i) + j]
            cute.autovec_copy(quad, sX[None, thread, i])

    def add_quads(self, rO: Any, sX: Any, first_group: int, thread: Any) -> None:
        """Adds what another warpgroup has given."""
        quad, first = cute.make_rmem_tensor((4,), Float32), first_group * self.row_blocks
        for i in range(sX.shape[2]):
            cute.autovec_copy(sX[None, thread, i], quad)
            for j in range(4):
                rO[4 * (first + i) + j] = rO[4 * (first + i) + j] + quad[j]

    @cute.jit
    def store_side(
        self,
        storage: cutlass.Constexpr,
        rO: cute.Tensor,
        gO: cute.Tensor,
        side: cutlass.Constexpr,
        stage: Int32,
        row_tile: Int32,
        group: Int32,
        warp_index: Int32,
        lane: Int32,
    ) -> None:
        """256 value columns of O^T registers to gO [tokens, heads, 512], through shared memory: a warp then writes ROW_BYTES of a row at once.

        The two halves of a warp's lines are neighbouring columns. Units of 16 bytes are permuted by row: no bank conflicts on either side.
        """
        dtype, groups = gO.element_type, VALUE_GROUPS // SIDES
        unit = 128 // dtype.width
        pass_columns = 32 * unit
        pass_groups = pass_columns // 64
        sO = self.side_pointer(storage, stage, side, dtype)
        store = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=2 * dtype.width)
        places = cute.make_layout((2, self.row_blocks, pass_groups), stride=(1, 8 * pass_columns, 64))
        pairs = cute.make_rmem_tensor(places.shape, dtype)
        column = warp_index * 16 + lane // 4 * 2
        for step in cutlass.range_constexpr(groups // pass_groups):
            if cutlass.const_expr(step > 0):
                self.sync_warpgroup(group)
            for parity in cutlass.range_constexpr(2):
                row = (lane % 4) * 2 + parity
                for block in cutlass.range_constexpr(self.row_blocks):
                    for i in cutlass.range_constexpr(pass_groups):
                        for half in cutlass.range_constexpr(2):
                            pairs[half, block, i] = rO[parity, half, block, side * groups + step * pass_groups + i].to(dtype)
                place = row * pass_columns + ((column // unit) ^ row) * unit + column % unit
                cute.copy(store, pairs, cute.make_tensor((sO + place).align(2 * dtype.width // 8), places))
            cute.arch.fence_proxy("async.shared", space="cta")  # TMA writes here next
            self.sync_warpgroup(group)
            for i in cutlass.range_constexpr(self.tile_rows // 4):
                row = i * 4 + warp_index
                token, head, exists = self.locate(row, row_tile)
                if exists:
                    source = (sO + (row * pass_columns + (lane ^ (row % 8)) * unit)).align(16)
                    target = (gO[token, head, None].iterator + (side * (HEAD_DIM_V // SIDES) + step * pass_columns + lane * unit)).align(16)
                    values = cute.make_rmem_tensor((unit,), dtype)
                    cute.autovec_copy(cute.make_tensor(source, cute.make_layout((unit,))), values)
                    cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout((unit,))))

    @cute.jit
    def store_zeros(self, gO: cute.Tensor, row_tile: Int32, warp_index: Int32, lane: Int32) -> None:
        """A request without keys: zeros to all its rows."""
        zeros = cute.make_rmem_tensor((8,), gO.element_type)
        zeros.fill(0.0)
        for i in cutlass.range_constexpr(self.row_blocks):
            token, head, exists = self.locate(i * (4 * SIDES) + warp_index, row_tile)
            if exists:
                for part in cutlass.range_constexpr(HEAD_DIM_V // 256):
                    target = (gO[token, head, None].iterator + (part * 256 + lane * 8)).align(16)
                    cute.autovec_copy(zeros, cute.make_tensor(target, cute.make_layout((8,))))

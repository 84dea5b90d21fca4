"""The forward for more than 32 rows a CTA compiles with no GPU, and the machine code and register layouts are what the design counts on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import BFloat16
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from dense_mla.forward_sm90 import SHARED_MEMORY_LIMIT, fake_arguments
from dense_mla.forward_sm90_wide import PART_COLUMNS, ForwardSm90Wide
from dense_mla.problem import ContextShard, DecodeProblem
from test_compile import MachineCode, assert_no_spills, disassemble

FORWARDS = [
    DecodeProblem(64, 64, torch.float32, return_lse=True),
    DecodeProblem(48, 944, kv_dtype=torch.float16, batch_invariant=True),
    # Two row tiles of 6 tokens: several boxes a tile, and another number of visible keys in every row.
    DecodeProblem(8, 16, query_len=12, return_lse=True, context=ContextShard(world=2, rank=1, interleave=16)),
]


def compiled(problem: DecodeProblem, path: Path, capfd: pytest.CaptureFixture[str]) -> tuple[ForwardSm90Wide, MachineCode, str]:
    """The kernel, its machine code, and what ptxas has to say of it."""
    forward = ForwardSm90Wide(problem)
    options = f"--gpu-arch sm_90a --enable-tvm-ffi --keep-cubin --dump-dir {path} remarks{{ptx}}"
    kernel = cute.compile(forward, *fake_arguments(problem), options=options)
    return forward, disassemble(kernel, path), "".join(capfd.readouterr())


@pytest.mark.parametrize("problem", FORWARDS, ids=lambda p: f"{p.num_heads}x{p.query_len}-{p.page_size}")
def test_machine_code(problem: DecodeProblem, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    forward, code, remarks = compiled(problem, tmp_path, capfd)
    assert_no_spills(code)
    assert 0 < forward.shared_memory_bytes <= SHARED_MEMORY_LIMIT
    # Scores: 36 k16 steps. Values, in two parts: four k16 steps for our own P, for the other's within the scores, and for the other's after the
    # last tile.
    assert (code.sass.count("HGMMA.64x64x16"), code.sass.count("HGMMA.64x128x16"), code.count("HGMMA")) == (36, 24, 60)
    # C7510 and its like: ptxas serialises products, or waits for them where the source does not.
    assert "ptxas info" in remarks and "(C75" not in remarks, remarks
    # Every exponential of a tile once: 32 scores of a thread; 2 factors in each of three places.
    assert code.count("MUFU.EX2") == 32 + 6
    assert code.count("ACQBULK") == 1 and code.sass.count("PREEXIT") == 1


def test_chunk_order() -> None:
    """Rope columns, then the owner's values, then the other's, which have to wait until the other is through with the tile before."""
    orders: dict[int, list[int]] = {}

    @cute.jit
    def trace(forward: cutlass.Constexpr) -> None:
        for owner in cutlass.range_constexpr(2):
            orders[owner] = [int(forward.chunk_at(step, owner)) for step in range(9)]

    cute.compile(trace, ForwardSm90Wide(FORWARDS[0]), options="--gpu-arch sm_90a")
    assert orders == {0: [8, 0, 1, 2, 3, 4, 5, 6, 7], 1: [8, 4, 5, 6, 7, 0, 1, 2, 3]}
    for problem in (DecodeProblem(64, 64), DecodeProblem(128, 64)):
        assert 1 <= ForwardSm90Wide(problem).chunks_before_other <= 1 + 4  # the other's P V starts before the first chunk that waits for it


def coordinates(tensor: Any) -> list[tuple[int, ...]]:
    return [tuple(map(int, tensor[i])) for i in range(cute.size(tensor))]


def test_registers_of_scores_output_and_probabilities() -> None:
    """Which row and column a register holds; that P's registers are operand A as they are; that stmatrix puts P where the other reads it."""
    warp_index, registers = 2, {}

    @cute.jit
    def trace(forward: cutlass.Constexpr) -> None:
        def mma(columns: int, source: warpgroup.OperandSource, b_major: OperandMajorMode) -> Any:
            op = warpgroup.MmaF16BF16Op(BFloat16, cutlass.Float32, (64, columns, 16), source, OperandMajorMode.K, b_major)
            return cute.make_tiled_mma(op)

        mma_s = mma(64, warpgroup.OperandSource.SMEM, OperandMajorMode.K)
        mma_own = mma(PART_COLUMNS, warpgroup.OperandSource.RMEM, OperandMajorMode.MN)
        store = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), BFloat16), mma_s)
        cS, cO = cute.make_identity_tensor((64, 64)), cute.make_identity_tensor((64, PART_COLUMNS))
        for lane in cutlass.range_constexpr(32):
            thread = 32 * warp_index + lane
            own, storer = mma_own.get_slice(thread), store.get_slice(thread)
            order = storer.retile(cute.make_tensor(0, cute.make_layout(mma_s.partition_shape_C((64, 64)))))
            registers[lane] = {
                "rows": [int(forward.score_row(0, half, thread)) for half in range(2)],
                "S": coordinates(mma_s.get_slice(thread).partition_C(cS)),
                "O": coordinates(own.partition_C(cO)),
                "A": coordinates(own.partition_A(cS)),
                "addresses": coordinates(storer.partition_D(cS)),
                "order": [int(order[i]) for i in range(cute.size(order))],
            }

    cute.compile(trace, ForwardSm90Wide(FORWARDS[0]), options="--gpu-arch sm_90a")
    for lane, held in registers.items():
        rows = [16 * warp_index + lane // 4 + 8 * half for half in range(2)]
        assert held["rows"] == rows
        for name, blocks in (("S", 8), ("O", PART_COLUMNS // 8)):
            expected = [(rows[half], 8 * block + lane % 4 * 2 + parity) for block in range(blocks) for half in range(2) for parity in range(2)]
            assert held[name] == expected
        assert held["A"] == held["S"]
        # stmatrix: register j of a lane goes to matrix j, row lane / 4, columns 2 (lane % 4) and the next; lane 8j + i names row i of matrix j.
        for copy in range(4):
            for j in range(4):
                row = registers[8 * j + lane // 4]["addresses"][8 * copy : 8 * copy + 8]
                stored = [held["S"][held["order"][8 * copy + 2 * j + e]] for e in range(2)]
                assert stored == row[lane % 4 * 2 : lane % 4 * 2 + 2]

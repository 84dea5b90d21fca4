"""The forward for E4M3 caches compiles with no GPU, and the machine code is what the design counts on."""

from __future__ import annotations

import re
from pathlib import Path

import cutlass.cute as cute
import pytest
import torch

from dense_mla.arch import build_forward
from dense_mla.compiled import compile_kernels
from dense_mla.forward_sm90 import SHARED_MEMORY_LIMIT, ForwardSm90, fake_arguments
from dense_mla.forward_sm90_fp8 import REGISTERS, ForwardSm90Fp8
from dense_mla.named_barrier import NamedBarrierSm90
from dense_mla.problem import ContextShard, DecodeProblem
from test_compile import CAPABILITY, MachineCode, assert_no_spills, disassemble

E4M3 = torch.float8_e4m3fn
FORWARDS = [
    DecodeProblem(1, 64, kv_dtype=E4M3),
    DecodeProblem(16, 64, torch.float32, E4M3, return_lse=True),
    DecodeProblem(12, 16, kv_dtype=E4M3, batch_invariant=True),
    DecodeProblem(4, 48, torch.float32, E4M3, query_len=4, return_lse=True, context=ContextShard(world=2, rank=1, interleave=16)),
    DecodeProblem(12, 944, kv_dtype=E4M3, query_len=2),
    DecodeProblem(8, 944, kv_dtype=E4M3, query_len=16, return_lse=True),
    DecodeProblem(64, 16, torch.float32, E4M3, batch_invariant=True),
    # Every row sees another number of keys, and other ranks hold some of them.
    DecodeProblem(8, 48, torch.float32, E4M3, query_len=4, return_lse=True, context=ContextShard(world=2, rank=1, interleave=16)),
]


def compiled(problem: DecodeProblem, path: Path, capfd: pytest.CaptureFixture[str]) -> tuple[ForwardSm90, MachineCode, str]:
    """The kernel, its machine code, and what ptxas has to say of it."""
    forward = build_forward(CAPABILITY, problem)
    options = f"--gpu-arch sm_90a --enable-tvm-ffi --keep-cubin --dump-dir {path} remarks{{ptx}}"
    kernel = cute.compile(forward, *fake_arguments(problem), options=options)
    return forward, disassemble(kernel, path), "".join(capfd.readouterr())


@pytest.mark.parametrize("problem", FORWARDS, ids=lambda p: f"{p.num_heads}x{p.query_len}-{p.page_size}")
def test_machine_code(problem: DecodeProblem, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    forward, code, remarks = compiled(problem, tmp_path, capfd)
    assert isinstance(forward, ForwardSm90Fp8)
    assert_no_spills(code)
    assert 0 < forward.shared_memory_bytes <= SHARED_MEMORY_LIMIT
    # Scores: 36 k16 steps of 576 columns. Values: eight m64 tiles of four k16 steps. Without a name for the type, HGMMA is FP16.
    assert code.count("HGMMA") == code.sass.count(f"HGMMA.64x{problem.tile_rows}x16.F32 ") == 36 + 32
    # Every byte of a tile is converted once for the scores, and its value columns once more: 4 f16x2 words of each step, two values a word.
    assert code.sass.count("F2FP.F16.E4M3.UNPACK_B") == 4 * (36 + 32)
    assert code.sass.count("LDSM.16.MT88.4") == 16
    # C7510 and its like: ptxas serialises products, or waits for them where the source does not: one wait for every four steps.
    assert "ptxas info" in remarks and "(C75" not in remarks, remarks
    assert code.sass.count("WARPGROUP.ARRIVE") == code.sass.count("WARPGROUP.DEPBAR") == 9 + 8
    assert code.count("UTMALDG") == (9 if problem.page_size >= 48 else 1) + 3 and code.count("USETMAXREG") == 2
    assert code.count("ACQBULK") == 1 and code.sass.count("PREEXIT") == 1


@pytest.mark.parametrize("problem", [FORWARDS[0], FORWARDS[1], FORWARDS[4], FORWARDS[6]], ids=lambda p: f"{p.tile_rows}-rows")
def test_warpgroups(problem: DecodeProblem, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Up to 16 rows three warpgroups take tiles in turn, above that two: more registers than the SM has would hang the launch."""
    forward, code, _ = compiled(problem, tmp_path, capfd)
    assert isinstance(forward, ForwardSm90Fp8)
    consumers = 3 if problem.tile_rows <= 16 else 2
    producer, consumer = REGISTERS[consumers]
    assert forward.consumers == consumers and 128 * (producer + consumers * consumer) <= 65_536
    assert sorted(int(word, 16) for word in re.findall(r"USETMAXREG\..*?(0x[0-9a-f]+)", code.sass)) == [producer, consumer]
    assert max(map(int, re.findall(r"\bR(\d+)\b", code.sass))) < consumer
    # The sums of a piece wait for all warpgroups, its sides for their two owners. (Barriers of one warpgroup have their id in a register.)
    barriers = {(int(index, 16), int(threads, 16)) for index, threads in re.findall(r"BAR\.SYNC\S* (0x[0-9a-f]+), (0x[0-9a-f]+)", code.sass)}
    assert barriers == {(NamedBarrierSm90.CONSUMERS, 128 * consumers), (NamedBarrierSm90.SIDES, 256)}


def test_every_kernel_of_a_problem(tmp_path: Path) -> None:
    """Schedule, forward and merge by the way that the decoder takes."""
    kernels = compile_kernels(FORWARDS[1], CAPABILITY, "--keep-cubin", f"--dump-dir {tmp_path}")
    for kernel in (kernels.schedule, kernels.forward, kernels.merge):
        assert_no_spills(disassemble(kernel, tmp_path))


@pytest.mark.parametrize(
    ("heads", "query_len", "row_tiles", "tile_rows"),
    [(1, 1, 1, 8), (12, 1, 1, 16), (20, 1, 1, 24), (32, 1, 1, 32), (48, 1, 2, 24), (96, 1, 3, 32), (128, 1, 4, 32), (12, 3, 2, 24), (8, 16, 4, 32)],
)
def test_row_tiles(heads: int, query_len: int, row_tiles: int, tile_rows: int) -> None:
    """A warpgroup's registers hold 32 rows of all 512 columns."""
    problem = DecodeProblem(heads, 64, kv_dtype=E4M3, query_len=query_len)
    assert (problem.row_tiles, problem.tile_rows) == (row_tiles, tile_rows)
    assert row_tiles * problem.tile_heads * problem.tile_tokens >= problem.rows


def test_queries_and_output_stay_bf16() -> None:
    assert DecodeProblem(8, 64, kv_dtype=E4M3).query_dtype == torch.bfloat16
    assert DecodeProblem(8, 64, kv_dtype=torch.float16).query_dtype == torch.float16
    with pytest.raises(ValueError, match=r"kv_dtype must be torch\.bfloat16, torch\.float16 or torch\.float8_e4m3fn, got torch\.float8_e5m2"):
        DecodeProblem(8, 64, kv_dtype=torch.float8_e5m2)

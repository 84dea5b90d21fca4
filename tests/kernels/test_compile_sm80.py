"""The portable forward compiles for every architecture of the list with no GPU, and fits it: registers, shared memory, instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from dense_mla.arch import ARCHITECTURES
from dense_mla.forward_sm80 import ForwardSm80, fake_arguments
from dense_mla.problem import ContextShard, DecodeProblem
from dense_mla.tile_sm80 import tile_rows
from test_compile import MachineCode, assert_no_spills, disassemble

# What no architecture below Hopper has, and what this kernel uses on none: TMA, its barriers, WGMMA, tcgen05, stmatrix, register reallocation.
NEWER = ["UTMALDG", "UTMASTG", "UTMAPF", "SYNCS", "UBLKCP", "HGMMA", "UTCHMMA", "WARPGROUP", "STSM", "USETMAXREG"]


@dataclass(frozen=True)
class Architecture:
    """What the vendor documents of a compute capability: shared memory that a CTA may have, griddepcontrol from 9.0 on, FP8 from 8.9 on."""

    target: str
    shared_memory_limit: int

    @property
    def capability(self) -> int:
        return int(self.target.removeprefix("sm_").rstrip("a"))

    @property
    def dependent_launch(self) -> bool:
        return self.capability >= 90

    @property
    def converts_e4m3(self) -> bool:
        return self.capability >= 89


SM80, SM86, SM87, SM89 = (
    Architecture("sm_80", 166_912),
    Architecture("sm_86", 101_376),
    Architecture("sm_87", 166_912),
    Architecture("sm_89", 101_376),
)
SM90, SM100, SM103, SM110 = (Architecture(f"sm_{n}a", 232_448) for n in (90, 100, 103, 110))
SM120, SM121 = Architecture("sm_120a", 101_376), Architecture("sm_121a", 101_376)

BF16, FP32 = torch.bfloat16, torch.float32
RANK_3_OF_8 = ContextShard(8, 3, 64)
FORWARDS = [
    (SM80, DecodeProblem(16, 64, FP32, return_lse=True)),
    (SM80, DecodeProblem(128, 528, BF16, query_len=4, batch_invariant=True, context=RANK_3_OF_8, return_lse=True)),
    (SM86, DecodeProblem(8, 16, BF16)),
    (SM86, DecodeProblem(64, 944, FP32, return_lse=True)),
    (SM87, DecodeProblem(12, 48, BF16, batch_invariant=True)),
    (SM87, DecodeProblem(64, 64, FP32)),
    (SM89, DecodeProblem(11, 64, FP32)),
    (SM89, DecodeProblem(32, 48, BF16, batch_invariant=True, return_lse=True)),
    (SM90, DecodeProblem(16, 64, BF16)),
    (SM90, DecodeProblem(32, 944, FP32, return_lse=True)),
    (SM100, DecodeProblem(16, 64, FP32)),
    (SM100, DecodeProblem(12, 64, BF16, query_len=8, kv_dtype=torch.float16)),
    (SM103, DecodeProblem(1, 64, BF16)),
    (SM103, DecodeProblem(128, 528, BF16, query_len=4, batch_invariant=True, context=RANK_3_OF_8, return_lse=True)),
    (SM110, DecodeProblem(6, 32, BF16, return_lse=True)),
    (SM110, DecodeProblem(8, 64, BF16, query_len=4)),
    (SM120, DecodeProblem(16, 64, BF16)),
    (SM120, DecodeProblem(32, 1024, FP32, query_len=2, causal=False, return_lse=True)),
    (SM121, DecodeProblem(12, 64, BF16, kv_dtype=torch.float16)),
    (SM121, DecodeProblem(8, 64, FP32, query_len=4, return_lse=True)),
]


def name(value: object) -> str:
    if isinstance(value, Architecture):
        return value.target
    assert isinstance(value, DecodeProblem)
    return f"{value.num_heads}x{value.query_len}-page{value.page_size}"


@pytest.mark.parametrize(("architecture", "problem"), FORWARDS, ids=name)
def test_forward(architecture: Architecture, problem: DecodeProblem, tmp_path: Path) -> None:
    forward, code = compiled(ForwardSm80, architecture, problem, tmp_path)
    assert_instructions(code, forward, architecture)


def compiled(kind: type[ForwardSm80], architecture: Architecture, problem: DecodeProblem, tmp_path: Path) -> tuple[ForwardSm80, MachineCode]:
    """The kernel and its machine code, which fits the architecture."""
    import cutlass.cute as cute

    conversion = {"converts_e4m3": architecture.converts_e4m3} if problem.needs_k_scale else {}
    forward = kind(problem, architecture.shared_memory_limit, architecture.dependent_launch, **conversion)
    options = f"--gpu-arch {architecture.target} --enable-tvm-ffi --keep-cubin --dump-dir {tmp_path}"
    code = disassemble(cute.compile(forward, *fake_arguments(problem), options=options), tmp_path)
    assert_no_spills(code)
    assert forward.shared_memory_bytes == forward.tile.shared_memory_bytes <= architecture.shared_memory_limit
    return forward, code


def assert_instructions(code: MachineCode, forward: ForwardSm80, architecture: Architecture) -> None:
    tile = forward.tile
    # Both products stand twice: in the loop, and for the first tile's scores and the last tile's values.
    scores = 9 * tile.m_tiles * tile.warp_keys // 8
    values = 8 * tile.m_tiles * tile.keys // 16
    assert code.count("HMMA") == code.sass.count("HMMA.16816.F32") == 2 * (scores + values)
    assert code.sass.count("LDSM.16.MT88.4") == 2 * tile.line_units // 2 * tile.keys // 16
    # Three copies of load_tile: ahead of the first request, at its first tile, in the loop. Sixteen bytes past L1, zeros past the end.
    copies = -(-9 // tile.chunks_at_once)
    assert code.count("LDGSTS") == len(re.findall(r"LDGSTS\.E\.BYPASS\.(?:LTC128B\.)?128\.ZFILL ", code.sass)) == 3 * copies
    assert code.count("ACQBULK") == code.sass.count("PREEXIT") == int(architecture.dependent_launch)
    assert [instruction for instruction in NEWER if code.count(instruction)] == []
    # Two barriers a tile, twice, and one before the last tile's values; one for the largest values of Q, where it is converted.
    assert code.sass.count("BAR.SYNC") == 5 + forward.converts_queries


def test_every_architecture_compiles_both_heights_of_the_tile() -> None:
    """Those of 16 and of 32 rows have other registers and another ring; what else a problem says goes around the list."""
    targets = [facts.target for facts in ARCHITECTURES.values()]
    assert {(architecture.target, tile_rows(problem.rows)) for architecture, problem in FORWARDS} == {(t, rows) for t in targets for rows in (16, 32)}


def test_the_limits_are_the_toolkits() -> None:
    from cutlass.memory import get_smem_capacity_in_bytes

    architectures = {architecture for architecture, _ in FORWARDS}
    for architecture in architectures:
        assert architecture.shared_memory_limit == get_smem_capacity_in_bytes(architecture.target.rstrip("a"))
    facts = {(each.target, each.shared_memory_limit, each.dependent_launch, each.converts_e4m3) for each in ARCHITECTURES.values()}
    assert facts == {(each.target, each.shared_memory_limit, each.dependent_launch, each.converts_e4m3) for each in architectures}

"""The portable forward for E4M3 caches compiles for every architecture of the list with no GPU, and fits it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from dense_mla.arch import ARCHITECTURES, build_forward
from dense_mla.compiled import compile_kernels
from dense_mla.forward_sm80_fp8 import ForwardSm80Fp8
from dense_mla.problem import ContextShard, DecodeProblem
from dense_mla.tile_sm80 import tile_rows
from test_compile import MachineCode, assert_no_spills, disassemble
from test_compile_sm80 import (
    SM80,
    SM86,
    SM87,
    SM89,
    SM90,
    SM100,
    SM103,
    SM110,
    SM120,
    SM121,
    Architecture,
    assert_instructions,
    compiled,
    name,
)

E4M3, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
RANK_3_OF_8 = ContextShard(8, 3, 64)
FORWARDS = [
    (SM80, DecodeProblem(16, 64, FP32, E4M3, return_lse=True)),
    (SM80, DecodeProblem(128, 528, BF16, E4M3, query_len=4, batch_invariant=True, context=RANK_3_OF_8, return_lse=True)),
    (SM86, DecodeProblem(8, 16, BF16, E4M3)),
    (SM86, DecodeProblem(64, 944, FP32, E4M3, return_lse=True)),
    (SM87, DecodeProblem(12, 48, BF16, E4M3, batch_invariant=True)),
    (SM87, DecodeProblem(64, 64, FP32, E4M3)),
    (SM89, DecodeProblem(11, 64, FP32, E4M3)),
    (SM89, DecodeProblem(32, 64, BF16, E4M3, return_lse=True)),
    (SM90, DecodeProblem(16, 64, BF16, E4M3)),
    (SM90, DecodeProblem(32, 944, FP32, E4M3, return_lse=True)),
    (SM100, DecodeProblem(16, 64, FP32, E4M3)),
    (SM100, DecodeProblem(128, 528, BF16, E4M3, query_len=4, batch_invariant=True, context=RANK_3_OF_8, return_lse=True)),
    (SM103, DecodeProblem(1, 64, BF16, E4M3)),
    (SM103, DecodeProblem(12, 64, BF16, E4M3, query_len=8)),
    (SM110, DecodeProblem(6, 32, BF16, E4M3, return_lse=True)),
    (SM110, DecodeProblem(8, 64, BF16, E4M3, query_len=4)),
    (SM120, DecodeProblem(16, 64, BF16, E4M3)),
    (SM120, DecodeProblem(32, 1024, FP32, E4M3, query_len=2, causal=False, return_lse=True)),
    (SM121, DecodeProblem(12, 64, BF16, E4M3)),
    (SM121, DecodeProblem(8, 64, FP32, E4M3, query_len=4, return_lse=True)),
]


@pytest.mark.parametrize(("architecture", "problem"), FORWARDS, ids=name)
def test_forward(architecture: Architecture, problem: DecodeProblem, tmp_path: Path) -> None:
    forward, code = compiled(ForwardSm80Fp8, architecture, problem, tmp_path)
    assert_instructions(code, forward, architecture)
    # Two chunks of a key a load, the ninth alone.
    assert code.sass.count("LDSM.16.M88.2") == 2
    if architecture.converts_e4m3:
        assert_converted_to_f16(code, problem)
    else:
        assert_converted_to_bf16(code)


# A word of four codes for the scores: 16 keys, four columns of every chunk; for the values: 32 keys at 64 columns over 32 lanes. Two conversions a
# word, and all of it stands twice.
SCORE_WORDS, VALUE_WORDS = 9 * 2, 16
CONVERSIONS = 2 * 2 * (SCORE_WORDS + VALUE_WORDS)


def assert_converted_to_f16(code: MachineCode, problem: DecodeProblem) -> None:
    """FP16 operands in all products, an instruction a pair of codes, and NaN made a number only where rows see different keys."""
    assert code.sass.count("HMMA.16816.F32 ") == code.count("HMMA")
    assert code.sass.count("F2FP.F16.E4M3.UNPACK_B") == CONVERSIONS
    larger = re.findall(r"\bV?HMNMX2?\S*", code.sass)
    assert len(larger) == (2 * 2 * VALUE_WORDS if problem.causal and problem.query_len > 1 else 0)


def assert_converted_to_bf16(code: MachineCode) -> None:
    """BF16 operands in all products, and no conversion instruction."""
    assert code.sass.count("HMMA.16816.F32.BF16") == code.count("HMMA")
    assert ".E4M3" not in code.sass
    # Where the architecture has a product without a sum, it may be taken.
    products = re.findall(r"\bH(?:FMA2|MUL2)\.(?:MMA\.)?BF16\S*", code.sass)
    assert len(products) == CONVERSIONS
    # Denormals are numbers here: every E4M3 code is one of BF16's before it is scaled up.
    assert [instruction for instruction in products if "FTZ" in instruction] == []


def test_every_architecture_compiles_both_heights_of_the_tile() -> None:
    targets = [facts.target for facts in ARCHITECTURES.values()]
    assert {(architecture.target, tile_rows(problem.rows)) for architecture, problem in FORWARDS} == {(t, rows) for t in targets for rows in (16, 32)}


@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_every_architecture_builds_it(capability: tuple[int, int]) -> None:
    """By the decoder's own way: the portable kernel where there is no other, and on Hopper when it is asked for."""
    forward = build_forward(capability, DecodeProblem(16, 64, kv_dtype=E4M3), "sm80")
    assert type(forward) is ForwardSm80Fp8
    assert forward.tile.shared_memory_bytes <= ARCHITECTURES[capability].shared_memory_limit
    assert forward.dependent_launch == (capability >= (9, 0))
    assert forward.converts_queries == (capability >= (8, 9))


def test_every_kernel_of_a_problem(tmp_path: Path) -> None:
    """Schedule, forward and merge by the way that the decoder takes."""
    kernels = compile_kernels(FORWARDS[0][1], (8, 0), "--keep-cubin", f"--dump-dir {tmp_path}")
    for kernel in (kernels.schedule, kernels.forward, kernels.merge):
        assert_no_spills(disassemble(kernel, tmp_path))

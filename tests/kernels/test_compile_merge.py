"""The machine code of the merge: nothing spills, and all loads of a round are out before one of them is waited for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from dense_mla.compiled import compile_options, kernel_sources
from dense_mla.merge_plan import MergeTile
from dense_mla.problem import DecodeProblem
from test_compile import CAPABILITY, assert_no_spills, disassemble

SHAPES = [
    (1, 1), (8, 1), (12, 1), (16, 1), (17, 1), (32, 1), (33, 1), (12, 4), (7, 7), (64, 1), (16, 5), (96, 1), (128, 1), (128, 2),
]  # fmt: skip
LOAD_REGISTERS = {"LDG.E": 1, "LDG.E.64": 2, "LDG.E.128": 4}  # of the pieces; the schedule's loads have more in their names


def round_of_loads(sass: str) -> tuple[list[str], list[str]]:
    """The loads of pieces, and the instructions before the last of them that read what an earlier one loaded."""
    code = [text.split(maxsplit=1) for text in re.findall(r"/\*[0-9a-f]{4}\*/ +(?:@!?P\d +)?(.*?) ;", sass)]
    places = [place for place, (name, *_) in enumerate(code) if name in LOAD_REGISTERS]
    loaded: set[int] = set()
    early = []
    for name, *operands in code[places[0] : places[-1] + 1]:
        registers = [int(number) for number in re.findall(r"\bR(\d+)", operands[0] if operands else "")]
        if name in LOAD_REGISTERS:
            loaded |= set(range(registers[0], registers[0] + LOAD_REGISTERS[name]))
        elif loaded & set(registers):
            early.append(" ".join([name, *operands]))
    return [code[place][0] for place in places], early


def test_an_early_reader_is_found() -> None:
    code = "/*0010*/ LDG.E.128 R8, desc[UR4][R2.64] ;\n/*0020*/ @!P1 {} ;\n/*0030*/ @P0 LDG.E R4, desc[UR4][R2.64] ;\n/*0040*/ FADD R5, R8, R4 ;"
    assert round_of_loads(code.format("IADD3 R2, R2, R12, RZ")) == (["LDG.E.128", "LDG.E"], [])
    assert round_of_loads(code.format("PRMT R20, R11, 0x7632, R20"))[1] == ["PRMT R20, R11, 0x7632, R20"]


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "tokens"), SHAPES)
def test_one_round_of_loads(heads: int, tokens: int, dtype: torch.dtype, return_lse: bool, tmp_path: Path) -> None:
    problem = DecodeProblem(heads, 64, dtype, query_len=tokens, return_lse=return_lse)
    merge = kernel_sources(problem, CAPABILITY)[2].compile(compile_options(CAPABILITY, "--keep-cubin", f"--dump-dir {tmp_path}"))
    code, tile = disassemble(merge, tmp_path), MergeTile.of(problem.rows)
    value_bytes = tile.vector * dtype.itemsize
    assert_no_spills(code)
    loads, early = round_of_loads(code.sass)
    values = ["LDG.E.64"] if value_bytes == 8 else ["LDG.E.128"] * (value_bytes // 16)
    assert sorted(loads) == sorted(["LDG.E", *values] * tile.batch)
    assert early == []
    assert code.count(rf"STG\.E\.{16 * tile.vector}") == 1, "the output too"

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from dense_mla import DecodeProblem
from dense_mla.problem import MAX_RANGES, MAX_TILE_ROWS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 0}, "num_heads must be from 1 to 128, got 0"),
        ({"num_heads": 129}, "num_heads must be from 1 to 128, got 129"),
        ({"page_size": 24}, "page_size must be a positive multiple of 16, got 24"),
        ({"page_size": 0}, "page_size must be a positive multiple of 16, got 0"),
        ({"partial_dtype": torch.float16}, "partial_dtype must be torch.bfloat16 or torch.float32, got torch.float16"),
        ({"kv_dtype": torch.float8_e5m2}, "kv_dtype must be torch.bfloat16, torch.float16 or torch.float8_e4m3fn, got torch.float8_e5m2"),
        ({"query_len": 0}, "query_len must be from 1 to 16, got 0"),
        ({"query_len": 17}, "query_len must be from 1 to 16, got 17"),
    ],
)
def test_bad_facts_are_named_with_what_is_allowed(change: dict[str, object], message: str) -> None:
    facts: dict[str, object] = {"num_heads": 12, "page_size": 64}
    with pytest.raises(ValueError, match=f"^{message}$"):
        DecodeProblem(**(facts | change))  # type: ignore[arg-type]


def test_equal_facts_are_one_compile_key() -> None:
    assert hash(DecodeProblem(12, 64)) == hash(DecodeProblem(12, 64, torch.bfloat16))
    assert len({DecodeProblem(12, 64), DecodeProblem(12, 64, torch.float32), DecodeProblem(12, 768), DecodeProblem(11, 64)}) == 4


@pytest.mark.parametrize("heads", range(1, 129))
def test_row_tiles_hold_every_row(heads: int) -> None:
    problem = DecodeProblem(heads, 64)
    assert problem.row_tiles * problem.tile_rows >= problem.rows == heads
    assert (problem.row_tiles - 1) * problem.tile_rows < heads, "no row tile is empty"
    assert problem.tile_rows <= MAX_TILE_ROWS and problem.tile_rows % 8 == 0


@pytest.mark.parametrize(("heads", "tile_rows", "row_tiles"), [(1, 8, 1), (6, 8, 1), (11, 16, 1), (12, 16, 1), (24, 24, 1), (64, 64, 1), (96, 48, 2)])
def test_twelve_heads_are_not_padded_to_sixty_four(heads: int, tile_rows: int, row_tiles: int) -> None:
    problem = DecodeProblem(heads, 64)
    assert (problem.tile_rows, problem.row_tiles) == (tile_rows, row_tiles)


def test_the_grid_never_exceeds_the_sms() -> None:
    for heads in range(1, 129):
        problem = DecodeProblem(heads, 64)
        assert problem.num_ranges(132) * problem.row_tiles <= 132
    assert DecodeProblem(128, 64).num_ranges(1) == 1


def test_more_ranges_than_the_merge_has_room_for_are_refused() -> None:
    assert DecodeProblem(12, 64).num_ranges(MAX_RANGES) == DecodeProblem(128, 64).num_ranges(2 * MAX_RANGES + 1) == MAX_RANGES
    with pytest.raises(ValueError, match=r"^num_ranges must be at most 512, got 513 \(1026 SMs over 2 row tiles\)$"):
        DecodeProblem(128, 64).num_ranges(1026)


def test_importing_the_package_imports_no_cutlass_no_vllm_and_starts_no_cuda() -> None:
    code = (
        "import sys, dense_mla, dense_mla.reference, torch\n"
        "assert not {'cutlass', 'vllm'} & set(sys.modules), sorted(sys.modules)\n"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

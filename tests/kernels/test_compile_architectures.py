"""Schedule and merge, which every forward shares, compile for every architecture with no GPU. The forwards: test_compile*.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dense_mla.arch import ARCHITECTURES
from dense_mla.compiled import compile_options, kernel_sources
from dense_mla.problem import DecodeProblem
from test_compile import assert_no_spills, disassemble
from test_compile_sm80 import NEWER

# The lists of a batch-invariant step are the longest.
INVARIANT = DecodeProblem(128, 528, torch.bfloat16, query_len=4, batch_invariant=True, return_lse=True)
PLAIN = DecodeProblem(16, 64, torch.float32)


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of shared memory that the kernels lay out while they are traced."""
    import cutlass

    sizes: list[int] = []

    class Recording(cutlass.memory.SmemAllocator):
        def allocate(self, struct: Any, *rest: Any, **options: Any) -> Any:
            sizes.append(struct.size_in_bytes())
            return super().allocate(struct, *rest, **options)

    monkeypatch.setattr(cutlass.memory, "SmemAllocator", Recording)
    return sizes


@pytest.mark.parametrize(("capability", "problem"), [*((each, INVARIANT) for each in ARCHITECTURES), ((8, 6), PLAIN), ((12, 0), PLAIN)])
def test_schedule_and_merge(capability: tuple[int, int], problem: DecodeProblem, allocated: list[int], tmp_path: Path) -> None:
    """No spills, room for the lists, and of what newer GPUs have only the wait for the kernel before, where there is one."""
    facts = ARCHITECTURES[capability]
    schedule, _, merge = kernel_sources(problem, capability)
    assert merge.function.shared_memory_bytes <= facts.shared_memory_limit
    for source in (schedule, merge):
        allocated.clear()
        code = disassemble(source.compile(compile_options(capability, "--keep-cubin", f"--dump-dir {tmp_path}")), tmp_path)
        assert_no_spills(code)
        assert code.count("ACQBULK") == code.sass.count("PREEXIT") == int(facts.dependent_launch)
        assert [instruction for instruction in NEWER if code.count(instruction)] == []
        assert 0 < sum(allocated) <= facts.shared_memory_limit

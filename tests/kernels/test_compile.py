"""The kernels compile for every supported architecture with no GPU, and the machine code is what the design counts on."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from dense_mla.arch import ARCHITECTURES, KERNELS, RAN_ON, WIDE_ROWS, build_forward, forward_class, ran_on, unsupported_reason
from dense_mla.compiled import compile_kernels
from dense_mla.problem import DecodeProblem

SHARED_MEMORY_LIMIT = 232_448
CAPABILITY = (9, 0)

FORWARDS = [
    DecodeProblem(1, 64),
    DecodeProblem(8, 16, torch.float32),
    DecodeProblem(12, 944, torch.bfloat16, return_lse=True),
    DecodeProblem(16, 64, torch.float32, return_lse=True),
    DecodeProblem(24, 32, torch.float32),
    DecodeProblem(32, 768, torch.float32, return_lse=True),
    DecodeProblem(48, 64, torch.float32),
    DecodeProblem(64, 16, torch.float32, return_lse=True),
    DecodeProblem(96, 48, torch.bfloat16, return_lse=True),
    DecodeProblem(128, 64, torch.float32, return_lse=True),
]


@dataclass(frozen=True)
class MachineCode:
    """What the disassembler says of one kernel."""

    sass: str
    stack_bytes: int
    local_bytes: int

    def count(self, instruction: str) -> int:
        return len(re.findall(rf"\b{instruction}\b", self.sass))


def cuda_tool(name: str) -> str:
    """A program of NVIDIA's wheels, which understand the PTX that the DSL emits; an older toolkit's may not."""
    import nvidia.cu13

    return str(Path(next(iter(nvidia.cu13.__path__)), "bin", name))


def disassemble(kernel: object, path: Path) -> MachineCode:
    cubin = path / "kernel.cubin"
    artifact = kernel.artifacts.CUBIN  # type: ignore[attr-defined]
    cubin.write_bytes(artifact if isinstance(artifact, bytes) else Path(artifact).read_bytes())
    usage = subprocess.run([cuda_tool("cuobjdump"), "-res-usage", cubin], check=True, capture_output=True, text=True).stdout
    sass = subprocess.run([cuda_tool("nvdisasm"), "-c", cubin], check=True, capture_output=True, text=True).stdout
    return MachineCode(sass, *(int(re.findall(rf"{key}:(\d+)", usage)[-1]) for key in ("STACK", "LOCAL")))


def assert_no_spills(code: MachineCode) -> None:
    assert (code.stack_bytes, code.local_bytes, code.count("STL"), code.count("LDL")) == (0, 0, 0, 0)


@pytest.mark.parametrize(("heads", "probabilities", "row_sums"), [(12, 8, 4), (64, 32, 2)])
def test_fp16_probabilities_are_scaled_and_the_output_scaled_back(heads: int, probabilities: int, row_sums: int, tmp_path: Path) -> None:
    """In both Hopper forwards, once for each of a thread's probabilities of a tile and once for each of its rows."""
    kernels = compile_kernels(DecodeProblem(heads, 64, kv_dtype=torch.float16), CAPABILITY, "--keep-cubin", f"--dump-dir {tmp_path}")
    code = disassemble(kernels.forward, tmp_path)
    assert_no_spills(code)
    factors = [len(re.findall(rf"\bFMUL\b[^;]*, {re.escape(repr(factor))}(?:\.0)? ?;", code.sass)) for factor in (32768, 2.0**-15)]
    assert factors == [probabilities, row_sums]


@pytest.mark.parametrize("problem", FORWARDS, ids=lambda p: f"{p.num_heads}x{p.page_size}-{p.partial_dtype}")
def test_every_kernel_of_a_problem(problem: DecodeProblem, tmp_path: Path) -> None:
    """Fault 70: spills and joins that fail show here, for every number of rows. (That the trace carries the rescale: cases.peak_at.)"""
    kernels = compile_kernels(problem, CAPABILITY, "--keep-cubin", f"--dump-dir {tmp_path}")
    forward, merge, schedule = (disassemble(k, tmp_path) for k in (kernels.forward, kernels.merge, kernels.schedule))
    for code in (forward, merge, schedule):
        assert_no_spills(code)
    # Scores: the warpgroups split 36 k16 steps of 576 columns. Values: four m64 tiles of four k16 steps each. (Many rows: test_compile_wide.py.)
    if problem.tile_rows <= WIDE_ROWS:
        assert forward.count("HGMMA") == forward.sass.count(f"HGMMA.64x{problem.tile_rows}x16") == 18 + 16
    assert forward.count("UTMALDG") > 0 and forward.count("USETMAXREG") == 2
    # Programmatic dependent launch: each kernel waits for the one before it, and lets the next one queue up.
    assert all(code.count("ACQBULK") == 1 and code.sass.count("PREEXIT") == 1 for code in (forward, merge, schedule))
    # A merge CTA that starts last has all of this on its way: the two loads of its share, and no barrier.
    before_the_wait = merge.sass.partition("ACQBULK")[0]
    assert re.findall(r"\b(?:LDG\.E\.128\S*|LDG|LDS|BAR)\b", before_the_wait) == ["LDG.E.128.STRONG.GPU"] * 2


@pytest.mark.parametrize("tile_rows", [8, 16, 24, 32, 48, 64])
def test_shared_memory_fits(tile_rows: int) -> None:
    import cutlass.cute as cute

    from dense_mla.forward_sm90 import fake_arguments

    problem = DecodeProblem(tile_rows, 64)
    assert problem.tile_rows == tile_rows
    forward = build_forward(CAPABILITY, problem)
    cute.compile(forward, *fake_arguments(problem), options="--gpu-arch sm_90a --enable-tvm-ffi")
    assert 0 < forward.shared_memory_bytes <= SHARED_MEMORY_LIMIT


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (13, 0)])
def test_other_architectures_are_refused_before_anything_compiles(capability: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"compute capability {capability[0]}\.{capability[1]} is not supported: there is no kernel"):
        compile_kernels(DecodeProblem(16, 64), capability)


def test_every_architecture_has_its_kernel() -> None:
    """Fault 79: the choice for each capability. Nothing but Hopper gets Hopper's instructions."""
    few, many = DecodeProblem(12, 64), DecodeProblem(64, 64)
    assert forward_class((9, 0), few).__name__ == "ForwardSm90" and forward_class((9, 0), many).__name__ == "ForwardSm90Wide"
    fp8 = DecodeProblem(12, 64, kv_dtype=torch.float8_e4m3fn)
    assert forward_class((9, 0), few, "sm80").__name__ == "ForwardSm80" and forward_class((9, 0), fp8).__name__ == "ForwardSm90Fp8"
    assert forward_class((9, 0), fp8, "sm80").__name__ == "ForwardSm80Fp8"
    for capability in [(8, 0), (8, 6), (8, 7), (8, 9), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]:
        assert forward_class(capability, few).__name__ == forward_class(capability).__name__ == "ForwardSm80"
        assert forward_class(capability, fp8).__name__ == "ForwardSm80Fp8"
        assert unsupported_reason(capability) is unsupported_reason((9, 0)) is None
        with pytest.raises(ValueError, match="kernel sm90 needs compute capability 9"):
            forward_class(capability, few, "sm90")
    with pytest.raises(ValueError, match="kernel must be one of sm90, sm80, got sm70"):
        forward_class((9, 0), few, "sm70")


def test_what_ran_on_hardware_is_a_fact_of_each_kernel() -> None:
    """Whatever the table does not name was compiled only, and no kernel can be said to have run where it does not exist."""
    assert ran_on((9, 0)) == ran_on((9, 0), "sm80") == "NVIDIA H200"
    assert {capability for capability in ARCHITECTURES if ran_on(capability) is not None} == {(9, 0)}
    assert ran_on((7, 5)) is None
    for capability, kernels in RAN_ON.items():
        assert set(kernels) <= set(KERNELS) and all(forward_class(capability, kernel=kernel) for kernel in kernels)

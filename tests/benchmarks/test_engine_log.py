"""What a log has to say: lines that vLLM wrote on an H200, as the evidence of this checkout keeps them."""

import json

import pytest

from benchmarks.engine_log import compiled_while_serving, error_lines, unsaid
from benchmarks.evidence import EVIDENCE_DIR

RUNS = [run for run in json.loads((EVIDENCE_DIR / "serve_tiny_h200.json").read_text())["runs"] if not run["error"]]
OURS = "DENSE_MLA backend: kernel K for sm_90a, KV cache {cache}, partial dtype bf16 (default), 12 heads per rank, workspace 8 bytes{end}"


def said(cache: str = "bfloat16", end: str = "") -> list[str]:
    return ["Using AttentionBackendEnum.DENSE_MLA backend.", OURS.format(cache=cache, end=end)]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["name"])
def test_a_log_says_what_its_own_run_asked_for_and_nothing_else(run: dict[str, object]) -> None:
    lines, backend, dtype = run["log_lines"], run["backend"], run["partial_dtype"]
    assert unsaid(lines, backend, dtype, full_graphs=True) is None
    for other in {"DENSE_MLA", "FLASHMLA", "TRITON_MLA"} - {backend}:
        assert f"{other} was used" in str(unsaid(lines, other, dtype))
    if backend == "DENSE_MLA":
        other = "fp32" if dtype == "bf16" else "bf16"
        assert unsaid(lines, backend, other) == f"the log does not say that its partials are {other}"


def test_an_fp8_cache_and_batch_invariance_are_in_our_line() -> None:
    fp8, invariant = said("float8_e4m3fn"), said(end=", batch invariant")
    assert unsaid(fp8, "DENSE_MLA", "bf16", kv_cache_dtype="fp8") is None is unsaid(invariant, "DENSE_MLA", "bf16", batch_invariant=True)
    assert unsaid(said(), "DENSE_MLA", "bf16", kv_cache_dtype="fp8") == "the log does not say that its KV cache is E4M3"
    assert unsaid(fp8, "DENSE_MLA", "bf16") == "the log does not say that its KV cache is of 16 bits"
    assert unsaid(said(), "DENSE_MLA", "bf16", batch_invariant=True) == "the log does not say that it was batch invariant"
    assert unsaid(invariant, "DENSE_MLA", "bf16") == "the log does not say that it was not batch invariant"


def test_another_backends_fp8_cache_is_in_a_line_of_vllms() -> None:
    lines = ["Using AttentionBackendEnum.TRITON_MLA backend."]
    assert unsaid(lines, "TRITON_MLA", kv_cache_dtype="fp8") == "the log does not say that its KV cache is E4M3"
    assert unsaid([*lines, "Using fp8 data type to store kv cache. It reduces"], "TRITON_MLA", kv_cache_dtype="fp8") is None


@pytest.mark.parametrize("line", ["Capturing CUDA graphs (FULL): 100%", "Capturing CUDA graphs (decode, FULL):   0%"])
def test_both_model_runners_name_their_full_graphs(line: str) -> None:
    assert unsaid([*said(), line], "DENSE_MLA", "bf16", full_graphs=True) is None
    missing = "the log does not say that full CUDA graphs were captured"
    assert unsaid([*said(), "Capturing CUDA graphs (PIECEWISE)"], "DENSE_MLA", "bf16", full_graphs=True) == missing


def test_kernels_compiled_while_serving_are_named_once() -> None:
    lines = [
        "INFO [jit_monitor.py:84] Kernel JIT monitor activated; monitored JIT compilations during inference will use mode=warn.",
        "WARNING [jit_monitor.py:140] Triton kernel JIT compilation during inference: _fwd_kernel_stage2. This causes a latency spike",
        "RuntimeError: CuTeDSL JIT compilation during inference: ForwardSm90. This causes a latency spike",
    ]
    assert compiled_while_serving(lines * 2) == ["Triton kernel JIT compilation: _fwd_kernel_stage2", "CuTeDSL JIT compilation: ForwardSm90"]


def test_error_lines() -> None:
    lines = ["INFO fine", "(EngineCore pid=1) ERROR 12-01 [core.py] dead", "ERROR 12-01 x", "Traceback (most recent call last):", "no errors here"]
    assert error_lines(lines) == lines[1:4]

"""What a run writes down about itself, and the table that is made of its rows."""

import json
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import evidence
from benchmarks.comparison_table import comparison_table
from benchmarks.evidence import DecodeEvidence, DecodeRow, Failure, RunFacts, error_text, recorded_command, source_state, write_json

FACTS = RunFacts("python x", "c0ffee", False, "NVIDIA H200", "580.1", "2.11", "0.33.0", "4.8.0", "2026-12-01T00:00:00+00:00")


def row(kernel: str, us: float, partial_dtype: str | None = None, **changes: Any) -> DecodeRow:
    values: dict[str, Any] = {
        "kernel": kernel, "shape": "1x4096", "heads": 16, "query_len": 1, "batch": 1, "context": 4096, "keys": 4096, "page_size": 64,
        "kv_dtype": "bf16", "partial_dtype": partial_dtype, "planned_for": 4096, "us_samples": (us, us), "us": us, "GBps": 1.0, "relative_l2": 0.002,
        "floor_us": 1.0, "caches": 85, "calls": 85, "sm_clock_mhz": 1980,
    }  # fmt: skip
    return DecodeRow(**values | changes)


def test_evidence_is_one_flat_object_with_the_fields_that_the_documents_read() -> None:
    failure = Failure("TRITON_MLA", "1x4096", 16, 64, None, "RuntimeError: no")
    content = DecodeEvidence(FACTS, 4543.21, [row("dense_mla", 6.5, "bf16")], [failure], ["16 heads, 8x8192"]).to_json()
    facts = {"command", "commit", "dirty", "gpu", "driver", "torch", "vllm", "cutlass_dsl", "date"}
    assert set(content) == facts | {"read_ceiling_GBps", "timing", "rows", "failures", "not_run"}
    assert content["read_ceiling_GBps"] == 4543.2
    wanted = {"kernel", "heads", "query_len", "batch", "context", "page_size", "kv_dtype", "partial_dtype", "us_samples", "us", "GBps", "relative_l2"}
    assert wanted | {"floor_us", "shape"} <= set(content["rows"][0]) == {field.name for field in fields(DecodeRow)}
    assert content["failures"][0]["error"] == "RuntimeError: no"
    assert json.loads(json.dumps(content, allow_nan=False))["rows"][0]["us_samples"] == [6.5, 6.5]


def test_table_has_a_line_a_shape_and_both_ratios() -> None:
    rows = [
        row("dense_mla", 6.0, "bf16"),
        row("dense_mla", 6.5, "fp32"),
        row("dense_mla+schedule", 1.0, "bf16"),
        row("dense_mla+forward", 0.5, "bf16", relative_l2=None),
        row("FLASHMLA", 27.0),
        row("FLASH_ATTN_MLA", 15.0),
        row("dense_mla", 40.0, "bf16", shape="1x131072", floor_us=32.0),
        row("FLASH_ATTN_MLA", 75.0, shape="1x131072", floor_us=32.0),
    ]
    head, first, second = (" ".join(line.split()) for line in comparison_table(rows).splitlines())
    names = "dense_mla bf16 dense_mla fp32 dense_mla+schedule bf16 dense_mla+forward bf16 FLASHMLA FLASH_ATTN_MLA"
    assert head == f"heads shape floor {names} best peer / ours ours / floor"
    assert first == "16 1x4096 1.0 6.0 6.5 1.0 0.5 27.0 15.0 2.50 6.00"  # neither schedule nor forward alone is ours
    assert second == "16 1x131072 32.0 40.0 - - - - 75.0 1.88 1.25"


def test_table_of_the_portable_kernel_has_its_ratios() -> None:
    rows = [row("dense_mla+sm80", 10.0, "bf16"), row("dense_mla+sm80", 11.0, "fp32"), row("TRITON_MLA", 27.0), row("B12X", 15.0)]
    assert comparison_table(rows).split()[-2:] == ["1.50", "10.00"]


def test_table_without_ours_or_without_peers_has_no_ratio() -> None:
    assert comparison_table([row("FLASHMLA", 27.0)]).split()[-2:] == ["-", "-"]
    assert comparison_table([row("dense_mla", 5.0, "bf16")]).split()[-2:] == ["-", "5.00"]


def test_command_is_recorded_from_the_root_without_places() -> None:
    script = str(evidence.ROOT / "kernels" / "benchmarks" / "bench_decode.py")
    argv = [script, "--shapes", "1x4096", "--json", "/somewhere/a.json", "--commit=abc", "--dirty", "no", "--heads", "16"]
    assert recorded_command(argv) == "python kernels/benchmarks/bench_decode.py --shapes 1x4096 --heads 16"


def test_commit_comes_from_the_caller_then_the_environment_then_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DENSE_MLA_COMMIT", raising=False)
    monkeypatch.delenv("DENSE_MLA_DIRTY", raising=False)
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=r"no \.git .* give --commit and --dirty"):
        source_state(None, None)
    _git_repository(tmp_path)
    commit, dirty = source_state(None, None)
    assert len(commit) == 40 and not dirty
    (tmp_path / "docs" / "evidence").mkdir(parents=True)
    (tmp_path / "docs" / "evidence" / "a.json").write_text("{}")
    assert source_state(None, None) == (commit, False)
    (tmp_path / "code.py").write_text("changed")
    assert source_state(None, None) == (commit, True)
    monkeypatch.setenv("DENSE_MLA_COMMIT", "fromenv")
    monkeypatch.setenv("DENSE_MLA_DIRTY", "yes")
    assert source_state(None, None) == ("fromenv", True)
    assert source_state("given", "no") == ("given", False)


def test_commit_without_its_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DENSE_MLA_DIRTY", raising=False)
    with pytest.raises(ValueError, match=r"--dirty .* must be yes or no"):
        source_state("given", None)


def test_without_a_gpu_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="there is no CUDA device here to measure"):
        evidence.collect_facts("c0ffee", "no")


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"
    write_json(path, {"us": 1.5})
    with pytest.raises(ValueError, match="nan"):
        write_json(path, {"us": float("nan")})
    assert json.loads(path.read_text()) == {"us": 1.5}


def test_error_text_is_one_short_line() -> None:
    assert error_text(ValueError("a\n  b")) == "ValueError: a b"
    assert len(error_text(ValueError("x" * 5000))) == 600


def _git_repository(folder: Path) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    (folder / "code.py").write_text("")
    for arguments in (["init", "-q"], ["add", "code.py"], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True)

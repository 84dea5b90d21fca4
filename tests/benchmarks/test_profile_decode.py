"""The script that profiles a decode: what it asks of Nsight Compute, what it reads from it, and the evidence that it writes."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from nsight_pages import DETAILS, FP8, WIDE

from benchmarks import nsight_compute, profile_decode
from benchmarks.evidence import EVIDENCE_DIR, RunFacts
from benchmarks.nsight_compute import read_metrics
from benchmarks.profile_decode import Work, parse_arguments

FACTS = RunFacts("python x", "c0ffee", False, "NVIDIA H200", "580.1", "2.11", None, "4.8.0", "2026-12-01T00:00:00+00:00")
EXPORT = ["--gpu", "NVIDIA H200", "--torch", "2.11.0", "--date", "2026-12-01", "--commit", "0d73e1c", "--dirty", "no"]
FAKE_NCU = """#!{python}
import pathlib, sys
folder = pathlib.Path({folder!r})
mode = (folder / "mode").read_text()
if "-i" in sys.argv:
    print((folder / ("wide.csv" if "source" in sys.argv else "wide.txt")).read_text())
    sys.exit()
(folder / "argv").write_text("\\n".join(sys.argv[1:]))
if mode == "report":
    pathlib.Path(sys.argv[sys.argv.index("-o") + 1]).write_text("report")
print({{
    "permission": "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the target device 0.",
    "broken": "==ERROR== The application returned an error code (1).",
    "nothing": "==WARNING== No kernels were profiled.",
    "report": "==PROF== Disconnected",
}}[mode])
sys.exit(mode in ("permission", "broken"))
"""


@pytest.fixture
def exports(tmp_path: Path) -> Path:
    for name, text in (("wide.csv", WIDE), ("fp8.csv", FP8), ("wide.txt", DETAILS), ("fp8.txt", DETAILS)):
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def fake_ncu(exports: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that behaves as Nsight Compute does in the way that the file `mode` names."""
    program = exports / "ncu"
    program.write_text(FAKE_NCU.format(python=sys.executable, folder=str(exports)))
    program.chmod(0o755)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(profile_decode, "collect_facts", lambda commit, dirty: FACTS)
    return program


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["profile_decode.py", *arguments])
    return profile_decode.main()


def test_metrics_are_read_from_their_sections_in_our_units() -> None:
    metrics = read_metrics(DETAILS)
    assert metrics["elapsed_cycles"] == 449138 and metrics["duration_us"] == 263.23
    assert metrics["memory_throughput_percent"] == 52.64  # not the TB/s of another section
    assert metrics["cycles_per_issued_instruction"] == 10.29
    assert read_metrics(DETAILS.replace("Ghz         1.70", "Mhz          990"))["sm_frequency_GHz"] == 0.99
    with pytest.raises(ValueError, match="Duration must be in ns or us or ms, got s"):
        read_metrics(DETAILS.replace("us       263.23", "s          0.26"))
    with pytest.raises(ValueError, match="must have Elapsed Cycles"):
        read_metrics("no page")


def test_exports_become_one_evidence_file(exports: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(exports)
    files = ["--csv", "wide.csv,fp8.csv", "--details", "wide.txt,fp8.txt", "--json", "out.json"]
    assert run(monkeypatch, "--work", "128:128x4096,16:32x16384:fp8", *files, *EXPORT) == 0
    content = json.loads(Path("out.json").read_text())
    assert (content["commit"], content["dirty"], content["gpu"], content["vllm"]) == ("0d73e1c", False, "NVIDIA H200", None)
    assert "--csv wide.csv,fp8.csv" in content["command"] and "--json" not in content["command"]
    wide, fp8 = content["rows"]
    assert (wide["heads"], wide["shape"], wide["kv_dtype"]) == (128, "128x4096", "bf16")
    assert (fp8["heads"], fp8["shape"], fp8["kv_dtype"]) == (16, "32x16384", "fp8_e4m3")
    wait = max((item for item in wide["instructions"] if item["role"] == "consumer"), key=lambda item: item["samples"])
    assert (wait["class"], wait["samples"], wait["executed"], wait["stalls"]) == ("keys", 2825, 65536, {"long_sb": 2820, "unnamed": 4, "selected": 1})
    assert wait["share"] == round(2825 / wide["samples"], 4)
    assert wait["share_of_role"] == round(2825 / wide["roles"]["consumer"]["samples"], 4)
    assert all(item["samples"] >= 0.005 * wide["samples"] for item in wide["instructions"])
    assert sum(item["samples"] for item in wide["consumer_classes"].values()) == wide["roles"]["consumer"]["samples"]
    printed = capsys.readouterr().out
    assert "128 heads, 128x4096, bf16 cache" in printed and "@!P0 BRA #" in printed and "idle" in printed


def test_a_profile_is_taken_of_the_second_of_three_decodes(fake_ncu: Path, exports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (exports / "mode").write_text("report")
    out = exports / "out.json"
    assert run(monkeypatch, "--ncu", str(fake_ncu), "--work", "16:2x300:fp8", "--partial-dtype", "fp32", "--json", str(out)) == 0
    content = json.loads(out.read_text())
    assert content["profiler"] == nsight_compute.PROFILER and content["rows"][0]["partial_dtype"] == "fp32"
    argv = (exports / "argv").read_text().splitlines()
    assert argv[: len(nsight_compute.OPTIONS.split())] == nsight_compute.OPTIONS.split()
    child = argv[argv.index(sys.executable) + 2 :]
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(profile_decode, "decode", lambda *arguments: calls.append(arguments))
    assert run(monkeypatch, *child) == 0
    assert calls == [(Work.parse("16:2x300:fp8"), 64, "fp32")]


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("permission", "no permission to read the GPU's performance counters (ERR_NVGPUCTRPERM)"),
        ("broken", "ncu ended with status 1: ==ERROR== The application returned an error code (1)."),
        ("nothing", "ncu wrote no report: ==WARNING== No kernels were profiled."),
    ],
)
def test_what_nsight_compute_refuses_is_one_line(
    mode: str, message: str, fake_ncu: Path, exports: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (exports / "mode").write_text(mode)
    out = exports / "out.json"
    assert run(monkeypatch, "--ncu", str(fake_ncu), "--work", "16:2x300", "--json", str(out)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and not out.exists()


def test_without_nsight_compute_or_a_gpu_it_says_so(fake_ncu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--ncu", "/nowhere/ncu") == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(monkeypatch, "--ncu", str(fake_ncu)) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert "no program /nowhere/ncu" in first and "no CUDA device" in second


def test_the_decode_goes_over_the_caches_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import decode_inputs

    seen: list[int] = []

    def ours(inputs: Any, *, partial_dtype: torch.dtype) -> Any:
        assert partial_dtype == torch.float32 and inputs.heads == 8 and inputs.caches.dtype == torch.float8_e4m3fn
        return lambda cache, out: seen.append(cache.data_ptr() - inputs.caches.data_ptr())

    monkeypatch.setattr(decode_inputs, "num_caches", lambda cache_bytes: 2)
    monkeypatch.setattr(profile_decode, "ours", ours)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "device", lambda *_: "cpu")
    profile_decode.decode(Work.parse("8:2x100:fp8"), 64, "fp32")
    assert seen[0] == seen[2] == 0 < seen[1]


def test_work_reads_the_shapes_of_the_benchmark() -> None:
    work = Work.parse("64:mixed:8:300")
    assert (work.heads, work.shape.label, work.kv_dtype) == (64, "mixed:8:300", torch.bfloat16)
    assert Work.parse("16:1x4096q4:fp8").shape.query_len == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--work", "x:1x4096"], "work must be HEADS:SHAPE"),
        (["--work", "16:4096"], "shape must be BATCHxKEYS"),
        (["--work", "16:1x4096", "--page-size", "24"], "page_size must be"),
        (["--work", "16:1x4096", "--csv", "a,b", "--details", "c", *EXPORT], "a file each for 1 items of --work, got 2 and 1"),
        (["--work", "16:1x4096", "--csv", "a", "--details", "c"], "--csv must come with --gpu, --torch, --date and --commit"),
        (["--date", "2026-12-01"], "need --csv"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parse_arguments(arguments)
    assert raised.value.code == 2 and message in capsys.readouterr().err


def test_the_recorded_evidence_adds_up_and_is_what_the_document_quotes() -> None:
    content = json.loads((EVIDENCE_DIR / "profile_h200.json").read_text())
    quoted = re.findall(r"(\d+) % of the consumers' time", (EVIDENCE_DIR.parent / "kernel_sm90.md").read_text())
    assert quoted == [f"{100 * row['consumer_classes']['keys']['share']:.0f}" for row in content["rows"]]
    assert content["dirty"] is False and content["rows"]
    for row in content["rows"]:
        assert sum(item["samples"] for item in row["roles"].values()) == row["samples"]
        assert sum(item["samples"] for item in row["consumer_classes"].values()) == row["roles"]["consumer"]["samples"]

"""The command line as a user runs it: what it prints, and one line with exit code 2 for a mistake."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from dense_mla import DecodeProblem, workspace_size
from vllm_dense_mla import __version__, cli, demo

PLAN = ["plan", "--heads", "12", "--max-num-seqs", "256", "--capture-sizes", "1,2,4,8", "--sms", "132"]


def outputs(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        code = cli.main(argv)
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("cpu_only")
def test_demo_on_the_cpu_reports_path_schedule_workspace_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = outputs(capsys, "demo", "--heads", "4", "--batch", "3", "--max-len", "700", "--page-size", "48", "--seed", "7")
    assert (code, err) == (0, "")
    assert "CPU, the torch reference (no CUDA device here)" in out
    assert re.search(r"^lengths +700 \d+ 0 ", out, re.M)
    pieces = re.search(r"^pieces +(\d+) (\d+) (\d+)$", out, re.M)
    assert pieces and int(pieces[1]) > 1 and int(pieces[3]) == 1
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        size = workspace_size(DecodeProblem(4, 48, dtype), 3, 132)
        assert re.search(rf"^{name} +1 +3 +3 +{size.slots} +{size.out_partial_bytes:,} +{size.lse_partial_bytes:,} +{size.total_bytes:,}$", out, re.M)
    errors = {name: float(value) for name, value in re.findall(r"^(bf16|fp32) +(\d\.\d+e-\d+) +\d+ ms$", out, re.M)}
    rounding = re.search(r"rounded to BF16, has (\S+):", out)
    assert rounding and set(errors) == {"bf16", "fp32"}
    assert float(rounding[1]) <= errors["fp32"] <= 1.2 * float(rounding[1])
    assert float(rounding[1]) < errors["bf16"] <= 1.6 * float(rounding[1])


@pytest.mark.gpu
def test_demo_on_a_gpu_runs_the_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = outputs(capsys, "demo")
    assert (code, err) == (0, "")
    assert re.search(r"^path .*, the kernels, on \d+ SMs$", out, re.M)
    rounding = re.search(r"rounded to BF16, has (\S+):", out)
    errors = {name: float(value) for name, value in re.findall(r"^(bf16|fp32) +(\d\.\d+e-\d+) +[\d.]+ us$", out, re.M)}
    assert rounding and errors["fp32"] <= 1.2 * float(rounding[1]) and errors["bf16"] <= 1.6 * float(rounding[1])


def test_an_unsupported_gpu_is_named_and_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class T4:
        name, major, minor, multi_processor_count = "Tesla T4", 7, 5, 40

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: T4)
    device, sm_count, path = demo.pick_path()
    assert (device.type, sm_count) == ("cpu", 132)
    assert path.startswith("CPU, the torch reference (Tesla T4: ") and "7.5" in path


def test_demo_batches_hold_nan_wherever_no_request_may_read() -> None:
    data = demo.make_batch(heads=2, batch=4, max_len=100, page_size=32, seed=1, device=torch.device("cpu"))
    assert data.lens[0] == 100 and data.lens[-1] == 0
    assert int((~data.kv_cache.isnan().any(-1)).sum()) == sum(data.lens)


def test_plan_prints_every_bucket_of_both_dtypes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = outputs(capsys, *PLAN)
    assert (code, err) == (0, "")
    for dtype in (torch.bfloat16, torch.float32):
        for requests in (1, 2, 4, 8, 256):
            size = workspace_size(DecodeProblem(12, 64, dtype), requests, 132)
            sizes = rf"{size.slots} +{size.out_partial_bytes:,} +{size.lse_partial_bytes:,} +{size.total_bytes:,}"
            assert re.search(rf"^ +1 +{requests} +{requests} +{sizes}$", out, re.M)
    assert "fp32: each GPU reserves 6,500,864 bytes" in out


def test_plan_says_which_capture_sizes_have_no_bucket(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = outputs(capsys, "plan", "--heads", "12", "--max-num-seqs", "4", "--capture-sizes", "1,2,8")
    assert "Capture sizes above max-num-seqs 4 hold no decode batch" in out


@pytest.mark.usefixtures("cpu_only")
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("demo --heads 200", "num_heads must be from 1 to 128, got 200"),
        ("demo --page-size 24", "page_size must be a positive multiple of 16, got 24"),
        ("demo --batch 0", "argument --batch: must be a whole number of at least 1, got '0'"),
        ("demo --batch 4096 --max-len 4096", "--batch x --max-len must be at most 1048576 keys, got 16777216"),
        ("plan --heads 12", "--model CONFIG.JSON, or a number of heads, for which is missing: --max-num-seqs, --capture-sizes"),
        ("plan", "for which is missing: --heads, --max-num-seqs, --capture-sizes"),
        ("plan --heads 12 --max-num-seqs 4 --capture-sizes 1 --tensor-parallel-size 8", "--tensor-parallel-size cannot be given with --heads"),
        ("plan --config a.yaml --heads 12 --max-num-seqs 4", "--heads, --max-num-seqs cannot be given with --config"),
        ("plan --model config.json --heads 12", "--heads cannot be given with --model"),
        ("plan --config no/such.yaml", "--config must be a file, got no/such.yaml"),
        ("plan --heads 129 --max-num-seqs 4 --capture-sizes 1", "num_heads must be from 1 to 128, got 129"),
        ("plan --heads 12 --max-num-seqs 4 --capture-sizes 1,x", "argument --capture-sizes: must be a whole number of at least 1, got 'x'"),
        ("serve", "argument COMMAND: invalid choice: 'serve' (choose from"),
        ("", "the following arguments are required: COMMAND"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(argv: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = outputs(capsys, *argv.split())
    assert (code, out) == (2, "")
    assert err.startswith("vllm-dense-mla") and message in err and err.count("\n") == 1


def test_help_and_version_load_no_torch() -> None:
    code = (
        "import sys\nfrom vllm_dense_mla import cli\n"
        "try:\n    cli.main(['--version'])\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "assert not {'torch', 'vllm', 'cutlass'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert result.stdout == f"vllm-dense-mla {__version__}\n"

"""`vllm-dense-mla check`: what it says on a machine without a GPU, with each part broken, and (marked gpu) on an H200."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_dense_mla import __version__, check, cli, self_test
from vllm_dense_mla.check import Check, Report, collect_report
from vllm_dense_mla.settings import load_settings


@pytest.fixture
def cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point, whether or not the tests run from an install."""
    point = SimpleNamespace(name="dense_mla", value="vllm_dense_mla:register")
    monkeypatch.setattr(check.importlib.metadata, "entry_points", lambda group: [point] if group == "vllm.general_plugins" else [])
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


def fake_gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])


@pytest.mark.usefixtures("cpu_only", "installed")
def test_without_a_gpu_it_says_so_and_runs_what_it_can(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check"]) == 1
    out = capsys.readouterr().out
    status = {line[:10].strip(): line[10:19].strip() for line in out.splitlines() if line[:1].strip() and not line.startswith("Not well")}
    assert status == {
        "versions": "ok",
        "plugin": "ok",
        "GPUs": "failed",
        "kernels": "not run",
        "settings": "ok",
        "self-test": "ok",
        "bandwidth": "not run",
    }
    assert f"vllm-dense-mla {__version__}, vllm 0.33." in out and f"torch {torch.__version__.split('+')[0]}" in out
    assert "ForwardSm90 does not run: it needs compute capability 9.0" in out
    assert "the torch reference on the CPU: no kernel ran" in out
    assert out.splitlines()[-1] == (
        "Not well: GPUs failed, kernels not run, bandwidth not run. docs/troubleshooting.md has the cures."
    )
    assert len(out.splitlines()) <= 24  # one screen


@pytest.mark.usefixtures("cpu_only", "installed")
def test_json_holds_the_same_and_the_numbers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("VLLM_K3_DENSE_MLA_PARTIAL_DTYPE", "fp32")
    assert cli.main(["check", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    checks = {each["name"]: each for each in found["checks"]}
    assert found["ok"] is False and checks["self-test"]["path"] == "reference"
    variable = "VLLM_K3_DENSE_MLA_PARTIAL_DTYPE"
    assert checks["settings"]["settings"][variable] == {"value": "fp32", "source": variable}
    results = checks["self-test"]["results"]
    problems = [(12, 768, "bf16"), (16, 64, "bf16"), (64, 64, "bf16"), (16, 64, "fp8"), (64, 64, "fp8")]
    assert [(each["heads"], each["page_size"], each["kv_cache"], each["partial_dtype"]) for each in results] == [
        (*problem, dtype) for problem in problems for dtype in ("bf16", "fp32")
    ]
    assert all(1.0 <= each["error"] <= each["bound"] for each in results)


def test_where_kernels_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The folder, where it comes from and what it holds, or why it is not used; nothing is made by looking."""
    variable = "VLLM_K3_DENSE_MLA_CACHE_DIR"
    folder = tmp_path / "cache"

    def line(value: str) -> tuple[str, dict[str, Any]]:
        monkeypatch.setenv(variable, value)
        load_settings.cache_clear()
        found = check._check_settings()
        assert found.status == "ok"
        return found.text.splitlines()[1], found.values["settings"][variable]

    assert line("off") == (f"kernel cache off ({variable})", {"value": "off", "source": variable})
    with monkeypatch.context() as nobody:
        nobody.setattr(os.path, "expanduser", lambda path: path)
        nobody.delenv("XDG_CACHE_HOME", raising=False)
        assert line("on")[0] == f"kernel cache off: there is no home directory ({variable})"
    values = {"value": str(folder), "source": variable, "entries": 0, "bytes": 0, "refusal": None}
    assert line(str(folder)) == (f"kernel cache {folder} ({variable}): 0 kernels of 0 bytes", values) and not folder.exists()
    folder.mkdir(mode=0o700)
    for name, size in ((f"Merge-{'a' * 64}.o", 1000), (f"ForwardSm90-{'b' * 64}.o", 500), ("c.o", 1), (f"{'d' * 64}.lock", 0)):
        (folder / name).write_bytes(b"k" * size)
    assert line(str(folder)) == (f"kernel cache {folder} ({variable}): 2 kernels of 1,500 bytes", values | {"entries": 2, "bytes": 1500})
    folder.chmod(0o777)
    assert line(str(folder))[0] == f"kernel cache {folder} ({variable}) is not used: others may write to it (mode 777)"


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ((), " is not used: {above} cannot be written to"),
        (("home",), " is not used: {above}/home cannot be written to"),
        (("home", "home/kernels"), ": 0 kernels of 0 bytes; it cannot be written: kernels that it lacks are compiled and not kept"),
    ],
    ids=["neither it nor its parent", "not it", "it is there"],
)
def test_a_kernel_folder_that_cannot_be_made_or_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, made: tuple[str, ...], said: str) -> None:
    """As in a container whose file system is read-only: nothing is kept, and one that came filled is read."""
    for name in made:
        (tmp_path / name).mkdir(mode=0o700)
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # root may write wherever a file system lets it
    folder = tmp_path / "home" / "kernels"
    monkeypatch.setenv("VLLM_K3_DENSE_MLA_CACHE_DIR", str(folder))
    load_settings.cache_clear()
    line = check._check_settings().text.splitlines()[1]
    assert line == f"kernel cache {folder} (VLLM_K3_DENSE_MLA_CACHE_DIR){said.format(above=tmp_path)}"
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == list(made)


@pytest.mark.usefixtures("cpu_only")
def test_a_wrong_answer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = self_test.decode_on_cpu

    def wrong(*arguments: Any) -> Any:
        decoded = honest(*arguments)
        decoded.out[0, 0, 0] = torch.nan
        return decoded

    monkeypatch.setattr(self_test, "decode_on_cpu", wrong)
    assert check._check_answers().status == "failed"


def test_a_bad_setting_is_its_line_and_the_rest_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_K3_DENSE_MLA_PARTIAL_DTYPE", "fp16")
    settings = check._guarded("settings", check._check_settings)
    assert settings.status == "failed"
    assert settings.text.endswith("VLLM_K3_DENSE_MLA_PARTIAL_DTYPE must be bf16, fp32, bfloat16 or float32 (any case), got 'fp16'")
    parts = ["versions", "plugin", "gpus", "kernels", "answers", "bandwidth"]
    for part in parts:
        monkeypatch.setattr(check, f"_check_{part}", lambda: Check("other", "ok", "text"))
    report = collect_report()
    assert [each.status for each in report.checks].count("ok") == len(parts) and not report.is_well


def test_all_well_is_exit_code_0(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "collect_report", lambda: Report((Check("versions", "ok", "all there"),)))
    assert cli.main(["check"]) == 0
    assert capsys.readouterr().out == "versions  ok       all there\n\nAll is well.\n"


@pytest.mark.usefixtures("installed")
def test_a_plugin_that_vllm_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver")
    found = check._check_plugin()
    assert (found.status, found.text) == (
        "failed",
        "VLLM_PLUGINS must list dense_mla, got 'lora_filesystem_resolver': vLLM does not load the plugin",
    )
    monkeypatch.setattr(check.importlib.metadata, "entry_points", lambda group: [])
    assert check._check_plugin().text.startswith("vLLM finds no entry point of vllm-dense-mla")


@pytest.mark.parametrize(
    ("versions", "text"),
    [({"vllm": "0.32.0"}, "vLLM must be 0.33, got 0.32.0"), ({"apache-tvm-ffi": None}, "missing: apache-tvm-ffi")],
)
def test_another_vllm_or_a_missing_package(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str | None], text: str) -> None:
    everything = dict.fromkeys(check.DISTRIBUTIONS, "1.0") | {"vllm": "0.33.0"} | versions
    monkeypatch.setattr(check, "_version", everything.__getitem__)
    found = check._check_versions()
    assert found.status == "failed" and found.text.splitlines()[-1] == text


def test_gpus_with_and_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel names the GPUs that run it, and each GPU without one has its reason."""
    unsupported = (7, 5)
    fake_gpus(monkeypatch, unsupported, (9, 0))
    found = check._check_kernels()
    assert found.status == "failed"
    assert "ForwardSm90 runs on GPU 1" in found.text.splitlines()
    assert re.search(r"^GPU 0: compute capability 7\.5 is not supported", found.text, re.M)
    assert found.values["kernels"]["1"].startswith("ForwardSm90, ForwardSm90Wide") and found.values["kernels"]["1"].endswith(" for sm_90a")
    assert "ForwardSm90Wide runs on GPU 1" in found.text.splitlines()
    assert check.supported_gpu() == torch.device("cuda", 1)


def test_a_gpu_of_a_kind_that_nothing_ran_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs there, and the report says that it is the first to know."""
    fake_gpus(monkeypatch, (9, 0), (12, 0))
    found = check._check_kernels()
    assert found.status == "ok" and "ForwardSm80 runs on GPU 1" in found.text.splitlines()
    said = [line for line in found.text.splitlines() if line.startswith("GPU ")]
    assert said == ["GPU 1: compiled for compute capability 12.0 and never run on such a GPU: the self-test below has to show it"]
    assert found.values["compiled_only"] == [1] and found.values["kernels"]["1"] == "ForwardSm80, ForwardSm80Fp8 for sm_120a"


def test_every_kernel_that_is_chosen_is_in_the_table() -> None:
    from dense_mla.arch import ARCHITECTURES, unsupported_reason

    table = check.kernel_table()
    served = {capability for capabilities in table.values() for capability in capabilities}
    assert served == {capability for capability in ARCHITECTURES if unsupported_reason(capability) is None}
    assert (9, 0) in table["ForwardSm90"] and (9, 0) in table["ForwardSm90Wide"] and (9, 0) not in table["ForwardSm80"]


@pytest.mark.parametrize(("read", "decode", "status"), [(4000.0, 3000.0, "ok"), (4000.0, 1900.0, "failed")])
def test_a_decode_far_below_the_read_bandwidth_fails(monkeypatch: pytest.MonkeyPatch, read: float, decode: float, status: str) -> None:
    import sys
    from types import ModuleType

    module = ModuleType("vllm_dense_mla.read_bandwidth")
    vars(module).update(DECODE_KEYS=16384, DECODE_REQUESTS=64, measure_read=lambda device: read, measure_decode=lambda problem, device: decode)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(check, "supported_gpu", lambda: torch.device("cuda", 0))
    found = check._check_bandwidth()
    assert found.status == status and f"read {read:,.0f} GB/s; decode {decode:,.0f} GB/s" in found.text
    assert found.values["share"] == decode / read


@pytest.mark.gpu
@pytest.mark.usefixtures("installed")
def test_on_a_gpu_the_kernels_are_right_and_fast(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["check", "--json"])
    found = json.loads(capsys.readouterr().out)
    checks = {each["name"]: each for each in found["checks"]}
    assert checks["self-test"]["path"] == "kernels" and checks["self-test"]["status"] == "ok", checks["self-test"]
    assert checks["bandwidth"]["status"] == "ok", checks["bandwidth"]
    # No decode reads faster than the fastest read, but for what the L2 holds from the launch before.
    assert check.LEAST_SHARE < checks["bandwidth"]["share"] < 1.1
    assert (checks["GPUs"]["status"], checks["kernels"]["status"]) == ("ok", "ok")
    # Whether the versions are vLLM's pins depends on the environment that the tests run in.
    assert (code == 0) is found["ok"] is (checks["versions"]["status"] == "ok")

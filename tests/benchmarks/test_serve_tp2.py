"""serve_tp2's runs, comparisons and refusals, with small programs in place of vLLM and of the second GPU."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engines import FACTS, FAKE_SERVER, answers, fake_command

from benchmarks import gpu_memory, serve_tiny, serve_tp2, served_run
from benchmarks.serve_tp2 import evidence_of, main, parse_arguments, planned_runs
from benchmarks.served_run import RunRecord, ServedRun, server_arguments
from benchmarks.tiny_checkpoint import TinyCheckpoint
from benchmarks.variants import NO_MULTICAST, RANK_VARIANTS, VARIANTS

DRAFTS = "vllm:spec_decode_num_drafts"
METRICS = f'self.send_response(200), self.end_headers(), self.wfile.write(b"{DRAFTS}_total{{engine=\\"0\\"}} 7.0\\n")'
SERVER_WITH_METRICS = FAKE_SERVER.replace("    def do_GET(self):\n", f"    def do_GET(self):\n        if self.path == '/metrics': return {METRICS}\n")
NAMES = [
    "offline_triton_mla", "offline_triton_mla_tp2",
    "offline_dense_mla_bf16", "offline_dense_mla_fp32", "offline_dense_mla_bf16_spec4", "offline_dense_mla_fp32_spec4",
    "offline_dense_mla_bf16_invariant",
    *(f"serve_dense_mla_{rest}" for ranks in ("tp2", "dcp2") for rest in (
        f"bf16_{ranks}", f"fp32_{ranks}", f"bf16_{ranks}_spec4", f"fp32_{ranks}_spec4", f"bf16_{ranks}_invariant")),
]  # fmt: skip
WHOLE = planned_runs()


def records(logprob: float = -0.25, without: str | None = None) -> dict[str, RunRecord]:
    """Of the whole list, every answer alike; on two GPUs with this logprob."""
    found = {}
    for run in planned_runs():
        said = answers(logprob) if run.variant.gpus > 1 else answers()
        found[run.name] = RunRecord(run.name, run.path, run.backend, run.partial_dtype, run.variant_name, answers=said)
    found.pop(without, None)
    return found


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(self: ServedRun, checkpoint: Path, scratch: Path, port: int, serve_arguments: list[str]) -> list[str]:
        assert json.loads((checkpoint / "config.json").read_text())["num_attention_heads"] == 24
        if self.path == "serve":
            return [sys.executable, "-c", SERVER_WITH_METRICS, str(port)]
        return fake_command(self, checkpoint, scratch, port, serve_arguments, {DRAFTS: 3})

    monkeypatch.setattr(ServedRun, "command", command)
    monkeypatch.setattr(served_run, "processes_by_gpu", lambda: {"GPU-a": [11], "GPU-b": [12]})


def test_the_whole_list() -> None:
    assert [run.name for run in planned_runs()] == [run.name for run in parse_arguments([]).runs] == NAMES
    assert {run.variant.gpus for run in planned_runs() if run.path == "serve"} == {2}
    assert parse_arguments([]).json.name == "serve_tp2_h200.json"


def test_every_run_on_two_gpus_shares_out_heads_or_keys_without_multicast() -> None:
    assert set(RANK_VARIANTS) == {"tp2", "tp2_spec4", "tp2_invariant", "dcp2", "dcp2_spec4", "dcp2_invariant"}
    for name, variant in RANK_VARIANTS.items():
        alone = VARIANTS[str(variant.undivided)]
        assert variant.options["tensor_parallel_size"] == 2 and variant.options["disable_custom_all_reduce"]
        assert variant.options.get("decode_context_parallel_size", 1) == (2 if name.startswith("dcp2") else 1)
        assert alone.options.items() <= variant.options.items() and alone.environment.items() <= variant.environment.items()
        assert (variant.rounds, variant.exercised) == (alone.rounds, alone.exercised)
        assert NO_MULTICAST.items() <= variant.environment.items()
    assert RANK_VARIANTS["dcp2_invariant"].environment["VLLM_BATCH_INVARIANT"] == "1"
    assert not any("tensor_parallel_size" in variant.options for variant in VARIANTS.values())


def test_vllm_knows_every_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = pytest.importorskip("vllm.envs")
    for name, value in NO_MULTICAST.items():
        if name.startswith("VLLM_"):
            monkeypatch.setenv(name, value)
            assert envs.environment_variables[name]() is False


@pytest.mark.parametrize("name", RANK_VARIANTS)
def test_vllm_makes_a_deployment_of_every_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's command line, its whole config and the backend's consent: a mistake would cost time on two GPUs."""
    pytest.importorskip("vllm")
    from vllm_dense_mla.deployment import read_deployment

    run = ServedRun("serve", "DENSE_MLA", "bf16", name, compilation="none")
    for variable, value in run.environment.items():
        monkeypatch.setenv(variable, value)
    TinyCheckpoint(heads=24).write_config(tmp_path)
    deployment = read_deployment(["CHECKPOINT", *server_arguments("DENSE_MLA", 8123, run.options)], tmp_path / "config.json")
    steps = deployment.steps
    ranks = 2 if name.startswith("dcp2") else 1
    assert (deployment.tensor_parallel, steps.heads, steps.kernel_heads, steps.context_world) == (2, 12, 12 * ranks, ranks)
    assert (steps.longest_query, steps.batch_invariant) == (5 if "spec4" in name else 1, "invariant" in name)
    assert "--disable-log-stats" not in server_arguments("DENSE_MLA", 8123, run.options), "the server would count no drafts"


def test_runs_go_into_one_evidence(fake_vllm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two calls, the second with what the first has left out."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(serve_tp2, "check_plugin", lambda backends: None)
    monkeypatch.setattr(serve_tp2, "collect_facts", lambda commit, dirty: FACTS)
    monkeypatch.setattr(serve_tp2, "planned_runs", lambda: [run for run in WHOLE if run.partial_dtype != "fp32" and "invariant" not in run.name])
    path = tmp_path / "tp2.json"
    options = ["serve_tp2.py", "--layers", "1", "--jobs", "4", "--json", str(path), "--variants"]
    monkeypatch.setattr("sys.argv", [*options, "plain,tp2"])
    assert main() == 1
    assert json.loads(path.read_text())["not_run"] == [
        "offline_dense_mla_bf16_spec4", "serve_dense_mla_bf16_tp2_spec4", "serve_dense_mla_bf16_dcp2", "serve_dense_mla_bf16_dcp2_spec4",
    ]  # fmt: skip
    monkeypatch.setattr("sys.argv", [*options, "spec4,tp2_spec4,dcp2,dcp2_spec4", "--reuse", str(path)])
    assert main() == 0, capsys.readouterr().out
    content = json.loads(path.read_text())
    runs = {run["name"]: run for run in content["runs"]}
    assert runs["serve_dense_mla_bf16_tp2_spec4"]["counters"] == {DRAFTS: 7.0}
    assert runs["serve_dense_mla_bf16_dcp2"]["gpu_processes"] == {"GPU-a": [11], "GPU-b": [12]}
    assert "NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1" in runs["serve_dense_mla_bf16_dcp2"]["command"]


def test_a_rank_on_both_gpus_is_an_error(fake_vllm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_run, "processes_by_gpu", lambda: {"GPU-a": [11, 12], "GPU-b": [12]})
    args = parse_arguments(["--variants", "tp2", "--layers", "1", "--json", str(tmp_path / "tp2.json")])
    args.runs = [run for run in args.runs if run.name == "serve_dense_mla_bf16_tp2"]
    (record,) = serve_tiny.executed(args.runs, args, time.monotonic() + 60)
    assert record.error == "RuntimeError: every rank must keep to its own GPU, but these processes were on several: [12]"


def test_each_run_is_compared_with_the_undivided_one() -> None:
    content = evidence_of(FACTS, records())
    assert content["passed"] and content["not_run"] == []
    found = {item["run"]: (item["with"], item["required"]) for item in content["comparisons"]}
    assert found["offline_triton_mla_tp2"] == ("offline_triton_mla", False)
    assert found["offline_dense_mla_fp32"] == ("offline_triton_mla", True)
    assert found["serve_dense_mla_fp32_dcp2_spec4"] == ("offline_dense_mla_fp32_spec4", True)
    assert found["serve_dense_mla_bf16_tp2_invariant"] == ("offline_dense_mla_bf16_invariant", True)
    assert len(found) == 1 + 2 + 10


@pytest.mark.parametrize("without", ["offline_dense_mla_bf16_spec4", "serve_dense_mla_fp32_dcp2", "offline_triton_mla_tp2"])
def test_evidence_needs_the_whole_list(without: str) -> None:
    content = evidence_of(FACTS, records(without=without))
    assert not content["passed"] and content["not_run"] == [without]


def test_evidence_needs_every_answer_within_the_bar() -> None:
    assert evidence_of(FACTS, records(-0.268))["passed"]
    assert not evidence_of(FACTS, records(-0.272))["passed"]
    failed = records()
    failed["serve_dense_mla_bf16_dcp2"].error = "TimeoutError: slow"
    assert not evidence_of(FACTS, failed)["passed"]
    peer = records()
    peer["offline_triton_mla_tp2"].answers = answers(-0.9)
    assert evidence_of(FACTS, peer)["passed"], "a peer's own distance is only shown"


@pytest.mark.parametrize("found", [0, 1])
def test_fewer_than_two_gpus_are_refused_in_one_line(found: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    monkeypatch.setattr("sys.argv", ["serve_tp2.py"])
    assert main() == 2
    assert capsys.readouterr().err == f"serve_tp2: at least 2 GPUs are needed, got {found}\n"


@pytest.mark.parametrize(("arguments", "message"), [(["--variants", "tp2,tp4"], "got tp4"), (["--jobs", "0"], "--jobs must be at least 1, got 0")])
def test_bad_arguments_say_what_is_allowed(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_processes_by_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def says(text: str) -> Any:
        monkeypatch.setattr(gpu_memory, "APPS_QUERY", (sys.executable, "-c", f"print({text!r})"))
        return gpu_memory.processes_by_gpu()

    assert says("GPU-a, 11\nGPU-a, 12\nGPU-b, 13") == {"GPU-a": [11, 12], "GPU-b": [13]}
    assert says("No devices were found") == {}
    monkeypatch.setattr(gpu_memory, "APPS_QUERY", ("no-such-program",))
    assert gpu_memory.processes_by_gpu() == {}

"""One run of serve_tiny: its child, its answers and its log, with small programs in place of vLLM."""

import os
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import fake_engines
import pytest
from fake_engines import FAKE_SERVER, answers, fake_command

from benchmarks import served_run
from benchmarks.engine_process import EngineProcess
from benchmarks.served_run import COMPILATIONS, UNTUNED, RunRecord, ServedRun, execute, recorded_child, server_arguments
from benchmarks.tiny_checkpoint import TinyCheckpoint
from benchmarks.tiny_k3_checkpoint import TinyK3Checkpoint


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServedRun, "command", fake_command)


def run(what: ServedRun, folder: Path, seconds: float = 30) -> RunRecord:
    started: list[EngineProcess] = []
    result = execute(what, folder / "checkpoint", folder, folder / "run.log", time.monotonic() + seconds, [], started.append)
    assert started[0].exit_status() is not None, "a process was left behind"
    return result


def test_served_run_answers_over_http_and_shuts_down(fake_vllm: None, tmp_path: Path) -> None:
    result = run(ServedRun("serve", "DENSE_MLA", "fp32"), tmp_path)
    assert (result.error, result.exit_status, result.name) == (None, 0, "serve_dense_mla_fp32")
    assert result.answers == answers()
    assert any("partial dtype fp32" in line for line in result.log_lines)
    assert result.command.startswith("VLLM_K3_DENSE_MLA_PARTIAL_DTYPE=fp32 python -c")


def test_served_run_records_the_servers_refusal(fake_vllm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_REFUSES", "1")
    assert "POST /v1/completions answered 400" in str(run(ServedRun("serve", "DENSE_MLA", "bf16"), tmp_path).error)


def test_offline_run_reads_the_answers_of_its_child(fake_vllm: None, tmp_path: Path) -> None:
    result = run(ServedRun("offline", "TRITON_MLA"), tmp_path)
    assert result.error is None and result.answers == answers()


def test_a_run_whose_log_names_another_backend_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServedRun, "command", lambda *arguments: [*fake_command(*arguments)[:-1], "TRITON_MLA"])
    assert str(run(ServedRun("offline", "FLASHMLA"), tmp_path).error) == "RuntimeError: the log does not say that FLASHMLA was used"


def test_a_run_whose_log_names_another_partial_dtype_is_an_error(fake_vllm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable got lost on its way: both partial dtypes would be the same run."""
    monkeypatch.setattr(fake_engines, "FAKE_SERVER", FAKE_SERVER.replace("{dtype}", "bf16"))
    assert run(ServedRun("serve", "DENSE_MLA", "bf16"), tmp_path).error is None
    assert run(ServedRun("serve", "DENSE_MLA", "fp32"), tmp_path).error == "RuntimeError: the log does not say that its partials are fp32"


@pytest.mark.parametrize("kept", [slice(0), slice(7), slice(None, None, -1)], ids=["none", "one missing", "another order"])
def test_answers_that_are_missing_are_an_error(kept: slice, fake_vllm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_engines, "answers", lambda prompt_tokens: answers()[kept])
    assert "RuntimeError: the answers must be of (prompt, answer) tokens [(1, 48), " in str(run(ServedRun("offline", "TRITON_MLA"), tmp_path).error)


def test_a_logprob_that_is_no_number_is_the_runs_error(fake_vllm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not of whoever writes the evidence, in which there is no place for it."""
    monkeypatch.setattr(fake_engines, "FAKE_SERVER", FAKE_SERVER.replace("-0.25", "float('nan')"))
    result = run(ServedRun("serve", "DENSE_MLA", "bf16"), tmp_path)
    assert result.error == "ValueError: a logprob of the answer to the prompt of 1 tokens is not finite" and result.answers == []


@pytest.mark.parametrize(
    ("program", "seconds", "message"),
    [
        ("raise SystemExit('no plugin')", 30, "ended with status 1 before it was healthy"),
        ("import time; time.sleep(60)", 1, "not healthy at the time limit"),
    ],
)
def test_a_server_that_never_answers_is_recorded_and_ended(
    program: str, seconds: float, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServedRun, "command", lambda *_: [sys.executable, "-c", program])
    assert message in str(run(ServedRun("serve", "DENSE_MLA", "bf16"), tmp_path, seconds).error)


def test_a_run_that_exercised_nothing_is_an_error(fake_vllm: None, tmp_path: Path) -> None:
    result = run(ServedRun("offline", "TRITON_MLA", None, "spec4"), tmp_path)
    assert "vllm:spec_decode_num_drafts is 0 at the end: the run shows nothing of spec4" in str(result.error)


def test_a_run_without_full_graphs_is_an_error(fake_vllm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_engines, "FAKE_SERVER", FAKE_SERVER.replace("(FULL)", "(PIECEWISE)"))
    assert "does not say that full CUDA graphs were captured" in str(run(ServedRun("serve", "DENSE_MLA", "bf16"), tmp_path).error)


def test_a_missing_plugin_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])
    with pytest.raises(ValueError, match=r"no entry point dense_mla in group vllm.general_plugins .found: none.; install the project first"):
        served_run.check_plugin(["TRITON_MLA", "DENSE_MLA"])
    served_run.check_plugin(["TRITON_MLA"])


def test_vllm_takes_the_engine_options_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if not current_platform.device_type:  # the parser asks for the kind of device
        monkeypatch.setattr(current_platform, "device_type", "cuda")

    def parsed(compilation: str) -> Any:
        arguments = server_arguments("DENSE_MLA", 8123, ServedRun("serve", "DENSE_MLA", compilation=compilation).options)
        return make_arg_parser(FlexibleArgumentParser()).parse_args(["CHECKPOINT", *arguments])

    own, uncompiled = parsed("vllm"), parsed("none")
    assert (own.attention_backend, own.port, own.max_model_len, own.kv_cache_memory_bytes) == ("DENSE_MLA", 8123, 8192, 2**30)
    assert own.skip_tokenizer_init and own.fail_on_environ_validation and own.enable_prefix_caching is False
    assert (own.compilation_config.mode, own.compilation_config.cudagraph_mode) == (None, None)
    mode, graphs = uncompiled.compilation_config.mode, uncompiled.compilation_config.cudagraph_mode
    options = {name for compilation in COMPILATIONS for name in ServedRun("offline", "DENSE_MLA", compilation=compilation).options}
    assert options <= {field.name for field in fields(EngineArgs)}
    assert int(mode) == 0 and getattr(graphs, "name", graphs) == "FULL_DECODE_ONLY"


def test_vllms_own_compilation_captures_full_graphs_of_our_decode_steps() -> None:
    """The mode that vLLM starts from, and what it makes of it for a backend that takes uniform batches."""
    pytest.importorskip("vllm")
    from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
    from vllm.config import vllm as vllm_config
    from vllm.v1.attention.backend import AttentionCGSupport

    from vllm_dense_mla.metadata import DenseMLAMetadataBuilder

    default = vllm_config.VllmConfig.__dataclass_fields__["optimization_level"].default
    graphs = vllm_config.OPTIMIZATION_LEVEL_TO_CONFIG[default]["compilation_config"]["cudagraph_mode"]
    config = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=graphs)
    config.set_splitting_ops_for_v1(all2all_backend="", data_parallel_size=1)
    support = DenseMLAMetadataBuilder._cudagraph_support
    assert support == AttentionCGSupport.UNIFORM_BATCH
    resolved = config.resolve_cudagraph_mode_and_sizes(support, "DENSE_MLA")
    assert resolved == CUDAGraphMode.FULL_AND_PIECEWISE and resolved.decode_mode() == CUDAGraphMode.FULL


@pytest.mark.parametrize(
    ("name", "checkpoint", "page_size"),
    [
        ("prefix", TinyCheckpoint(), 64),
        ("invariant", TinyCheckpoint(), 64),
        ("plain", TinyK3Checkpoint(), 768),
        ("heads96", TinyK3Checkpoint(96), 5760),
    ],
    ids=["prefix", "invariant", "k3", "k3 heads96"],
)
def test_vllm_makes_a_deployment_of_a_run(
    name: str, checkpoint: TinyCheckpoint, page_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line, vLLM's whole config and the backend's consent; the page that K3's prompts are chosen for."""
    pytest.importorskip("vllm")
    from vllm_dense_mla.deployment import read_deployment

    run = ServedRun("serve", "DENSE_MLA", "bf16", name, compilation="none")
    for variable, value in run.environment.items():
        monkeypatch.setenv(variable, value)
    checkpoint.write_config(tmp_path)
    deployment = read_deployment(["CHECKPOINT", *server_arguments("DENSE_MLA", 8123, run.options)], tmp_path / "config.json")
    assert (deployment.steps.heads, deployment.page_size) == (checkpoint.heads, page_size)
    assert (deployment.steps.longest_query, deployment.steps.batch_invariant) == (1, name == "invariant")


def test_recorded_command_names_no_place(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    command = ServedRun("offline", "TRITON_MLA").command(checkpoint, tmp_path, 1, [])
    text = recorded_child(command, {}, checkpoint, tmp_path)
    assert text.startswith("python kernels/benchmarks/offline_engine.py CHECKPOINT offline_triton_mla.json {")
    assert str(tmp_path) not in text and sys.executable not in text


@pytest.mark.parametrize("path", ["offline", "serve"])
def test_an_engine_without_compilation_is_not_tuned_either(path: Literal["offline", "serve"], tmp_path: Path) -> None:
    command = ServedRun(path, "DENSE_MLA", "bf16", compilation="none").command(tmp_path, tmp_path, 1, [])
    module = {"offline": "benchmarks.offline_engine", "serve": "vllm.entrypoints.cli.main"}[path]
    assert recorded_child(command, {}, tmp_path, tmp_path).startswith(f"python kernels/benchmarks/untuned.py {module} ")


def test_kernels_of_a_spawned_engine_have_one_configuration(tmp_path: Path) -> None:
    """As vLLM starts it: a process that is spawned, of a module which knows nothing of the change."""
    pytest.importorskip("triton")
    (tmp_path / "engine.py").write_text(
        """
import multiprocessing, sys
import triton


def report():
    @triton.autotune([triton.Config({}, num_warps=warps) for warps in (2, 4)], key=[])
    @triton.jit
    def kernel():
        pass

    print(*(config.num_warps for config in kernel.configs), *sys.argv[1:], flush=True)


def main():
    child = multiprocessing.get_context("spawn").Process(target=report)
    child.start()
    child.join()
    report()
"""
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    said = subprocess.run([sys.executable, str(UNTUNED), "engine", "word"], env=environment, capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[-1] == "2 word"
    assert [line.split()[0] for line in said.splitlines()] == ["2", "2"]

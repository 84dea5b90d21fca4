"""serve_tiny's children, comparisons and options, with small programs in place of vLLM."""

import json
import sys
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import serve_tiny, served_run
from benchmarks.answers import Answer
from benchmarks.engine_process import EngineProcess
from benchmarks.evidence import RunFacts
from benchmarks.serve_tiny import evidence_of, executed, parse_arguments, planned_runs
from benchmarks.served_run import COMPILATIONS, RunRecord, ServedRun, execute, recorded_child, server_arguments
from benchmarks.tiny_checkpoint import TinyCheckpoint
from benchmarks.variants import K3_PROMPT_TOKENS, LONG_PROMPT_TOKENS, PROMPT_TOKENS, VARIANTS

FACTS = RunFacts("python x", "c0ffee", False, "NVIDIA H200", "580.1", "2.11", "0.33.0", "4.8.0", "2026-12-01T00:00:00+00:00")

# Answers as vLLM's completions endpoint does for a model without a tokenizer; /health only after a moment.
FAKE_SERVER = """
import json, os, signal, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
print("Using AttentionBackendEnum.DENSE_MLA backend.", flush=True)
print("Capturing CUDA graphs (FULL):   0%|          | 0/5", flush=True)
print("partial dtype", os.environ["VLLM_K3_DENSE_MLA_PARTIAL_DTYPE"], "for DENSE_MLA", flush=True)
ready = time.monotonic() + 0.7
class Handler(BaseHTTPRequestHandler):
    def reply(self, status, content):
        self.send_response(status); self.end_headers(); self.wfile.write(json.dumps(content).encode())
    def do_GET(self):
        self.reply(200 if time.monotonic() > ready else 503, {})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if os.environ.get("FAKE_REFUSES"):
            return self.reply(400, {"error": "no such thing"})
        step = {"token_id:5": -0.25, "token_id:9": -2.0}
        n = body["max_tokens"]
        choice = {"token_ids": [5] * n, "logprobs": {"top_logprobs": [step] * n}}
        self.reply(200, {"choices": [{"index": i} | choice for i, _ in enumerate(body["prompt"])]})
    def log_message(self, *args): pass
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
FAKE_ENGINE = """
import sys
print("Using AttentionBackendEnum.TRITON_MLA backend.")
open(sys.argv[1], "w").write(sys.argv[2])
"""


def answers(logprob: float = -0.25) -> list[Answer]:
    return [Answer(n, (5,) * 48, (logprob,) * 48, ((9,),) * 48, ((-2.0,),) * 48) for n in PROMPT_TOKENS]


def record(name: str, found: list[Answer], error: str | None = None) -> RunRecord:
    path, *backend = name.split("_")
    variant = backend.pop() if backend[-1] in VARIANTS else "no_attention" if name.endswith("no_attention") else "plain"
    backend = backend[:-2] if variant == "no_attention" else backend
    dtype = backend.pop() if backend[-1] in ("bf16", "fp32") else None
    return RunRecord(name, path, "_".join(backend).upper(), dtype, variant, answers=found, error=error)


CONTENT = json.dumps({"answers": [asdict(answer) for answer in answers()], "counters": {}})


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(self: ServedRun, checkpoint: Path, scratch: Path, port: int, serve_arguments: list[str]) -> list[str]:
        if self.path == "serve":
            return [sys.executable, "-c", FAKE_SERVER, str(port)]
        return [sys.executable, "-c", FAKE_ENGINE, str(scratch / f"{self.name}.json"), CONTENT]

    monkeypatch.setattr(ServedRun, "command", command)


def run(what: ServedRun, folder: Path, seconds: float = 30) -> RunRecord:
    started: list[EngineProcess] = []
    result = execute(what, folder / "checkpoint", folder, folder / "run.log", time.monotonic() + seconds, [], started.append)
    assert started[0].exit_status() is not None, "a process was left behind"
    return result


def test_served_run_answers_over_http_and_shuts_down(fake_vllm: None, tmp_path: Path) -> None:
    result = run(ServedRun("serve", "DENSE_MLA", "fp32"), tmp_path)
    assert (result.error, result.exit_status, result.name) == (None, 0, "serve_dense_mla_fp32")
    assert result.answers == answers()
    assert "partial dtype fp32 for DENSE_MLA" in result.log_lines
    assert result.command.startswith("VLLM_K3_DENSE_MLA_PARTIAL_DTYPE=fp32 python -c")


def test_served_run_records_the_servers_refusal(fake_vllm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_REFUSES", "1")
    assert "POST /v1/completions answered 400" in str(run(ServedRun("serve", "DENSE_MLA", "bf16"), tmp_path).error)


def test_offline_run_reads_the_answers_of_its_child(fake_vllm: None, tmp_path: Path) -> None:
    result = run(ServedRun("offline", "TRITON_MLA"), tmp_path)
    assert result.error is None and result.answers == answers()


def test_a_run_whose_log_names_another_backend_is_an_error(fake_vllm: None, tmp_path: Path) -> None:
    assert "does not say that FLASHMLA was used" in str(run(ServedRun("offline", "FLASHMLA"), tmp_path).error)


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


def test_runs_go_side_by_side_into_one_passing_evidence(fake_vllm: None, tmp_path: Path) -> None:
    args = parse_arguments(["--parallel", "--json", str(tmp_path / "evidence" / "tiny.json"), "--layers", "1"])
    runs = planned_runs(["offline", "serve"], ["TRITON_MLA"], []) + planned_runs(["serve"], ["DENSE_MLA"], ["bf16", "fp32"])
    records = {result.name: result for result in executed(runs, args, time.monotonic() + 60)}
    assert sorted(records) == ["offline_triton_mla", "serve_dense_mla_bf16", "serve_dense_mla_fp32"]
    assert not [result.error for result in records.values() if result.error]
    assert len(list((tmp_path / "evidence").glob("tiny_*.log"))) == 3
    records |= {name: record(name, answers()) for name in ("offline_dense_mla_bf16", "offline_dense_mla_fp32")}
    assert evidence_of(FACTS, "deepseek", records)["passed"]


def test_a_comparison_says_how_far_the_logprobs_are_apart() -> None:
    names = ("offline_triton_mla", "offline_flashmla", "offline_dense_mla_bf16")
    records = {name: record(name, answers(logprob)) for name, logprob in zip(names, (-0.25, -0.28, -0.30))}
    found = {(item["run"], item["with"]): item for item in evidence_of(FACTS, "deepseek", records)["comparisons"]}
    for run, apart in (("offline_flashmla", 0.03), ("offline_dense_mla_bf16", 0.05)):
        item = found[run, "offline_triton_mla"]
        assert (item["tokens"], item["agreeing"]) == (48 * len(PROMPT_TOKENS),) * 2
        assert item["logprob_rms"] == item["logprob_gap"] == item["prompts"][0]["logprob_rms"] == pytest.approx(apart)


def test_evidence_needs_every_comparison() -> None:
    good = {name: record(name, answers()) for name in ("offline_triton_mla", "offline_dense_mla_bf16", "serve_dense_mla_bf16")}
    content = evidence_of(FACTS, "deepseek", good)
    assert content["passed"]
    assert [(item["run"], item["with"]) for item in content["comparisons"]] == [
        ("offline_dense_mla_bf16", "offline_triton_mla"),
        ("serve_dense_mla_bf16", "offline_triton_mla"),
        ("serve_dense_mla_bf16", "offline_dense_mla_bf16"),
    ]
    assert content["comparisons"][0]["prompts"][7]["prompt_tokens"] == 4000
    assert not evidence_of(FACTS, "deepseek", {k: v for k, v in good.items() if k != "offline_triton_mla"})["passed"]
    assert not evidence_of(FACTS, "deepseek", good | {"offline_dense_mla_bf16": record("offline_dense_mla_bf16", answers(-0.4))})["passed"]
    assert not evidence_of(FACTS, "deepseek", good | {"serve_dense_mla_bf16": record("serve_dense_mla_bf16", [], "TimeoutError: slow")})["passed"]
    assert not evidence_of(FACTS, "deepseek", {"offline_triton_mla": good["offline_triton_mla"]})["passed"]


def test_evidence_is_read_back_for_a_later_part(tmp_path: Path) -> None:
    records = {name: record(name, answers()) for name in ("offline_triton_mla", "offline_dense_mla_bf16")}
    path = tmp_path / "a.json"
    path.write_text(json.dumps(evidence_of(FACTS, "deepseek", records), allow_nan=False))
    assert serve_tiny.earlier_records(path) == records


def test_a_peer_that_differs_from_the_reference_itself_does_not_fail_ours() -> None:
    records = {name: record(name, answers()) for name in ("offline_triton_mla", "offline_dense_mla_bf16")}
    records["offline_flashmla"] = record("offline_flashmla", answers(-0.9))
    content = evidence_of(FACTS, "deepseek", records)
    assert content["passed"]
    assert [(item["run"], item["with"], item["within_bar"], item["required"]) for item in content["comparisons"]] == [
        ("offline_dense_mla_bf16", "offline_triton_mla", True, True),
        ("offline_dense_mla_bf16", "offline_flashmla", False, False),
        ("offline_flashmla", "offline_triton_mla", False, False),
    ]


def test_a_peer_that_agrees_with_the_reference_has_to_agree_with_ours() -> None:
    records = {"offline_triton_mla": record("offline_triton_mla", answers(-0.25)), "offline_flashmla": record("offline_flashmla", answers(-0.268))}
    records["offline_dense_mla_bf16"] = record("offline_dense_mla_bf16", answers(-0.234))
    content = evidence_of(FACTS, "deepseek", records)
    assert [item["within_bar"] for item in content["comparisons"]] == [True, True, False]
    assert not content["passed"]


def test_a_variant_is_compared_with_the_reference_served_the_same_way() -> None:
    names = ("offline_triton_mla", "offline_dense_mla_bf16", "offline_dense_mla_bf16_spec4")
    records = {name: record(name, answers()) for name in names}
    assert records[names[2]].variant == "spec4"
    assert not evidence_of(FACTS, "deepseek", records)["passed"]
    records["offline_triton_mla_spec4"] = record("offline_triton_mla_spec4", answers(-0.265))
    content = evidence_of(FACTS, "deepseek", records)
    assert content["passed"]
    assert [item["with"] for item in content["comparisons"]] == ["offline_triton_mla", "offline_triton_mla_spec4"]


def test_head_counts_only_have_to_answer() -> None:
    records = {"offline_dense_mla_bf16_heads96": record("offline_dense_mla_bf16_heads96", answers())}
    assert evidence_of(FACTS, "k3", records)["passed"]
    records["offline_dense_mla_bf16_heads6"] = record("offline_dense_mla_bf16_heads6", [], "RuntimeError: no")
    assert not evidence_of(FACTS, "k3", records)["passed"]


def test_answers_that_stay_the_same_without_attention_prove_nothing() -> None:
    records = {name: record(name, answers()) for name in ("offline_triton_mla", "offline_dense_mla_bf16")}
    records["offline_triton_mla_no_attention"] = record("offline_triton_mla_no_attention", answers())
    content = evidence_of(FACTS, "k3", records)
    assert not content["passed"] and not content["control"]["attention_decides"]
    different = [replace(answer, ids=(5, 6, *answer.ids[2:])) for answer in answers()]
    records["offline_triton_mla_no_attention"] = record("offline_triton_mla_no_attention", different)
    content = evidence_of(FACTS, "k3", records)
    assert content["passed"]
    assert [prompt["agreeing"] for prompt in content["control"]["prompts"]] == [1] * len(PROMPT_TOKENS)


def test_a_run_that_exercised_nothing_is_an_error(fake_vllm: None, tmp_path: Path) -> None:
    result = run(ServedRun("offline", "TRITON_MLA", None, "spec4"), tmp_path)
    assert "vllm:spec_decode_num_drafts is 0 at the end: the run shows nothing of spec4" in str(result.error)


def test_planned_variants() -> None:
    arguments = ["--model-shape", "k3", "--backends", "TRITON_MLA,FLASHMLA,DENSE_MLA", "--variants", "plain,no_attention,heads96,heads6"]
    args = parse_arguments(arguments)
    assert args.json.name == "serve_k3_shape_h200.json"
    assert [run.name for run in args.runs] == [
        "offline_triton_mla", "offline_flashmla", "offline_dense_mla_bf16", "offline_dense_mla_fp32", "offline_triton_mla_no_attention",
        "offline_dense_mla_bf16_heads96", "offline_dense_mla_bf16_heads6", "serve_dense_mla_bf16", "serve_dense_mla_fp32",
    ]  # fmt: skip
    assert {run.rounds for run in args.runs} == {(K3_PROMPT_TOKENS,)}
    ours = ["--parts", "offline", "--backends", "DENSE_MLA", "--partial-dtypes", "bf16"]
    spec, invariant, fp8, prefix = parse_arguments([*ours, "--variants", "spec8,invariant,fp8,prefix"]).runs
    assert spec.options["speculative_config"]["num_speculative_tokens"] == 8 and spec.rounds == (LONG_PROMPT_TOKENS, PROMPT_TOKENS)
    assert invariant.environment == {"VLLM_BATCH_INVARIANT": "1", "VLLM_K3_DENSE_MLA_PARTIAL_DTYPE": "bf16"}
    assert fp8.options["kv_cache_dtype"] == "fp8" and spec.options["kv_cache_memory_bytes"] == 2**30
    assert prefix.options["enable_prefix_caching"] and prefix.rounds == (PROMPT_TOKENS, PROMPT_TOKENS)


def test_runs_of_other_heads_have_checkpoints_of_their_own(tmp_path: Path) -> None:
    args = parse_arguments(["--model-shape", "k3", "--variants", "plain,no_attention,heads6", "--heads", "3", "--parts", "offline"])
    folders = serve_tiny.written_checkpoints(args.runs, args, tmp_path)
    heads = {run.name: json.loads((folder / "config.json").read_text())["linear_attn_config"]["num_heads"] for run, folder in folders.items()}
    assert heads == {
        "offline_triton_mla": 3, "offline_dense_mla_bf16": 3, "offline_dense_mla_fp32": 3,
        "offline_triton_mla_no_attention": 3, "offline_dense_mla_bf16_heads6": 6,
    }  # fmt: skip
    plain, without = (load_file(tmp_path / name / "model.safetensors") for name in ("checkpoint_3", "checkpoint_3_no_attention"))
    different = [name for name, tensor in plain.items() if not torch.equal(tensor, without[name])]
    assert different == ["model.layers.1.self_attn.o_proj.weight"] and not without[different[0]].any()


@pytest.mark.parametrize(
    ("arguments", "compilation", "evidence"),
    [
        ([], "vllm", "serve_tiny_h200.json"),
        (["--compilation", "none"], "none", "serve_tiny_h200.json"),
        (["--variants", "plain,fp8"], "none", "serve_variants_h200.json"),
        (["--variants", "fp8", "--compilation", "vllm"], "vllm", "serve_variants_h200.json"),
        (["--model-shape", "k3"], "none", "serve_k3_shape_h200.json"),
    ],
)
def test_compilation_is_vllms_own_unless_a_start_has_to_be_quick(arguments: list[str], compilation: str, evidence: str) -> None:
    args = parse_arguments(arguments)
    assert (args.compilation, args.json.name) == (compilation, evidence)
    assert ("FLASHMLA" in args.backends) == (evidence == "serve_tiny_h200.json")
    assert {run.compilation for run in args.runs} == {compilation}
    uncompiled = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    assert all(run.options.get("compilation_config") == (uncompiled if compilation == "none" else None) for run in args.runs)
    assert evidence_of(FACTS, args.model_shape, {}, args.compilation)["compilation"] == compilation


def test_a_run_without_full_graphs_is_an_error(fake_vllm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.FAKE_SERVER", FAKE_SERVER.replace("(FULL)", "(PIECEWISE)"))
    assert "does not say that full CUDA graphs were captured" in str(run(ServedRun("serve", "DENSE_MLA", "bf16"), tmp_path).error)


@pytest.mark.parametrize("line", ["Capturing CUDA graphs (FULL): 100%", "Capturing CUDA graphs (decode, FULL):   0%"])
def test_both_model_runners_name_their_full_graphs(line: str) -> None:
    assert served_run.names_full_graphs(["x", line]) and not served_run.names_full_graphs(["Capturing CUDA graphs (PIECEWISE)"])


def test_planned_runs() -> None:
    names = [what.name for what in planned_runs(["offline", "serve"], ["TRITON_MLA", "DENSE_MLA"], ["bf16", "fp32"])]
    assert names[:3] == ["offline_triton_mla", "offline_dense_mla_bf16", "offline_dense_mla_fp32"]
    assert names[3:] == ["serve_dense_mla_bf16", "serve_dense_mla_fp32"]
    assert [what.name for what in planned_runs(["serve"], ["FLASHMLA"], ["bf16"])] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "serve", "--backends", "TRITON_MLA"], "nothing to run: only DENSE_MLA is served"),
        (["--variants", "plain,spec5"], "got spec5"),
        (["--model-shape", "k3", "--layers", "4"], "--layers must be 2 with --model-shape k3, got 4"),
        (["--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["--parts", "offline,http"], "--parts must be offline, serve or both, got http"),
    ],
)
def test_bad_arguments_say_what_is_allowed(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


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


def test_recorded_command_names_no_place(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    command = ServedRun("offline", "TRITON_MLA").command(checkpoint, tmp_path, 1, [])
    text = recorded_child(command, {}, checkpoint, tmp_path)
    assert text.startswith("python kernels/benchmarks/offline_engine.py CHECKPOINT offline_triton_mla.json {")
    assert str(tmp_path) not in text and sys.executable not in text


def test_checkpoint_holds_what_its_config_says(tmp_path: Path) -> None:
    TinyCheckpoint(heads=12, layers=2).write(tmp_path)
    config, weights = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    assert (config["num_attention_heads"], config["kv_lora_rank"], config["qk_rope_head_dim"]) == (12, 512, 64)
    assert config["first_k_dense_replace"] == config["num_hidden_layers"] == 2
    assert weights["model.layers.1.self_attn.q_proj.weight"].shape == (12 * 192, 1024)
    assert weights["model.layers.1.self_attn.kv_b_proj.weight"].shape == (12 * 256, 512)
    assert weights["model.layers.0.self_attn.o_proj.weight"].shape == (1024, 12 * 128)
    assert len(weights) == 3 + 2 * 10 and {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    again = TinyCheckpoint(heads=12, layers=2).weights()
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())

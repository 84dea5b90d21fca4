"""serve_tiny's runs, comparisons and options, with small programs in place of vLLM."""

import json
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_engines import FACTS, answers, fake_command
from safetensors.torch import load_file

from benchmarks import serve_tiny
from benchmarks.answers import Answer
from benchmarks.serve_tiny import evidence_of, executed, parse_arguments, planned_runs
from benchmarks.served_run import RunRecord, ServedRun
from benchmarks.variants import K3_PROMPT_TOKENS, LONG_PROMPT_TOKENS, PROMPT_TOKENS, VARIANTS


def record(name: str, found: list[Answer], error: str | None = None) -> RunRecord:
    path, *backend = name.split("_")
    if name.endswith("_fp8_one_layer"):
        return RunRecord(name, path, "_".join(backend[:2]).upper(), None, "fp8_one_layer", answers=found, error=error)
    variant = backend.pop() if backend[-1] in VARIANTS else "no_attention" if name.endswith("no_attention") else "plain"
    backend = backend[:-2] if variant == "no_attention" else backend
    dtype = backend.pop() if backend[-1] in ("bf16", "fp32") else None
    return RunRecord(name, path, "_".join(backend).upper(), dtype, variant, answers=found, error=error)


def test_runs_go_side_by_side_into_one_passing_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServedRun, "command", fake_command)
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
    earlier = serve_tiny.earlier_records(path, "deepseek", "vllm")
    assert earlier == {name: replace(made, source="c0ffee") for name, made in records.items()}
    again = evidence_of(replace(FACTS, commit="later"), "deepseek", earlier)
    assert again["commit"] == "later" and {run["source"] for run in again["runs"]} == {"c0ffee"}
    for model_shape, compilation in (("k3", "vllm"), ("deepseek", "none")):
        with pytest.raises(ValueError, match=f"model shape {model_shape}, compilation {compilation}, got deepseek, vllm"):
            serve_tiny.earlier_records(path, model_shape, compilation)


def test_a_run_to_come_is_named_and_nothing_has_passed_without_it() -> None:
    planned = planned_runs(["offline"], ["TRITON_MLA", "DENSE_MLA"], ["bf16", "fp32"])
    records = {name: record(name, answers()) for name in ("offline_triton_mla", "offline_dense_mla_bf16")}
    content = evidence_of(FACTS, "deepseek", records, planned=planned)
    assert (content["passed"], content["not_run"]) == (False, ["offline_dense_mla_fp32"])
    records["offline_dense_mla_fp32"] = record("offline_dense_mla_fp32", answers())
    assert evidence_of(FACTS, "deepseek", records, planned=planned)["passed"]


def test_a_stopped_call_leaves_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal between two runs: the file holds the first, and the name of the second."""
    path, seen = tmp_path / "a.json", []

    def executed(runs: list[ServedRun], *_: object) -> Generator[RunRecord]:
        seen.append(json.loads(path.read_text()))
        yield record("offline_triton_mla", answers())
        raise SystemExit(143)

    monkeypatch.setattr(serve_tiny, "executed", executed)
    args = parse_arguments(["--parts", "offline", "--backends", "TRITON_MLA,DENSE_MLA", "--partial-dtypes", "bf16", "--json", str(path)])
    records: dict[str, RunRecord] = {}
    with pytest.raises(SystemExit):
        serve_tiny.run_and_report(args, records, lambda: evidence_of(FACTS, "deepseek", records, planned=args.runs))
    assert seen[0]["not_run"] == ["offline_triton_mla", "offline_dense_mla_bf16"] and not seen[0]["passed"]
    content = json.loads(path.read_text())
    assert [run["name"] for run in content["runs"]] == ["offline_triton_mla"] and content["not_run"] == ["offline_dense_mla_bf16"]


def test_answers_to_other_prompts_fail_the_comparison_and_not_the_script() -> None:
    records = {"offline_triton_mla": record("offline_triton_mla", answers(prompt_tokens=[n + 1 for n in PROMPT_TOKENS]))}
    records["offline_dense_mla_bf16"] = record("offline_dense_mla_bf16", answers())
    (comparison,) = evidence_of(FACTS, "deepseek", records)["comparisons"]
    assert not comparison["within_bar"] and "cannot compare" in comparison["error"]


def test_answers_that_agree_in_no_token_are_not_within_the_bar() -> None:
    """Though each parts at a near tie: nothing would be compared."""
    reference = [replace(answer, other_ids=((6,),) * 48, other_logprobs=((-0.3,),) * 48) for answer in answers()]
    ours = [replace(answer, ids=(6,) * 48, other_ids=((5,),) * 48, other_logprobs=((-0.3,),) * 48) for answer in answers()]
    records = {"offline_triton_mla": record("offline_triton_mla", reference), "offline_dense_mla_bf16": record("offline_dense_mla_bf16", ours)}
    content = evidence_of(FACTS, "deepseek", records)
    assert all(prompt["within_bar"] for prompt in content["comparisons"][0]["prompts"]) and not content["passed"]


def test_a_peer_that_does_not_start_is_no_failure_of_ours() -> None:
    records = {name: record(name, answers()) for name in ("offline_triton_mla", "offline_dense_mla_bf16")}
    records["offline_flashmla"] = record("offline_flashmla", [], "RuntimeError: no")
    assert evidence_of(FACTS, "k3", records)["passed"]
    records["offline_triton_mla"].error = "RuntimeError: the log does not say that TRITON_MLA was used"
    assert not evidence_of(FACTS, "k3", records)["passed"]


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


def test_a_k3_model_is_served_whole_unless_asked_otherwise() -> None:
    assert [run.name for run in parse_arguments(["--model-shape", "k3"]).runs] == [
        "offline_triton_mla", "offline_flashmla", "offline_dense_mla_bf16", "offline_dense_mla_fp32", "offline_triton_mla_no_attention",
        *(f"offline_dense_mla_bf16_heads{heads}" for heads in (96, 48, 24, 6)), "serve_dense_mla_bf16", "serve_dense_mla_fp32",
    ]  # fmt: skip
    assert parse_arguments([]).variants == ["plain"]


def test_runs_of_other_heads_have_checkpoints_of_their_own(tmp_path: Path) -> None:
    args = parse_arguments(["--model-shape", "k3", "--variants", "plain,no_attention,heads6", "--heads", "3", "--parts", "offline"])
    folders = serve_tiny.written_checkpoints(args.runs, args, tmp_path)
    heads = {run.name: json.loads((folder / "config.json").read_text())["linear_attn_config"]["num_heads"] for run, folder in folders.items()}
    assert heads == {
        "offline_triton_mla": 3, "offline_flashmla": 3, "offline_dense_mla_bf16": 3, "offline_dense_mla_fp32": 3,
        "offline_triton_mla_no_attention": 3, "offline_dense_mla_bf16_heads6": 6,
    }  # fmt: skip
    plain, without = (load_file(tmp_path / name / "model.safetensors") for name in ("checkpoint_3x2", "checkpoint_3x2_no_attention"))
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
    assert ("FLASHMLA" in args.backends) == (evidence != "serve_variants_h200.json")
    assert {run.compilation for run in args.runs} == {compilation}
    uncompiled = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    assert all(run.options.get("compilation_config") == (uncompiled if compilation == "none" else None) for run in args.runs)
    assert evidence_of(FACTS, args.model_shape, {}, args.compilation)["compilation"] == compilation


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


@pytest.mark.parametrize(("variant", "within"), [("fp8", True), ("fp8_one_layer", False), ("plain", False)])
def test_keys_of_two_e4m3_layers_may_differ_and_those_of_one_may_not(variant: str, within: bool) -> None:
    """Between the two bars: noise of one layer is rounded to E4M3 in the next."""
    suffix = "" if variant == "plain" else f"_{variant}"
    names = (f"offline_triton_mla{suffix}", f"offline_dense_mla{suffix}")
    records = {name: record(name, answers(logprob)) for name, logprob in zip(names, (-0.25, -0.275))}
    (found,) = evidence_of(FACTS, "deepseek", records)["comparisons"]
    assert (found["within_bar"], found["logprob_rms"]) == (within, pytest.approx(0.025))
    assert found["logprob_rms_bar"] == (0.03 if within else 0.02)


def test_a_variant_of_one_layer_has_a_checkpoint_of_one(tmp_path: Path) -> None:
    args = parse_arguments(["--variants", "fp8,fp8_one_layer", "--parts", "offline", "--backends", "DENSE_MLA", "--partial-dtypes", "bf16"])
    folders = serve_tiny.written_checkpoints(args.runs, args, tmp_path)
    layers = {run.variant_name: json.loads((folder / "config.json").read_text())["num_hidden_layers"] for run, folder in folders.items()}
    assert layers == {"fp8": 2, "fp8_one_layer": 1}

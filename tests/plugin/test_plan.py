"""`vllm-dense-mla plan` of a model or a serve config: the numbers against plain arithmetic, and one line for what cannot be served."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_inspection import inspect_in_process  # noqa: F401

from dense_mla import DecodeProblem, arch, workspace_size
from vllm_dense_mla import cli
from vllm_dense_mla.absent_gpu import _select, planned_gpu
from vllm_dense_mla.decode_steps import DecodeSteps
from vllm_dense_mla.deployment import Deployment, read_deployment
from vllm_dense_mla.plan import plan_lines, print_plan, workspace_tables

MODELS = Path(__file__).parent / "model_configs"
DCP8 = Deployment(
    model="a model",
    steps=DecodeSteps(heads=8, capture_sizes=(1, 2, 4), max_num_seqs=4, context_world=8),
    mla_layers=61,
    model_mla_layers=61,
    page_size=64,
    draft=None,
    max_model_len=262144,
    tensor_parallel=8,
    pipeline_parallel=1,
)


def plan(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(["plan", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_plan_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    """Kimi-K3 at TP 8: the linear-attention state makes pages of 768 keys, 24 of 93 layers are MLA."""
    argv = ["--model", str(MODELS / "kimi_k3.json"), "--tensor-parallel-size", "8", "--max-num-seqs", "8", "--capture-sizes", "1,2,4,8"]
    code, out, err = plan(capsys, *argv)
    assert (code, err) == (0, "")
    lines = dict(re.findall(r"^(\S+(?: \S+)*?)  +(\S.*)$", out.split("\n\n")[0], re.M))
    assert lines["heads"] == "12 query heads on a rank"
    assert lines["kernel"] == "ForwardSm90 for sm_90a (tested on an NVIDIA H200)"
    assert lines["block size"].startswith("768 tokens")
    assert lines["batch"] == "up to 8 requests of 1 query token; CUDA graphs of 4 sizes up to 8 tokens"
    assert lines["KV a token"] == "1,152 bytes a layer; 27,648 on a rank (24 layers), 27,648 for the model's 24 MLA layers"
    sizes = [workspace_size(DecodeProblem(12, 64, dtype), 8, 132).total_bytes for dtype in (torch.bfloat16, torch.float32)]
    more = sizes[1] - sizes[0]
    assert lines["fp32 costs"] == f"{more:,} bytes more than bf16 partials on each GPU: the KV cache of {-(-more // 27648)} tokens"
    assert [f"reserves {size:,} bytes" in out for size in sizes] == [True, True]


def test_without_sizes_vllm_chooses_for_an_h200(capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM serves 1,024 requests at once on a GPU of this size, and captures graphs up to 512 tokens."""
    code, out, err = plan(capsys, "--model", str(MODELS / "kimi_linear.json"))
    assert (code, err) == (0, "")
    assert "up to 1024 requests of 1 query token; CUDA graphs of 51 sizes up to 512 tokens" in out
    assert re.search(r"^GPUs +1, 132 SMs each$", out, re.M) and re.search(r"^block size +1,920 tokens", out, re.M)


def test_decode_context_parallelism_gathers_heads_and_shares_tokens() -> None:
    lines = dict(plan_lines(DCP8, 132))
    assert lines["GPUs"] == "8 (tensor parallel 8, decode context parallel 8), 132 SMs each"
    assert lines["heads"] == "8 query heads on a rank, 64 in its kernels: those of 8 ranks that share the keys"
    assert lines["KV a token"] == "1,152 bytes a layer; 8,784 on a rank (61 layers, over 8 ranks), 70,272 for the model's 61 MLA layers"
    assert "query tokens:" not in lines["kernel"] and "draft" not in lines
    assert "own weights" in dict(plan_lines(replace(DCP8, draft="a drafter"), 132))["draft"]


@pytest.mark.parametrize(("data_parallel", "micro_batches"), [("2", 2), ("1", 1)])
def test_micro_batches_have_a_workspace_each(data_parallel: str, micro_batches: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Dual batch overlap, which takes data-parallel ranks."""
    argv = ["deepseek", "--attention-backend", "DENSE_MLA", "--tensor-parallel-size", "8", "--data-parallel-size", data_parallel]
    argv += ["--enable-dbo", "--enable-expert-parallel", "--all2all-backend", "deepep_low_latency", "--max-num-seqs", "64"]
    deployment = read_deployment(argv, MODELS / "deepseek_v3.json")
    print_plan(deployment, 132)
    out = capsys.readouterr().out
    sizes = [micro_batches * workspace_size(DecodeProblem(16, 64, dtype), 64, 132).total_bytes for dtype in (torch.bfloat16, torch.float32)]
    each = ", for 2 micro-batches" if micro_batches == 2 else ""
    assert re.findall("each GPU reserves (.*)$", out, re.M) == [f"{size:,} bytes{each}" for size in sizes]
    assert f"{sizes[1] - sizes[0]:,} bytes more than bf16 partials" in out


def test_speculation_and_batch_invariance_are_in_the_plan() -> None:
    """12 heads: 1 and 2 query tokens are up to 24 rows of a CTA and 3 to 5 more, which another kernel works on."""
    steps = replace(DCP8.steps, heads=12, context_world=1, longest_query=5, batch_invariant=True)
    deployment = replace(DCP8, steps=steps)
    lines = dict(plan_lines(deployment, 132))
    assert lines["kernel"] == "ForwardSm90 (query tokens: 1, 2), ForwardSm90Wide (query tokens: 3, 4, 5) for sm_90a (tested on an NVIDIA H200)"
    assert lines["batch"] == "up to 4 requests of 1 to 5 query tokens; CUDA graphs of 3 sizes up to 4 tokens; batch invariant"
    tables = workspace_tables(deployment, 132)[torch.bfloat16]
    problem = DecodeProblem(12, 768, query_len=5, batch_invariant=True)
    assert tables.largest == workspace_size(problem, 4, 132) and tables.largest.slots == 4 * 32


def test_the_plan_says_what_was_compiled_only() -> None:
    lines = dict(plan_lines(DCP8, 188, (12, 0)))
    assert lines["kernel"] == "ForwardSm80 for sm_120a (compiled only, never run on such a GPU: see vllm-dense-mla check)"


def test_a_plan_for_a_gpu_without_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As prepare refuses it there."""
    monkeypatch.setitem(arch.ARCHITECTURES, (12, 0), replace(arch.ARCHITECTURES[12, 0], shared_memory_limit=65_536))
    with pytest.raises(ValueError, match=r"^shared memory of a CTA must be at least \d+ bytes for 64 query rows, got 65536$"):
        plan_lines(DCP8, 188, (12, 0))


@pytest.mark.parametrize("source", [["--model", str(MODELS / "kimi_linear.json")], ["--heads", "12", "--max-num-seqs", "4", "--capture-sizes", "1"]])
def test_another_gpu_needs_its_size(source: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = plan(capsys, *source, "--capability", "12.0")
    assert (code, out) == (2, "")
    assert err == "vllm-dense-mla: error: --sms must be given with --capability 12.0: the GPU's streaming multiprocessors\n"
    code, out, err = plan(capsys, *source, "--capability", "12.0", "--sms", "188")
    assert (code, err) == (0, "") and "188 SMs" in out


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, ["--tensor-parallel-size", "7"], "vLLM does not take this deployment: Total number of attention heads (32) must be divisible by"),
        ({}, ["--capability", "7.5"], "DENSE_MLA does not take this deployment: compute capability 7.5 is not supported: "),
        ({"kv_lora_rank": 256}, [], "DENSE_MLA does not take this deployment: head_size must be 576"),
        ({"architectures": None}, [], "config.json must be a model's, with `architectures`, got"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    changes: dict[str, object], options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((MODELS / "kimi_linear.json").read_text()) | changes
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None or key == "q_lora_rank"}))
    code, out, err = plan(capsys, "--model", str(path), *options)
    assert (code, out) == (2, "")
    assert err.startswith("vllm-dense-mla: error: ") and message in err and err.count("\n") == 1


def test_a_model_without_mla(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from vllm import envs

    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    assert envs.VLLM_MLA_DISABLE
    code, out, err = plan(capsys, "--model", str(MODELS / "kimi_linear.json"))
    assert (code, out) == (2, "")
    assert err == "vllm-dense-mla: error: KimiLinearForCausalLM has no Multi-head Latent Attention that vLLM serves as such\n"


@pytest.mark.parametrize("text", ["attention-backend: [DENSE_MLA\n", "- DENSE_MLA\n", ""])
def test_a_serve_config_that_is_no_yaml_of_options(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    serve = tmp_path / "serve.yaml"
    serve.write_text(text)
    code, out, err = plan(capsys, "--config", str(serve))
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith("vllm-dense-mla: error: vllm serve does not take these arguments: ")


def test_a_backend_that_is_not_this_one_is_named_even_where_it_would_refuse() -> None:
    """Its own reasons, of a library that is not here, say nothing about this backend."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    asked = AttentionSelectorConfig(head_size=576, dtype=torch.float32, kv_cache_dtype="auto", block_size=64, use_mla=True)
    with pytest.raises(ValueError, match=r"^attention-backend must be DENSE_MLA, got TRITON_MLA$"):
        _select(AttentionBackendEnum.TRITON_MLA, asked, (9, 0))


def test_heads_on_a_gpu_without_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = plan(capsys, "--heads", "12", "--max-num-seqs", "4", "--capture-sizes", "1", "--capability", "7.5", "--sms", "80")
    assert (code, out) == (2, "") and err == f"vllm-dense-mla: error: {arch.unsupported_reason((7, 5))}\n"


def test_a_model_s_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `vllm serve` takes it."""
    (tmp_path / "config.json").write_text((MODELS / "kimi_linear.json").read_text())
    code, out, err = plan(capsys, "--model", str(tmp_path), "--max-num-seqs", "4")
    assert (code, err) == (0, "") and "32 query heads on a rank" in out


def test_files_that_are_no_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text("{")
    assert f"config.json must be a model's, got {path}: " in plan(capsys, "--model", str(path))[2]
    assert f"config.json must be a model's, got {tmp_path / 'no.json'}: " in plan(capsys, "--model", str(tmp_path / "no.json"))[2]


def test_another_backend_a_wrong_flag_and_a_model_that_is_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub

    def offline(*_: object, **__: object) -> str:
        raise ConnectionError("no network in a test")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    serve = tmp_path / "serve.yaml"
    for text, message in (
        ("model: some/model\nattention-backend: TRITON_MLA\n", "attention-backend must be DENSE_MLA, got TRITON_MLA"),
        ("model: some/model\n", "no attention backend is named: set attention-backend to DENSE_MLA"),
        ("model: some/model\nattention-backend: DENSE_MLA\nno-such-option: 1\n", "vllm serve does not take these arguments: unrecognized"),
    ):
        serve.write_text(text)
        code, out, err = plan(capsys, "--config", str(serve), "--model", str(MODELS / "kimi_linear.json"))
        assert (code, out) == (2, "") and message in err and err.count("\n") == 1
    serve.write_text("model: some/model\nattention-backend: DENSE_MLA\n")
    assert "config.json of some/model is neither on this machine nor on a hub in reach (ConnectionError): give the file with --model" in (
        plan(capsys, "--config", str(serve))[2]
    )


def test_the_planned_gpu_is_taken_back() -> None:
    from vllm.platforms import current_platform

    before = dict(vars(current_platform))
    with pytest.raises(RuntimeError), planned_gpu():
        assert current_platform.device_type == "cuda" and current_platform.get_device_name() == "NVIDIA H200"
        raise RuntimeError
    assert vars(current_platform) == before

"""Each serve config as `vllm serve --config FILE` reads it, and as the engine would build it: no GPU, no weights, no network."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from model_inspection import inspect_in_process  # noqa: F401

from dense_mla.arch import ran_on
from vllm_dense_mla.cli import main
from vllm_dense_mla.deployment import describe, engine_config
from vllm_dense_mla.plan import workspace_tables
from vllm_dense_mla.registration import PARTIAL_DTYPE_VARIABLE
from vllm_dense_mla.settings import load_settings

CONFIGS = Path(__file__).parents[2] / "serve_configs"
MODEL_CONFIGS = Path(__file__).parent / "model_configs"  # what the published config.json files say about the shape of the model
HOPPER = (9, 0)


@dataclass(frozen=True)
class Expected:
    """What a serve config is for. `tokens`: query tokens that a request brings to a step; `token_bytes`: of KV cache, on the fullest rank."""

    model: str
    config: str
    gpus: int
    heads: int
    page_size: int
    token_bytes: int
    tensor_parallel: int
    kernel_heads: int
    tokens: int = 1
    context_parallel: int = 1
    capability: tuple[int, int] = HOPPER
    kv_cache_dtype: str = "bfloat16"


K3, K2, LINEAR = "moonshotai/Kimi-K3", "moonshotai/Kimi-K2-Instruct-0905", "moonshotai/Kimi-Linear-48B-A3B-Instruct"
EXPECTED = {
    "kimi_k3_h200_tp8.yaml": Expected(K3, "kimi_k3", 16, 12, 768, 13 * 1152, 8, 12),
    "kimi_k3_h200_tp8_speculative.yaml": Expected(K3, "kimi_k3", 16, 12, 768, 13 * 1152, 8, 12, tokens=5),
    "kimi_k3_h200_tp16.yaml": Expected(K3, "kimi_k3", 16, 6, 384, 24 * 1152, 16, 6),
    "kimi_k3_h200_tp16_speculative.yaml": Expected(K3, "kimi_k3", 16, 6, 384, 24 * 1152, 16, 6, tokens=5),
    "kimi_k2_h200_tp8.yaml": Expected(K2, "kimi_k2", 8, 8, 64, 61 * 1152, 8, 8),
    "kimi_k2_h200_tp8_dcp8.yaml": Expected(K2, "kimi_k2", 8, 8, 64, 61 * 144, 8, 64, context_parallel=8),
    "deepseek_v3_h200_tp8.yaml": Expected("deepseek-ai/DeepSeek-V3", "deepseek_v3", 8, 16, 64, 61 * 1152, 8, 16),
    "kimi_k2_h200_tp8_fp8.yaml": Expected(K2, "kimi_k2", 8, 8, 64, 61 * 576, 8, 8, kv_cache_dtype="fp8"),
    "deepseek_v3_h200_tp8_fp8.yaml": Expected(
        "deepseek-ai/DeepSeek-V3", "deepseek_v3", 8, 16, 64, 61 * 576, 8, 16, kv_cache_dtype="fp8"
    ),
    "kimi_linear_h200_tp1.yaml": Expected(LINEAR, "kimi_linear", 1, 32, 1920, 7 * 1152, 1, 32),
    "kimi_linear_rtx_pro_6000_tp2.yaml": Expected(LINEAR, "kimi_linear", 2, 16, 1024, 7 * 1152, 2, 16, capability=(12, 0)),
}
FILES = sorted(path.name for path in CONFIGS.glob("*.yaml"))


@cache
def built(name: str) -> Any:
    """vLLM's config of a file, or the one line that it is refused with."""
    expected = EXPECTED[name]
    try:
        return engine_config(["--config", str(CONFIGS / name)], MODEL_CONFIGS / f"{expected.config}.json", expected.capability)
    except ValueError as error:
        return str(error)


def parsed(*rest: str) -> Any:
    from vllm_dense_mla.absent_gpu import planned_gpu
    from vllm_dense_mla.deployment import _parse

    with planned_gpu():
        return _parse(rest)


def test_every_config_is_tested():
    assert set(FILES) == set(EXPECTED)


@pytest.mark.parametrize("name", FILES)
def test_parser_reads_it(name):
    """Fault 75: the backend is chosen by the flag, and vLLM resolves it to the plugin's."""
    from vllm.config import AttentionConfig

    args, expected = parsed("--config", str(CONFIGS / name)), EXPECTED[name]
    assert (args.model, args.tensor_parallel_size) == (expected.model, expected.tensor_parallel)
    assert args.tensor_parallel_size * args.pipeline_parallel_size == expected.gpus
    assert args.nnodes == (2 if expected.gpus > 8 else 1)
    backend = AttentionConfig(backend=args.attention_backend).backend
    assert backend.name == "DENSE_MLA" and backend.get_path() == "vllm_dense_mla.backend.DenseMLABackend"
    assert args.kv_cache_dtype == expected.kv_cache_dtype


@pytest.mark.parametrize("name", FILES)
def test_engine_arguments_build_and_the_backend_answers(name):
    """vLLM's whole config, its hybrid page size included, and the backend's consent."""
    expected, found = EXPECTED[name], built(name)
    assert not isinstance(found, str), found
    vllm_config, model = found
    deployment = describe(vllm_config, model)
    steps = deployment.steps
    assert (deployment.model, steps.heads, deployment.page_size) == (expected.model, expected.heads, expected.page_size)
    assert deployment.token_bytes == expected.token_bytes
    assert deployment.tensor_parallel * deployment.pipeline_parallel == expected.gpus
    assert vllm_config.uniform_decode_query_len == expected.tokens
    assert (steps.longest_query, steps.kernel_heads, steps.context_world) == (expected.tokens, expected.kernel_heads, expected.context_parallel)
    assert steps.capture_sizes and workspace_tables(deployment, 132)[torch.bfloat16].largest.total_bytes > 0


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_partial_dtypes_of_the_comment(monkeypatch, name, dtype):
    """A config file holds no environment: its comment shows both commands, whose values must be such that the settings take them."""
    commands = re.findall(rf"^#   {PARTIAL_DTYPE_VARIABLE}=(\S+) vllm serve --config serve_configs/{name}$", (CONFIGS / name).read_text(), re.M)
    assert commands == ["bf16", "fp32"]
    monkeypatch.setenv(PARTIAL_DTYPE_VARIABLE, dtype)
    assert load_settings().partial_dtype == dtype


@pytest.mark.parametrize("name", FILES)
def test_a_gpu_that_ran_nothing_is_named_as_such(name):
    """Such a file sends its reader to the self-test first."""
    text = (CONFIGS / name).read_text()
    assert ("compiled and never run" in text and "`vllm-dense-mla check`" in text) == (ran_on(EXPECTED[name].capability) is None)


@pytest.mark.parametrize("name", FILES)
def test_plan_of_the_comment(name, monkeypatch, capsys):
    """The command of the file's comment, run as it stands; the model's name leads to its config.json, as on a machine that has the model."""
    (command,) = re.findall(r"^#   vllm-dense-mla (plan .*)$", (CONFIGS / name).read_text(), re.M)
    expected = EXPECTED[name]
    monkeypatch.chdir(CONFIGS.parent)
    monkeypatch.setattr("vllm_dense_mla.deployment._find_config", lambda model, revision: MODEL_CONFIGS / f"{expected.config}.json")
    # Built once for all tests of a file: two seconds each.
    monkeypatch.setattr("vllm_dense_mla.deployment.engine_config", lambda *_: _built_or_raise(name))
    code, captured = main(command.split()), capsys.readouterr()
    assert (code, captured.err) == (0, "")
    assert re.search(rf"^heads +{expected.heads} query heads on a rank", captured.out, re.M)
    assert f"{expected.token_bytes:,} on a rank" in captured.out and re.search(r"^fp32 costs +[\d,]+ bytes more", captured.out, re.M)


def _built_or_raise(name: str) -> Any:
    found = built(name)
    if isinstance(found, str):
        raise ValueError(found)
    return found


@pytest.mark.parametrize("name", FILES)
def test_numbers_of_the_comments(name):
    """Bytes of a token, gigabytes of a request and the block size, as the comments have them, are what vLLM's config gives."""
    found = built(name)
    if isinstance(found, str):
        pytest.skip(found)
    text, deployment = (CONFIGS / name).read_text().replace("\n# ", " "), describe(*found)
    said = {
        "bytes": (re.findall(r"([\d,]{4,}) bytes", text), f"{deployment.token_bytes:,.0f}"),
        "GB": (re.findall(r"(?:is|takes|length) (\d\.\d) GB", text), f"{deployment.token_bytes * deployment.max_model_len / 1e9:.1f}"),
        "page": (re.findall(r"\(([\d,]+) tokens at tensor parallel", text), f"{deployment.page_size:,}"),
    }
    for numbers, right in said.values():
        assert set(numbers) <= {right}
    assert len(said["bytes"][0]) == len(said["GB"][0]) == ("max-model-len" in text)
    assert len(said["page"][0]) == ("block-size" not in text)


@pytest.mark.parametrize("name", FILES)
def test_command_line_wins_over_the_config(name):
    assert parsed("--config", str(CONFIGS / name), "--attention-backend", "TRITON_MLA").attention_backend == "TRITON_MLA"


@pytest.mark.parametrize("name", FILES)
def test_every_choice_has_its_reason(name):
    """A comment stands over each setting, or over the group without a blank line that it belongs to."""
    for group in re.split(r"\n\n+", (CONFIGS / name).read_text().strip()):
        settings = [line for line in group.splitlines() if not line.startswith("#")]
        assert not settings or group.startswith("#") or settings == [f"model: {EXPECTED[name].model}"], group

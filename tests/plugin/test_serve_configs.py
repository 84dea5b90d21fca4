"""Each serve config through vLLM's own parser, as `vllm serve --config FILE` reads it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from dense_mla.problem import DecodeProblem
from vllm_dense_mla.buckets import size_buckets
from vllm_dense_mla.cli import main
from vllm_dense_mla.registration import PARTIAL_DTYPE_VARIABLE
from vllm_dense_mla.settings import load_settings

CONFIGS = Path(__file__).parents[2] / "serve_configs"
EXPECTED = {  # file: model, query heads of the model, tensor parallel size
    "kimi_k3_h200_tp8.yaml": ("moonshotai/Kimi-K3", 96, 8),
    "deepseek_v3_h200_tp8.yaml": ("deepseek-ai/DeepSeek-V3", 128, 8),
}
FILES = sorted(path.name for path in CONFIGS.glob("*.yaml"))


@pytest.fixture(scope="module")
def parse(device_type):
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    return lambda *rest: parser.parse_args(["serve", *rest])


def test_every_config_is_tested():
    assert set(FILES) == set(EXPECTED)


@pytest.mark.parametrize("name", FILES)
def test_config_resolves(parse, name):
    """Fault 75: the backend is chosen by the flag, and vLLM resolves it to the plugin's."""
    from vllm.config import AttentionConfig

    args = parse("--config", str(CONFIGS / name))
    model, heads, tensor_parallel = EXPECTED[name]
    assert (args.model, args.tensor_parallel_size) == (model, tensor_parallel)
    assert heads % args.tensor_parallel_size == 0
    backend = AttentionConfig(backend=args.attention_backend).backend
    assert backend.name == "DENSE_MLA" and backend.get_path() == "vllm_dense_mla.backend.DenseMLABackend"
    assert args.kv_cache_dtype == "bfloat16"


@pytest.mark.parametrize("name", FILES)
def test_partial_dtype_resolves(monkeypatch, name):
    """A config file holds no environment: its comment shows the command, whose variable must be one that the settings take."""
    commands = re.findall(rf"^#\s+{PARTIAL_DTYPE_VARIABLE}=(\S+) vllm serve --config serve_configs/{name}$", (CONFIGS / name).read_text(), re.M)
    assert commands == ["bf16"]
    monkeypatch.setenv(PARTIAL_DTYPE_VARIABLE, commands[0])
    assert load_settings().torch_dtype == torch.bfloat16


@pytest.mark.parametrize("name", FILES)
def test_plan_in_the_comment_is_of_this_deployment(parse, capsys, name):
    args = parse("--config", str(CONFIGS / name))
    (command,) = re.findall(r"^#\s+vllm-dense-mla (plan .*)$", (CONFIGS / name).read_text(), re.M)
    _, heads, tensor_parallel = EXPECTED[name]
    assert f"--heads {heads // tensor_parallel} --max-num-seqs {args.max_num_seqs} " in command
    assert main(command.split()) == 0
    largest = size_buckets(DecodeProblem(heads // tensor_parallel, 64), (), args.max_num_seqs, 132).largest
    assert f"{largest.out_partial_bytes:,}" in capsys.readouterr().out


@pytest.mark.parametrize("name", FILES)
def test_command_line_wins_over_the_config(parse, name):
    assert parse("--config", str(CONFIGS / name), "--attention-backend", "TRITON_MLA").attention_backend == "TRITON_MLA"


@pytest.mark.parametrize("name", FILES)
def test_every_choice_has_its_reason(name):
    """A comment line stands over each setting."""
    lines = (CONFIGS / name).read_text().splitlines()
    settings = [index for index, line in enumerate(lines) if line and not line.startswith("#")]
    uncommented = [lines[i] for i in settings if not lines[i - 1].startswith("#") and i - 1 not in settings]
    assert uncommented in ([], ["model: " + EXPECTED[name][0]])

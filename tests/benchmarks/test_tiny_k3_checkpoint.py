"""The Kimi-K3-shaped checkpoint fills every parameter of vLLM's model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.tiny_k3_checkpoint import TinyK3Checkpoint

# The model's classes as vLLM loads them, without a GPU: streams, the attention backend and prefill are not there to be built.
LOAD = """
import json, sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from vllm.platforms import current_platform

if not current_platform.device_type:
    current_platform.device_type = "cuda"
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs

folder = sys.argv[1]
arguments = EngineArgs(model=folder, skip_tokenizer_init=True, attention_backend="TRITON_MLA", max_model_len=8192, compilation_config={"mode": 0})
config = arguments.create_engine_config()
with set_current_vllm_config(config):
    init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
    initialize_model_parallel(1, 1)
    from vllm.models.kimi_k3.nvidia import mla, model

    class Nothing:
        def __init__(self, *_, **__):
            pass

    torch.cuda.Stream = torch.cuda.Event = Nothing
    mla.get_attn_backend = lambda *_, **__: SimpleNamespace(get_impl_cls=lambda: lambda **_: SimpleNamespace(dcp_world_size=1))
    mla.get_mla_prefill_backend = lambda _: Nothing
    torch.set_default_dtype(torch.bfloat16)
    built = model.KimiLinearForCausalLM(vllm_config=config)
    for parameter in built.parameters():
        parameter.data.fill_(float("nan"))
    weights = load_file(Path(folder) / "model.safetensors")
    loaded = built.load_weights(weights.items())
    missing = [name for name, _ in built.named_parameters() if name not in loaded]
    # Rows that pad a merged projection have no weight of their own.
    holes = [name for name, parameter in built.named_parameters() if parameter.isnan().any()]
    print("RESULT" + json.dumps({"missing": missing, "holes": holes, "decay": built.model.layers[0].self_attn.A_log.float().exp().tolist()}))
"""


def test_vllms_model_loads_it_whole(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    import json

    checkpoint = TinyK3Checkpoint(heads=12)
    checkpoint.write(tmp_path)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([sys.executable, "-c", LOAD, str(tmp_path)], capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT")).removeprefix("RESULT"))
    assert result["missing"] == [] == result["holes"]
    assert len(result["decay"]) == 12 and min(result["decay"]) >= 1 and max(result["decay"]) <= 16


def test_weights_are_the_same_every_time_and_of_unit_rows() -> None:
    weights, again = (TinyK3Checkpoint(heads=3).weights() for _ in range(2))
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())
    for name, gain in (("q_b_proj", 2.0), ("kv_b_proj", 1.0), ("o_proj", 8.0)):
        rows = weights[f"model.layers.1.self_attn.{name}.weight"].float().norm(dim=1)
        assert rows.mean().item() == pytest.approx(gain, rel=0.05)
    steps = torch.nn.functional.softplus(weights["model.layers.0.self_attn.dt_bias"])
    assert steps.min().item() > 1e-3 * 0.99 and steps.max().item() < 0.1 * 1.01

"""The DeepSeek-V3-shaped checkpoint is what its config says."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.tiny_checkpoint import TinyCheckpoint


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

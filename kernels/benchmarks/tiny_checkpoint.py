"""A small DeepSeek-V3-shaped checkpoint whose next token depends on attention: random weights, no tokenizer, no mixture of experts.

The MLA widths are the real ones (512 latent + 64 rope, heads of 128), so the decode kernels see records of 576. vLLM's own dummy weights are too
small for a wrong attention output to change a token; these have rows of unit variance, and more where a layer's attention enters and leaves.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN = 1024
INTERMEDIATE = 2048
VOCAB = 1024
LATENT = 512
ROPE = 64
HEAD = 128
QUERY_GAIN = 2.0  # peaked softmax: a key more or less matters
OUTPUT_GAIN = 4.0  # attention outweighs the residual stream
LOGIT_GAIN = 2.0  # logits stay below 8: BF16 has them in steps of 1/32, well below the bar of answers.py; above 8 two steps would be past it
SEED = 441


@dataclass(frozen=True)
class TinyCheckpoint:
    """Heads, layers and longest context of the model. 12 heads are one rank of Kimi-K3's at tensor parallel size 8.

    Without `attention`, no attention's output reaches the residual stream; all other weights are the same.
    """

    heads: int = 12
    layers: int = 2
    max_positions: int = 16384
    attention: bool = True

    def write(self, directory: Path) -> None:
        """Write `config.json` and `model.safetensors`: the same bytes every time."""
        self.write_config(directory)
        save_file(self.weights(), directory / "model.safetensors", metadata={"format": "pt"})

    def write_config(self, directory: Path) -> None:
        """Write `config.json` alone."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config(), indent=1))

    def config(self) -> dict[str, Any]:
        """Hugging Face config. Every layer is dense (`first_k_dense_replace`), the expert entries only satisfy the config class."""
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "torch_dtype": "bfloat16",
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "q_lora_rank": None,
            "kv_lora_rank": LATENT,
            "qk_rope_head_dim": ROPE,
            "qk_nope_head_dim": HEAD,
            "v_head_dim": HEAD,
            "first_k_dense_replace": self.layers,
            "moe_intermediate_size": 256,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 0,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
        }

    def weights(self) -> dict[str, torch.Tensor]:
        """BF16 tensors under DeepSeek-V3's names."""
        draw = torch.Generator().manual_seed(SEED)
        tensors = {
            "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=draw).bfloat16(),
            "model.norm.weight": ones(HIDDEN),
            "lm_head.weight": linear(draw, VOCAB, HIDDEN, LOGIT_GAIN),
        }
        for index in range(self.layers):
            tensors |= {f"model.layers.{index}.{name}.weight": tensor for name, tensor in self._layer(draw).items()}
        return tensors

    def _layer(self, draw: torch.Generator) -> dict[str, torch.Tensor]:
        return {
            "input_layernorm": ones(HIDDEN),
            "self_attn.q_proj": linear(draw, self.heads * (HEAD + ROPE), HIDDEN, QUERY_GAIN),
            "self_attn.kv_a_proj_with_mqa": linear(draw, LATENT + ROPE, HIDDEN),
            "self_attn.kv_a_layernorm": ones(LATENT),
            "self_attn.kv_b_proj": linear(draw, self.heads * 2 * HEAD, LATENT),
            "self_attn.o_proj": linear(draw, HIDDEN, self.heads * HEAD, OUTPUT_GAIN if self.attention else 0.0),
            "post_attention_layernorm": ones(HIDDEN),
            "mlp.gate_proj": linear(draw, INTERMEDIATE, HIDDEN),
            "mlp.up_proj": linear(draw, INTERMEDIATE, HIDDEN),
            "mlp.down_proj": linear(draw, HIDDEN, INTERMEDIATE),
        }


def linear(draw: torch.Generator, outputs: int, inputs: int, gain: float = 1.0) -> torch.Tensor:
    """A random weight whose outputs have `gain` times the size of its inputs."""
    weight = torch.randn(outputs, inputs, generator=draw)
    return (weight * gain / inputs**0.5).bfloat16()


def ones(size: int) -> torch.Tensor:
    """A norm's weight."""
    return torch.ones(size, dtype=torch.bfloat16)

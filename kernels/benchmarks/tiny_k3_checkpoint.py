"""A small Kimi-K3-shaped checkpoint whose next token depends on attention: one KDA layer, one MLA layer with query LoRA and an output gate.

As in the DeepSeek-shaped one, weights have rows of unit variance instead of vLLM's tiny dummy values. What reaches the residual stream of MLA's
attention is multiplied by 8: half of it is lost in the sigmoid gate. The KDA layer's decay rates are drawn as its authors initialise them, so that
its state forgets within tens of tokens: what is further away reaches the answer through MLA's attention alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.tiny_checkpoint import (
    HEAD,
    HIDDEN,
    INTERMEDIATE,
    LATENT,
    LOGIT_GAIN,
    OUTPUT_GAIN,
    QUERY_GAIN,
    ROPE,
    SEED,
    VOCAB,
    TinyCheckpoint,
    linear,
    ones,
)

QUERY_LORA = 512
CONVOLUTION = 4
GATED_OUTPUT_GAIN = 2 * OUTPUT_GAIN
DECAY_RATES = (1.0, 16.0)
TIME_STEPS = (1e-3, 1e-1)


@dataclass(frozen=True)
class TinyK3Checkpoint(TinyCheckpoint):
    """Heads of both layers, as tensor parallelism shares them out: 96 heads of Kimi-K3 over TP 1, 2, 4, 8 or 16. `layers` is 2."""

    def config(self) -> dict[str, Any]:
        """Hugging Face config."""
        return {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            "torch_dtype": "bfloat16",
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": 2,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "head_dim": HEAD,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "kv_lora_rank": LATENT,
            "q_lora_rank": QUERY_LORA,
            "qk_nope_head_dim": HEAD,
            "qk_rope_head_dim": ROPE,
            "v_head_dim": HEAD,
            "mla_use_nope": True,
            "mla_use_output_gate": True,
            "linear_attn_config": {
                "kda_layers": [1],
                "full_attn_layers": [2],
                "num_heads": self.heads,
                "head_dim": HEAD,
                "short_conv_kernel_size": CONVOLUTION,
                "use_full_rank_gate": True,
            },
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
        }

    def weights(self) -> dict[str, torch.Tensor]:
        """BF16 tensors under Kimi-Linear's names, and the KDA layer's decay in FP32."""
        draw = torch.Generator().manual_seed(SEED)
        tensors = {
            "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=draw).bfloat16(),
            "model.norm.weight": ones(HIDDEN),
            "lm_head.weight": linear(draw, VOCAB, HIDDEN, LOGIT_GAIN),
        }
        for index, attention in enumerate((self._kda(draw), self._mla(draw))):
            tensors |= {f"model.layers.{index}.self_attn.{name}": tensor for name, tensor in attention.items()}
            tensors |= {f"model.layers.{index}.{name}.weight": tensor for name, tensor in self._mlp(draw).items()}
        return tensors

    def _kda(self, draw: torch.Generator) -> dict[str, torch.Tensor]:
        width = self.heads * HEAD
        tensors = {f"{name}_proj.weight": linear(draw, width, HIDDEN) for name in ("q", "k", "v", "g")}
        for name in ("q", "k", "v"):
            tensors[f"{name}_conv1d.weight"] = linear(draw, width, CONVOLUTION).unsqueeze(1)
        rates = torch.empty(self.heads).uniform_(*DECAY_RATES, generator=draw)
        steps = torch.empty(width).uniform_(*TIME_STEPS, generator=draw)
        return tensors | {
            "f_a_proj.weight": linear(draw, HEAD, HIDDEN),
            "f_b_proj.weight": linear(draw, width, HEAD),
            "b_proj.weight": linear(draw, self.heads, HIDDEN),
            "A_log": rates.log(),
            "dt_bias": steps.expm1().log(),  # softplus of it is the step
            "o_norm.weight": ones(HEAD),
            "o_proj.weight": linear(draw, HIDDEN, width),
        }

    def _mla(self, draw: torch.Generator) -> dict[str, torch.Tensor]:
        output_gain = GATED_OUTPUT_GAIN if self.attention else 0.0
        return {
            "q_a_proj.weight": linear(draw, QUERY_LORA, HIDDEN),
            "q_a_layernorm.weight": ones(QUERY_LORA),
            "q_b_proj.weight": linear(draw, self.heads * (HEAD + ROPE), QUERY_LORA, QUERY_GAIN),
            "kv_a_proj_with_mqa.weight": linear(draw, LATENT + ROPE, HIDDEN),
            "kv_a_layernorm.weight": ones(LATENT),
            "kv_b_proj.weight": linear(draw, self.heads * 2 * HEAD, LATENT),
            "g_proj.weight": linear(draw, self.heads * HEAD, HIDDEN),
            "o_proj.weight": linear(draw, HIDDEN, self.heads * HEAD, output_gain),
        }

    @staticmethod
    def _mlp(draw: torch.Generator) -> dict[str, torch.Tensor]:
        return {
            "input_layernorm": ones(HIDDEN),
            "post_attention_layernorm": ones(HIDDEN),
            "mlp.gate_proj": linear(draw, INTERMEDIATE, HIDDEN),
            "mlp.up_proj": linear(draw, INTERMEDIATE, HIDDEN),
            "mlp.down_proj": linear(draw, HIDDEN, INTERMEDIATE),
        }

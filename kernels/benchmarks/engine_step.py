"""One decode step as vLLM's engine makes it, without the engine: a backend's own metadata builder and layer, over a small model's real config.

`build` is what a step costs once, `launch` what every layer adds. Imports vLLM: only scripts that measure its classes use this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from benchmarks.decode_inputs import SCALE, DecodeInputs
from benchmarks.tiny_checkpoint import HEAD, LATENT, ROPE, TinyCheckpoint
from dense_mla.problem import HEAD_DIM_QK

LAYER = "layer"
MAX_MODEL_LEN = 8192
MAX_NUM_SEQS = 64


class ModelLayer(AttentionLayerBase):
    """An attention layer as a metadata builder sees it: the model's widths."""

    def __init__(self, heads: int) -> None:
        self.num_heads = heads
        self.q_lora_rank, self.kv_lora_rank = None, LATENT
        self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = HEAD, ROPE, HEAD
        # Prefill is no part of a decode step: builders only clone its backend.
        self.prefill_backend = SimpleNamespace(clone=lambda: None)

    def get_attn_backend(self) -> Any:
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class EngineStep:
    """A backend's builder and layer, and the inputs of one step."""

    backend: str
    builder: Any
    layer: Any
    common: CommonAttentionMetadata
    inputs: DecodeInputs
    scales: SimpleNamespace

    @classmethod
    def of(cls, backend: str, config: VllmConfig, inputs: DecodeInputs) -> EngineStep:
        """Build both, as the engine does when it starts. `backend` is a name of vLLM's registry."""
        found: Any = AttentionBackendEnum[backend].get_class()
        device = inputs.q.device
        spec = MLAAttentionSpec(block_size=inputs.page_size, num_kv_heads=1, head_size=HEAD_DIM_QK, dtype=torch.bfloat16)
        with set_current_vllm_config(config):
            layer = found.get_impl_cls()(**layer_arguments(inputs.heads))
            builder = found.get_builder_cls()(spec, [LAYER], config, device)
        one = torch.ones((), dtype=torch.float32, device=device)
        return cls(backend, builder, layer, common_metadata(inputs), inputs, SimpleNamespace(_q_scale=one, _k_scale=one, _v_scale=one))

    def build(self) -> Any:
        """The step's metadata."""
        return self.builder.build(0, self.common)

    def launch(self, metadata: Any, q: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """One layer's decode attention, `[requests, heads, 512]`."""
        out: torch.Tensor = self.layer.forward_mqa(q, self.inputs.caches[0], metadata, self.scales)[0]
        return out


def engine_config(folder: Path, heads: int, capture_sizes: Sequence[int]) -> VllmConfig:
    """The config that vLLM makes for a small DeepSeek-shaped model served by DENSE_MLA with full CUDA graphs. `folder` gets the model's config."""
    TinyCheckpoint(heads).write_config(folder)
    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        attention_backend="DENSE_MLA",
        block_size=64,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": list(capture_sizes)},
    )
    config = arguments.create_engine_config()
    config.compilation_config.static_forward_context = {LAYER: ModelLayer(heads)}
    return config


def layer_arguments(heads: int) -> dict[str, Any]:
    """What vLLM's MLA layer passes to a backend's layer class."""
    plain = dict.fromkeys(("alibi_slopes", "sliding_window", "logits_soft_cap", "kv_sharing_target_layer_name", "q_lora_rank", "indexer"))
    widths = {"kv_lora_rank": LATENT, "qk_nope_head_dim": HEAD, "qk_rope_head_dim": ROPE, "qk_head_dim": HEAD + ROPE, "v_head_dim": HEAD}
    kind = {"num_heads": heads, "head_size": HEAD_DIM_QK, "scale": SCALE, "num_kv_heads": 1, "kv_cache_dtype": "auto", "attn_type": "decoder"}
    return plain | widths | kind | {"kv_b_proj": None}


def common_metadata(inputs: DecodeInputs) -> CommonAttentionMetadata:
    """What the model runner hands to every builder in a step of one token a request."""
    requests, device = inputs.shape.batch, inputs.q.device
    starts = torch.arange(requests + 1, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=inputs.seq_lens,
        num_reqs=requests,
        num_actual_tokens=requests,
        max_query_len=1,
        max_seq_len=inputs.shape.context,
        block_table_tensor=inputs.block_table,
        slot_mapping=torch.zeros(requests, dtype=torch.int64, device=device),
        seq_lens_cpu_upper_bound=inputs.seq_lens.cpu(),
    )

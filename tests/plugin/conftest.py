"""A real vLLM config of a small MLA model, a layer as the metadata builder sees it, and a decoder that computes with the reference."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

HEADS = 12  # what a rank of Kimi-K3 holds at tensor parallel 8
SM_COUNT = 132
CAPTURE_SIZES = [1, 2, 4, 8, 16, 24]
MAX_NUM_SEQS = 12
MAX_MODEL_LEN = 4096
SCALE = 192**-0.5


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plugin registered, as in each of vLLM's processes; no setting in the environment, and none remembered."""
    import vllm_dense_mla
    from vllm_dense_mla.settings import load_settings

    monkeypatch.delenv("VLLM_K3_DENSE_MLA_PARTIAL_DTYPE", raising=False)
    vllm_dense_mla.register()
    load_settings.cache_clear()
    yield
    load_settings.cache_clear()


@pytest.fixture(scope="session")
def device_type() -> None:
    """vLLM's parser and configs want to know the kind of device: on a machine without one, say CUDA."""
    from vllm.platforms import current_platform

    if not current_platform.device_type:
        current_platform.device_type = "cuda"


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a small DeepSeek-V3-shaped model with the real MLA widths, and no weights."""
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "torch_dtype": "bfloat16",
        "vocab_size": 1024,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 2,
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
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 16384,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "num_nextn_predict_layers": 0,
    }
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def engine_config(model_dir: Path, device_type: None) -> Any:
    """The VllmConfig that vLLM itself makes of `attention_backend="dense_mla"`."""
    import vllm_dense_mla

    vllm_dense_mla.register()
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(
        model=str(model_dir),
        skip_tokenizer_init=True,
        attention_backend="dense_mla",
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
        block_size=16,
    )
    return args.create_engine_config()


@pytest.fixture
def vllm_config(engine_config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`engine_config` with capture sizes and one MLA layer, named "layer", in its forward context."""
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.utils import torch_utils

    class Layer(AttentionLayerBase):
        def __init__(self) -> None:
            self.num_heads = HEADS
            self.q_lora_rank, self.kv_lora_rank = None, 512
            self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = 128, 64, 128
            # Prefill stays vLLM's: builders only clone its backend and hand it their metadata.
            self.prefill_backend = SimpleNamespace(clone=lambda: SimpleNamespace(get_name=lambda: "NONE", prepare_metadata=lambda metadata: None))

        def get_attn_backend(self) -> Any:
            raise NotImplementedError

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            raise NotImplementedError

    for module in (mla_attention, torch_utils):  # vLLM pins host memory for prefill, which takes a driver
        monkeypatch.setattr(module, "PIN_MEMORY", False)
    monkeypatch.setattr(engine_config.compilation_config, "static_forward_context", {"layer": Layer()})
    monkeypatch.setattr(engine_config.compilation_config, "cudagraph_capture_sizes", list(CAPTURE_SIZES))
    return engine_config


class ReferenceDecoder:
    """`DenseMLADecoder`'s door with the reference behind it: the same schedule, workspace and rounding, on the CPU."""

    def __init__(self, problem: Any, device: torch.device, max_requests: int, cache_dir: Any = None) -> None:
        self.problem, self.device, self.max_requests, self.cache_dir = problem, device, max_requests, cache_dir
        self.sm_count = SM_COUNT
        self.num_ranges = problem.num_ranges(SM_COUNT)
        self.scheduled: list[list[int]] = []
        self.runs: list[dict[str, Any]] = []

    def empty_schedule(self) -> torch.Tensor:
        from dense_mla.schedule import schedule_words

        words = schedule_words(self.num_ranges, self.max_requests, self.sm_count, self.problem.batch_invariant)
        return torch.zeros(words, dtype=torch.int32, device=self.device)

    def schedule(self, seq_lens: torch.Tensor, block_table: torch.Tensor, schedule: torch.Tensor) -> None:
        assert schedule.shape == self.empty_schedule().shape and block_table.shape[0] >= seq_lens.shape[0] <= self.max_requests
        self.scheduled.append(seq_lens.tolist())
        schedule[0] = len(self.scheduled)

    def run(self, q: Any, kv_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, **rest: Any) -> None:
        """What `DenseMLADecoder.run` refuses is refused here, and a schedule of other lengths."""
        from dense_mla import reference

        problem = self.problem
        assert (rest["lse"] is not None) == problem.return_lse and (rest["total_lens"] is not None) == problem.needs_total_lens
        assert kv_cache.dtype == problem.kv_dtype and self.scheduled[-1] == seq_lens.tolist()
        assert rest["max_seq_len"] <= block_table.shape[1] * problem.page_size
        self.runs.append({"q": q, "kv_cache": kv_cache, "block_table": block_table, "seq_lens": seq_lens, **rest})
        if kv_cache.dtype == torch.float8_e4m3fn:  # the reference on the dequantised cache
            assert rest["k_scale"].shape == (1,) and rest["k_scale"].dtype == torch.float32
            kv_cache, problem = (kv_cache.float() * rest["k_scale"]).bfloat16(), replace(problem, kv_dtype=torch.bfloat16)
        else:
            assert "k_scale" not in rest
        out, lse = reference.decode(
            problem,
            q,
            kv_cache,
            block_table[: seq_lens.shape[0]],
            seq_lens,
            scale=rest["scale"],
            num_ranges=self.num_ranges,
            workspace=rest["workspace"],
            total_lens=rest["total_lens"],
        )
        rest["out"].copy_(out)
        if rest["lse"] is not None:
            assert rest["lse"].dtype == torch.float32 and rest["lse"].is_contiguous()
            rest["lse"].copy_(lse)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[ReferenceDecoder]:
    """Makes builders prepare a `ReferenceDecoder`; the list is of those prepared."""
    from vllm_dense_mla import metadata

    decoders: list[ReferenceDecoder] = []

    def prepare(problem: Any, device: torch.device, *, max_requests: int, cache_dir: Any) -> ReferenceDecoder:
        decoders.append(ReferenceDecoder(problem, device, max_requests, cache_dir))
        return decoders[-1]

    monkeypatch.setattr(metadata, "DenseMLADecoder", SimpleNamespace(prepare=prepare))
    monkeypatch.setattr(metadata, "device_capability", lambda device: (9, 0))
    return decoders


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's workspace manager, on the CPU, and the SM count of an H200."""
    from vllm.v1.worker import workspace as module

    from vllm_dense_mla import impl

    monkeypatch.setattr(module, "_manager", None)
    monkeypatch.setattr(impl, "current_sm_count", lambda: SM_COUNT)
    module.init_workspace_manager(torch.device("cpu"), num_ubatches=2)
    return module.current_workspace_manager()


@pytest.fixture
def no_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which vLLM has made no workspace manager."""
    from vllm.v1.worker import workspace as module

    monkeypatch.setattr(module, "_manager", None)


@pytest.fixture
def speculate(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Any]:
    """Makes `vllm_config` one that drafts so many tokens, and gives it back."""

    def draft(tokens: int) -> Any:
        speculation = SimpleNamespace(num_speculative_tokens=tokens, parallel_drafting=False, method="ngram", enable_adaptive_verification=False)
        monkeypatch.setattr(vllm_config, "speculative_config", speculation)
        return vllm_config

    return draft


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[logging.LogRecord]]:
    """What the plugin logs, whatever vLLM's level, and no line remembered as said."""
    from vllm.logger import _print_info_once, _print_warning_once

    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("vllm.dense_mla")
    monkeypatch.setattr(logger, "handlers", [handler])
    logger.setLevel(logging.INFO)
    _print_info_once.cache_clear()
    _print_warning_once.cache_clear()
    yield records
    logger.setLevel(logging.NOTSET)


def make_builder(
    vllm_config: Any, page_size: int = 64, kv_cache_dtype: str = "auto", dtype: torch.dtype = torch.bfloat16, layer: str = "layer"
) -> Any:
    """A metadata builder, built as vLLM builds it, for a KV-cache group whose kernels see pages of `page_size`."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    from vllm_dense_mla.metadata import DenseMLAMetadataBuilder

    spec = MLAAttentionSpec(block_size=page_size, num_kv_heads=1, head_size=576, dtype=dtype, cache_dtype_str=kv_cache_dtype)
    return DenseMLAMetadataBuilder(spec, [layer], vllm_config, torch.device("cpu"))


def make_impl(vllm_config: Any, **changes: Any) -> Any:
    """A layer's side of the backend, made as vLLM's layers make it."""
    from vllm.config import set_current_vllm_config

    from vllm_dense_mla.impl import DenseMLAImpl

    arguments = {
        "num_heads": HEADS,
        "head_size": 576,
        "scale": SCALE,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "qk_head_dim": 192,
        "v_head_dim": 128,
        "kv_b_proj": None,
        "indexer": None,
        **changes,
    }
    with set_current_vllm_config(vllm_config):
        return DenseMLAImpl(**arguments)


def cache_and_query(
    pages: int, page_size: int, rows: int, pair: bool, heads: int = HEADS, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, Any]:
    """Unit-Gaussian keys [pages, page_size, 576] and queries [rows, heads, 576], in two parts for `pair`."""
    generator = torch.Generator().manual_seed(rows)
    cache = torch.randn(pages, page_size, 576, generator=generator).to(dtype)
    q = torch.randn(rows, heads, 576, generator=generator).to(dtype)
    return cache, (q[..., :512], q[..., 512:]) if pair else q


def prepared_buckets(builder: Any) -> dict[int, Any]:
    """The bucket tables that a builder's steps use, by query length."""
    return {problem.query_len: step.buckets for problem, step in builder._prepared.items() if problem.causal}


def step(
    seq_lens: list[int],
    query_lens: list[int] | None = None,
    width: int = 8,
    max_seq_len: int | None = None,
    num_tokens: int | None = None,
    local_lens: list[int] | None = None,
) -> Any:
    """vLLM's per-step metadata of a batch; block table row r holds pages r * width + 1 and up (page 0 is the null page).

    A full graph's padded requests have query length 0, and `num_tokens` then counts its rows. `local_lens`: keys on this rank, of seq_lens.
    """
    from vllm.v1.attention.backend import CommonAttentionMetadata

    query_lens = query_lens or [1] * len(seq_lens)
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    num_tokens = num_tokens or sum(query_lens)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lens,
        num_reqs=len(seq_lens),
        num_actual_tokens=num_tokens,
        max_query_len=max(query_lens),
        max_seq_len=max_seq_len or max(seq_lens),
        block_table_tensor=torch.arange(len(seq_lens) * width, dtype=torch.int32).view(-1, width) + 1,
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
        seq_lens_cpu_upper_bound=lens,
        dcp_local_seq_lens=None if local_lens is None else torch.tensor(local_lens, dtype=torch.int32),
    )

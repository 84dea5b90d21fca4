"""Ways to serve the tiny model: what vLLM has to be asked for so that a decode step is of another kind, and which prompts bring it about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.answers import LOGPROB_RMS_BAR

PLAIN = "plain"
NO_ATTENTION = "no_attention"
PROMPT_TOKENS = (1, 17, 64, 65, 200, 511, 1500, 4000)
K3_PROMPT_TOKENS = (1, 200, 767, 768, 769, 1536, 4000)  # its attention blocks hold 768 tokens at 12 heads
K3_VARIANTS = (PLAIN, NO_ATTENTION, "heads96", "heads48", "heads24", "heads6")  # plain: 12 heads, 96 over TP 8
LONG_PROMPT_TOKENS = (2000, 2500, 3000, 3500, 4000)  # a fifth of the vocabulary, or nearly all, occurred before: drafts in most steps


@dataclass(frozen=True)
class Variant:
    """One way.

    Attributes:
        options: engine options that differ from the plain ones.
        environment: variables that it sets.
        rounds: lengths of the prompts, a batch after the other; `None` for the model's own, once.
        exercised: counter of vLLM's that must not be 0 at the end: the run would have shown nothing.
        heads: query heads of the checkpoint, `None` for the run's own.
        layers: of the checkpoint, `None` for the run's own.
        rms_bar: what the logprobs of all tokens together may differ by, as a root mean square.
        attention: whether attention reaches the residual stream; without it, the answers show what attention decides.
        only_ours: whether DENSE_MLA alone runs, in one partial dtype, to be compared with nobody.
        gpus: how many it takes.
        undivided: with several GPUs, the variant on one of them that answers alike.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    rounds: tuple[tuple[int, ...], ...] | None = None
    exercised: str | None = None
    heads: int | None = None
    layers: int | None = None
    rms_bar: float = LOGPROB_RMS_BAR
    attention: bool = True
    only_ours: bool = False
    gpus: int = 1
    undivided: str | None = None


def _speculative(tokens: int) -> Variant:
    # A single earlier occurrence of the last token is enough for a draft: the model is random, and hardly repeats itself otherwise.
    config = {"method": "ngram", "num_speculative_tokens": tokens, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    options = {"speculative_config": config, "disable_log_stats": False}
    return Variant(options, rounds=(LONG_PROMPT_TOKENS, PROMPT_TOKENS), exercised="vllm:spec_decode_num_drafts")


VARIANTS: dict[str, Variant] = {
    PLAIN: Variant(),
    NO_ATTENTION: Variant(attention=False),
    "spec4": _speculative(4),
    "spec8": _speculative(8),
    # The same prompts twice, the second time out of the cache; long ones in chunks beside the decode of short ones.
    "prefix": Variant(
        {"enable_prefix_caching": True, "enable_chunked_prefill": True, "max_num_batched_tokens": 512, "disable_log_stats": False},
        rounds=(PROMPT_TOKENS, PROMPT_TOKENS),
        exercised="vllm:prefix_cache_hits",
    ),
    "invariant": Variant(environment={"VLLM_BATCH_INVARIANT": "1"}),
    # BF16 noise of one layer's attention tips some keys of the next to a neighbouring E4M3 number, a 16th or an 8th away, which counts in every
    # later token. With one layer the cache holds the same bits whichever backend decodes.
    "fp8": Variant({"kv_cache_dtype": "fp8"}, rms_bar=1.5 * LOGPROB_RMS_BAR),
    "fp8_one_layer": Variant({"kv_cache_dtype": "fp8"}, layers=1),
    **{f"heads{heads}": Variant(heads=heads, only_ours=True) for heads in (96, 48, 24, 12, 6)},
}

# NVLink multicast off, wherever vLLM or a library below it would take it by itself, and the all-reduce and the exchange of context ranks left to
# NCCL: a process that dies with multicast memory can put the GPUs of a host out of service, which others may share.
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
    "VLLM_USE_DIRECT_DCP_A2A": "0",
    "VLLM_USE_DIRECT_DCP_Q_GATHER": "0",
    "VLLM_USE_DIRECT_DCP_KV_GATHER": "0",
}
TENSOR_PARALLEL = {"tensor_parallel_size": 2, "disable_custom_all_reduce": True}
RANKS: dict[str, dict[str, Any]] = {"tp2": TENSOR_PARALLEL, "dcp2": TENSOR_PARALLEL | {"decode_context_parallel_size": 2}}
UNDIVIDED = (PLAIN, "spec4", "invariant")


def _divided(name: str, ranks: str) -> Variant:
    alone = VARIANTS[name]
    options, environment = {**alone.options, **RANKS[ranks]}, {**alone.environment, **NO_MULTICAST}
    return replace(alone, options=options, environment=environment, gpus=2, undivided=name)


# Of two GPUs: the heads shared out (tp2), and each request's keys as well (dcp2).
RANK_VARIANTS: dict[str, Variant] = {
    ranks if name == PLAIN else f"{ranks}_{name}": _divided(name, ranks) for ranks in RANKS for name in UNDIVIDED
}


def variant_of(name: str) -> Variant:
    """A variant on one GPU or on several."""
    return RANK_VARIANTS[name] if name in RANK_VARIANTS else VARIANTS[name]


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    """Token ids from 2 to 1001 (no special tokens) of one batch of prompts: prompt i steps by 3(i + 1) a token, so that no two begin alike."""
    return [[(7 * i * i + 3 * (i + 1) * position) % 1000 + 2 for position in range(length)] for i, length in enumerate(lengths)]

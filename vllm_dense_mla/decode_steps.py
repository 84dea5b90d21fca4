"""What a vLLM config lets happen in decode steps: the problems to prepare kernels for, and the workspace to reserve.

The metadata builder prepares with it, the layer reserves with it and `vllm-dense-mla plan` prints it, so that the three agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dense_mla.problem import MAX_HEADS, MAX_QUERY_LEN, TILE_KEYS, WHOLE_CONTEXT, ContextShard, DecodeProblem

from .buckets import WorkspaceTables, size_buckets
from .cache_dtypes import cache_element_type

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class DecodeSteps:
    """The decode steps of one rank's layers.

    Attributes:
        heads: query heads of the rank's own.
        kv_dtype: element type of the KV cache.
        longest_query: query tokens that a request brings to a step at most: 1, and 1 more for each speculative token.
        context_world: ranks that share out the keys of a request (decode context parallelism), in runs of `interleave` keys.
        batch_invariant: whether a row's bits may depend on that row alone.
        capture_sizes: tokens of each CUDA graph. `max_num_seqs`: requests that run at once.
    """

    heads: int
    capture_sizes: tuple[int, ...]
    max_num_seqs: int
    kv_dtype: torch.dtype = torch.bfloat16
    longest_query: int = 1
    context_world: int = 1
    interleave: int = 1
    batch_invariant: bool = False

    @property
    def kernel_heads(self) -> int:
        """Query heads that the kernels see: decode context parallelism gathers the heads of its ranks."""
        return self.heads * self.context_world

    def held_at_most(self, keys: int) -> int:
        """Of a request's keys, how many a rank holds at most."""
        return -(-keys // (self.context_world * self.interleave)) * self.interleave if self.context_world > 1 else keys

    def refusals(self) -> list[str]:
        """Why these steps are not served; empty where they are."""
        reasons = []
        if self.longest_query > MAX_QUERY_LEN:
            reasons.append(
                f"a request may bring at most {MAX_QUERY_LEN} query tokens to a decode step, got {self.longest_query}: "
                f"num_speculative_tokens must be at most {MAX_QUERY_LEN - 1}"
            )
        if self.kernel_heads > MAX_HEADS:
            ranks = f" x {self.context_world} ranks of decode context parallelism" if self.context_world > 1 else ""
            reasons.append(f"a rank must attend with at most {MAX_HEADS} query heads, got {self.heads}{ranks}")
        return reasons

    def problems(self, page_size: int, partial_dtype: torch.dtype, *, causal: bool = True, context_rank: int = 0) -> dict[int, DecodeProblem]:
        """The problem of each query length that can occur, by query length. vLLM makes batches of any one of them: a batch of verifications,
        one of requests that nothing was drafted for, one of prompts' ends.

        Args:
            page_size: keys in a page, as the kernels see it.
            partial_dtype: storage of the split partials.
            causal: False for draft blocks, whose query tokens see each other. One query token sees all keys either way.
            context_rank: this rank among `context_world`.

        Raises:
            ValueError: steps that are not served.
        """
        reasons = self.refusals()
        if reasons:
            raise ValueError("; ".join(reasons))
        # With one query token, or where every token sees all keys, the shard does not matter: all ranks then share their compiled kernels.
        shard = ContextShard(self.context_world, context_rank, self.interleave) if self.context_world > 1 else WHOLE_CONTEXT
        return {
            query_len: DecodeProblem(
                num_heads=self.kernel_heads,
                page_size=page_size,
                partial_dtype=partial_dtype,
                kv_dtype=self.kv_dtype,
                query_len=query_len,
                causal=causal or query_len == 1,
                return_lse=self.context_world > 1,
                batch_invariant=self.batch_invariant,
                context=shard if causal and query_len > 1 else WHOLE_CONTEXT,
            )
            for query_len in range(1, self.longest_query + 1)
        }

    def workspace(self, partial_dtype: torch.dtype, sm_count: int) -> WorkspaceTables:
        """Workspace of every batch. The page size does not change it, nor does which keys a row sees.

        Raises:
            ValueError: steps that are not served, or a size out of range.
        """
        problems = self.problems(TILE_KEYS, partial_dtype)
        return WorkspaceTables(
            {query_len: size_buckets(problem, self.capture_sizes, self.max_num_seqs, sm_count) for query_len, problem in problems.items()}
        )


def read_steps(vllm_config: VllmConfig, heads: int, kv_cache_dtype: str) -> DecodeSteps:
    """The decode steps that a vLLM config leads to.

    Args:
        vllm_config: the engine's, or a draft model's.
        heads: query heads of a layer on this rank.
        kv_cache_dtype: the layer's, as vLLM spells it; "auto" is the model's dtype.
    """
    from vllm import envs
    from vllm.v1.attention.backend import max_decode_query_len

    parallel = vllm_config.parallel_config
    return DecodeSteps(
        heads=heads,
        capture_sizes=tuple(vllm_config.compilation_config.cudagraph_capture_sizes or ()),
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        kv_dtype=cache_element_type(kv_cache_dtype, vllm_config.model_config.dtype),
        longest_query=int(max_decode_query_len(vllm_config)),
        context_world=parallel.decode_context_parallel_size,
        interleave=parallel.cp_kv_cache_interleave_size,
        batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
    )

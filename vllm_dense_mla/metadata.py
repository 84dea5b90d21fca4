"""Once a step: which kernels and which bucket of workspace the decode batch takes, and who works on which of its keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from vllm.distributed.parallel_state import get_dcp_world_size_and_rank
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport

from dense_mla.arch import capability_name, compile_target, forward_class, ran_on
from dense_mla.compiled import preparation
from dense_mla.decoder import DenseMLADecoder
from dense_mla.problem import DecodeProblem
from dense_mla.workspace import WorkspaceSize

from .buckets import BucketTable, WorkspaceTables, size_buckets
from .decode_steps import read_steps
from .registration import BACKEND_NAME
from .settings import DenseMLASettings, load_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import AttentionSpec

# A child of vLLM's logger: its handlers and its level are vLLM's. One named after this package would show no INFO line.
logger = init_logger("vllm.dense_mla")


@dataclass
class DenseMLADecodeMetadata(MLACommonDecodeMetadata):
    """The decode part of a step: block_table [requests, width], seq_lens [requests], int32 on the device, and what our layers need.

    With decode context parallelism seq_lens counts the keys on this rank, and dcp_tot_seq_lens those on all ranks.
    """

    decoder: DenseMLADecoder
    """The prepared kernels of the step's query length, shared by all layers of the KV-cache group."""

    schedule: torch.Tensor
    """The step's schedule, int32 on the device, at the same address in every step of a builder and a query length."""

    bucket: WorkspaceSize
    """Workspace that the step may use."""

    query_len: int
    """Query tokens of each request."""

    request_lens: torch.Tensor
    """seq_lens of the requests that have query tokens, the first of the batch; a graph's padded requests are among them."""

    total_lens: torch.Tensor | None
    """Their lengths over all ranks, where the causal rule needs them."""

    max_seq_len: int
    """Keys that no request of the step exceeds on this rank; known to the host."""


@dataclass
class DenseMLAMetadata(MLACommonMetadata[DenseMLADecodeMetadata]):
    """vLLM's MLA metadata with our decode part."""


@dataclass(frozen=True)
class PreparedStep:
    """What steps of one query length run with. The schedule buffer is theirs alone, because its size depends on the problem."""

    decoder: DenseMLADecoder
    schedule: torch.Tensor
    buckets: BucketTable


class DenseMLAMetadataBuilder(MLACommonMetadataBuilder[DenseMLAMetadata]):
    """Prepares the kernels of every query length when it is built, and launches the schedule kernel once a step.

    vLLM builds several: for profiling, for every KV-cache group, for every micro-batch. Each owns its schedule buffers, so that two
    micro-batches never write to the same; the kernels are compiled once a process.
    """

    # The kernels take one query length a launch. vLLM leaves what differs from a batch's first request to prefill.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM
    supports_non_causal_multi_token_decode: ClassVar[bool] = True
    # Every row of such a block sees all keys that its rank has: nothing about the other ranks is needed before the merge.
    supports_non_causal_multi_token_dcp: ClassVar[bool] = True

    def __init__(self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, DenseMLAMetadata, supports_dcp_with_varlen=True)
        # As for vLLM's own backends: with context parallelism a draft step's metadata is built anew.
        self.supports_draft_decode_metadata_update = self.dcp_world_size == 1
        settings = load_settings()
        cache_dtype = getattr(kv_cache_spec, "cache_dtype_str", None) or vllm_config.cache_config.cache_dtype
        self._steps = read_steps(vllm_config, self.num_heads, cache_dtype)
        self._is_causal = True
        self._host_lens_are_bounds = self._steps.longest_query > 1 and vllm_config.scheduler_config.async_scheduling is not False
        self._prepared: dict[DecodeProblem, PreparedStep] = {}
        self._problems = {causal: self._prepare(causal, settings) for causal in self._kinds_of_block()}
        tables = self._steps.workspace(settings.torch_dtype, next(iter(self._prepared.values())).decoder.sm_count)
        _log_once([step.decoder for step in self._prepared.values()], tables, settings)

    def _kinds_of_block(self) -> tuple[bool, ...]:
        """Whether blocks of query tokens are causal: always, and for the layers of some draft models not always."""
        return (True, False) if self.non_causal_multi_token_decode else (True,)

    def _prepare(self, causal: bool, settings: DenseMLASettings) -> dict[int, DecodeProblem]:
        """Compile and load what blocks of a kind need, before the first graph is captured and the first request comes."""
        _, rank = get_dcp_world_size_and_rank(self._steps.context_world > 1)
        # page_size is the block size that the kernels see; cache_config.block_size may be a multiple of it.
        problems = self._steps.problems(self.page_size, settings.torch_dtype, causal=causal, context_rank=rank)
        for problem in problems.values():
            if problem not in self._prepared:
                decoder = DenseMLADecoder.prepare(
                    problem, self.device, max_requests=self._steps.max_num_seqs, cache_dir=settings.cache_folder
                )
                buckets = size_buckets(problem, self._steps.capture_sizes, self._steps.max_num_seqs, decoder.sm_count)
                self._prepared[problem] = PreparedStep(decoder, decoder.empty_schedule(), buckets)
        return problems

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> DenseMLAMetadata:
        """vLLM's, which does not tell `_build_decode` whether the step's blocks are causal."""
        self._is_causal = common_attn_metadata.causal is not False
        return super().build(common_prefix_len, self._with_exact_lens(common_attn_metadata), fast_build)

    def _with_exact_lens(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """The step with the lengths that the device has, where a verification becomes prefill.

        Prefill takes its lengths from the host. With asynchronous scheduling the host does not know yet which drafted tokens were rejected, and
        counts them all: keys of rejected tokens would be attended to. Such a step waits for the device; it is one in which the scheduler
        cut a request's draft short, or micro-batches cut a batch within a request. No other step does.
        """
        if not self._host_lens_are_bounds:
            return common
        starts = common.query_start_loc_cpu.numpy()  # every step comes by here: NumPy takes a fraction of torch's time for a few numbers
        query_lens = starts[1:] - starts[:-1]
        differs = query_lens != query_lens[0]
        if not differs.any():
            return common
        # vLLM decodes the requests before the first that differs.
        verifies = np.logical_or.accumulate(differs) & (query_lens > 0) & (query_lens <= self._steps.longest_query)
        if common.is_prefilling is not None:  # the host knows how much of a prompt is there
            verifies &= ~common.is_prefilling.numpy()[: verifies.size]
        return replace(common, seq_lens_cpu_upper_bound=common.seq_lens.cpu()) if verifies.any() else common

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> DenseMLAMetadata:
        """vLLM's, which checks that no request brings too many query tokens for a decode, and not that all bring the same number.

        Raises:
            ValueError: requests of different query lengths, of which vLLM leaves some to prefill: their graph would have the dummy requests'
                keys for ever. Micro-batches get there, where half of a batch's tokens ends within a request.
        """
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        if metadata.num_prefills:
            lens = ", ".join(map(str, common_attn_metadata.query_start_loc_cpu.diff().tolist()))
            multiple = self.vllm_config.parallel_config.num_ubatches * self._steps.longest_query
            raise ValueError(
                f"{BACKEND_NAME} decodes requests of one query length in a full CUDA graph, got {lens}: "
                f"with micro-batches, cudagraph_capture_sizes must be multiples of {multiple}"
            )
        return metadata

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
    ) -> DenseMLADecodeMetadata:
        """Pick the step's kernels and bucket, and launch the schedule kernel. Waits for nothing and allocates nothing.

        Raises:
            ValueError: requests of different query lengths, or more query tokens or requests than were prepared.
        """
        query_len, requests = uniform_query_len(query_start_loc_cpu, num_decode_tokens)
        step = self._step_of(query_len)
        bucket = step.buckets.bucket_for(requests)
        request_lens = seq_lens_device[:requests]
        step.decoder.schedule(request_lens, block_table_tensor, step.schedule)
        return DenseMLADecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            decoder=step.decoder,
            schedule=step.schedule,
            bucket=bucket,
            query_len=query_len,
            request_lens=request_lens,
            total_lens=_first(dcp_tot_seq_lens_device, requests) if step.decoder.problem.needs_total_lens else None,
            # vLLM's bound counts tokens that are not there yet; no request has more keys than max_model_len.
            max_seq_len=min(max_seq_len, self._steps.held_at_most(self.model_config.max_model_len)),
        )

    def update_draft_decode_metadata(self, metadata: DenseMLAMetadata) -> None:
        """Plan a draft step anew from the lengths that are on the device now: one launch, which vLLM records in the draft's graph."""
        decode = metadata.decode
        if decode is not None:
            decode.decoder.schedule(decode.request_lens, decode.block_table, decode.schedule)

    def _step_of(self, query_len: int) -> PreparedStep:
        problems = self._problems[self._is_causal]
        if query_len not in problems:
            raise ValueError(f"{BACKEND_NAME} decodes 1 to {max(problems)} query tokens of each request here, got {query_len}")
        return self._prepared[problems[query_len]]


def uniform_query_len(query_start_loc: torch.Tensor, num_tokens: int) -> tuple[int, int]:
    """Query tokens of each request of a decode batch, and how many of its requests have them.

    A graph's padded requests come after the others. `query_start_loc` gives them no tokens, and `num_tokens` counts the rows of the graph,
    theirs included; outside of graphs it counts the tokens that there are.

    Args:
        query_start_loc: [requests + 1] int32 on the host.
        num_tokens: rows of q.

    Raises:
        ValueError: rows that are not the requests' query tokens.
    """
    all_requests = query_start_loc.shape[0] - 1
    first = int(query_start_loc[1]) - int(query_start_loc[0])
    # A micro-batch of nothing but padding has no first length; any of the prepared fits, for no row counts.
    query_len = first or max(num_tokens // all_requests, 1)
    requests, rest = divmod(num_tokens, query_len)
    if rest or requests > all_requests:
        raise ValueError(
            f"{BACKEND_NAME} decodes requests of one query length, got {num_tokens} query tokens of {all_requests} requests, {first} of the first"
        )
    return query_len, requests


def _first(lens: torch.Tensor | None, requests: int) -> torch.Tensor | None:
    return None if lens is None else lens[:requests]


def _log_once(decoders: list[DenseMLADecoder], tables: WorkspaceTables, settings: DenseMLASettings) -> None:
    """What runs here, where its kernels come from, and the bucket tables; at INFO from rank 0, once however many builders there are.

    A WARNING as well on a GPU of a kind that no test ran on, and where batch invariance ends outside the kernels.
    """
    problem, capability = decoders[0].problem, device_capability(decoders[0].device)
    names = ", ".join(dict.fromkeys(kernel_name(decoder) for decoder in decoders))
    logger.info_once(
        "%s backend: kernel %s, KV cache %s, partial dtype %s (%s), %d heads per rank, %s, page size %d, workspace %d bytes%s",
        BACKEND_NAME,
        names,
        str(problem.kv_dtype).removeprefix("torch."),
        settings.partial_dtype,
        settings.partial_dtype_source,
        problem.num_heads,
        "1 query token" if len(tables.by_query_len) == 1 else f"1 to {max(tables.by_query_len)} query tokens",
        problem.page_size,
        tables.largest.total_bytes,
        ", batch invariant" if problem.batch_invariant else "",
        scope="global",
    )
    if ran_on(capability) is None:
        logger.warning_once(
            "%s kernel %s was compiled and never run on a GPU of compute capability %s: try it with `vllm-dense-mla check` before you rely on it",
            BACKEND_NAME,
            names,
            capability_name(capability),
            scope="global",
        )
    if problem.batch_invariant and len(tables.by_query_len) > 1:
        logger.warning_once(
            "%s with VLLM_BATCH_INVARIANT=1 and speculative decoding: the kernels' bits depend on a request alone, but the other requests of a step "
            "decide whether vLLM decodes its tokens together or verifies them as prefill, whose bits are others",
            BACKEND_NAME,
            scope="global",
        )
    took = preparation()
    logger.info_once(
        "%s kernels: %d compiled, %d loaded from the cache (%s), %.1f s",
        BACKEND_NAME,
        took.compiled,
        took.loaded,
        settings.cache_place,
        took.seconds,
        scope="global",
    )
    logger.info_once("%s workspace of each decode batch:\n%s", BACKEND_NAME, str(tables), scope="global")


def kernel_name(decoder: DenseMLADecoder) -> str:
    """The forward kernel of a decoder, and the architecture that it is compiled for."""
    capability = device_capability(decoder.device)
    return f"{forward_class(capability, decoder.problem).__name__} for {compile_target(capability)}"


def device_capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)

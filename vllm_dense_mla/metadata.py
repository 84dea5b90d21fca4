"""Once a step: which bucket of workspace the decode batch takes, and who works on which of its keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport

from dense_mla.arch import compile_target, forward_class
from dense_mla.decoder import DenseMLADecoder
from dense_mla.problem import DecodeProblem
from dense_mla.workspace import WorkspaceSize

from .buckets import BucketTable, decode_batch_sizes, size_buckets
from .registration import BACKEND_NAME
from .settings import DenseMLASettings, load_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec

# A child of vLLM's logger: its handlers and its level are vLLM's. One named after this package would show no INFO line.
logger = init_logger("vllm.dense_mla")


@dataclass
class DenseMLADecodeMetadata(MLACommonDecodeMetadata):
    """The decode part of a step: block_table [requests, width], seq_lens [requests], int32 on the device, and what our layers need."""

    decoder: DenseMLADecoder
    """The prepared kernels, shared by all layers of the KV-cache group."""

    schedule: torch.Tensor
    """The step's schedule, int32 on the device, at the same address in every step of a builder."""

    bucket: WorkspaceSize
    """Workspace that the step may use."""

    max_seq_len: int
    """Keys that no request of the step exceeds; known to the host."""


@dataclass
class DenseMLAMetadata(MLACommonMetadata[DenseMLADecodeMetadata]):
    """vLLM's MLA metadata with our decode part."""


class DenseMLAMetadataBuilder(MLACommonMetadataBuilder[DenseMLAMetadata]):
    """Prepares the kernels when it is built, and launches the schedule kernel once a step.

    vLLM builds several: for profiling, for every KV-cache group, for every micro-batch. Each owns its schedule buffer, so that two
    micro-batches never write to the same; the kernels are compiled once a process.
    """

    # A captured graph holds one row per request. With speculative decoding a verification of several tokens is prefill.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.SINGLE_ONLY

    def __init__(self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, DenseMLAMetadata)
        settings = load_settings()
        capture_sizes, max_num_seqs = decode_batch_sizes(vllm_config)
        # page_size is the block size that the kernels see; cache_config.block_size may be a multiple of it.
        problem = DecodeProblem(num_heads=self.num_heads, page_size=self.page_size, partial_dtype=settings.torch_dtype)
        self.decoder = DenseMLADecoder.prepare(problem, device, max_requests=max_num_seqs)
        self.buckets = size_buckets(problem, capture_sizes, max_num_seqs, self.decoder.sm_count)
        self.schedule = self.decoder.empty_schedule()
        _log_once(self.decoder, self.buckets, settings)

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
        """Pick the step's bucket and launch the schedule kernel. Waits for nothing and allocates nothing.

        Raises:
            ValueError: several query tokens of a request, or more requests than were prepared.
        """
        num_requests = seq_lens_device.shape[0]
        if num_decode_tokens != num_requests:
            raise ValueError(f"{BACKEND_NAME} decodes 1 query token of each request, got {num_decode_tokens} tokens of {num_requests} requests")
        bucket = self.buckets.bucket_for(num_requests)
        self.decoder.schedule(seq_lens_device, block_table_tensor, self.schedule)
        return DenseMLADecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            decoder=self.decoder,
            schedule=self.schedule,
            bucket=bucket,
            # vLLM's bound counts tokens that are not there yet; no request has more keys than max_model_len.
            max_seq_len=min(max_seq_len, self.model_config.max_model_len),
        )


def _log_once(decoder: DenseMLADecoder, buckets: BucketTable, settings: DenseMLASettings) -> None:
    """What runs here, in one line, and the bucket table; at INFO from rank 0, once however many builders there are."""
    problem = decoder.problem
    logger.info_once(
        "%s backend: kernel %s, partial dtype %s (%s), %d heads per rank, page size %d, workspace %d bytes",
        BACKEND_NAME,
        kernel_name(decoder.device),
        settings.partial_dtype,
        settings.partial_dtype_source,
        problem.num_heads,
        problem.page_size,
        buckets.largest.total_bytes,
        scope="global",
    )
    logger.info_once("%s workspace of each decode batch:\n%s", BACKEND_NAME, str(buckets), scope="global")


def kernel_name(device: torch.device) -> str:
    """The forward kernel of a CUDA device, and the architecture that it is compiled for."""
    capability = torch.cuda.get_device_capability(device)
    return f"{forward_class(capability).__name__} for {compile_target(capability)}"

"""Workspace bytes of every batch size that decodes: a bucket for each CUDA-graph batch, and one for the largest eager batch.

Pure arithmetic: no GPU, and no vLLM but for `decode_batch_sizes`, which reads the two numbers from its config.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dense_mla.problem import DecodeProblem
from dense_mla.schedule import MAX_REQUESTS
from dense_mla.workspace import WorkspaceSize, workspace_size

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_COLUMNS = ("rows", "slots", "out_partial bytes", "lse_partial bytes", "total bytes")


@dataclass(frozen=True)
class BucketTable:
    """Workspace of each bucket, by ascending rows (requests of one decode token). A step uses the first bucket that holds its rows."""

    buckets: tuple[WorkspaceSize, ...]

    @property
    def largest(self) -> WorkspaceSize:
        """The bucket that no step exceeds: what has to be reserved."""
        return self.buckets[-1]

    def bucket_for(self, rows: int) -> WorkspaceSize:
        """The smallest bucket of at least `rows` rows.

        Raises:
            ValueError: more rows than the largest bucket holds.
        """
        index = bisect_left(self.buckets, rows, key=lambda bucket: bucket.requests)
        if index == len(self.buckets):
            raise ValueError(f"a decode batch must have at most {self.largest.requests} rows (max_num_seqs), got {rows}")
        return self.buckets[index]

    def __str__(self) -> str:
        rows = [_COLUMNS, *(_cells(bucket) for bucket in self.buckets)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def size_buckets(problem: DecodeProblem, capture_sizes: Iterable[int], max_num_seqs: int, sm_count: int) -> BucketTable:
    """Workspace of every decode batch of a deployment.

    Args:
        problem: heads and partial dtype decide the bytes; the page size does not matter.
        capture_sizes: batch sizes of vLLM's CUDA graphs, in tokens, in any order. Those above `max_num_seqs` hold no decode-only
            batch, so that they get no bucket.
        max_num_seqs: requests that vLLM runs at once: the largest batch, graph or not.
        sm_count: streaming multiprocessors of the GPU.

    Raises:
        ValueError: a size below 1, or more requests than the kernels schedule.
    """
    sizes = set(capture_sizes)
    if not 1 <= max_num_seqs <= MAX_REQUESTS:
        raise ValueError(f"max_num_seqs must be from 1 to {MAX_REQUESTS}, got {max_num_seqs}")
    for name, value in (("sm_count", sm_count), ("capture_sizes", min(sizes, default=1))):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    rows = sorted({size for size in sizes if size < max_num_seqs} | {max_num_seqs})
    return BucketTable(tuple(workspace_size(problem, n, sm_count) for n in rows))


def decode_batch_sizes(vllm_config: VllmConfig) -> tuple[tuple[int, ...], int]:
    """`capture_sizes` and `max_num_seqs` of a vLLM config, for `size_buckets`."""
    return tuple(vllm_config.compilation_config.cudagraph_capture_sizes or ()), vllm_config.scheduler_config.max_num_seqs


def _cells(bucket: WorkspaceSize) -> tuple[str, ...]:
    numbers = (bucket.requests, bucket.slots, bucket.out_partial_bytes, bucket.lse_partial_bytes, bucket.total_bytes)
    return tuple(f"{number:,}" for number in numbers)

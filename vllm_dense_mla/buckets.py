"""Workspace bytes of every batch that decodes: a bucket for each CUDA-graph batch, and one for the largest eager batch.

Pure arithmetic: no GPU and no vLLM.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dense_mla.problem import DecodeProblem
from dense_mla.schedule import MAX_REQUESTS
from dense_mla.workspace import WorkspaceSize, workspace_size

_COLUMNS = ("query tokens", "requests", "rows", "slots", "out_partial bytes", "lse_partial bytes", "total bytes")


@dataclass(frozen=True)
class BucketTable:
    """Workspace of each bucket of one query length, by ascending requests. A step uses the first bucket that holds its requests."""

    query_len: int
    buckets: tuple[WorkspaceSize, ...]

    @property
    def largest(self) -> WorkspaceSize:
        """The bucket that no step of this query length exceeds."""
        return self.buckets[-1]

    def bucket_for(self, requests: int) -> WorkspaceSize:
        """The smallest bucket of at least `requests` requests.

        Raises:
            ValueError: more requests than the largest bucket holds.
        """
        index = bisect_left(self.buckets, requests, key=lambda bucket: bucket.requests)
        if index == len(self.buckets):
            raise ValueError(f"a decode batch must have at most {self.largest.requests} requests (max_num_seqs), got {requests}")
        return self.buckets[index]

    def __str__(self) -> str:
        return _aligned(_cells(self.query_len, bucket) for bucket in self.buckets)


@dataclass(frozen=True)
class WorkspaceTables:
    """The bucket tables of every query length that can occur, by query length."""

    by_query_len: Mapping[int, BucketTable]

    @property
    def largest(self) -> WorkspaceSize:
        """The bucket that no step exceeds, whatever its query length: what has to be reserved."""
        return max((table.largest for table in self.by_query_len.values()), key=lambda bucket: bucket.total_bytes)

    def __str__(self) -> str:
        """One line a bucket; of the query lengths between 1 and the longest, of which few graphs are captured, the largest bucket alone."""
        shown = {1, max(self.by_query_len)}
        return _aligned(
            _cells(query_len, bucket)
            for query_len, table in sorted(self.by_query_len.items())
            for bucket in (table.buckets if query_len in shown else table.buckets[-1:])
        )


def size_buckets(problem: DecodeProblem, capture_sizes: Iterable[int], max_num_seqs: int, sm_count: int) -> BucketTable:
    """Workspace of every decode batch of a deployment whose requests have `problem.query_len` query tokens.

    Args:
        problem: heads, query tokens, batch invariance and partial dtype decide the bytes; the page size does not matter.
        capture_sizes: batch sizes of vLLM's CUDA graphs, in tokens, in any order. vLLM rounds one up to whole requests. Those of more
            requests than `max_num_seqs` hold no decode-only batch, so that they get no bucket.
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
    requests = {-(-size // problem.query_len) for size in sizes}
    batches = sorted({count for count in requests if count < max_num_seqs} | {max_num_seqs})
    return BucketTable(problem.query_len, tuple(workspace_size(problem, count, sm_count) for count in batches))


def _cells(query_len: int, bucket: WorkspaceSize) -> tuple[str, ...]:
    rows = bucket.requests * query_len
    numbers = (query_len, bucket.requests, rows, bucket.slots, bucket.out_partial_bytes, bucket.lse_partial_bytes, bucket.total_bytes)
    return tuple(f"{number:,}" for number in numbers)


def _aligned(lines: Iterable[tuple[str, ...]]) -> str:
    cells = [_COLUMNS, *lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)

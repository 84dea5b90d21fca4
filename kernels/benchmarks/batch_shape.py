"""The batches that a benchmark decodes: how many requests, and how many keys each has."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchShape:
    """Lengths of a batch's requests, in keys, the label that they were made from, and the query tokens of each request."""

    label: str
    seq_lens: tuple[int, ...]
    query_len: int = 1

    @classmethod
    def parse(cls, label: str) -> BatchShape:
        """Read `8x4096`, `8x4096q4` (4 query tokens of each request), `mixed:64:32768` (64 requests, uniform from 1 to 32768 keys) or
        `spike:64:131072:512` (one of 131072 among 63 of 512).

        The lengths of a mixed batch depend on its label alone.

        Raises:
            ValueError: anything else, a batch or length below 1 and requests shorter than their query tokens included.
        """
        if found := re.fullmatch(r"(\d+)x(\d+)(?:q(\d+))?", label):
            batch, keys, query_len = (int(text or 1) for text in found.groups())
            if batch and query_len and keys >= query_len:
                return cls(label, (keys,) * batch, query_len)
        kind, *texts = label.split(":")
        if len(texts) != {"mixed": 2, "spike": 3}.get(kind) or not all(text.isdecimal() and int(text) for text in texts):
            raise ValueError(
                f"shape must be BATCHxKEYS, BATCHxKEYSqTOKENS, mixed:BATCH:KEYS or spike:BATCH:LONG:SHORT with numbers from 1, got {label!r}"
            )
        batch, keys, *rest = map(int, texts)
        if kind == "mixed":
            draw = random.Random(label)
            return cls(label, tuple(draw.randint(1, keys) for _ in range(batch)))
        # In the middle: a schedule that only looks right for a long first or last request shows here.
        return cls(label, tuple(keys if i == batch // 2 else rest[0] for i in range(batch)))

    @property
    def batch(self) -> int:
        """Requests."""
        return len(self.seq_lens)

    @property
    def is_uniform(self) -> bool:
        """Whether all requests have the same length."""
        return len(set(self.seq_lens)) == 1

    @property
    def context(self) -> int:
        """Keys of the longest request."""
        return max(self.seq_lens)

    @property
    def keys(self) -> int:
        """Keys of all requests."""
        return sum(self.seq_lens)

    def pages(self, page_size: int) -> tuple[int, ...]:
        """Pages of each request."""
        return tuple(-(-n // page_size) for n in self.seq_lens)

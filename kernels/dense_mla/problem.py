"""The static facts of one decode launch: everything that a kernel is compiled for, and nothing that changes from step to step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

HEAD_DIM_QK = 576  # kv_lora_rank 512 + qk_rope_head_dim 64
HEAD_DIM_V = 512  # the value is the latent part of the key record
TILE_KEYS = 64  # keys of one WGMMA tile (its M)
MAX_TILE_ROWS = 64  # query rows that one CTA holds: Q and two K stages fill the shared memory
MAX_HEADS = 128
PARTIAL_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class DecodeProblem:
    """What the kernels of one MLA decode are compiled for. Hashable: it is the compile key, together with the device.

    Args:
        num_heads: query heads on this rank, 1 to 128. They share one latent KV head.
        page_size: keys in a page of the KV cache, a positive multiple of 16.
        partial_dtype: storage of `out_partial`, `torch.bfloat16` or `torch.float32`. Changes that tensor and nothing else.
        kv_dtype: element type of the KV cache. `torch.bfloat16`.
        query_len: query tokens of every request. 1.
        return_lse: whether `run` writes the natural-log LSE beside the output.

    Raises:
        ValueError: a value outside those, naming it and what is allowed.
    """

    num_heads: int
    page_size: int
    partial_dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    query_len: int = 1
    return_lse: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.num_heads <= MAX_HEADS:
            raise ValueError(f"num_heads must be from 1 to {MAX_HEADS}, got {self.num_heads}")
        if self.page_size < 16 or self.page_size % 16:
            raise ValueError(f"page_size must be a positive multiple of 16, got {self.page_size}")
        if self.partial_dtype not in PARTIAL_DTYPES:
            raise ValueError(f"partial_dtype must be torch.bfloat16 or torch.float32, got {self.partial_dtype}")
        if self.kv_dtype != torch.bfloat16:
            raise ValueError(f"kv_dtype must be torch.bfloat16, got {self.kv_dtype}")
        if self.query_len != 1:
            raise ValueError(f"query_len must be 1, got {self.query_len}")

    @property
    def rows(self) -> int:
        """Query rows of a request that share its keys: query_len x num_heads."""
        return self.num_heads * self.query_len

    @property
    def row_tiles(self) -> int:
        """CTAs that share one range of keys, each with its own query rows."""
        return -(-self.rows // MAX_TILE_ROWS)

    @property
    def tile_rows(self) -> int:
        """Rows of one CTA: WGMMA's N. A multiple of 8 up to 32 rows, of 16 above, where the warpgroups share the rows out."""
        rows = -(-self.rows // self.row_tiles)
        step = 8 if rows <= 32 else 16
        return -(-rows // step) * step

    def num_ranges(self, sm_count: int) -> int:
        """Ranges into which the schedule cuts a step's tiles: one per CTA and row tile, so that the grid never exceeds the SMs."""
        return max(sm_count // self.row_tiles, 1)

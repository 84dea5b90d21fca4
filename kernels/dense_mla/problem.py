"""The static facts of one decode launch: everything that a kernel is compiled for, and nothing that changes from step to step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

HEAD_DIM_QK = 576  # kv_lora_rank 512 + qk_rope_head_dim 64
HEAD_DIM_V = 512  # the value is the latent part of the key record
TILE_KEYS = 64  # keys of one WGMMA tile (its M)
MAX_TILE_ROWS = 64  # query rows that one CTA holds: Q and two K stages fill the shared memory
MAX_HEADS = 128
FIXED_COST = 1  # what starting a request costs a CTA, in tiles of 16-bit keys
FIXED_COST_E4M3 = 3  # in tiles of E4M3 keys, which take half as long
MAX_QUERY_LEN = 16
MAX_RANGES = 512  # of a schedule, more than any GPU has SMs: the schedule kernel has shared memory for as many split requests
FP8_TILE_ROWS = 32  # the same with an E4M3 cache: one warpgroup holds the output of all 512 columns, 4 registers a row
KV_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
PARTIAL_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class ContextShard:
    """Which keys of a request this rank holds, where ranks share out the context (decode context parallelism).

    Runs of `interleave` keys go to the ranks in turn: key k lies on rank (k // interleave) % world. The rank's keys keep their order.

    Raises:
        ValueError: a value out of range.
    """

    world: int = 1
    rank: int = 0
    interleave: int = 1

    def __post_init__(self) -> None:
        if self.world < 1 or self.interleave < 1:
            raise ValueError(f"world and interleave must be at least 1, got {self.world} and {self.interleave}")
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank must be from 0 to {self.world - 1}, got {self.rank}")

    def held(self, keys: int) -> int:
        """Of the first `keys` keys of a request, how many this rank holds. `RequestRange.visible_keys` does the same on the device."""
        round_keys = self.world * self.interleave
        return keys // round_keys * self.interleave + min(max(keys % round_keys - self.rank * self.interleave, 0), self.interleave)


WHOLE_CONTEXT = ContextShard()


@dataclass(frozen=True)
class DecodeProblem:
    """What the kernels of one MLA decode are compiled for. Hashable: it is the compile key, together with the device.

    Args:
        num_heads: query heads that attend on this rank, 1 to 128 (with decode context parallelism, after the gather). They share one
            latent KV head.
        page_size: keys in a page of the KV cache, a positive multiple of 16.
        partial_dtype: storage of `out_partial`, `torch.bfloat16` or `torch.float32`. Changes that tensor and nothing else.
        kv_dtype: element type of the KV cache: `torch.bfloat16` or `torch.float16`, and q and the output are of the same; or
            `torch.float8_e4m3fn` with one scale for the whole cache, and q and the output are BF16.
        query_len: query tokens of every request, 1 to 16. The last of them is the newest key of the request.
        causal: query token t of a request sees `seq_len - query_len + 1 + t` keys; otherwise every token sees all `seq_len`.
        return_lse: whether `run` writes the natural-log LSE beside the output.
        batch_invariant: cut requests at places that their own length decides, so that a row's bits depend on that row alone.
        context: which keys this rank holds. With several ranks and query tokens, the causal rule counts the keys of all ranks.

    Raises:
        ValueError: a value outside those, naming it and what is allowed.
    """

    num_heads: int
    page_size: int
    partial_dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    query_len: int = 1
    causal: bool = True
    return_lse: bool = False
    batch_invariant: bool = False
    context: ContextShard = WHOLE_CONTEXT

    def __post_init__(self) -> None:
        if not 1 <= self.num_heads <= MAX_HEADS:
            raise ValueError(f"num_heads must be from 1 to {MAX_HEADS}, got {self.num_heads}")
        if self.page_size < 16 or self.page_size % 16:
            raise ValueError(f"page_size must be a positive multiple of 16, got {self.page_size}")
        if self.partial_dtype not in PARTIAL_DTYPES:
            raise ValueError(f"partial_dtype must be torch.bfloat16 or torch.float32, got {self.partial_dtype}")
        if self.kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype must be torch.bfloat16, torch.float16 or torch.float8_e4m3fn, got {self.kv_dtype}")
        if not 1 <= self.query_len <= MAX_QUERY_LEN:
            raise ValueError(f"query_len must be from 1 to {MAX_QUERY_LEN}, got {self.query_len}")

    @property
    def needs_k_scale(self) -> bool:
        """Whether `run` takes the scale of the cache, by which its values were divided."""
        return self.kv_dtype == torch.float8_e4m3fn

    @property
    def fixed_cost(self) -> int:
        """What starting a request costs a CTA, in tiles: the schedule counts it in."""
        return FIXED_COST_E4M3 if self.needs_k_scale else FIXED_COST

    @property
    def query_dtype(self) -> torch.dtype:
        """Element type of q and of the output."""
        return torch.bfloat16 if self.needs_k_scale else self.kv_dtype

    @property
    def max_tile_rows(self) -> int:
        """Most query rows that one CTA holds."""
        return FP8_TILE_ROWS if self.needs_k_scale else MAX_TILE_ROWS

    @property
    def rows(self) -> int:
        """Query rows of a request that share its keys: query_len x num_heads, row = token x num_heads + head."""
        return self.num_heads * self.query_len

    @property
    def rows_differ(self) -> bool:
        """Whether rows of a request see different numbers of keys."""
        return self.causal and self.query_len > 1

    @property
    def head_tiles(self) -> int:
        """Row tiles into which the heads of one token are cut: as few as hold them."""
        return -(-self.num_heads // self.max_tile_rows)

    @property
    def tile_heads(self) -> int:
        """Heads of one row tile."""
        return -(-self.num_heads // self.head_tiles)

    @property
    def token_tiles(self) -> int:
        """Row tiles into which the query tokens are cut: as few as hold them, whole tokens each."""
        return -(-self.query_len // max(self.max_tile_rows // self.tile_heads, 1))

    @property
    def tile_tokens(self) -> int:
        """Query tokens of one row tile."""
        return -(-self.query_len // self.token_tiles)

    @property
    def row_tiles(self) -> int:
        """CTAs that share one range of keys, each with its own query rows: tile = token tile x head_tiles + head tile."""
        return self.head_tiles * self.token_tiles

    @property
    def tile_rows(self) -> int:
        """Rows of one CTA: WGMMA's N. A multiple of 8 up to 32 rows, of 16 above."""
        rows = self.tile_heads * self.tile_tokens
        step = 8 if rows <= 32 else 16
        return -(-rows // step) * step

    @property
    def needs_total_lens(self) -> bool:
        """Whether the causal rule needs the lengths over all ranks beside this rank's own."""
        return self.context.world > 1 and self.query_len > 1 and self.causal

    def num_ranges(self, sm_count: int) -> int:
        """Ranges into which the schedule cuts a step's tiles: one per CTA and row tile, so that the grid never exceeds the SMs.

        Raises:
            ValueError: more than the kernels take.
        """
        ranges = max(sm_count // self.row_tiles, 1)
        if ranges > MAX_RANGES:
            raise ValueError(f"num_ranges must be at most {MAX_RANGES}, got {ranges} ({sm_count} SMs over {self.row_tiles} row tiles)")
        return ranges

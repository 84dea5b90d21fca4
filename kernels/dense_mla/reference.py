"""MLA decode in plain torch, on any device: the exact answer, and what the kernels do with it.

    S[row, key] = scale * sum_d q[row, d] kv[key, d]        d over 576
    out[row]    = sum_key softmax(S[row])[key] kv[key, :512]
    lse[row]    = ln sum_key exp(S[row, key])

`attention` is that in FP64. `decode` follows the kernels: the same schedule, the same partial slots, the same roundings to BF16 (the
probabilities before P V, the partials where they are stored in BF16, the output) and the same order of the merge. S, the sums and the
merge are FP32 in both; `decode` takes the maximum of a whole piece where a kernel carries it from tile to tile, so the two agree to a
rounding of the probabilities and not to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .paged_kv import PageTiling
from .problem import HEAD_DIM_QK, HEAD_DIM_V, WHOLE_CONTEXT, ContextShard, DecodeProblem
from .schedule import INVARIANT_PIECES, NO_SLOT, Schedule, invariant_piece_tiles, max_slots, plan
from .workspace import ALIGNMENT, workspace_views

Query = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
NAN_BYTE = 0xFF  # a float of any width made of it is NaN


@dataclass(frozen=True)
class Piece:
    """The tiles of one request that one CTA works on, end_tile not among them, and their partial slot (NO_SLOT: it is the whole request)."""

    request: int
    first_tile: int
    end_tile: int
    slot: int


def pieces(schedule: Schedule, num_tiles: list[int], batch_invariant: bool = False) -> Iterator[Piece]:
    """Every CTA's pieces, CTA by CTA, in the order in which it walks them.

    Args:
        schedule: the plan of the step.
        num_tiles: tiles of each request (`PageTiling.num_tiles`). An empty request is one piece without tiles.
        batch_invariant: as the plan was made.
    """
    for r in schedule.ranges:
        for request in range(r.first_request, r.last_request + 1):
            is_first, is_last = request == r.first_request, request == r.last_request
            first_tile = r.first_tile if is_first else 0
            end_tile = r.end_tile if is_last else num_tiles[request]
            if batch_invariant:
                yield from _invariant_pieces(request, first_tile, end_tile, num_tiles[request])
            else:
                slot = r.first_slot if is_first else r.last_slot if is_last else NO_SLOT
                yield Piece(request, first_tile, end_tile, slot)


def _invariant_pieces(request: int, first_tile: int, end_tile: int, num_tiles: int) -> Iterator[Piece]:
    length = invariant_piece_tiles(num_tiles)
    for begin in range(first_tile, max(end_tile, first_tile + 1), length):
        slot = request * INVARIANT_PIECES + begin // length if num_tiles > length else NO_SLOT
        yield Piece(request, begin, min(begin + length, end_tile), slot)


def attention(
    q: Query,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    query_len: int = 1,
    causal: bool = True,
    context: ContextShard = WHOLE_CONTEXT,
    total_lens: torch.Tensor | None = None,
    k_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact answer in FP64, from the visible keys alone.

    Args:
        q: `[R, heads, 576]`, or the pair `[R, heads, 512]`, `[R, heads, 64]`; R = requests x query_len.
        kv_cache: `[pages, page_size, 576]`.
        block_table: `[requests, width]`; columns past ceil(seq_len / page_size) are not read.
        seq_lens: `[requests]`, keys of each request on this rank.
        scale: softmax scale.
        query_len, causal, context: as in `DecodeProblem`.
        total_lens: `[requests]`, keys of each request on all ranks; needed where causal query tokens share the keys out among ranks.
        k_scale: what the cache's values have to be multiplied with.

    Returns:
        out `[R, heads, 512]` and the natural-log lse `[R, heads]`, both FP64. A row that sees no key: 0 and -inf.

    Raises:
        ValueError: a shape that does not fit, a negative length, a block table narrower than the lengths need, or no total_lens where needed.
    """
    query = _joined(q)
    lens = _checked_lens(query, kv_cache, block_table, seq_lens, query_len)
    totals = _totals(lens, total_lens, causal and query_len > 1 and context.world > 1)
    out = query.new_zeros((*query.shape[:2], HEAD_DIM_V), dtype=torch.float64)
    lse = query.new_full(query.shape[:2], -math.inf, dtype=torch.float64)
    for r, seq_len in enumerate(lens):
        keys = _keys(kv_cache, block_table[r], 0, seq_len).double() * k_scale
        for t, visible in enumerate(visible_keys(seq_len, totals[r], query_len, causal, context)):
            if visible:
                scores = scale * query[r * query_len + t].double() @ keys[:visible].T
                lse[r * query_len + t] = scores.logsumexp(-1)
                out[r * query_len + t] = scores.softmax(-1) @ keys[:visible, :HEAD_DIM_V]
    return out, lse


def visible_keys(seq_len: int, total_len: int, query_len: int, causal: bool, context: ContextShard) -> list[int]:
    """How many of this rank's `seq_len` keys each query token of a request sees; causality counts the `total_len` keys of all ranks."""
    if not causal or query_len == 1:
        return [seq_len] * query_len
    return [context.held(max(total_len - query_len + 1 + t, 0)) for t in range(query_len)]


def decode(
    problem: DecodeProblem,
    q: Query,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    num_ranges: int,
    workspace: torch.Tensor | None = None,
    total_lens: torch.Tensor | None = None,
    k_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels compute, piece by piece: forward into `out` or a partial slot, then the merge of the split requests.

    Args:
        problem: heads, page size, query tokens and dtypes.
        q, kv_cache, block_table, seq_lens, scale, total_lens, k_scale: as in `attention`.
        num_ranges: CTAs that share the work (`DecodeProblem.num_ranges`).
        workspace: `torch.uint8` buffer of `workspace_size(...).total_bytes`, for a look at the partials afterwards. By default one made
            here. It is filled with NaN first: whatever the merge read without being written would show.

    Returns:
        out `[R, heads, 512]` in the problem's query_dtype and the natural-log lse `[R, heads]` in FP32. A row that sees no key: 0 and -inf.

    Raises:
        ValueError: as in `attention`, or heads or page size other than the problem's.
    """
    query = _joined(q)
    lens = _checked_lens(query, kv_cache, block_table, seq_lens, problem.query_len)
    _check_problem(problem, query, kv_cache)
    totals = _totals(lens, total_lens, problem.needs_total_lens)
    tiling = PageTiling(problem.page_size)
    schedule = plan(lens, problem.page_size, num_ranges, problem.batch_invariant, problem.fixed_cost)
    slots = max_slots(len(lens), num_ranges, problem.batch_invariant)
    out_partial, lse_partial = _nan_partials(problem, slots, query.device, workspace)

    by_request = query.unflatten(0, (len(lens), problem.query_len)).flatten(1, 2)  # rows = token x heads + head
    out = query.new_full((len(lens), problem.rows, HEAD_DIM_V), math.nan, dtype=problem.query_dtype)
    lse = query.new_full((len(lens), problem.rows), math.nan, dtype=torch.float32)  # base 2 until the end
    for piece in pieces(schedule, [tiling.num_tiles(n) for n in lens], problem.batch_invariant):
        r, seq_len = piece.request, lens[piece.request]
        first_key = tiling.first_key(piece.first_tile)
        end_key = min(tiling.first_key(piece.end_tile), seq_len)
        visible = visible_keys(seq_len, totals[r], problem.query_len, problem.causal, problem.context)
        limits = torch.tensor(visible, device=query.device).repeat_interleave(problem.num_heads) - first_key
        o, lse2 = _forward(by_request[r], _keys(kv_cache, block_table[r], first_key, end_key), limits, scale, k_scale)
        if piece.slot == NO_SLOT:
            out[r], lse[r] = o, lse2
        else:
            out_partial[piece.slot], lse_partial[piece.slot] = o, lse2
    for split in schedule.splits:
        slots_of = slice(split.first_slot, split.first_slot + split.pieces)
        out[split.request], lse[split.request] = merge(out_partial[slots_of], lse_partial[slots_of])
    return out.view(*query.shape[:2], HEAD_DIM_V), (lse * math.log(2)).view(query.shape[:2])


def merge(out_partial: torch.Tensor, lse_partial: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the partials of one request, weighted by 2^lse, in slot order.

    Args:
        out_partial: `[pieces, rows, 512]` in the partial dtype, each normalised by its own sum.
        lse_partial: `[pieces, rows]`, FP32, base 2. -inf: no key in that piece; its out_partial has no say, NaN included.

    Returns:
        out `[rows, 512]` and the base-2 lse `[rows]`, both FP32. A row whose pieces are all empty: 0 and -inf.
    """
    top = lse_partial.amax(0)
    # Where all pieces are empty, -inf minus -inf would be NaN: subtract 0 there.
    weights = torch.exp2(lse_partial - torch.where(top == -math.inf, 0.0, top))
    total, acc = torch.zeros_like(top), out_partial.new_zeros(out_partial.shape[1:], dtype=torch.float32)
    for weight, o, lse in zip(weights, out_partial, lse_partial, strict=True):
        total = total + weight
        acc = acc + torch.where((lse == -math.inf)[:, None], 0.0, weight[:, None] * o.float())
    empty = top == -math.inf
    return torch.where(empty[:, None], 0.0, acc / torch.where(empty, 1.0, total)[:, None]), top + torch.log2(total)


def relative_l2(out: torch.Tensor, exact: torch.Tensor) -> float:
    """||out - exact|| / ||exact|| over all elements, in FP64. 0 where both are all zeros."""
    norm = float(exact.double().norm())
    error = float((out.double() - exact.double()).norm())
    return error / norm if norm else error


def _forward(
    query: torch.Tensor, keys: torch.Tensor, limits: torch.Tensor, scale: float, k_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One piece: query [rows, 576] on keys [n, 576], of which row i sees the first limits[i] -> normalised out [rows, 512], base-2 lse, FP32."""
    if not keys.shape[0]:
        return query.new_zeros((query.shape[0], HEAD_DIM_V), dtype=torch.float32), query.new_full(query.shape[:1], -math.inf, dtype=torch.float32)
    values = keys.float()
    scores = (query.float() @ values.T) * (scale * k_scale * math.log2(math.e))
    scores.masked_fill_(torch.arange(keys.shape[0], device=keys.device) >= limits[:, None], -math.inf)
    top = scores.amax(-1, keepdim=True)
    p = torch.exp2(scores - torch.where(top == -math.inf, 0.0, top))
    total = p.sum(-1)
    # The tensor cores take P in BF16 with BF16 values, and else in FP16 and 2^15 times larger; the sum is over the unrounded P.
    rounded = p.to(keys.dtype).float() if keys.dtype == torch.bfloat16 else p.mul(2.0**15).half().float() * 2.0**-15
    out = rounded @ values[:, :HEAD_DIM_V] * k_scale
    return out / torch.where(total == 0, 1.0, total)[:, None], top[:, 0] + torch.log2(total)


def _keys(kv_cache: torch.Tensor, pages: torch.Tensor, first_key: int, end_key: int) -> torch.Tensor:
    """Keys first_key up to (not including) end_key of a request, [n, 576]. Only pages that hold one of them are looked up."""
    page_size = kv_cache.shape[1]
    if first_key >= end_key:
        return kv_cache.new_empty((0, HEAD_DIM_QK))
    first_page = first_key // page_size
    ids = pages[first_page : -(-end_key // page_size)].long()
    keys = kv_cache[ids].flatten(0, 1)
    return keys[first_key - first_page * page_size : end_key - first_page * page_size]


def _joined(q: Query) -> torch.Tensor:
    query = torch.cat(q, -1) if isinstance(q, tuple) else q
    if query.dim() != 3 or query.shape[-1] != HEAD_DIM_QK:
        raise ValueError(f"q must be [requests, heads, {HEAD_DIM_QK}] or a pair that joins to it, got {list(query.shape)}")
    return query


def _checked_lens(
    query: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, query_len: int
) -> list[int]:
    """seq_lens on the host, once all shapes fit them."""
    if kv_cache.dim() != 3 or kv_cache.shape[-1] != HEAD_DIM_QK:
        raise ValueError(f"kv_cache must be [pages, page_size, {HEAD_DIM_QK}], got {list(kv_cache.shape)}")
    requests, rest = divmod(query.shape[0], query_len)
    if rest or seq_lens.shape != (requests,):
        raise ValueError(f"seq_lens must be [{requests}] for q of {query.shape[0]} rows, {query_len} a request, got {list(seq_lens.shape)}")
    if block_table.dim() != 2 or block_table.shape[0] != requests:
        raise ValueError(f"block_table must be [{requests}, width], got {list(block_table.shape)}")
    lens: list[int] = seq_lens.tolist()
    if min(lens, default=0) < 0:
        raise ValueError(f"seq_lens must be at least 0, got {min(lens)}")
    columns = -(-max(lens, default=0) // kv_cache.shape[1])
    if block_table.shape[1] < columns:
        needed = f"{columns} columns for seq_len {max(lens)} in pages of {kv_cache.shape[1]}"
        raise ValueError(f"block_table must have {needed}, got {block_table.shape[1]}")
    return lens


def _totals(lens: list[int], total_lens: torch.Tensor | None, needed: bool) -> list[int]:
    """Keys of each request on all ranks. On one rank, or where every token sees all keys, nobody has to say."""
    if total_lens is not None:
        totals: list[int] = total_lens.tolist()
        return totals
    if needed:
        raise ValueError("total_lens must be given for causal blocks of query tokens on several ranks, got None")
    return lens


def _check_problem(problem: DecodeProblem, query: torch.Tensor, kv_cache: torch.Tensor) -> None:
    if query.shape[1] != problem.num_heads:
        raise ValueError(f"q must have the problem's {problem.num_heads} heads, got {query.shape[1]}")
    if kv_cache.shape[1] != problem.page_size:
        raise ValueError(f"kv_cache must have the problem's page_size {problem.page_size}, got {kv_cache.shape[1]}")


def _nan_partials(
    problem: DecodeProblem, slots: int, device: torch.device, workspace: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if workspace is None:
        row_bytes = HEAD_DIM_V * problem.partial_dtype.itemsize + 4
        workspace = torch.empty(slots * problem.rows * row_bytes + 2 * ALIGNMENT, dtype=torch.uint8, device=device)
    workspace.fill_(NAN_BYTE)
    out_partial, lse_partial = workspace_views(problem, workspace, slots)
    return out_partial.flatten(1, 2), lse_partial.flatten(1, 2)

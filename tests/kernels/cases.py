"""Small inputs that once broke MLA decode kernels elsewhere, each with the property that must hold.

The numbers of the faults: tests/FAULTS.md.

The reference on the CPU and the kernels on a GPU run the very same input:

    case = cases.FAULTS["late peak"](device)
    out, lse = decode(case)                      # the reference or the kernels
    case.check(out, lse, partial_dtype)

Every page that no request may read, every row past a request's last key and every stale block-table column is poison.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from dense_mla.problem import WHOLE_CONTEXT, ContextShard, DecodeProblem
from dense_mla.reference import attention, relative_l2

SCALE = 192**-0.5
NULL_PAGE = 0
STALE_PAGE = 2_147_480_000  # no cache has it: reading it faults

# Relative L2 error against FP64, as a multiple of the error of rounding the exact result to BF16 once.
ERROR_BOUND = {torch.float32: 1.2, torch.bfloat16: 1.6}


@dataclass(frozen=True)
class Case:
    """One decode input. `expected_out` and `expected_lse` are FP64: the closed form where there is one, `attention` otherwise.

    Args:
        q: `[requests x query_len, heads, 576]`, or the pair.
        kv_cache, block_table, seq_lens, scale: as for the kernels.
        k_scale: what the values of an E4M3 cache have to be multiplied with.
        out_atol: bound on every element instead of the relative L2 bound, for answers with a closed form.
    """

    name: str
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    expected_out: torch.Tensor
    expected_lse: torch.Tensor
    scale: float = SCALE
    out_atol: float | None = None
    lse_atol: float = 2e-5
    query_len: int = 1
    causal: bool = True
    context: ContextShard = WHOLE_CONTEXT
    total_lens: torch.Tensor | None = None
    k_scale: float = 1.0

    @property
    def query_dtype(self) -> torch.dtype:
        return (self.q if isinstance(self.q, torch.Tensor) else self.q[0]).dtype

    @property
    def num_heads(self) -> int:
        return (self.q if isinstance(self.q, torch.Tensor) else self.q[0]).shape[1]

    @property
    def page_size(self) -> int:
        return self.kv_cache.shape[1]

    def problem(self, partial_dtype: torch.dtype, **facts: bool) -> DecodeProblem:
        """What the kernels have to be prepared for."""
        # One query token sees all of a rank's keys: which rank it is makes no difference, and no other kernel.
        context = self.context if self.query_len > 1 else WHOLE_CONTEXT
        shape = {"query_len": self.query_len, "causal": self.causal, "context": context}
        return DecodeProblem(self.num_heads, self.page_size, partial_dtype, kv_dtype=self.kv_cache.dtype, **shape, **facts)

    def check(self, out: torch.Tensor, lse: torch.Tensor | None, partial_dtype: torch.dtype) -> None:
        """Assert the expected property of `out` [requests, heads, 512] and, where it was asked for, of the natural-log `lse`."""
        empty = self.expected_lse == -math.inf
        assert out.dtype == self.query_dtype and out.shape == self.expected_out.shape
        assert (out[empty] == 0).all(), f"{self.name}: a row without keys must give exactly 0"
        assert not out.isnan().any(), f"{self.name}: NaN reached the output"
        if self.out_atol is not None:
            assert (out.double() - self.expected_out).abs().max().item() <= self.out_atol, self.name
        else:
            bound = ERROR_BOUND[partial_dtype] * relative_l2(self.expected_out.to(out.dtype), self.expected_out)
            assert relative_l2(out, self.expected_out) <= bound, self.name
        if lse is not None:
            self._check_lse(lse, empty)

    def _check_lse(self, lse: torch.Tensor, empty: torch.Tensor) -> None:
        assert lse.dtype == torch.float32 and lse.is_contiguous() and lse.shape == self.expected_lse.shape
        assert (lse[empty] == -math.inf).all(), f"{self.name}: the LSE of a row without keys is -inf"
        error = (lse.double() - self.expected_lse)[~empty].abs()
        assert not error.isnan().any() and (error <= self.lse_atol).all(), f"{self.name}: LSE off by {error.max().item()}"


def paged(
    keys: Sequence[torch.Tensor], page_size: int, *, seed: int = 0, extra_columns: int = 2, stale: int = STALE_PAGE, null_page: float = math.nan
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lay requests' keys out in pages: kv_cache [pages, page_size, 576], block_table [requests, width] and seq_lens [requests].

    Page ids are a random, non-monotonic choice out of twice as many pages as needed. Page 0 belongs to nobody and holds `null_page`; all
    else that no request may read is NaN, and the columns past a request's last page hold `stale`.
    """
    device = keys[0].device
    counts = [-(-len(k) // page_size) for k in keys]
    ids = 1 + torch.randperm(2 * sum(counts) + 1, generator=torch.Generator().manual_seed(seed))
    kv_cache = torch.full((len(ids) + 1, page_size, 576), math.nan, dtype=keys[0].dtype, device=device)
    kv_cache[NULL_PAGE] = null_page
    table = torch.full((len(keys), max(counts) + extra_columns), stale, dtype=torch.int32)
    taken = 0
    for r, (k, count) in enumerate(zip(keys, counts)):
        pages = ids[taken : taken + count]
        table[r, :count] = pages.int()
        flat = torch.full((count * page_size, 576), math.nan, dtype=k.dtype, device=device)
        flat[: len(k)] = k
        kv_cache[pages.to(device)] = flat.view(count, page_size, 576)
        taken += count
    lens = torch.tensor([len(k) for k in keys], dtype=torch.int32, device=device)
    return kv_cache, table.to(device), lens


def gaussian(
    seq_lens: Sequence[int],
    device: torch.device | str = "cpu",
    *,
    heads: int = 12,
    page_size: int = 64,
    seed: int = 0,
    stale: int = STALE_PAGE,
    null_page: float = math.nan,
    name: str = "gaussian",
    query_len: int = 1,
    causal: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    """Unit-Gaussian q and keys, against FP64. The keys of a request depend on `seed` and its place alone, not on the page size."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(len(seq_lens) * query_len, heads, 576, generator=generator).to(device, dtype)
    keys = [torch.randn(n, 576, generator=generator).to(device, dtype) for n in seq_lens]
    cache = paged(keys, page_size, seed=seed, stale=stale, null_page=null_page)
    out, lse = attention(q, *cache, SCALE, query_len=query_len, causal=causal)
    return Case(name, q, *cache, out, lse, query_len=query_len, causal=causal)


def context_shards(
    seq_lens: Sequence[int],
    world: int,
    interleave: int,
    device: torch.device | str = "cpu",
    *,
    heads: int = 12,
    page_size: int = 64,
    query_len: int = 1,
    seed: int = 0,
) -> tuple[Case, list[Case]]:
    """A batch undivided, and each rank's case with the keys that it holds, under decode context parallelism."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(len(seq_lens) * query_len, heads, 576, generator=generator).bfloat16().to(device)
    keys = [torch.randn(n, 576, generator=generator).bfloat16().to(device) for n in seq_lens]
    cache = paged(keys, page_size, seed=seed)
    out, lse = attention(q, *cache, SCALE, query_len=query_len)
    whole = Case("undivided", q, *cache, out, lse, query_len=query_len)
    ranks = []
    for rank in range(world):
        context = ContextShard(world, rank, interleave)
        held = [k[(torch.arange(len(k), device=k.device) // interleave) % world == rank] for k in keys]
        cache = paged(held, page_size, seed=seed + rank)
        out, lse = attention(q, *cache, SCALE, query_len=query_len, context=context, total_lens=whole.seq_lens)
        ranks.append(Case(f"rank {rank}", q, *cache, out, lse, query_len=query_len, context=context, total_lens=whole.seq_lens))
    return whole, ranks


def poisoned_workspace(device: torch.device | str = "cpu") -> Case:
    """Fault 1: a merge that reads splits the forward never wrote. 65 keys make two live tiles, however many CTAs there are."""
    return gaussian([65], device, name="two live tiles")


def fewer_keys_than_splits(device: torch.device | str = "cpu") -> Case:
    """Fault 2: one to three keys, far fewer than CTAs."""
    return gaussian([1, 2, 3], device, name="fewer keys than splits")


def repeated_calls(device: torch.device | str = "cpu") -> Case:
    """Fault 4: one request of 16 heads, cut at every split count; identical calls must be bit-equal."""
    return gaussian([4096], device, heads=16, name="one request, any split count")


def empty_request(device: torch.device | str = "cpu") -> Case:
    """Faults 7 and 28: a request without keys, alone and so never split: the forward itself writes 0 and -inf."""
    return gaussian([0], device, name="one empty request")


def all_empty(device: torch.device | str = "cpu") -> Case:
    """Fault 26: a whole batch of 128 requests without keys."""
    return gaussian([0] * 128, device, name="128 empty requests")


def uniform_average(device: torch.device | str = "cpu") -> Case:
    """Fault 9: q = 0, so every key counts the same and the padding of the last tile shows in the denominator. out = mean of V, lse = ln(len)."""
    lens = [1, 63, 64, 65, 943, 944, 945, 1887]
    base = gaussian(lens, device, page_size=944, name="uniform average")
    q = torch.zeros(len(lens), base.num_heads, 576, dtype=torch.bfloat16, device=device)
    case = _against_fp64(base.name, q, base.kv_cache, base.block_table, base.seq_lens)
    expected = torch.tensor([math.log(n) for n in lens], dtype=torch.float64, device=device)
    return replace(case, expected_lse=expected[:, None].expand_as(case.expected_lse), lse_atol=1e-6)


def null_page_batch(device: torch.device | str = "cpu", *, null_page: float = math.nan) -> Case:
    """Fault 11: unused table columns name page 0, which holds junk; the last of the four requests is padding."""
    return gaussian([70, 130, 5, 0], device, stale=NULL_PAGE, null_page=null_page, name="junk in the null page")


def many_splits(device: torch.device | str = "cpu") -> Case:
    """Faults 12 and 15: 44 tiles, cut into 1, 2, 4 and 44 pieces: the error bound holds at each."""
    return gaussian([2816], device, name="44 tiles")


def peak_at(key: int, device: torch.device | str = "cpu", *, num_keys: int = 4096) -> Case:
    """Fault 13: all logits 0 but one at +40, so out = V[key]. Late, it makes every earlier sum shrink by e^-40."""
    generator = torch.Generator().manual_seed(key)
    keys = torch.zeros(num_keys, 576)
    keys[:, :512] = torch.randn(num_keys, 512, generator=generator)
    keys[:, :512] *= 0.5
    q = torch.zeros(1, 12, 576)
    q[..., 512] = 40.0  # the logits come from the 64 columns that are no part of V
    keys[key, 512] = 1.0
    keys = keys.bfloat16().to(device)
    case = _against_fp64(f"peak at key {key}", q.bfloat16().to(device), *paged([keys], 64), scale=1.0)
    exact = keys[key, :512].double().expand_as(case.expected_out[0])[None]
    assert (case.expected_out - exact).abs().max() < 1e-10
    return replace(case, expected_out=exact, out_atol=2.0**-7)


def sink(device: torch.device | str = "cpu", *, heads: int = 12, dtype: torch.dtype = torch.float16) -> Case:
    """A first key without values, whose weight is 2^25 times that of each other key; the answer is what the others add up to."""
    generator = torch.Generator().manual_seed(14)
    keys = torch.zeros(256, 576)
    keys[1:, :512] = 64 + 64 * torch.rand(255, 512, generator=generator)
    keys[0, 512] = 1.0  # the logits come from the 64 columns that are no part of V
    q = torch.zeros(1, heads, 576)
    q[..., 512] = 25.0
    case = _against_fp64("sink", q.to(device, dtype), *paged([keys.to(device, dtype)], 64), scale=math.log(2))
    assert case.expected_out.min() > 4e-4
    return case


def padded_rows(device: torch.device | str = "cpu", *, stale: int = -1) -> Case:
    """Fault 22: requests without keys between real ones, table columns that hold -1 or an id beyond any cache."""
    return gaussian([70, 0, 3, 0], device, stale=stale, name=f"stale columns of {stale}")


def same_tokens_at(page_size: int, device: torch.device | str = "cpu") -> Case:
    """Fault 47: the same tokens give the same answer at every page size."""
    return gaussian([2500, 17, 945, 64], device, page_size=page_size, name=f"pages of {page_size}")


def odd_heads(heads: int, device: torch.device | str = "cpu") -> Case:
    """Fault 62: head counts that fill no tile of rows."""
    return gaussian([300, 0, 65], device, heads=heads, name=f"{heads} heads")


def strided_query(device: torch.device | str = "cpu") -> Case:
    """Fault 68: q_nope from a transposed batched product, its head stride above its row stride; q_pe a slice of a wider tensor."""
    base = gaussian([300, 65, 1], device, name="strided q pair")
    assert isinstance(base.q, torch.Tensor)
    nope = base.q[..., :512].transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.full((*base.q.shape[:2], 192), math.nan, dtype=torch.bfloat16, device=device)
    wide[..., 128:] = base.q[..., 512:]
    return replace(base, q=(nope, wide[..., 128:]))


FAULTS: dict[str, Callable[[torch.device | str], Case]] = {
    "poisoned workspace": poisoned_workspace,
    "fewer keys than splits": fewer_keys_than_splits,
    "one request": repeated_calls,
    "empty request": empty_request,
    "all empty": all_empty,
    "uniform average": uniform_average,
    "null page": null_page_batch,
    "44 tiles": many_splits,
    "stale -1": padded_rows,
    "stale beyond the cache": partial(padded_rows, stale=STALE_PAGE),
    "strided q": strided_query,
    "late peak": partial(peak_at, 4095),
    "peak starts tile 2": partial(peak_at, 64),
    "peak ends tile 2": partial(peak_at, 127),
    "peak first": partial(peak_at, 0),
    **{f"{heads} heads": partial(odd_heads, heads) for heads in (1, 4, 6, 8, 11, 12, 16, 96)},
    **{f"page {size}": partial(same_tokens_at, size) for size in (16, 32, 64, 128, 768, 944, 1024)},
}


def _against_fp64(
    name: str, q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, scale: float = SCALE
) -> Case:
    out, lse = attention(q, kv_cache, block_table, seq_lens, scale)
    return Case(name, q, kv_cache, block_table, seq_lens, out, lse, scale)

"""What the kernels are handed, value by value and address by address. No GPU: the launches are recorded, the tensors lie on the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dense_mla.compiled import LOG2_E, CompiledKernels
from dense_mla.decoder import DenseMLADecoder
from dense_mla.problem import DecodeProblem
from dense_mla.schedule import max_slots

PAGE_SIZE = 16
Query = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def inside(heads: int, rows: int) -> Query:
    """A window of a wider tensor, in every dimension."""
    return torch.randn(rows + 3, heads + 2, 640).bfloat16()[2 : 2 + rows, 1 : 1 + heads, 64:640]


def pair(heads: int, rows: int) -> Query:
    """Two windows of different tensors, the latent part with its heads outermost, as a transposed batched product leaves it."""
    latent = torch.randn(heads, rows + 2, 512).bfloat16().transpose(0, 1)[1 : 1 + rows]
    return latent, torch.randn(rows, heads + 1, 640).bfloat16()[:, 1:, 560:624]


def dense(heads: int, rows: int) -> Query:
    return torch.randn(rows, heads, 576).bfloat16()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Any, ...]]:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    return {}


@pytest.mark.parametrize("query", [inside, pair, dense])
@pytest.mark.parametrize("partial_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize(("heads", "query_len"), [(1, 1), (12, 1), (2, 16), (1, 2)])
def test_views(
    heads: int, query_len: int, requests: int, partial_dtype: torch.dtype, query: Any, launches: dict[str, tuple[Any, ...]]
) -> None:
    kernels = CompiledKernels(print, *(lambda *args, name=name: launches.update({name: args}) for name in ("forward", "merge")), row_tiles=1)
    problem = DecodeProblem(heads, PAGE_SIZE, partial_dtype, query_len=query_len, return_lse=True)
    decoder, rows = DenseMLADecoder(problem, torch.device("cpu"), 8, kernels), requests * query_len
    q, scale = query(heads, rows), 0.25
    out = torch.zeros(rows + 2, heads + 1, 576).bfloat16()[1 : 1 + rows, 1 : 1 + heads, 32:544]
    lse = torch.zeros(rows, heads)
    size = decoder.workspace_size(requests).total_bytes
    storage = torch.zeros(size + 1024 + 101, dtype=torch.uint8)
    workspace = storage[256 + -storage.data_ptr() % 256 :]  # starts inside its storage, and is not even a multiple of 4 long
    kv_cache = torch.randn(4, 32, 576).bfloat16()[1:, :PAGE_SIZE]
    table, lens = torch.zeros(requests, 4, dtype=torch.int32), torch.zeros(requests, dtype=torch.int32)
    schedule = decoder.empty_schedule()
    decoder.run(q, kv_cache, table, lens, schedule=schedule, workspace=workspace, out=out, scale=scale, lse=lse)

    latent, rope = q if isinstance(q, tuple) else (q[..., :512], q[..., 512:])
    cache, q_nope, q_rope, *lookups, to, to_lse, out_partial, lse_partial, scale_log2, ranges = launches["forward"]
    assert cache.data_ptr() == kv_cache.data_ptr() and torch.equal(cache, kv_cache)
    assert torch.equal(q_nope, latent.unflatten(0, (requests, query_len))) and q_nope.data_ptr() == latent.data_ptr()
    assert torch.equal(q_rope, rope.unflatten(0, (requests, query_len))) and q_rope.data_ptr() == rope.data_ptr()
    assert [tensor is given for tensor, given in zip(lookups, (table, lens, None, schedule), strict=True)] == [True] * 4
    assert (scale_log2, ranges) == (scale * LOG2_E, 132)
    assert all(stride % 8 == 0 for tensor in (cache, q_nope, q_rope, to) for stride in tensor.stride()[:-1]), "no tensor map takes these"

    to.copy_(torch.arange(to.numel()).view(to.shape))
    assert torch.equal(out, torch.arange(to.numel()).view(out.shape).bfloat16())
    assert to_lse.data_ptr() == lse.data_ptr() and to_lse.shape == (requests, query_len, heads)

    slots = max_slots(requests, 132)
    assert out_partial.shape == (slots, query_len, heads, 512) and out_partial.dtype == partial_dtype and out_partial.is_contiguous()
    assert lse_partial.shape == (slots, query_len, heads) and lse_partial.dtype == torch.float32 and lse_partial.is_contiguous()
    begin, end = out_partial.data_ptr() - workspace.data_ptr(), out_partial.numel() * partial_dtype.itemsize
    assert begin == 0 and lse_partial.data_ptr() - workspace.data_ptr() == -(-end // 256) * 256
    assert lse_partial.data_ptr() + lse_partial.numel() * 4 <= workspace.data_ptr() + size
    assert [a is b for a, b in zip(launches["merge"][:5], (out_partial, lse_partial, schedule, to, to_lse), strict=True)] == [True] * 5
    assert launches["merge"][5:] == (132, 132)


def test_the_schedule_shares_out_the_merge_that_will_be_launched(launches: dict[str, tuple[Any, ...]]) -> None:
    """Ranges, and of the merge a request's vectors, pieces in flight and CTAs: here 96 rows in two row tiles."""
    kernels = CompiledKernels(lambda *args: launches.update(schedule=args), print, print, row_tiles=2)
    decoder = DenseMLADecoder(DecodeProblem(48, PAGE_SIZE, query_len=2), torch.device("cpu"), 8, kernels)
    table, lens, schedule = torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), decoder.empty_schedule()
    decoder.schedule(lens, table, schedule)
    given, (ranges, *merge_work) = launches["schedule"][:3], launches["schedule"][3:]
    assert [a is b for a, b in zip(given, (lens, table, schedule), strict=True)] == [True] * 3
    assert (ranges, *merge_work) == (66, 96 * 64, 9, 132)
    assert schedule.shape == (8 + 66 * 12 + 132 * 8,)


def test_an_output_whose_rows_share_memory_is_refused(launches: dict[str, tuple[Any, ...]]) -> None:
    kernels = CompiledKernels(*(lambda *args, name=name: launches.update({name: args}) for name in ("schedule", "forward", "merge")), row_tiles=1)
    decoder = DenseMLADecoder(DecodeProblem(12, PAGE_SIZE), torch.device("cpu"), 8, kernels)
    storage = torch.zeros(decoder.workspace_size(3).total_bytes + 256, dtype=torch.uint8)
    arguments = {
        "q": torch.zeros(3, 12, 576, dtype=torch.bfloat16),
        "kv_cache": torch.zeros(4, PAGE_SIZE, 576, dtype=torch.bfloat16),
        "block_table": torch.zeros(3, 4, dtype=torch.int32),
        "seq_lens": torch.zeros(3, dtype=torch.int32),
        "schedule": decoder.empty_schedule(),
        "workspace": storage[-storage.data_ptr() % 256 :],
        "scale": 0.1,
    }
    for shared in (torch.zeros(1, 12, 512).bfloat16().expand(3, 12, 512), torch.zeros(3, 1, 512).bfloat16().expand(3, 12, 512)):
        with pytest.raises(ValueError, match="out must have an address of its own for every value, got strides"):
            decoder.run(**arguments, out=shared)
    assert not launches

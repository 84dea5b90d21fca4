from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dense_mla import DecodeProblem, workspace_size
from dense_mla.problem import MAX_RANGES, MAX_TILE_ROWS
from dense_mla.schedule import MAX_REQUESTS, max_slots
from dense_mla.workspace import ALIGNMENT, workspace_views

HEADS = [1, 3, 8, 12, 64, 96, 128]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("requests", [1, 8, 133, 1024])
def test_fp32_doubles_out_partial_and_nothing_else(heads: int, requests: int) -> None:
    bf16 = workspace_size(DecodeProblem(heads, 64), requests, 132)
    fp32 = workspace_size(DecodeProblem(heads, 64, torch.float32), requests, 132)
    assert fp32 == replace(bf16, out_partial_bytes=2 * bf16.out_partial_bytes)


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.bfloat16, 2), (torch.float32, 4)])
@pytest.mark.parametrize("heads", HEADS)
def test_bytes_of_a_bucket(heads: int, dtype: torch.dtype, itemsize: int) -> None:
    problem = DecodeProblem(heads, 64, dtype)
    size = workspace_size(problem, 8, 132)
    assert size.slots == max_slots(8, problem.num_ranges(132))
    assert size.out_partial_bytes == size.slots * heads * 512 * itemsize
    assert size.lse_partial_bytes == size.slots * heads * 4
    assert 0 <= size.total_bytes - size.out_partial_bytes - size.lse_partial_bytes < 2 * ALIGNMENT


def test_sixteen_heads_on_an_h200_take_under_nine_megabytes_whatever_the_batch() -> None:
    sizes = [workspace_size(DecodeProblem(16, 64, torch.float32), r, 132).total_bytes for r in (1, 133, 1024, 100_000)]
    assert sizes[1] == sizes[2] == sizes[3] < 8.7e6
    assert workspace_size(DecodeProblem(16, 64), 0, 132).total_bytes == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_views_lie_in_the_buffer_and_apart(dtype: torch.dtype) -> None:
    problem = DecodeProblem(11, 64, dtype)
    size = workspace_size(problem, 3, 132)
    canary = 0x5A
    buffer = torch.full((size.total_bytes + 64,), canary, dtype=torch.uint8)
    out_partial, lse_partial = workspace_views(problem, buffer, size.slots)
    assert (out_partial.shape, out_partial.dtype) == ((size.slots, 1, 11, 512), dtype)
    assert (lse_partial.shape, lse_partial.dtype) == ((size.slots, 1, 11), torch.float32)
    assert (lse_partial.data_ptr() - out_partial.data_ptr()) % ALIGNMENT == 0
    out_partial.fill_(1)
    lse_partial.fill_(2)
    assert (out_partial == 1).all() and (lse_partial == 2).all()
    assert (buffer[size.total_bytes :] == canary).all()


def test_a_workspace_that_32_bit_offsets_do_not_reach_is_refused() -> None:
    """128 rows x 32 slots a request: 1,023 requests are 2^31 - 2^21 values, one more would be 2^31."""
    problem = DecodeProblem(128, 64, batch_invariant=True)
    assert workspace_size(problem, 1023, 132).slots * 128 * 512 == 2**31 - 2**21
    with pytest.raises(ValueError, match=r"of 128 rows a request must have at most 1023 requests \(max_num_seqs\), got 1024"):
        workspace_size(problem, 1024, 132)
    assert workspace_size(DecodeProblem(128, 64, query_len=16), 4096, 132).slots == 8  # four ranges, whatever the batch


@pytest.mark.parametrize("sm_count", [1, 132, MAX_RANGES])
def test_32_bit_offsets_reach_every_batch_that_is_cut_by_ranges(sm_count: int) -> None:
    """The most rows and requests, in FP32, on the largest GPU: only batch invariance has a batch that is too large."""
    most = 0
    for heads in (1, 33, 64, 65, 96, 128):
        for query_len in (1, 2, 7, 16):
            for kv_dtype in (torch.bfloat16, torch.float8_e4m3fn):
                problem = DecodeProblem(heads, 64, torch.float32, kv_dtype, query_len)
                most = max(most, workspace_size(problem, MAX_REQUESTS, sm_count).out_partial_bytes // 4)
    assert most <= 2 * MAX_RANGES * MAX_TILE_ROWS * 512 < 2**31

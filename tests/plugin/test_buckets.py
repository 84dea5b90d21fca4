"""Workspace of every decode batch: integers, the look-up and the table."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from dense_mla.problem import DecodeProblem
from dense_mla.workspace import ALIGNMENT
from vllm_dense_mla.buckets import WorkspaceTables, size_buckets


def problem(heads=12, partial_dtype=torch.bfloat16, page_size=64, **rest):
    return DecodeProblem(heads, page_size, partial_dtype, **rest)


def test_a_bucket_for_each_capture_size_and_the_largest_batch():
    table = size_buckets(problem(), [8, 1, 4, 2, 4, 512], max_num_seqs=256, sm_count=132)
    assert [bucket.requests for bucket in table.buckets] == [1, 2, 4, 8, 256]
    # A request in one piece per SM at most; 12 heads; 512 values of 2 bytes, an FP32 LSE.
    assert [bucket.slots for bucket in table.buckets] == [132, 133, 135, 139, 264]
    assert table.buckets[0].out_partial_bytes == 132 * 12 * 512 * 2
    assert table.buckets[0].lse_partial_bytes == 132 * 12 * 4
    assert table.largest is table.buckets[-1]
    assert table.largest.total_bytes == max(bucket.total_bytes for bucket in table.buckets)


def test_no_graphs_leave_the_largest_batch():
    assert [bucket.requests for bucket in size_buckets(problem(), (), 6, 132).buckets] == [6]


@given(
    heads=st.integers(1, 128),
    query_len=st.integers(1, 16),
    invariant=st.booleans(),
    sizes=st.lists(st.integers(1, 1024), max_size=40),
    max_num_seqs=st.integers(1, 2048),
    sm_count=st.integers(1, 200),
)
def test_fp32_doubles_out_partial_and_nothing_else(heads, query_len, invariant, sizes, max_num_seqs, sm_count):
    """Fault 16, bytes of the partials: 2 a value in BF16 and 4 in FP32; the LSE is FP32 in both."""
    modes = {"query_len": query_len, "batch_invariant": invariant}
    assume(not invariant or max_num_seqs * heads * query_len * 32 * 512 < 2**31)  # beyond that: test_workspace.py
    bf16 = size_buckets(problem(heads, **modes), sizes, max_num_seqs, sm_count)
    fp32 = size_buckets(problem(heads, torch.float32, **modes), sizes, max_num_seqs, sm_count)
    for half, full in zip(bf16.buckets, fp32.buckets, strict=True):
        assert (full.requests, full.slots, full.lse_partial_bytes) == (half.requests, half.slots, half.lse_partial_bytes)
        assert full.out_partial_bytes == 2 * half.out_partial_bytes == half.slots * heads * query_len * 512 * 4
    totals = [bucket.total_bytes for bucket in fp32.buckets]
    assert totals == sorted(totals) and all(total % ALIGNMENT == 0 for total in totals)


@given(requests=st.integers(1, 300), query_len=st.integers(1, 16), sizes=st.lists(st.integers(1, 512), max_size=20))
def test_bucket_for_is_the_smallest_that_holds_the_requests(requests, query_len, sizes):
    table = size_buckets(problem(query_len=query_len), sizes, 300, 132)
    bucket = table.bucket_for(requests)
    assert bucket.requests == min(b.requests for b in table.buckets if b.requests >= requests)


def test_capture_sizes_count_tokens():
    """vLLM rounds a size up to whole requests: 8 tokens are two requests of 5, and 512 are more than run at once."""
    table = size_buckets(problem(query_len=5), [1, 2, 4, 8, 16, 512], max_num_seqs=32, sm_count=132)
    assert [bucket.requests for bucket in table.buckets] == [1, 2, 4, 32]
    # 12 heads x 5 tokens are 60 rows, one tile.
    assert [bucket.slots for bucket in table.buckets] == [132, 133, 135, 163]
    assert table.buckets[0].out_partial_bytes == 132 * 60 * 512 * 2


def test_batch_invariance_reserves_every_piece_of_every_request():
    largest = size_buckets(problem(batch_invariant=True), (), 32, 132).largest
    assert (largest.slots, largest.out_partial_bytes) == (32 * 32, 32 * 32 * 12 * 512 * 2)


def test_tables_show_the_buckets_that_graphs_have_and_reserve_the_largest():
    """Two query tokens in between: no graph is captured for them, so that the table names their largest bucket alone."""
    tables = WorkspaceTables({n: size_buckets(problem(query_len=n), [1, 6], 8, 132) for n in (1, 2, 3)})
    shown = [tuple(map(int, line.split()[:3])) for line in str(tables).splitlines()[1:]]
    assert shown == [(1, 1, 1), (1, 6, 6), (1, 8, 8), (2, 8, 16), (3, 1, 3), (3, 2, 6), (3, 8, 24)]
    assert tables.largest is tables.by_query_len[3].largest


def test_million_token_context_with_1024_rows_is_bounded():
    """Fault 38, a reservation of 32 GiB: rows and splits are capped together, and context length is not in the formula at all."""
    largest = size_buckets(problem(12, torch.float32), range(1, 1025), max_num_seqs=1024, sm_count=132).largest
    assert largest.slots == 2 * 132
    assert (largest.out_partial_bytes, largest.lse_partial_bytes) == (264 * 12 * 512 * 4, 264 * 12 * 4)
    assert largest.total_bytes == 6_500_864  # the LSE rounded up to 256 bytes
    most_heads = size_buckets(problem(128, torch.float32), (), max_num_seqs=1024, sm_count=132).largest
    assert most_heads.total_bytes < 40 * 2**20


def test_page_size_does_not_change_the_bytes():
    """A layer reserves before it knows the page size."""
    assert size_buckets(problem(page_size=944), [1, 8], 64, 132) == size_buckets(problem(page_size=16), [1, 8], 64, 132)


def test_too_many_requests():
    with pytest.raises(ValueError, match=r"^a decode batch must have at most 12 requests \(max_num_seqs\), got 13$"):
        size_buckets(problem(), [1, 2], 12, 132).bucket_for(13)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((1, 2), 0, 132), "max_num_seqs must be from 1 to 4096, got 0"),
        (((1, 2), 4097, 132), "max_num_seqs must be from 1 to 4096, got 4097"),
        (((1, 2), 8, 0), "sm_count must be at least 1, got 0"),
        (((1, 0), 8, 132), "capture_sizes must be at least 1, got 0"),
    ],
)
def test_bad_sizes(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        size_buckets(problem(), *arguments)


def test_table_text():
    assert str(size_buckets(problem(12, torch.float32), [1, 8], 256, 132)) == (
        "query tokens  requests  rows  slots  out_partial bytes  lse_partial bytes  total bytes\n"
        "           1         1     1    132          3,244,032              6,336    3,250,432\n"
        "           1         8     8    139          3,416,064              6,672    3,422,976\n"
        "           1       256   256    264          6,488,064             12,672    6,500,864"
    )


def test_table_is_frozen():
    with pytest.raises(FrozenInstanceError):
        size_buckets(problem(), (), 1, 132).buckets = ()


def test_buckets_do_not_need_vllm():
    """`vllm-dense-mla plan` sizes a deployment where nothing is deployed."""
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "kernels"), os.environ.get("PYTHONPATH", "")])}
    code = "import sys, vllm_dense_mla.buckets, vllm_dense_mla.decode_steps; print(*({'vllm', 'cutlass'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout.split() == []

"""The kernels on a GPU in every mode that vLLM can ask for: several query tokens, context ranks, batch invariance, FP16."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import cases
from dense_mla.decoder import DenseMLADecoder
from dense_mla.problem import DecodeProblem
from dense_mla.reference import attention
from dense_mla.schedule import plan
from steps import DEVICE, DTYPES, Step, captured, decode
from test_decoder import assert_same_plan, numbered_table

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("query_len", [2, 3, 4, 5, 6, 7, 8, 16])
@pytest.mark.parametrize("heads", [8, 12])
def test_query_lengths(heads: int, query_len: int) -> None:
    """Fault 66. Some requests are shorter than the block of query tokens, whose first rows then see nothing."""
    lens = [0, 1, query_len - 1, query_len, 63, 64, 65, 64 + query_len - 1, 5000, 20_000]
    decode(cases.gaussian(lens, DEVICE, heads=heads, query_len=query_len), torch.bfloat16)


@pytest.mark.parametrize(("heads", "query_len"), [(1, 16), (3, 5), (16, 4), (24, 3), (48, 2), (64, 2), (96, 3), (128, 2)])
def test_row_tiles(heads: int, query_len: int) -> None:
    decode(cases.gaussian([0, 1, 130, 5000], DEVICE, heads=heads, query_len=query_len), torch.float32)


@pytest.mark.parametrize("page_size", [16, 48, 944])
def test_query_tokens_across_pages(page_size: int) -> None:
    decode(cases.gaussian([3, 945, 1888, 5000], DEVICE, heads=12, query_len=4, page_size=page_size), torch.bfloat16)


@pytest.mark.parametrize("query_len", [2, 7])
def test_draft_blocks_see_every_key(query_len: int) -> None:
    decode(cases.gaussian([0, 5, 64, 65, 5000], DEVICE, heads=12, query_len=query_len, causal=False), torch.bfloat16)


@pytest.mark.parametrize("seq_len", [218_000, 303_000])
def test_long_verification(seq_len: int) -> None:
    """Fault 81: verification of eight tokens at the context lengths of the report."""
    decode(cases.gaussian([seq_len], DEVICE, heads=8, query_len=8), torch.bfloat16)


def test_the_table_is_indexed_by_request_and_not_by_row() -> None:
    """Fault 64: 256 requests of 3 tokens; what lies behind the table's 256 rows is page ids that fault."""
    case = cases.gaussian([65] * 256, DEVICE, heads=8, query_len=3)
    storage = torch.full((1024, case.block_table.shape[1]), cases.STALE_PAGE, dtype=torch.int32, device=DEVICE)
    storage[:256] = case.block_table
    decode(replace(case, block_table=storage[:256]), torch.bfloat16)


def test_verification_of_high_pages() -> None:
    """Fault 44: eight query tokens, and a page stride whose product with the page id passes 2^31 elements."""
    base = cases.gaussian([3 * 944], DEVICE, heads=8, query_len=8, page_size=944)
    kv_cache = torch.full((4096, 944, 576), math.nan, dtype=torch.bfloat16, device=DEVICE)
    table = base.block_table.clone()
    for column, page in enumerate((4095, 3949, 1975)):
        kv_cache[page] = base.kv_cache[base.block_table[0, column]]
        table[0, column] = page
    high = decode(replace(base, kv_cache=kv_cache, block_table=table), torch.bfloat16)
    assert torch.equal(high.result, decode(base, torch.bfloat16).result)


def test_padded_verification_rows_in_a_graph() -> None:
    """A bucket of 8 requests captured with nothing in it, replayed with 5; the padded requests' rows become 0."""
    case = cases.gaussian([5000, 7, 64, 300, 1, 0, 0, 0], DEVICE, heads=12, query_len=4)
    eager = decode(case, torch.bfloat16)
    step = Step.of(replace(case, seq_lens=torch.zeros_like(case.seq_lens)), torch.bfloat16)
    graph = captured(step)
    step.case.seq_lens.copy_(case.seq_lens)
    step.out.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(step.result, eager.result) and torch.equal(step.lse, eager.lse)
    assert (step.result[20:] == 0).all() and (step.lse[20:] == -math.inf).all()


@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (8, 1), (2, 16), (3, 5)])
def test_context_ranks(world: int, interleave: int, query_len: int) -> None:
    """Faults 36, 56, 60: every rank right by itself, empty ones included; merged by natural log they are the undivided answer."""
    lens = [1, 3, query_len, 70, 1000, 5000]
    whole, ranks = cases.context_shards(lens, world, interleave, DEVICE, heads=96, query_len=query_len)
    steps = [decode(case, torch.float32) for case in ranks]
    lse = torch.stack([step.lse.double() for step in steps])
    weights = (lse - lse.logsumexp(0)).exp()[..., None]
    merged = (weights * torch.stack([step.result.double() for step in steps])).nan_to_num(0.0).sum(0)
    error = ((merged - whole.expected_out).norm() / whole.expected_out.norm()).item()
    assert error < 2.5e-3
    visible = whole.expected_lse > -math.inf
    assert torch.allclose(lse.logsumexp(0)[visible], whole.expected_lse[visible], atol=2e-5, rtol=0)


def test_two_ranks_of_uniform_keys_merge_to_four_fifths() -> None:
    """Fault 56: sums 2 and 8, values 0 and 1. A base-2 LSE read as a natural one would give 0.7233."""
    results = []
    for keys, value in ((2, 0.0), (8, 1.0)):
        latent = torch.zeros(keys, 576, dtype=torch.bfloat16, device=DEVICE)
        latent[:, :512] = value
        q = torch.zeros(1, 12, 576, dtype=torch.bfloat16, device=DEVICE)
        cache = cases.paged([latent], 64)
        step = decode(cases.Case("uniform", q, *cache, *attention(q, *cache, 1.0)), torch.bfloat16)
        results.append((step.lse.double(), step.result.double()))
    weights = torch.stack([lse for lse, _ in results]).softmax(0)[..., None]
    merged = (weights * torch.stack([out for _, out in results])).sum(0)
    assert torch.allclose(merged, torch.full_like(merged, 0.8), atol=1e-6)


@pytest.mark.parametrize("partial_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "query_len"), [(12, 1), (8, 4), (96, 1)])
def test_a_row_has_the_same_bits_in_any_batch(heads: int, query_len: int, partial_dtype: torch.dtype) -> None:
    """Faults 18 and 20: one request alone, and as the first, a middle and the last of batches of 2 to 256, eager and in a graph."""
    row = cases.gaussian([5000], DEVICE, heads=heads, query_len=query_len, seed=7)
    alone = decode(row, partial_dtype, batch_invariant=True)
    for batch in (2, 32, 256):
        for place in {0, batch // 2, batch - 1}:
            step = Step.of(batched(row, batch, place), partial_dtype, batch_invariant=True)
            graph = captured(step)
            for run in (lambda: (step.plan(), step.run()), graph.replay):  # noqa: B023
                step.out.fill_(math.nan)
                run()
                rows = slice(place * query_len, (place + 1) * query_len)
                assert torch.equal(step.result[rows], alone.result), f"request {place} of {batch}"
                assert torch.equal(step.lse[rows], alone.lse)


def batched(row: cases.Case, batch: int, place: int) -> cases.Case:
    """The request of `row` at a place among others of mixed lengths, which read its pages too."""
    lens = torch.tensor([(37 * i) % 5000 for i in range(batch)], dtype=torch.int32, device=DEVICE)
    lens[place] = row.seq_lens[0]
    q = torch.randn(batch * row.query_len, row.num_heads, 576, device=DEVICE).bfloat16()
    q[place * row.query_len : (place + 1) * row.query_len] = row.q
    return replace(row, q=q, seq_lens=lens, block_table=row.block_table.expand(batch, -1))


@pytest.mark.parametrize("partial_dtype", DTYPES, ids=str)
def test_batch_invariant_answers_are_right(partial_dtype: torch.dtype) -> None:
    decode(cases.gaussian([0, 1, 64, 256, 257, 8191, 8192, 8193, 40_000], DEVICE), partial_dtype, batch_invariant=True)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_more_pieces_at_replay_than_at_capture(batch_invariant: bool) -> None:
    """Fault 32: captured with requests of one key, replayed with the pieces of 40,000; nothing is written behind the workspace."""
    case = cases.gaussian([40_000, 257, 0, 5000], DEVICE)
    step = Step.of(replace(case, seq_lens=torch.ones_like(case.seq_lens)), torch.bfloat16, batch_invariant=batch_invariant)
    graph = captured(step)
    step.case.seq_lens.copy_(case.seq_lens)
    step.out.fill_(math.nan)
    graph.replay()
    replace(step, case=case).check()


def test_more_split_requests_than_the_schedule_kernel_has_threads() -> None:
    """1,100 requests of five tiles, two pieces each: their blocks are laid out in two passes. Whole ones and empty ones between them."""
    lens = [257 + 64 * (i % 3) if i % 7 else i % 2 for i in range(1284)]
    assert sum(n > 256 for n in lens) == 1100
    decode(cases.gaussian(lens, DEVICE, heads=1), torch.bfloat16, batch_invariant=True, max_requests=len(lens))


def test_the_device_plans_invariant_pieces_as_the_host_does() -> None:
    decoder = DenseMLADecoder.prepare(DecodeProblem(12, 64, batch_invariant=True), DEVICE, max_requests=2200)
    schedule = decoder.empty_schedule()
    for lens in ([0], [1], [5000], [40_000, 0, 3, 8191, 8192, 8193] * 20, [1_048_576], [300] * 1024, [300, 0] * 1100, [0, 0, 5000, 0]):
        table = numbered_table(len(lens), -(-max(lens) // 64))
        decoder.schedule(torch.tensor(lens, dtype=torch.int32, device=DEVICE), table, schedule)
        expected = plan(lens, 64, decoder.num_ranges, batch_invariant=True)
        assert_same_plan(schedule.tolist(), expected, decoder, lens, table)


@pytest.mark.parametrize("heads", [12, 64])
def test_fp16_models(heads: int) -> None:
    decode(cases.gaussian([0, 1, 65, 945, 5000], DEVICE, heads=heads, dtype=torch.float16), torch.float32)
    decode(cases.sink(DEVICE, heads=heads), torch.float32)


def test_limits() -> None:
    """Just under each limit it runs; just over it one line says so."""
    decode(cases.gaussian([65] * 2, DEVICE, heads=128, query_len=16), torch.bfloat16)
    for facts, message in (({"num_heads": 129}, "num_heads must be from 1 to 128"), ({"query_len": 17}, "query_len must be from 1 to 16")):
        with pytest.raises(ValueError, match=message):
            DecodeProblem(**{"num_heads": 8, "page_size": 64} | facts)
    step = Step.of(cases.gaussian([1] * 4096, DEVICE, heads=1), torch.bfloat16, max_requests=4096)
    step.plan()
    step.run()
    step.check()
    with pytest.raises(ValueError, match="max_requests must be from 1 to 4096, got 4097"):
        DenseMLADecoder.prepare(step.decoder.problem, DEVICE, max_requests=4097)


def test_decoders_share_a_workspace_on_one_stream() -> None:
    """Two problems in turn, back to back on a stream of their own: whoever starts early leaves the partials alone until the kernel before it ends."""
    steps = [Step.of(cases.gaussian([40_000, 3, 7000], DEVICE, heads=heads), torch.float32) for heads in (12, 96)]
    assert steps[0].workspace.numel() < steps[1].workspace.numel()
    steps[0].workspace = steps[1].workspace
    outs = [[torch.full_like(step.result, math.nan) for _ in range(50)] for step in steps]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in steps:
            step.plan()
        for pair in zip(*outs, strict=True):
            for step, out in zip(steps, pair, strict=True):
                step.run(out=out)
        for step in steps:
            step.run()
    for step, repeats in zip(steps, outs, strict=True):
        step.check()
        assert all(torch.equal(out, step.result) for out in repeats)

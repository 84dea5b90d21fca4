"""The kernels on a GPU, against FP64: every input of cases.py, every head count and page size, graphs, addresses, repeats."""

from __future__ import annotations

import math
import random
from dataclasses import astuple, replace

import pytest
import torch

import cases
from dense_mla import reference
from dense_mla.decoder import DenseMLADecoder
from dense_mla.kernel_cache import KernelCache
from dense_mla.merge_plan import merge_shares
from dense_mla.paged_kv import PageTiling
from dense_mla.problem import DecodeProblem
from dense_mla.reference import attention, relative_l2
from dense_mla.schedule import HEADER_WORDS, RANGE_WORDS, SHARE_WORDS, SPLIT_WORDS, Schedule, plan
from steps import CANARY_BYTES, DEVICE, DTYPES, Step, captured, decode

pytestmark = pytest.mark.gpu

MIXED_LENGTHS = [0, 1, 63, 64, 65, 943, 944, 945, 5000, 40_000]


@pytest.mark.parametrize("partial_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", cases.FAULTS)
def test_known_faults(name: str, partial_dtype: torch.dtype) -> None:
    decode(cases.FAULTS[name](DEVICE), partial_dtype)


@pytest.mark.parametrize("partial_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, 3, 6, 8, 11, 12, 16, 24, 32, 64, 96, 128])
def test_heads(heads: int, partial_dtype: torch.dtype) -> None:
    decode(cases.gaussian(MIXED_LENGTHS, DEVICE, heads=heads), partial_dtype)


@pytest.mark.parametrize("partial_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 528, 768, 944])
def test_page_sizes(page_size: int, partial_dtype: torch.dtype) -> None:
    decode(cases.gaussian(MIXED_LENGTHS, DEVICE, heads=12, page_size=page_size), partial_dtype)


@pytest.mark.parametrize("heads", [12, 48, 96])
def test_without_lse(heads: int) -> None:
    decode(cases.gaussian(MIXED_LENGTHS, DEVICE, heads=heads), torch.bfloat16, return_lse=False)


def test_many_requests_whole_and_split() -> None:
    rng = random.Random(3)
    decode(cases.gaussian([rng.choice([0, rng.randint(1, 900)]) for _ in range(256)], DEVICE, heads=8), torch.bfloat16)


@pytest.mark.parametrize(("page_size", "heads"), [(16, 12), (32, 1), (48, 64), (64, 16), (80, 128), (944, 12)])
def test_the_device_plans_what_the_host_plans(page_size: int, heads: int) -> None:
    """Also the same for both partial dtypes: the schedule kernel is not even told."""
    rng = random.Random(page_size)
    step = Step.of(cases.gaussian([1], DEVICE, heads=heads, page_size=page_size), torch.bfloat16, max_requests=4096)
    batches = [
        [rng.choice([0, rng.randint(0, longest)]) for _ in range(rng.randint(1, size))]
        for longest in (1, 70, 5000, 300_000)
        for size in (3, 40, 300)
    ]
    batches += [[4096] * 128, [4096] * 132, [4096] * 256, [5000] * 4096, [0] * 4096, [1_048_576]]
    for seq_lens in batches:
        step.schedule.fill_(-7)
        table = numbered_table(len(seq_lens), -(-max(seq_lens) // page_size))
        step.decoder.schedule(torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE), table, step.schedule)
        expected = plan(seq_lens, page_size, step.decoder.num_ranges)
        assert_same_plan(step.schedule.tolist(), expected, step.decoder, seq_lens, table)


def numbered_table(requests: int, width: int) -> torch.Tensor:
    """A block table in which every entry is another page."""
    return torch.arange(requests * (width + 1), dtype=torch.int32, device=DEVICE).view(requests, width + 1)


def assert_same_plan(words: list[int], expected: Schedule, decoder: DenseMLADecoder, seq_lens: list[int], table: torch.Tensor) -> None:
    problem, num_ranges, num_ctas = decoder.problem, decoder.num_ranges, decoder.sm_count
    pages, tiling = table.tolist(), PageTiling(problem.page_size)
    for index, r in enumerate(expected.ranges):
        at = HEADER_WORDS + index * RANGE_WORDS
        first, first_tile, last, end_tile, first_slot, last_slot = words[at : at + 6]
        if r.first_request <= r.last_request:
            assert (first, first_tile, last, end_tile) == (r.first_request, r.first_tile, r.last_request, r.end_tile)
            assert (first_slot, last_slot) == (r.first_slot, r.last_slot)
            if r.first_tile < tiling.num_tiles(seq_lens[first]):
                assert words[at + 6] == pages[first][tiling.first_key(r.first_tile) // tiling.page_size]
        else:
            assert last < first, "an idle CTA has no request"
    assert words[0] == len(expected.splits)
    at = HEADER_WORDS + num_ranges * RANGE_WORDS
    for share in merge_shares(expected.splits, problem.rows, num_ctas, problem.batch_invariant):
        assert words[at : at + SHARE_WORDS - 1] == list(astuple(share))
        at += SHARE_WORDS
    for index, s in enumerate(expected.splits):
        assert words[at : at + SPLIT_WORDS] == [s.request, s.first_slot, s.pieces, index]
        at += SPLIT_WORDS


@pytest.mark.parametrize("partial_dtype", DTYPES, ids=str)
def test_any_number_of_pieces_repeats_to_the_bit(partial_dtype: torch.dtype) -> None:
    """Fault 4: identical calls at every split count from 1 to 32, 100 of them at some."""
    for tiles in range(1, 33):
        step = Step.of(cases.gaussian([64 * tiles], DEVICE, heads=16, seed=tiles), partial_dtype)
        step.plan()
        assert step.schedule[0].item() == (tiles > 1)
        step.run()
        assert_as_accurate_as_the_reference(step)
        first = step.result.clone()
        for repeat in range(100 if tiles in (1, 16, 17, 31) else 5):
            step.out.fill_(math.nan)
            step.workspace[:-CANARY_BYTES] = (0x00, 0x7F, 0xFF)[repeat % 3]
            step.run()
            assert torch.equal(step.result, first), f"{tiles} pieces, repeat {repeat}"


def assert_as_accurate_as_the_reference(step: Step) -> None:
    """Within 3 % of the error of the same arithmetic in torch: few keys share the error of a BF16 P, which can then exceed 1.2 roundings."""
    problem, case = step.decoder.problem, step.case
    out, _ = reference.decode(
        problem, case.q, case.kv_cache, case.block_table, case.seq_lens, scale=case.scale, num_ranges=step.decoder.num_ranges
    )
    assert relative_l2(step.result, case.expected_out) <= 1.03 * relative_l2(out, case.expected_out)


def test_fp32_partials_cost_no_accuracy_over_a_single_piece() -> None:
    """Fault 15: 44 tiles in one piece and in 44. FP32 partials stay within 2 % of the single piece's error; BF16 within its bound."""
    one = cases.many_splits(DEVICE)
    errors = {}
    for partial_dtype in DTYPES:
        split = decode(one, partial_dtype)
        assert split.schedule[0].item() == 1
        errors[partial_dtype] = relative_l2(split.result, one.expected_out)
    batch = cases.gaussian([2816] * 132, DEVICE)
    whole = Step.of(replace(batch, q=one.q.expand(132, -1, -1), kv_cache=one.kv_cache, block_table=one.block_table.expand(132, -1)), torch.float32)
    whole.plan()
    whole.run()
    assert whole.schedule[0].item() == 0
    assert errors[torch.float32] <= 1.02 * relative_l2(whole.result[:1], one.expected_out)


@pytest.mark.parametrize("partial_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [12, 96])
def test_captured_at_one_key_replayed_at_forty_thousand_and_back(heads: int, partial_dtype: torch.dtype) -> None:
    """Fault 31: what capture saw decides nothing."""
    long = cases.gaussian([40_000, 7, 64, 5000], DEVICE, heads=heads)  # at capture each has a key, and so needs a page
    eager = decode(long, partial_dtype)
    step = Step.of(replace(long, seq_lens=torch.ones_like(long.seq_lens)), partial_dtype)
    graph = captured(step)
    for lens in (long.seq_lens, torch.ones_like(long.seq_lens), long.seq_lens):
        step.case.seq_lens.copy_(lens)
        step.out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        if lens is long.seq_lens:
            assert torch.equal(step.result, eager.result) and torch.equal(step.lse, eager.lse)
            assert step.schedule[0].item() > 0
        else:
            first = torch.stack([long.kv_cache[page, 0, :512] for page in long.block_table[:, 0].tolist()])
            assert torch.equal(step.result, first[:, None].expand(-1, heads, -1)), "one key: its value, exactly"


def test_buckets_captured_once_replay_in_any_order() -> None:
    """Faults 23, 25 and 29: four graphs share workspace and schedule; each equals eager whatever ran between, and padded rows are 0, not NaN."""
    lengths = {1: [3000], 2: [70, 0], 4: [5000, 1, 0, 900], 8: [64, 65, 0, 1, 2000, 300, 7, 0]}
    eager = {size: decode(cases.gaussian(lens, DEVICE), torch.bfloat16) for size, lens in lengths.items()}
    decoder = eager[8].decoder
    shared = torch.empty(decoder.workspace_size(8).total_bytes + CANARY_BYTES, dtype=torch.uint8, device=DEVICE)
    steps, graphs = {}, {}
    for size in (1, 2, 4, 8):
        case = eager[size].case
        step = Step.of(replace(case, seq_lens=torch.zeros_like(case.seq_lens)), torch.bfloat16)
        steps[size] = replace(step, workspace=shared, schedule=eager[8].schedule)
        graphs[size] = captured(steps[size])
    for size in (8, 1, 4, 2, 8):
        steps[size].case.seq_lens.copy_(eager[size].case.seq_lens)
        steps[size].out.fill_(math.nan)
        graphs[size].replay()
        torch.cuda.synchronize()
        assert torch.equal(steps[size].result, eager[size].result)
        assert (steps[size].result[eager[size].case.seq_lens == 0] == 0).all()


def test_pages_past_four_gibibytes() -> None:
    """Faults 41 and 42: page ids whose element or byte offsets pass 2^31 and 2^32. The pages where a wrapped offset would land are poison."""
    page_size, ids = 944, [0, 1974, 1975, 3949, 3950, 4095]
    base = cases.gaussian([len(ids) * page_size - 100], DEVICE, page_size=page_size)
    kv_cache = torch.full((4096, page_size, 576), math.nan, dtype=torch.bfloat16, device=DEVICE)
    table = base.block_table.clone()
    for column, page in enumerate(ids):
        kv_cache[page] = base.kv_cache[base.block_table[0, column]]
        table[0, column] = page
    high, low = decode(replace(base, kv_cache=kv_cache, block_table=table), torch.float32), decode(base, torch.float32)
    assert torch.equal(high.result, low.result)


@pytest.mark.parametrize("page_size", [16, 64, 768])
def test_pages_apart_and_an_offset(page_size: int) -> None:
    """Fault 69: a cache whose pages lie further apart than they are long, that starts inside its storage, as a block-outermost layout has it."""
    base = cases.gaussian([5000, 1, 0, 945], DEVICE, page_size=page_size)
    pages = base.kv_cache.shape[0]
    storage = torch.full((pages * (page_size * 576 * 2 + 64) + 72,), math.nan, dtype=torch.bfloat16, device=DEVICE)
    apart = storage.as_strided(base.kv_cache.shape, (page_size * 576 * 2 + 64, 576, 1), 72)
    apart.copy_(base.kv_cache)
    assert torch.equal(decode(replace(base, kv_cache=apart), torch.bfloat16).result, decode(base, torch.bfloat16).result)


def test_query_and_table_strides() -> None:
    base = cases.gaussian([300, 0, 945, 64], DEVICE)
    wide_q = torch.full((5, 14, 600), math.nan, dtype=torch.bfloat16, device=DEVICE)[1:, 1:13, 8:584]
    wide_q.copy_(base.q)
    wide_table = torch.full((6, base.block_table.shape[1] + 3), 2_147_480_000, dtype=torch.int32, device=DEVICE)
    wide_table[:4, : base.block_table.shape[1]] = base.block_table
    moved = decode(replace(base, q=wide_q, block_table=wide_table), torch.bfloat16)
    assert torch.equal(moved.result, decode(base, torch.bfloat16).result)


def test_reused_pages_hold_other_layers_state() -> None:
    """Fault 46: rows past the last key hold FP32 bit patterns of another layer, some of them NaN and infinity in BF16."""
    base = cases.gaussian([100, 944, 1000], DEVICE, page_size=944)
    dirty = torch.randn(base.kv_cache.numel() // 2, device=DEVICE).mul_(1e30).view(torch.bfloat16).view(base.kv_cache.shape).clone()
    dirty.view(-1)[::97] = math.inf
    for r, seq_len in enumerate(base.seq_lens.tolist()):
        for column in range(-(-seq_len // 944)):
            page, rows = base.block_table[r, column], min(944, seq_len - column * 944)
            dirty[page, :rows] = base.kv_cache[page, :rows]
    assert torch.equal(decode(replace(base, kv_cache=dirty), torch.bfloat16).result, decode(base, torch.bfloat16).result)


@pytest.mark.parametrize("heads", [12, 64])
def test_a_nan_that_a_request_sees_shows(heads: int) -> None:
    """In every row of that request, and in no other request: a broken cache must not pass for an answer."""
    case = cases.gaussian([300, 300, 5000], DEVICE, heads=heads)
    case.kv_cache[case.block_table[1, 2], 5] = math.nan
    step = Step.of(case, torch.bfloat16)
    step.plan()
    step.run()
    assert step.result[1].isnan().all() and step.lse[1].isnan().all()
    assert not step.result[[0, 2]].isnan().any() and not step.lse[[0, 2]].isnan().any()


def test_nothing_is_allocated_or_compiled_after_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 73: after a first step, ten more compile no kernel, load none and take no memory."""
    import cutlass.cute as cute

    step = decode(cases.gaussian(MIXED_LENGTHS, DEVICE), torch.bfloat16)
    monkeypatch.setattr(cute, "compile", lambda *args, **kwargs: pytest.fail("compiled after prepare"))
    monkeypatch.setattr(KernelCache, "fetch", lambda *args: pytest.fail("loaded after prepare"))
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(10):
        step.plan()
        step.run()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert DenseMLADecoder.prepare(step.decoder.problem, DEVICE, max_requests=7).num_ranges == step.decoder.num_ranges


def test_preparing_something_new_during_capture_is_refused() -> None:
    problem = DecodeProblem(7, 1040)
    warned = pytest.warns(UserWarning, match="CUDA Graph is empty")
    with warned, pytest.raises(RuntimeError, match="must run before CUDA graph capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        DenseMLADecoder.prepare(problem, DEVICE, max_requests=1)


def test_two_streams_at_once() -> None:
    """Fault 39: two decodes in flight, each with its own workspace and schedule, never wait for each other."""
    steps = [Step.of(cases.gaussian([40_000, 3, 7000], DEVICE, seed=seed), torch.float32) for seed in (1, 2)]
    streams = [torch.cuda.Stream() for _ in steps]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(50):
        for step, stream in zip(steps, streams, strict=True):
            with torch.cuda.stream(stream):
                step.plan()
                step.run()
    for step in steps:
        step.check()


def test_the_second_device_is_used_where_the_tensors_are() -> None:
    """Fault 71: compiled for, and launched on, the device of the tensors and not the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    second = torch.device("cuda", 1)
    case = cases.gaussian([5000, 0, 64], second)
    decoder = DenseMLADecoder.prepare(DecodeProblem(12, 64), second, max_requests=3)
    schedule = decoder.empty_schedule()
    workspace = torch.empty(decoder.workspace_size(3).total_bytes, dtype=torch.uint8, device=second)
    out = torch.full((3, 12, 512), math.nan, dtype=torch.bfloat16, device=second)
    decoder.schedule(case.seq_lens, case.block_table, schedule)
    decoder.run(case.q, case.kv_cache, case.block_table, case.seq_lens, schedule=schedule, workspace=workspace, out=out, scale=case.scale)
    case.check(out, None, torch.bfloat16)


def test_the_exact_reference_agrees_with_torch() -> None:
    """The oracle itself, once, against torch's own attention in FP64."""
    case = cases.gaussian([100, 200], DEVICE, heads=4)
    out, _ = attention(case.q, case.kv_cache, case.block_table, case.seq_lens, case.scale)
    pages = case.block_table[1, :4].long()
    keys = case.kv_cache[pages].reshape(-1, 576)[:200].double()
    expected = torch.nn.functional.scaled_dot_product_attention(
        case.q[1, :, None].double(), keys.expand(4, -1, -1), keys[:, :512].expand(4, -1, -1), scale=case.scale
    )
    assert torch.allclose(out[1], expected[:, 0], rtol=1e-12, atol=1e-12)

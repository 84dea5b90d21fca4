"""The kernels on a GPU with an E4M3 cache, against FP64 on the dequantised cache, and against the BF16 kernels on the same values."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import cases
from cases import Case
from dense_mla.reference import attention, relative_l2
from steps import DEVICE, DTYPES, Step, captured, decode

pytestmark = pytest.mark.gpu

MIXED_LENGTHS = [0, 1, 63, 64, 65, 127, 128, 129, 943, 944, 945, 5000, 40_000]
E4M3 = torch.float8_e4m3fn
NAN_CODES = (0x7F, 0xFF)


def quantised(case: Case, k_scale: float = 1.0, **changes: Any) -> Case:
    """The case on an E4M3 cache of its keys divided by `k_scale`. What was NaN becomes both NaN codes in turn."""
    codes = (case.kv_cache.float() / k_scale).to(E4M3).view(torch.uint8)
    last = torch.arange(576, device=codes.device) % 2 == 1
    codes = torch.where((codes & 0x7F == 0x7F) & last, codes | 0x80, codes)
    case = replace(case, kv_cache=codes.view(E4M3), k_scale=k_scale, **changes)
    out, lse = attention(
        case.q, case.kv_cache, case.block_table, case.seq_lens, case.scale,
        query_len=case.query_len, causal=case.causal, context=case.context, total_lens=case.total_lens, k_scale=k_scale,
    )  # fmt: skip
    return replace(case, expected_out=out, expected_lse=lse)


def dequantised(case: Case) -> Case:
    """The case on a BF16 cache of the same values."""
    values = (case.kv_cache.float() * case.k_scale).bfloat16()
    out, lse = attention(case.q, values, case.block_table, case.seq_lens, case.scale)
    return replace(case, kv_cache=values, expected_out=out, expected_lse=lse)


def error(step: Step) -> float:
    return relative_l2(step.result, step.case.expected_out)


@pytest.mark.parametrize("partial_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", cases.FAULTS)
def test_known_faults(name: str, partial_dtype: torch.dtype) -> None:
    decode(quantised(cases.FAULTS[name](DEVICE)), partial_dtype)


@pytest.mark.parametrize("partial_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, 8, 12, 16, 24, 32, 33, 64, 96, 128])
def test_heads(heads: int, partial_dtype: torch.dtype) -> None:
    decode(quantised(cases.gaussian(MIXED_LENGTHS, DEVICE, heads=heads)), partial_dtype)


@pytest.mark.parametrize("heads", [16, 24])
@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 80, 128, 944])
def test_page_sizes(heads: int, page_size: int) -> None:
    decode(quantised(cases.gaussian(MIXED_LENGTHS, DEVICE, heads=heads, page_size=page_size)), torch.bfloat16)


@pytest.mark.parametrize("partial_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k_scale", [0.06, 1.0, 2.5])
@pytest.mark.parametrize("heads", [8, 16, 32])
def test_scales_and_the_error_of_bf16(heads: int, k_scale: float, partial_dtype: torch.dtype) -> None:
    """Fault 53. The scale counts in the scores, rope part included, and in the values; the error is the BF16 kernel's on the same values."""
    fp8 = quantised(cases.gaussian([5000, 300, 64, 20_000], DEVICE, heads=heads), k_scale)
    bf16 = Step.of(dequantised(fp8), partial_dtype)
    bf16.plan()
    bf16.run()
    assert error(decode(fp8, partial_dtype)) <= 1.1 * error(bf16)


def one_key_above(num_keys: int, log2_above: float, top_value: float, rest: torch.Tensor) -> Case:
    """All logits 0 but one, which is ln 2 times `log2_above` higher; the keys beside it have the values `rest`."""
    keys = torch.zeros(num_keys, 576)
    keys[:, :512] = rest
    keys[num_keys // 3, :512] = top_value
    keys[num_keys // 3, 512] = 1.0
    q = torch.zeros(1, 12, 576)
    q[..., 512] = log2_above * math.log(2)  # to a rounding of BF16: the expected answer is of what it becomes
    base = cases.gaussian([num_keys], DEVICE)
    cache = cases.paged([keys.bfloat16().to(DEVICE)], 64)
    return quantised(replace(base, q=q.bfloat16().to(DEVICE), kv_cache=cache[0], block_table=cache[1], seq_lens=cache[2], scale=1.0))


@pytest.mark.parametrize("partial_dtype", DTYPES, ids=str)
def test_small_probabilities_keep_their_mass(partial_dtype: torch.dtype) -> None:
    """Fault 14: out = (v_top + 8 mean(v_rest)) / 9. P in E4M3 would give v_top / 9."""
    rest = torch.randint(1, 9, (16_384, 512), generator=torch.Generator().manual_seed(14)).float() / 4
    roundings = 1 if partial_dtype == torch.float32 else 2  # of values below 2 to BF16, 2^-8 at most each
    step = decode(replace(one_key_above(16_384, 11.0, 3.0, rest), out_atol=roundings * 2.0**-8), partial_dtype)
    mean = rest.mean(0).to(DEVICE)
    assert torch.allclose(step.result[0].float(), ((3 + 8 * mean) / 9).expand(12, -1), rtol=0.01)


def test_mass_below_the_least_fp16() -> None:
    """Probabilities of 2^-26, which FP16 would round to 0: 262,144 of them with the value 256 are all of the answer, about 1."""
    case = one_key_above(262_144, 26.0, 0.0, torch.full((1, 512), 256.0))
    assert 0.9 < case.expected_out.min() < 1.1
    decode(replace(case, out_atol=2.0**-8), torch.float32)


@pytest.mark.parametrize("exponent", [-60, -20, 20, 60])
def test_queries_of_any_magnitude(exponent: int) -> None:
    """Far beyond FP16's 65,504 and below its least value: a power of two moves from q to the softmax scale, and no bit changes."""
    base = quantised(cases.gaussian([5000, 64, 1], DEVICE))
    moved = replace(base, q=base.q * 2.0**exponent, scale=base.scale * 2.0**-exponent)
    assert torch.equal(decode(moved, torch.bfloat16).result, decode(base, torch.bfloat16).result)


def test_queries_with_outliers() -> None:
    """Values of 10^6 beside ordinary ones in a row, and rows of other magnitudes beside it; the keys are 0 where the outlier is."""
    base = cases.gaussian([2000, 129], DEVICE)
    keys, q = base.kv_cache.clone(), base.q.clone()
    keys[..., 7] = torch.where(keys[..., 7].isnan(), keys[..., 7], 0.0)
    q[:, ::3, 7] = 1e6
    q[:, 1::3] *= 1e-3
    q[:, 2::3] = 0.0
    decode(quantised(replace(base, kv_cache=keys, q=q)), torch.float32)


@pytest.mark.parametrize("page_size", [16, 64, 944])
def test_unread_bytes_never_show(page_size: int) -> None:
    """Rows past the last key, pages of nobody: NaN codes of either sign, the largest values, or zeros: the same bits."""
    base = quantised(cases.gaussian([100, 1, 63, 945, 1000], DEVICE, page_size=page_size))
    codes = base.kv_cache.view(torch.uint8)
    unread = codes & 0x7F == 0x7F
    results = []
    for code in (*NAN_CODES, 0x7E, 0xFE, 0x00):
        dirty = torch.where(unread, torch.tensor(code, dtype=torch.uint8, device=DEVICE), codes)
        results.append(decode(replace(base, kv_cache=dirty.view(E4M3)), torch.bfloat16).result)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("code", NAN_CODES)
def test_a_nan_that_a_request_sees_shows(code: int) -> None:
    case = quantised(cases.gaussian([5000, 300], DEVICE))
    codes = case.kv_cache.view(torch.uint8).clone()
    codes[case.block_table[1, 2].item(), 3, 100] = code
    step = Step.of(replace(case, kv_cache=codes.view(E4M3)), torch.bfloat16)
    step.plan()
    step.run()
    assert step.result[1].isnan().any(-1).all() and not step.result[0].isnan().any()


def test_a_scale_changed_after_capture_counts() -> None:
    base = quantised(cases.gaussian([5000, 0, 64], DEVICE))
    step = Step.of(base, torch.bfloat16)
    graph = captured(step)
    for k_scale in (1.0, 2.5, 0.06, 1.0):
        step.k_scale.fill_(k_scale)
        step.out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        out, lse = attention(base.q, base.kv_cache, base.block_table, base.seq_lens, base.scale, k_scale=k_scale)
        replace(base, expected_out=out, expected_lse=lse).check(step.result, step.lse, torch.bfloat16)


def test_a_scale_has_no_say_in_a_bf16_cache() -> None:
    """Fault 52: one that is given is refused, and one that is missing as well."""
    scale = torch.full((1,), 0.06, device=DEVICE)
    bf16 = Step.of(cases.gaussian([65], DEVICE), torch.bfloat16)
    with pytest.raises(ValueError, match=r"k_scale must be given exactly if kv_dtype is torch\.float8_e4m3fn, got torch\.bfloat16 and k_scale given"):
        bf16.run(k_scale=scale)
    fp8 = Step.of(quantised(cases.gaussian([65], DEVICE)), torch.bfloat16)
    bad = ((None, "k_scale missing"), (scale.double(), r"k_scale must be torch\.float32"), (scale.expand(2), r"k_scale must be \(1,\)"))
    for wrong, message in bad:
        with pytest.raises(ValueError, match=message):
            fp8.run(k_scale=wrong)
    with pytest.raises(ValueError, match=r"kv_cache must be torch\.float8_e4m3fn"):
        fp8.run(kv_cache=bf16.case.kv_cache)


@pytest.mark.parametrize(("heads", "query_len"), [(8, 2), (12, 2), (8, 4), (12, 3), (1, 16), (16, 8), (64, 2), (96, 3)])
def test_query_tokens(heads: int, query_len: int) -> None:
    """Fault 66. Rows see different numbers of keys; some requests are shorter than their query tokens."""
    lens = [0, 1, query_len - 1, query_len, 63, 64, 65, 63 + query_len, 128, 5000]
    decode(quantised(cases.gaussian(lens, DEVICE, heads=heads, query_len=query_len)), torch.bfloat16)


@pytest.mark.parametrize("page_size", [16, 48, 944])
def test_query_tokens_across_pages(page_size: int) -> None:
    decode(quantised(cases.gaussian([3, 945, 1888, 5000], DEVICE, heads=12, query_len=4, page_size=page_size), 0.06), torch.float32)


def test_draft_blocks_see_every_key() -> None:
    decode(quantised(cases.gaussian([0, 5, 64, 65, 5000], DEVICE, heads=12, query_len=7, causal=False)), torch.bfloat16)


@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (3, 5)])
def test_context_ranks(world: int, interleave: int, query_len: int) -> None:
    _, ranks = cases.context_shards([1, 3, query_len, 70, 1000, 5000], world, interleave, DEVICE, heads=96, query_len=query_len)
    for case in ranks:
        decode(quantised(case), torch.float32)


@pytest.mark.parametrize(("heads", "query_len"), [(12, 1), (32, 1), (8, 4)])
def test_a_row_has_the_same_bits_in_any_batch(heads: int, query_len: int) -> None:
    """Faults 18 and 20: alone, and as the first, a middle and the last of a batch. 5,001 keys: the last tile is either warpgroup's."""
    for seq_len in (5001, 5101):
        row = quantised(cases.gaussian([seq_len], DEVICE, heads=heads, query_len=query_len, seed=7))
        alone = decode(row, torch.bfloat16, batch_invariant=True)
        for place in (0, 31, 63):
            lens = torch.tensor([(37 * i) % 5000 for i in range(64)], dtype=torch.int32, device=DEVICE)
            lens[place] = seq_len
            q = torch.randn(64 * query_len, heads, 576, device=DEVICE).bfloat16()
            rows = slice(place * query_len, (place + 1) * query_len)
            q[rows] = row.q
            step = Step.of(replace(row, q=q, seq_lens=lens, block_table=row.block_table.expand(64, -1)), torch.bfloat16, batch_invariant=True)
            step.plan()
            step.run()
            assert torch.equal(step.result[rows], alone.result) and torch.equal(step.lse[rows], alone.lse)


def test_batch_invariant_answers_are_right() -> None:
    decode(quantised(cases.gaussian([0, 1, 64, 256, 257, 8191, 8192, 8193, 40_000], DEVICE)), torch.float32, batch_invariant=True)


@pytest.mark.parametrize("page_size", [16, 64, 768])
def test_pages_apart_and_an_offset(page_size: int) -> None:
    """Fault 69, in 16-byte steps that are no multiple of a 128-byte line."""
    base = quantised(cases.gaussian([5000, 1, 0, 945], DEVICE, page_size=page_size))
    stride = page_size * 576 * 2 + 48
    storage = torch.full((base.kv_cache.shape[0] * stride + 80,), NAN_CODES[0], dtype=torch.uint8, device=DEVICE)
    apart = storage.as_strided(base.kv_cache.shape, (stride, 576, 1), 80)
    apart.copy_(base.kv_cache.view(torch.uint8))
    assert torch.equal(decode(replace(base, kv_cache=apart.view(E4M3)), torch.bfloat16).result, decode(base, torch.bfloat16).result)


@pytest.mark.parametrize("heads", [16, 32])
def test_many_short_requests_in_one_range(heads: int) -> None:
    """Several requests a CTA, of one to four tiles and none: Q, tiles and the exchange of the warpgroups share one ring of stages."""
    lens = [0 if i % 11 == 5 else 1 + 53 * i % 256 for i in range(768)]
    decode(quantised(cases.gaussian(lens, DEVICE, heads=heads)), torch.bfloat16, max_requests=len(lens))


@pytest.mark.parametrize("heads", [8, 32])
def test_repeats_to_the_bit(heads: int) -> None:
    """200 calls: a race between the warpgroups would show as another bit."""
    step = Step.of(quantised(cases.gaussian([3000, 1, 700, 0, 20_000, 129, 64, 65] * 8, DEVICE, heads=heads)), torch.bfloat16)
    step.plan()
    step.run()
    step.check()
    first = step.result.clone()
    for _ in range(200):
        step.result.fill_(math.nan)
        step.run()
        assert torch.equal(step.result, first)

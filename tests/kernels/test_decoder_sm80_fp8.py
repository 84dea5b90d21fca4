"""The portable forward on an E4M3 cache on a GPU: the tests of the Hopper one with that kernel forced, as this GPU runs it and as an SM86 does.

Both are tiles of 32 keys; what differs is how many of them the ring holds, and whether codes are converted by the GPU's own instruction or by
integer arithmetic. Of the longer parameter lists there is a part here: every problem is compiled anew.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import torch

import cases
import test_decoder_fp8
from dense_mla.compiled import CompiledKernels, prepared_kernels
from dense_mla.decoder import DenseMLADecoder
from dense_mla.problem import DecodeProblem
from steps import DEVICE, Step, decode
from test_decoder_fp8 import (  # noqa: F401
    E4M3,
    NAN_CODES,
    quantised,
    test_a_nan_that_a_request_sees_shows,
    test_a_row_has_the_same_bits_in_any_batch,
    test_a_scale_changed_after_capture_counts,
    test_a_scale_has_no_say_in_a_bf16_cache,
    test_batch_invariant_answers_are_right,
    test_context_ranks,
    test_draft_blocks_see_every_key,
    test_many_short_requests_in_one_range,
    test_mass_below_the_least_fp16,
    test_pages_apart_and_an_offset,
    test_queries_with_outliers,
    test_query_tokens_across_pages,
    test_repeats_to_the_bit,
    test_small_probabilities_keep_their_mass,
    test_unread_bytes_never_show,
)

pytestmark = pytest.mark.gpu

SMALL_SHARED_MEMORY = 101_376  # of SM86
FAULTS = ("empty request", "uniform average", "null page", "stale beyond the cache", "strided q", "late peak")


@cache
def sm86_kernels(problem: DecodeProblem) -> CompiledKernels:
    import cutlass.cute as cute

    from dense_mla.arch import forward_class
    from dense_mla.forward_sm80 import fake_arguments

    capability = torch.cuda.get_device_capability(DEVICE)
    kernels = prepared_kernels(problem, DEVICE, "sm80")
    conversion = {"converts_e4m3": False} if problem.needs_k_scale else {}
    forward = forward_class(capability, problem, "sm80")(problem, SMALL_SHARED_MEMORY, dependent_launch=capability >= (9, 0), **conversion)
    assert forward.tile.stages <= 5 and (forward.tile.keys == 32) == problem.needs_k_scale
    options = f"--gpu-arch sm_{capability[0]}{capability[1]}{'a' if capability >= (9, 0) else ''} --enable-tvm-ffi"
    return CompiledKernels(kernels.schedule, cute.compile(forward, *fake_arguments(problem), options=options), kernels.merge, forward.row_tiles)


def prepare_as_sm86(problem: DecodeProblem, device: torch.device, *, max_requests: int) -> DenseMLADecoder:
    decoder = DenseMLADecoder(problem, device, max_requests, sm86_kernels(problem))
    decoder._load()  # as `prepare` does: a module must not be loaded while a graph is captured
    return decoder


@pytest.fixture(autouse=True, params=["as this GPU", "as SM86"])
def portable_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever prepares a decoder in these tests gets the portable forward."""
    forced = partial(DenseMLADecoder.prepare, kernel="sm80")
    monkeypatch.setattr(DenseMLADecoder, "prepare", forced if request.param == "as this GPU" else prepare_as_sm86)


def test_the_portable_forward_is_what_runs() -> None:
    step = decode(quantised(cases.gaussian([5000, 70], DEVICE, heads=16)), torch.bfloat16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step.run()
        torch.cuda.synchronize()
    names = " ".join(event.key for event in profile.key_averages())
    assert "ForwardSm80Fp8" in names and "ForwardSm90" not in names


@pytest.mark.parametrize("name", FAULTS)
def test_known_faults(name: str) -> None:
    test_decoder_fp8.test_known_faults(name, torch.bfloat16)


@pytest.mark.parametrize("heads", [1, 12, 33, 128])
def test_heads(heads: int) -> None:
    test_decoder_fp8.test_heads(heads, torch.float32)


@pytest.mark.parametrize("page_size", [16, 48, 944])
def test_page_sizes(page_size: int) -> None:
    test_decoder_fp8.test_page_sizes(24, page_size)


@pytest.mark.parametrize("k_scale", [0.06, 2.5])
@pytest.mark.parametrize("heads", [16, 32])
def test_scales_and_the_error_of_bf16(heads: int, k_scale: float) -> None:
    """The error is the portable BF16 kernel's on the same values."""
    test_decoder_fp8.test_scales_and_the_error_of_bf16(heads, k_scale, torch.bfloat16)


@pytest.mark.parametrize("exponent", [-60, 60])
def test_queries_of_any_magnitude(exponent: int) -> None:
    test_decoder_fp8.test_queries_of_any_magnitude(exponent)


@pytest.mark.parametrize(("heads", "query_len"), [(12, 2), (8, 4), (17, 4), (16, 8)])
def test_query_tokens(heads: int, query_len: int) -> None:
    """17 heads x 4: three CTAs of 32 rows, where the problem has four row tiles of whole tokens."""
    test_decoder_fp8.test_query_tokens(heads, query_len)


def test_every_code_in_every_place() -> None:
    """One key of each request counts, so that its values are the answer: every number of E4M3 comes out as it is, in columns of every kind."""
    numbers = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    places = torch.arange(512)
    requests = 127
    keys = [torch.zeros(40, 576, dtype=torch.uint8) for _ in range(requests)]
    for r, codes in enumerate(keys):
        codes[7 * r % 40, :512] = numbers[(places + 2 * r) % 254]
        codes[7 * r % 40, 512] = torch.tensor(1.0).to(E4M3).view(torch.uint8)
    # The pages are laid out as of BF16 numbers, and hold the codes of those.
    values = [codes.view(E4M3).bfloat16().to(DEVICE) for codes in keys]
    kv_cache, block_table, seq_lens = cases.paged(values, 64)
    q = torch.zeros(requests, 12, 576, dtype=torch.bfloat16, device=DEVICE)
    q[..., 512] = 200.0  # the logits come from the columns that are no part of V
    base = cases.gaussian([40] * requests, DEVICE)
    case = quantised(replace(base, q=q, kv_cache=kv_cache, block_table=block_table, seq_lens=seq_lens, scale=1.0, out_atol=0.0))
    step = Step.of(case, torch.float32)
    step.plan()
    step.run()
    expected = torch.stack([value[7 * r % 40, :512] for r, value in enumerate(values)])
    assert torch.equal(step.result, expected[:, None].expand(-1, 12, -1))


@pytest.mark.parametrize("code", NAN_CODES)
def test_a_nan_in_any_column_and_key_shows(code: int) -> None:
    """Columns of each of the warps that share a key, rope part and ninth chunk included; keys of both halves of a tile and of both key groups."""
    case = quantised(cases.gaussian([300, 70], DEVICE, heads=16))
    step = Step.of(case, torch.bfloat16)
    step.plan()
    codes = case.kv_cache.view(torch.uint8)
    for column, key in zip((0, 17, 46, 63, 191, 368, 511, 512, 544, 575), (0, 9, 16, 31, 32, 47, 63, 6, 25, 69), strict=True):
        place = (case.block_table[1, key // 64].item(), key % 64, column)
        kept = codes[place].item()
        codes[place] = code
        step.run()
        assert step.result[1].isnan().all() and not step.result[0].isnan().any(), (column, key)
        codes[place] = kept
    step.run()
    step.check()


def test_short_requests_between_empty_ones() -> None:
    """The producer runs across requests: as many tiles ahead as the ring holds, over requests of one tile and of none."""
    lens = [n for _ in range(64) for n in (1, 0, 33, 0, 0, 7, 64, 0)]
    decode(quantised(cases.gaussian(lens, DEVICE, heads=16)), torch.bfloat16, max_requests=len(lens))


def test_one_key_after_another() -> None:
    """Every length around the tiles of 32 keys, in one batch."""
    decode(quantised(cases.gaussian(list(range(130)), DEVICE, heads=12)), torch.bfloat16)

"""Decode steps of the portable kernel for GPUs that nobody ran it on: the PTX of all three kernels runs on the CPU, against FP64.

The decoder is the real one, its kernels are what is compiled for that architecture. ptx_cta.py faults on races in shared memory, on copies that
are read before they are waited for and on accesses out of bounds; what nobody may read is NaN, and pages lie too far apart for 32-bit offsets.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cases
from cases import Case
from dense_mla.compiled import CompiledKernels, KernelSource, kernel_sources
from dense_mla.decoder import DenseMLADecoder
from dense_mla.problem import DecodeProblem
from ptx_cta import Fault
from ptx_launch import Launch, kernel_text
from test_decoder_fp8 import E4M3, quantised

BF16, FP32 = torch.bfloat16, torch.float32
SM80, SM86, SM100, SM120 = (8, 0), (8, 6), (10, 0), (12, 0)  # one of each tile
BETWEEN_EMPTY = [n for _ in range(6) for n in (1, 0, 33, 0, 0, 7, 64, 0)]
Run = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def rank_of(seq_lens: list[int], rank: int, **options: int) -> Case:
    return cases.context_shards(seq_lens, 2, 16, **options)[1][rank]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Answers of a decode step on a GPU of that many SMs. `edit`: of the forward's PTX."""

    def text(source: KernelSource, capability: tuple[int, int]) -> str:
        return kernel_text(source, capability, tmp_path)

    def answers(
        case: Case, capability: tuple[int, int], sms: int, partial_dtype: torch.dtype = FP32, *, batch_invariant: bool = False,
        forward: str | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=sms))
        problem = case.problem(partial_dtype, return_lse=True, batch_invariant=batch_invariant)
        sources = kernel_sources(problem, capability, "sm80")
        launches = [Launch(s, capability, forward if forward and s is sources[1] else text(s, capability)) for s in sources]
        kernels = CompiledKernels(*launches, row_tiles=sources[1].function.row_tiles)
        return step(case, DenseMLADecoder(problem, torch.device("cpu"), 64, kernels))

    return answers


def step(case: Case, decoder: DenseMLADecoder) -> tuple[torch.Tensor, torch.Tensor]:
    """Everything that the kernels write is NaN before, and `out` a window of a wider tensor, whose rest must stay so."""
    problem, requests = decoder.problem, len(case.seq_lens)
    size = decoder.workspace_size(requests).total_bytes
    buffer = torch.full((size + 256,), 0xFF, dtype=torch.uint8)
    start = -buffer.data_ptr() % 256
    out = torch.full((requests * case.query_len + 1, case.num_heads + 1, 520), math.nan, dtype=case.query_dtype)
    lse = torch.full((requests * case.query_len, case.num_heads), math.nan)
    schedule = decoder.empty_schedule()
    decoder.schedule(case.seq_lens, case.block_table, schedule)
    decoder.run(
        case.q, case.kv_cache, case.block_table, case.seq_lens, schedule=schedule, workspace=buffer[start : start + size], out=out[:-1, :-1, :512],
        scale=case.scale, lse=lse, total_lens=case.total_lens if problem.needs_total_lens else None,
        k_scale=torch.tensor([case.k_scale]) if problem.needs_k_scale else None,
    )  # fmt: skip
    assert out[-1].isnan().all() and out[:, -1].isnan().all() and out[..., 512:].isnan().all(), "written past out"
    return out[:-1, :-1, :512], lse


# Capability, SMs, partial dtype, batch invariance, input: both heights of the tile for every tile, requests whole and split, rows that see nothing.
STEPS = {
    "sm_80, 16 rows": (SM80, 5, FP32, False, lambda: cases.gaussian([0, 700, 1, 33, 64, 65], heads=16, page_size=48)),
    "sm_80, 32 rows": (SM80, 6, BF16, False, lambda: cases.gaussian([300, 0, 2, 81], heads=17, page_size=80, query_len=3)),
    "sm_86, 16 rows": (SM86, 5, FP32, False, lambda: cases.gaussian([0, 100, 1, 33, 0, 17, 300], heads=11, page_size=48)),
    "sm_86, 32 rows": (SM86, 6, FP32, True, lambda: cases.gaussian([400, 0, 31, 300], heads=33, page_size=16)),
    "sm_86, short requests": (SM86, 3, BF16, False, lambda: cases.gaussian(BETWEEN_EMPTY, heads=4)),
    "sm_100, 16 rows": (SM100, 4, FP32, False, lambda: cases.gaussian([600, 0, 129], heads=12, dtype=torch.float16)),
    "sm_80, sink": (SM80, 1, FP32, False, cases.sink),
    "sm_120, sink": (SM120, 1, FP32, False, lambda: cases.sink(heads=32)),
    "sm_120, sink in BF16": (SM120, 1, FP32, False, lambda: cases.sink(dtype=torch.bfloat16)),
    "sm_100, 32 rows": (SM100, 4, FP32, False, lambda: cases.gaussian([90, 1, 0, 500], heads=20, query_len=2, causal=False)),
    "sm_120, 16 rows": (SM120, 4, FP32, True, lambda: cases.gaussian([530, 3, 0, 620], heads=3, page_size=528, query_len=5)),
    "sm_120, 32 rows": (SM120, 5, FP32, False, lambda: rank_of([420, 66, 2, 1, 0], 1, heads=8, query_len=4)),
    "E4M3, sm_80, 16 rows": (SM80, 5, FP32, False, lambda: quantised(cases.gaussian([700, 0, 1, 33, 65], heads=16, page_size=48), 0.06)),
    "E4M3, sm_86, 32 rows": (SM86, 3, BF16, False, lambda: quantised(cases.gaussian([100, 0, 2, 33, 140], heads=17, page_size=16, query_len=3))),
    "E4M3, sm_100, 32 rows": (SM100, 6, FP32, True, lambda: quantised(cases.gaussian([400, 0, 129], heads=40, page_size=80), 2.5)),
    "E4M3, sm_120, 16 rows": (SM120, 4, BF16, False, lambda: quantised(cases.gaussian(BETWEEN_EMPTY, heads=7))),
    "E4M3, sm_120, 32 rows": (SM120, 4, FP32, False, lambda: quantised(rank_of([420, 66, 2, 1, 0], 0, heads=8, query_len=4))),
}


@pytest.mark.parametrize("name", STEPS)
def test_step(name: str, run: Run) -> None:
    capability, sms, partial_dtype, batch_invariant, make = STEPS[name]
    case = make()
    out, lse = run(case, capability, sms, partial_dtype, batch_invariant=batch_invariant)
    case.check(out, lse, partial_dtype)


@pytest.mark.parametrize("capability", [SM80, SM120])
def test_every_code_comes_out_as_it_is(capability: tuple[int, int], run: Run) -> None:
    """One key has all the weight, so that its values are the answer; in 32 requests every number stands in columns of every kind."""
    numbers = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    keys = [torch.zeros(40, 576, dtype=torch.uint8) for _ in range(32)]
    for r, codes in enumerate(keys):
        codes[7 * r % 40, :512] = numbers[(torch.arange(512) + 8 * r) % 254]
        codes[7 * r % 40, 512] = torch.tensor(1.0).to(E4M3).view(torch.uint8)
    values = [codes.view(E4M3).bfloat16() for codes in keys]
    q = torch.zeros(32, 2, 576, dtype=torch.bfloat16)
    q[..., 512] = 200.0  # the logits come from the columns that are no part of V
    kv_cache, block_table, seq_lens = cases.paged(values, 64)
    base = cases.gaussian([40] * 32, heads=2)
    out, _ = run(quantised(replace(base, q=q, kv_cache=kv_cache, block_table=block_table, seq_lens=seq_lens, scale=1.0)), capability, 4)
    expected = torch.stack([value[7 * r % 40, :512] for r, value in enumerate(values)])
    assert torch.equal(out, expected[:, None].expand(-1, 2, -1))


@pytest.mark.parametrize("capability", [SM80, SM120])
def test_a_nan_code_shows_in_the_rows_that_see_it(capability: tuple[int, int], run: Run) -> None:
    case = quantised(cases.gaussian([70, 70, 70], heads=4, query_len=2))
    for request, column, code in ((0, 0, 0x7F), (1, 575, 0xFF)):  # the newest key: the first of two tokens does not see it
        case.kv_cache.view(torch.uint8)[case.block_table[request, 1], 5, column] = code
    out, _ = run(case, capability, 3)
    assert out.isnan().flatten(1).all(1).tolist() == [False, True] * 2 + [False] * 2
    assert out.isnan().flatten(1).any(1).tolist() == [False, True] * 2 + [False] * 2


@pytest.mark.parametrize("capability", [SM80, SM120])
def test_rows_of_any_magnitude(capability: tuple[int, int], run: Run) -> None:
    """Far beyond FP16 on either side, with the softmax scale moved the other way; within a request rows much smaller than others, and of zeros."""
    base = cases.gaussian([90, 0, 40], heads=20)
    assert isinstance(base.q, torch.Tensor)
    for exponent in (100, -100):
        q = base.q.clone()
        q[:, 1::4] *= 2.0**-20
        q[:, 2::4] = 0.0
        case = quantised(replace(base, q=q * 2.0**exponent, scale=base.scale * 2.0**-exponent))
        case.check(*run(case, capability, 3), FP32)


@pytest.mark.parametrize("capability", [SM80, SM120])
def test_outliers_in_the_columns_of_any_warp(capability: tuple[int, int], run: Run) -> None:
    """A value of 10^6 in each row, in turn in the 16 columns of each of four warps; the keys are 0 there. The row's scale is for all of them."""
    base = cases.gaussian([40, 33], heads=8)
    assert isinstance(base.q, torch.Tensor)
    q, keys = base.q.clone(), base.kv_cache.clone()
    for head in range(8):
        column = 16 * (head % 4) + 3 + 64 * head
        q[:, head, column] = 1e6
        keys[..., column] = torch.where(keys[..., column].isnan(), keys[..., column], 0.0)
    case = quantised(replace(base, q=q, kv_cache=keys))
    case.check(*run(case, capability, 2), FP32)


@pytest.mark.parametrize("capability", [SM80, SM120])
def test_a_query_that_is_no_number_shows(capability: tuple[int, int], run: Run) -> None:
    """In its own row, and in no other one."""
    case = quantised(cases.gaussian([40, 33], heads=4))
    assert isinstance(case.q, torch.Tensor)
    case.q[0, 1, 575], case.q[1, 2, 0], case.q[1, 3, 17] = math.nan, math.inf, -math.inf
    out, _ = run(case, capability, 2)
    assert out.isnan().any(-1).tolist() == out.isnan().all(-1).tolist() == [[False, True, False, False], [False, False, True, True]]


@pytest.fixture(scope="module")
def forward_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    source = kernel_sources(DecodeProblem(11, 48, FP32, return_lse=True), SM86, "sm80")[1]
    return kernel_text(source, SM86, tmp_path_factory.mktemp("ptx"))


def edited(text: str, pattern: str, place: int, replacement: str) -> str:
    """The text with one place of those that match replaced."""
    found = list(re.finditer(pattern, text))[place]
    return text[: found.start()] + found.expand(replacement) + text[found.end() :]


@pytest.mark.parametrize("barrier", range(5))
def test_every_barrier_is_needed(barrier: int, forward_text: str, run: Run) -> None:
    """That none is missing is what the steps above say; that they would say it, this."""
    assert len(re.findall(r"bar\.sync", forward_text)) == 5
    with pytest.raises(Fault, match=r"race in shared memory|copy to it is under way"):
        run(cases.gaussian([200, 17, 90], heads=11, page_size=48), SM86, 1, forward=edited(forward_text, r"bar\.sync[^;]*;", barrier, ""))


@pytest.mark.parametrize("barrier", range(6))
def test_every_barrier_is_needed_where_queries_are_converted(barrier: int, run: Run, tmp_path: Path) -> None:
    case = quantised(cases.gaussian([100, 17, 70], heads=11, page_size=48))
    text = kernel_text(kernel_sources(case.problem(FP32, return_lse=True), SM120, "sm80")[1], SM120, tmp_path)
    assert len(re.findall(r"bar\.sync", text)) == 6
    with pytest.raises(Fault, match=r"race in shared memory|copy to it is under way"):
        run(case, SM120, 1, forward=edited(text, r"bar\.sync[^;]*;", barrier, ""))


@pytest.mark.parametrize("wait", range(2))
def test_tiles_are_waited_for(wait: int, forward_text: str, run: Run) -> None:
    """A ring of five tiles: three under way, the newest two not waited for."""
    later = edited(forward_text, r"(cp\.async\.wait_group\s+)2;", wait, r"\g<1>3;")
    with pytest.raises(Fault, match="copy to it is under way"):
        run(cases.gaussian([200, 17, 90], heads=11, page_size=48), SM86, 1, forward=later)

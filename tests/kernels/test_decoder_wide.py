"""The forward of 33 to 64 rows a CTA on a GPU: row counts, both warpgroups as first and last of a request, and maxima that climb."""

from __future__ import annotations

import pytest
import torch

import cases
from dense_mla.reference import attention
from steps import DEVICE, DTYPES, Step, decode

pytestmark = pytest.mark.gpu

# Requests of one, two and three tiles, whole and cut short: within a CTA's range the next one starts with either warpgroup.
LENGTHS = [0, 1, 63, 64, 65, 127, 128, 129, 192, 193, 5000, 0, 40_000]


@pytest.mark.parametrize("partial_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [33, 40, 48, 56, 63, 64, 65, 96, 127, 128])
def test_row_counts(heads: int, partial_dtype: torch.dtype) -> None:
    decode(cases.gaussian(LENGTHS, DEVICE, heads=heads), partial_dtype)


@pytest.mark.parametrize("page_size", [16, 32, 48, 80, 128, 944])
@pytest.mark.parametrize("heads", [64, 128])
def test_page_sizes(heads: int, page_size: int) -> None:
    decode(cases.gaussian(LENGTHS, DEVICE, heads=heads, page_size=page_size), torch.float32)


def test_many_short_requests_in_one_range() -> None:
    """Five requests a CTA and more, each of one to three tiles: Q and the statistics change with tiles of the next request on their way."""
    decode(cases.gaussian([1 + 37 * i % 190 for i in range(768)], DEVICE, heads=64), torch.bfloat16, max_requests=768)


@pytest.mark.parametrize("slope", [-6.0, 0.25, 1.0, 5.0, 5.7, 9.0])
def test_logits_that_climb_from_tile_to_tile(slope: float) -> None:
    """`slope` nats a tile: the maximum stays, or rises with every tile."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(3, 64, 576, generator=generator)
    q[:, :, 0] = 1 / cases.SCALE
    keys = [torch.randn(n, 576, generator=generator) for n in (1000, 64, 20_000)]
    for k in keys:
        k[:, 0] = slope * (torch.arange(len(k)) // 64 % 32)
    cache = cases.paged([k.bfloat16().to(DEVICE) for k in keys], 64)
    q = q.bfloat16().to(DEVICE)
    out, lse = attention(q, *cache, cases.SCALE)
    # A score before scaling reaches 279 / SCALE < 2^12, which FP32 holds to 2^-12: times SCALE 1.8e-5 a rounding, and the tensor cores add it
    # up in 36 steps. Seen on an H200: 2.1e-4.
    decode(cases.Case("climbing logits", q, *cache, out, lse, lse_atol=4e-4), torch.float32)


@pytest.mark.parametrize("heads", [64, 128])
def test_repeats_to_the_bit(heads: int) -> None:
    """200 calls: a race between the warpgroups would show as another bit."""
    step = Step.of(cases.gaussian([3000, 1, 700, 0, 20_000, 129], DEVICE, heads=heads), torch.bfloat16)
    step.plan()
    step.run()
    step.check()
    first = step.result.clone()
    for _ in range(200):
        step.result.fill_(float("nan"))
        step.run()
        assert torch.equal(step.result, first)

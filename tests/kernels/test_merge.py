"""The merge kernel by itself, on a GPU: pieces that no forward wrote."""

from __future__ import annotations

import math
from dataclasses import astuple

import pytest
import torch

from dense_mla.decoder import DenseMLADecoder
from dense_mla.merge_plan import merge_shares
from dense_mla.problem import DecodeProblem
from dense_mla.schedule import HEADER_WORDS, RANGE_WORDS, SHARE_WORDS, Split
from dense_mla.workspace import workspace_views
from steps import DEVICE, DTYPES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("partial_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "query_len"), [(3, 1), (64, 1), (128, 1), (128, 16)])
@pytest.mark.parametrize("pieces", [2, 3, 8, 132])
def test_merge_of_pieces_that_saw_nothing(pieces: int, heads: int, query_len: int, partial_dtype: torch.dtype) -> None:
    """Fault 5: -inf minus -inf. All pieces empty: 0 and -inf. One of them with keys: that one, whatever NaN the empty ones' values hold.

    The more rows, the fewer threads share one, down to a single strand at 2,048, where a CTA takes several blocks of them too.
    """
    problem = DecodeProblem(heads, 64, partial_dtype, query_len=query_len, return_lse=True)
    decoder = DenseMLADecoder.prepare(problem, DEVICE, max_requests=1)
    pieces = min(pieces, decoder.num_ranges)  # no schedule cuts a request into more
    words = decoder.empty_schedule()
    shares = [(*astuple(share), 0) for share in merge_shares([Split(0, 0, pieces)], problem.rows, decoder.sm_count)]
    at = HEADER_WORDS + decoder.num_ranges * RANGE_WORDS
    words[at : at + decoder.sm_count * SHARE_WORDS] = torch.tensor(shares, dtype=torch.int32, device=DEVICE).flatten()
    size = decoder.workspace_size(1)
    workspace = torch.full((size.total_bytes,), 0xFF, dtype=torch.uint8, device=DEVICE)
    out_partial, lse_partial = workspace_views(problem, workspace, size.slots)
    lse_partial.fill_(-math.inf)
    out = torch.full((1, query_len, heads, 512), math.nan, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.full((1, query_len, heads), math.nan, device=DEVICE)
    expected_out, expected_lse = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    for piece, token, head, lse2 in ((pieces - 1, 0, 1, 3.0), (0, query_len - 1, heads - 1, -40.0)):
        value = torch.arange(512, device=DEVICE).sub(256).to(partial_dtype)  # exact in BF16
        lse_partial[piece, token, head], out_partial[piece, token, head] = lse2, value
        expected_lse[0, token, head], expected_out[0, token, head] = lse2 * math.log(2), value.to(out.dtype)
    decoder._kernels.merge(out_partial, lse_partial, words, out, lse, decoder.num_ranges, decoder.sm_count)
    assert torch.equal(out, expected_out)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=0)

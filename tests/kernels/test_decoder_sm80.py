"""The portable forward on a GPU: every test of the decoder once more with that kernel forced. The tile of 99 KB GPUs: test_decoder_sm80_small.py."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import cases
from dense_mla.decoder import DenseMLADecoder
from steps import DEVICE, DTYPES, Step, captured, decode
from test_decoder import (  # noqa: F401
    test_any_number_of_pieces_repeats_to_the_bit,
    test_buckets_captured_once_replay_in_any_order,
    test_captured_at_one_key_replayed_at_forty_thousand_and_back,
    test_fp32_partials_cost_no_accuracy_over_a_single_piece,
    test_heads,
    test_known_faults,
    test_many_requests_whole_and_split,
    test_page_sizes,
    test_without_lse,
)
from test_decoder_modes import (  # noqa: F401
    test_a_row_has_the_same_bits_in_any_batch,
    test_batch_invariant_answers_are_right,
    test_context_ranks,
    test_draft_blocks_see_every_key,
    test_fp16_models,
    test_long_verification,
    test_padded_verification_rows_in_a_graph,
    test_query_lengths,
    test_query_tokens_across_pages,
    test_row_tiles,
    test_the_table_is_indexed_by_request_and_not_by_row,
    test_verification_of_high_pages,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def portable_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever prepares a decoder in these tests gets the portable forward."""
    monkeypatch.setattr(DenseMLADecoder, "prepare", partial(DenseMLADecoder.prepare, kernel="sm80"))


def test_the_portable_forward_is_what_runs() -> None:
    step = decode(cases.gaussian([5000, 70], DEVICE, heads=16), torch.bfloat16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step.run()
        torch.cuda.synchronize()
    names = " ".join(event.key for event in profile.key_averages())
    assert "ForwardSm80" in names and "ForwardSm90" not in names


@pytest.mark.parametrize("partial_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [17, 33, 48, 65, 80, 127])
def test_uneven_row_tiles(heads: int, partial_dtype: torch.dtype) -> None:
    decode(cases.gaussian([0, 1, 15, 16, 17, 31, 32, 33, 64, 5000], DEVICE, heads=heads), partial_dtype)


@pytest.mark.parametrize("page_size", [16, 48, 80, 528])
def test_pieces_that_start_and_end_within_a_tile(page_size: int) -> None:
    """Pages that are no multiple of the tile: a piece's tiles count from its own first key, and end within one."""
    for seq_len in (79, 80, 81, 528, 1057, 4000):
        decode(cases.gaussian([seq_len], DEVICE, heads=16, page_size=page_size), torch.float32)


def test_one_key_after_another() -> None:
    """Every length around the tiles of 16 and 32 keys, in one batch."""
    decode(cases.gaussian(list(range(130)), DEVICE, heads=12), torch.bfloat16)


def test_short_requests_between_empty_ones() -> None:
    """The producer runs across requests: as many tiles ahead as the ring holds, over requests of one tile and of none."""
    lens = [n for _ in range(64) for n in (1, 0, 33, 0, 0, 7, 64, 0)]
    step = Step.of(cases.gaussian(lens, DEVICE, heads=16), torch.float32, max_requests=len(lens))
    step.plan()
    step.run()
    step.check()


def test_repeats_are_equal_to_the_bit() -> None:
    """A race in the ring, or between the warps of a tile, shows as a bit that changes."""
    for heads in (16, 32, 128):
        step = decode(cases.gaussian([3000, 1, 64, 9000, 0, 333], DEVICE, heads=heads), torch.float32)
        first = step.result.clone()
        graph = captured(step)
        for _ in range(200):
            graph.replay()
            assert torch.equal(step.result, first)

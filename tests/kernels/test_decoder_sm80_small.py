"""The portable forward on a GPU in the tile of 99 KB GPUs (SM86, SM89, SM12x): 16 keys, where this GPU would take more.

What a tile has a part in; of the longer parameter lists a part: every problem is compiled anew.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

import cases
import test_decoder
import test_decoder_modes
from dense_mla.compiled import CompiledKernels, compile_kernels
from dense_mla.decoder import DenseMLADecoder
from dense_mla.problem import DecodeProblem
from steps import DEVICE, decode
from test_decoder import (  # noqa: F401
    test_any_number_of_pieces_repeats_to_the_bit,
    test_fp32_partials_cost_no_accuracy_over_a_single_piece,
    test_many_requests_whole_and_split,
)
from test_decoder_modes import (  # noqa: F401
    test_batch_invariant_answers_are_right,
    test_draft_blocks_see_every_key,
    test_padded_verification_rows_in_a_graph,
    test_query_tokens_across_pages,
)
from test_decoder_sm80 import (  # noqa: F401
    test_one_key_after_another,
    test_pieces_that_start_and_end_within_a_tile,
    test_repeats_are_equal_to_the_bit,
    test_short_requests_between_empty_ones,
    test_the_portable_forward_is_what_runs,
)

pytestmark = pytest.mark.gpu

SMALL_SHARED_MEMORY = 101_376


@cache
def small_tile_kernels(problem: DecodeProblem) -> CompiledKernels:
    import cutlass.cute as cute

    from dense_mla.forward_sm80 import ForwardSm80, fake_arguments

    kernels = compile_kernels(problem, torch.cuda.get_device_capability(DEVICE))
    major, minor = torch.cuda.get_device_capability(DEVICE)
    forward = ForwardSm80(problem, SMALL_SHARED_MEMORY, dependent_launch=major >= 9)
    assert forward.tile.keys == 16
    options = f"--gpu-arch sm_{major}{minor}{'a' if major >= 9 else ''} --enable-tvm-ffi"
    return CompiledKernels(kernels.schedule, cute.compile(forward, *fake_arguments(problem), options=options), kernels.merge, forward.row_tiles)


@pytest.fixture(autouse=True)
def small_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever prepares a decoder in these tests gets the portable forward in that tile."""

    def prepare(problem: DecodeProblem, device: torch.device, *, max_requests: int) -> DenseMLADecoder:
        return DenseMLADecoder(problem, device, max_requests, small_tile_kernels(problem))

    monkeypatch.setattr(DenseMLADecoder, "prepare", prepare)


@pytest.mark.parametrize("name", cases.FAULTS)
def test_known_faults(name: str) -> None:
    test_decoder.test_known_faults(name, torch.bfloat16)


@pytest.mark.parametrize("heads", [1, 8, 12, 33, 128])
def test_heads(heads: int) -> None:
    test_decoder.test_heads(heads, torch.float32)


@pytest.mark.parametrize("page_size", [16, 48, 80, 944])
def test_page_sizes(page_size: int) -> None:
    test_decoder.test_page_sizes(page_size, torch.bfloat16)


@pytest.mark.parametrize("heads", [17, 48, 127])
def test_uneven_row_tiles(heads: int) -> None:
    decode(cases.gaussian([0, 1, 15, 16, 17, 31, 32, 33, 64, 5000], DEVICE, heads=heads), torch.bfloat16)


@pytest.mark.parametrize(("heads", "query_len"), [(12, 2), (8, 8), (1, 16), (12, 16)])
def test_query_lengths(heads: int, query_len: int) -> None:
    test_decoder_modes.test_query_lengths(heads, query_len)

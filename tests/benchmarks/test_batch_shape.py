"""Shapes as the command line names them."""

import pytest

from benchmarks.batch_shape import BatchShape


def test_uniform() -> None:
    shape = BatchShape.parse("8x4096")
    assert shape.seq_lens == (4096,) * 8
    assert (shape.batch, shape.context, shape.keys) == (8, 4096, 32768)


def test_several_query_tokens() -> None:
    shape = BatchShape.parse("8x4096q4")
    assert (shape.seq_lens, shape.query_len, shape.keys) == ((4096,) * 8, 4, 32768)
    assert BatchShape.parse("8x4096").query_len == 1


def test_mixed_is_the_same_every_time_and_covers_its_range() -> None:
    shape = BatchShape.parse("mixed:64:32768")
    assert shape.seq_lens == BatchShape.parse("mixed:64:32768").seq_lens
    assert shape.batch == 64
    assert 1 <= min(shape.seq_lens) < 4096 < 28672 < max(shape.seq_lens) <= 32768
    assert BatchShape.parse("mixed:64:32767").seq_lens != shape.seq_lens


def test_spike_has_one_long_request_inside() -> None:
    shape = BatchShape.parse("spike:64:131072:512")
    assert sorted(shape.seq_lens) == [512] * 63 + [131072]
    assert shape.seq_lens[0] == shape.seq_lens[-1] == 512
    assert shape.context == 131072


def test_pages_round_up() -> None:
    assert BatchShape("", (1, 64, 65, 128)).pages(64) == (1, 1, 2, 2)


REFUSED = [
    "",
    "8",
    "8x",
    "0x64",
    "8x0",
    "8x-1",
    "8x4x2",
    "8:64",
    "mixed:8",
    "mixed:0:64",
    "spike:8:64",
    "spike:4:9:0",
    "even:8:64",
    "8x4q5",
    "8x64q0",
    "8x64q",
    "mixed:8:64q2",
]


@pytest.mark.parametrize("label", REFUSED)
def test_anything_else_is_refused(label: str) -> None:
    with pytest.raises(ValueError, match=f"shape must be BATCHxKEYS.*got '{label}'"):
        BatchShape.parse(label)

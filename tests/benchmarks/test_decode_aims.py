"""Which aim a run meets, misses or does not speak of."""

from dataclasses import replace

from test_render import ROW

from benchmarks.decode_aims import AIMED_US, aims_of, aims_section
from benchmarks.evidence import DecodeRow

FP8 = replace(ROW, kv_dtype="fp8_e4m3")


def verdicts(rows: list[DecodeRow]) -> dict[str, tuple[str | None, bool]]:
    return {f"{aim.of}, {aim.wanted}": (aim.found, aim.met) for aim in aims_of(rows)}


def peer(row: DecodeRow, us: float) -> DecodeRow:
    return replace(row, kernel="FLASHMLA", partial_dtype=None, us=us)


def test_a_time_is_met_at_its_limit_and_missed_above_it() -> None:
    found = verdicts([replace(ROW, us=6.5), replace(ROW, shape="1x32768", us=14.01)])
    assert found["1x4096, 16 heads, at most 6.5 us"] == ("6.5 us", True)
    assert found["1x32768, 16 heads, at most 14.0 us"] == ("14.0 us", False)
    assert found["8x8192, 16 heads, at most 22.0 us"] == (None, False)
    assert verdicts([replace(ROW, heads=64, us=1.0)])["1x4096, 16 heads, at most 6.5 us"] == (None, False)


def test_one_slower_case_of_any_heads_misses_the_peers() -> None:
    aim = "against the fastest peer, all shapes and heads, faster in all"
    rows = [ROW, peer(ROW, 8.0), replace(ROW, heads=128, us=9.0), peer(replace(ROW, heads=128), 9.5)]
    assert verdicts(rows)[aim] == ("2 of 2", True)
    assert verdicts([*rows, peer(replace(ROW, heads=128), 8.9)])[aim] == ("1 of 2", False)
    assert verdicts([ROW])[aim] == (None, False)


def test_partials_merge_longer_captures_tokens_and_uneven_batches() -> None:
    long, eight = replace(ROW, shape="1x32768", us=14.0), replace(ROW, heads=8, shape="1x65536", us=20.0)
    rows = [
        ROW, replace(ROW, partial_dtype="fp32", us=7.2), replace(ROW, kernel="dense_mla+planned", us=7.3),
        long, replace(long, partial_dtype="fp32", us=14.7), replace(long, kernel="dense_mla+forward", us=11.9),
        eight, replace(eight, shape="1x65536q8", query_len=8, us=31.0),
        replace(ROW, shape="mixed:64:32768", us=100.0, floor_us=90.0), replace(ROW, shape="spike:64:131072:512", us=100.0, floor_us=89.9),
    ]  # fmt: skip
    found = verdicts(rows)
    assert found["FP32 partials / BF16, the worst of all, at most 1.030"] == ("1.050", False)
    assert found["the merge at 1x32768, 16 heads, at most 2.0 us"] == ("2.1 us", False)
    assert found["the merge at 1x131072, 16 heads, at most 2.0 us"] == (None, False)
    assert found["captured for longer requests / for its own, the worst, at most 1.050"] == ("1.043", True)
    assert found["8 query tokens / 1, 8 heads, at most 1.50"] == ("1.55", False)
    assert found["mixed:64:32768, 16 heads, at least 90% of the read ceiling"] == ("90.0%", True)
    assert found["spike:64:131072:512, 16 heads, at least 90% of the read ceiling"] == ("89.9%", False)


def test_an_fp8_cache_has_aims_of_its_own() -> None:
    large = replace(FP8, shape="32x16384", us=70.0, floor_us=64.0)
    found = verdicts([replace(FP8, us=6.5), large, peer(large, 97.0)])
    assert found["32x16384, 16 heads, at most 78.0 us"] == ("70.0 us", True)
    assert found["the fastest peer / ours at 32x16384, at least 1.4"] == ("1.39", False)
    assert found["32x16384, 16 heads, at least 85% of the read ceiling"] == ("91.4%", True)
    assert len(found) == len(AIMED_US["fp8_e4m3"]) + 6


def test_the_section_counts_what_is_met_missed_and_not_measured() -> None:
    lines = aims_section([ROW], "dense_mla")
    assert lines[0] == "Aims met: 0 of 16; missed: 1; not measured: 15."
    assert "| 1x4096, 16 heads | at most 6.5 us | 7.0 us | missed |" in lines and "| 8x8192, 16 heads | at most 22.0 us | - | not measured |" in lines
    assert aims_section([ROW], "dense_mla+sm80") == []

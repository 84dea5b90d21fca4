"""What the decode kernels were to reach on an H200, and what a bench_decode run says of each: met, missed, or not measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.comparison_table import OURS
from benchmarks.contenders import FORWARD, PLANNED
from benchmarks.decode_pages import MAIN_HEADS, by_shape, fastest_peer, ordinary, ours_of, peer_ratios, table_head, table_line
from benchmarks.evidence import DecodeRow

# Microseconds at 16 rows, forward and merge, by the cache's elements.
AIMED_US = {
    "bf16": {
        "1x4096": 6.5, "1x32768": 14, "1x131072": 41, "8x8192": 22, "32x4096": 38, "32x16384": 142, "128x4096": 142, "128x16384": 538,
    },
    "fp8_e4m3": {
        "1x4096": 6.5, "1x32768": 11, "1x131072": 24, "8x8192": 15, "32x4096": 24, "32x16384": 78, "128x4096": 78, "128x16384": 285,
    },
}  # fmt: skip
MERGE_US, MERGED_SHAPES = 2.0, ("1x32768", "1x131072")
FP32_OVER_BF16 = 1.03
PLANNED_OVER_OWN = 1.05
TOKENS_SHAPE, TOKENS_HEADS, TOKENS_OVER_ONE = "1x65536q8", 8, 1.5
UNEVEN_SHAPES, UNEVEN_SHARE = ("mixed:64:32768", "spike:64:131072:512"), 0.9
# Of an FP8 cache, where the batch is large enough for memory to be the bound.
FP8_SHAPES, FP8_OVER_PEER, FP8_SHARE = ("32x16384", "128x4096", "128x16384"), 1.4, 0.85


@dataclass(frozen=True)
class Aim:
    """One aim: what it is of, what it was to be, and what was found; `found` None is not measured."""

    of: str
    wanted: str
    found: str | None
    met: bool

    @classmethod
    def at_most(cls, of: str, found: float | None, limit: float, unit: str = "", digits: int = 1) -> Aim:
        """Met at the limit or below it."""
        return cls(
            of, f"at most {limit:.{digits}f}{unit}", None if found is None else f"{found:.{digits}f}{unit}", found is not None and found <= limit
        )

    @classmethod
    def share(cls, of: str, found: float | None, least: float) -> Aim:
        """Of the read ceiling: met at `least` or above it."""
        return cls(of, f"at least {least:.0%} of the read ceiling", None if found is None else f"{found:.1%}", found is not None and found >= least)


def aims_section(rows: Sequence[DecodeRow], kernel: str) -> list[str]:
    """A line an aim; empty for a run of a kernel that none was set for."""
    if kernel != OURS:
        return []
    aims = aims_of(rows)
    met, measured = sum(aim.met for aim in aims), sum(aim.found is not None for aim in aims)
    lines = [f"Aims met: {met} of {len(aims)}; missed: {measured - met}; not measured: {len(aims) - measured}.", ""]
    lines += table_head(["", "aim", "found", ""])
    for aim in aims:
        verdict = "not measured" if aim.found is None else "met" if aim.met else "missed"
        lines.append(table_line([aim.of, aim.wanted, aim.found or "-", verdict]))
    return lines


def aims_of(rows: Sequence[DecodeRow]) -> list[Aim]:
    """The aims of the rows' cache."""
    cache = next((row.kv_dtype for row in rows), "bf16")
    groups = by_shape(rows, MAIN_HEADS)
    ours = {shape: ours_of(group) for shape, group in groups.items()}
    times = [
        Aim.at_most(f"{shape}, {MAIN_HEADS} heads", found.us if (found := ours.get(shape)) else None, limit, " us")
        for shape, limit in AIMED_US[cache].items()
    ]
    return times + (_aims_of_fp8(groups) if cache == "fp8_e4m3" else _aims_of_bf16(rows, groups))


def _aims_of_bf16(rows: Sequence[DecodeRow], groups: dict[str, list[DecodeRow]]) -> list[Aim]:
    ratios = peer_ratios(rows)
    faster = sum(ratio >= 1 for ratio, _ in ratios)
    costs = [wide.us / row.us for row in rows if (row.kernel, row.partial_dtype) == (OURS, "bf16") and (wide := _in_fp32(rows, row))]
    merges = {
        row.shape: usual.us - row.us for row in rows if row.kernel == FORWARD and row.heads == MAIN_HEADS and (usual := ordinary(rows, row, OURS))
    }
    planned = [row.us / usual.us for row in rows if row.kernel == PLANNED and (usual := ordinary(rows, row, OURS))]
    several = ours_of(by_shape(rows, TOKENS_HEADS).get(TOKENS_SHAPE, []))
    one = several and ordinary(rows, several, OURS, TOKENS_SHAPE.split("q")[0])
    return [
        Aim(
            "against the fastest peer, all shapes and heads",
            "faster in all",
            f"{faster} of {len(ratios)}" if ratios else None,
            faster == len(ratios) > 0,
        ),
        Aim.at_most("FP32 partials / BF16, the worst of all", max(costs, default=None), FP32_OVER_BF16, digits=3),
        *(Aim.at_most(f"the merge at {shape}, {MAIN_HEADS} heads", merges.get(shape), MERGE_US, " us") for shape in MERGED_SHAPES),
        *(Aim.share(f"{shape}, {MAIN_HEADS} heads", _share(groups, shape), UNEVEN_SHARE) for shape in UNEVEN_SHAPES),
        Aim.at_most("captured for longer requests / for its own, the worst", max(planned, default=None), PLANNED_OVER_OWN, digits=3),
        Aim.at_most(f"8 query tokens / 1, {TOKENS_HEADS} heads", several.us / one.us if several and one else None, TOKENS_OVER_ONE, digits=2),
    ]


def _aims_of_fp8(groups: dict[str, list[DecodeRow]]) -> list[Aim]:
    aims = []
    for shape in FP8_SHAPES:
        ours, peer = ours_of(groups.get(shape, [])), fastest_peer(groups.get(shape, []))
        found = peer.us / ours.us if ours and peer else None
        of, wanted = f"the fastest peer / ours at {shape}", f"at least {FP8_OVER_PEER}"
        aims.append(Aim(of, wanted, None if found is None else f"{found:.2f}", found is not None and found >= FP8_OVER_PEER))
        aims.append(Aim.share(f"{shape}, {MAIN_HEADS} heads", _share(groups, shape), FP8_SHARE))
    return aims


def _in_fp32(rows: Sequence[DecodeRow], row: DecodeRow) -> DecodeRow | None:
    return ours_of([other for other in rows if (other.heads, other.shape) == (row.heads, row.shape)], "fp32")


def _share(groups: dict[str, list[DecodeRow]], shape: str) -> float | None:
    """Of the read ceiling, where the shape was timed."""
    ours = ours_of(groups.get(shape, []))
    return ours.floor_us / ours.us if ours else None

"""What the documents say of a bench_decode run: tables, and what they come to. Every number is a row's, or the ratio of two."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.comparison_table import OURS, column_of
from benchmarks.contenders import FORWARD, INVARIANT, PLANNED
from benchmarks.evidence import DecodeRow

MAIN_HEADS = 16
ASIDE = (INVARIANT, PLANNED, FORWARD)  # each in a table of its own, beside the kernel that serves
CHART_ALT = "KV bytes per second of each kernel, beside the GPU's read ceiling"


def decode_section(evidence: dict[str, Any], kernel: str = OURS) -> list[str]:
    """Of a run whose own kernel is `kernel`: what was found, a table a head count, the tables beside, and what is not in them."""
    rows = decode_rows(evidence)
    shown = " In brackets, the relative L2 error against FP64 attention over the same cache." if has_errors(rows) else ""
    lines = [
        f"Read ceiling in the same process: {evidence['read_ceiling_GBps']:.0f} GB/s. Timing {evidence['timing']}.",
        f"Microseconds of a call, the median of its samples; the floor is KV bytes / read ceiling; - was not timed.{shown}",
        "",
        *findings(rows, kernel),
        "",
    ]
    for heads in sorted({row.heads for row in rows}):
        lines += [f"### {heads} heads", "", *table(by_shape(rows, heads), kernel), ""]
    for title, make in ASIDE_TABLES:
        if body := make(rows, kernel):
            lines += [f"### {title}", "", *body, ""]
    lines += [f"- {failure_line(failure)}" for failure in evidence["failures"]]
    return lines + not_run_lines(evidence["not_run"])


def summary(evidence: dict[str, Any]) -> list[str]:
    """The README's table: 16 heads, a query token of each request."""
    rows = [row for row in decode_rows(evidence) if row.query_len == 1]
    lines = ["| requests x keys | DENSE_MLA | fastest peer in vLLM | faster by | of the read ceiling |", "| --- | --- | --- | --- | --- |"]
    for shape, group in by_shape(rows, MAIN_HEADS).items():
        ours, peer = ours_of(group), fastest_peer(group)
        if ours is None:
            continue
        beside = f"{time_of(peer, peer.kernel)} | {peer.us / ours.us:.2f} x" if peer else "- | -"
        lines.append(f"| {shape} | {time_of(ours)} | {beside} | {ours.floor_us / ours.us:.0%} |")
    return lines


def findings(rows: Sequence[DecodeRow], kernel: str = OURS) -> list[str]:
    """What the tables come to, good or bad."""
    groups, ratios = _groups(rows), peer_ratios(rows, kernel)
    lines = []
    if ratios:
        slower = [f"{ours.shape} at {ours.heads} heads ({ratio:.2f})" for ratio, ours in ratios if ratio < 1]
        but = f": not in {', '.join(slower)}" if slower else ""
        lines.append(f"- Faster than the fastest peer in {len(ratios) - len(slower)} of {len(ratios)} cases{but}.")
    partials = [(ours_of(group, "fp32", kernel), ours_of(group, "bf16", kernel)) for group in groups]
    costs = sorted(((fp32.us / bf16.us, bf16) for fp32, bf16 in partials if fp32 and bf16), key=lambda item: item[0])
    if costs:
        (least, at_least), (most, at_most) = costs[0], costs[-1]
        lines.append(
            f"- FP32 partials take from {least:.3f} ({at_least.shape}, {at_least.heads} heads) to {most:.3f} ({at_most.shape}, "
            f"{at_most.heads} heads) of the time of BF16 partials."
        )
    return lines + [line for row in rows if (line := tokens_finding(row, rows, kernel))]


def peer_ratios(rows: Sequence[DecodeRow], kernel: str = OURS) -> list[tuple[float, DecodeRow]]:
    """The fastest peer's time / ours and our row, in every case that both were timed in."""
    return [(peer.us / ours.us, ours) for group in _groups(rows) if (ours := ours_of(group, "bf16", kernel)) and (peer := fastest_peer(group))]


def overall(evidence: dict[str, Any]) -> str:
    """One sentence for all head counts; empty without a peer's time."""
    ratios = peer_ratios(decode_rows(evidence))
    if not ratios:
        return ""
    least, at = min(ratios, key=lambda item: item[0])
    faster = sum(ratio >= 1 for ratio, _ in ratios)
    heads = ", ".join(map(str, sorted({row.heads for _, row in ratios})))
    worst = f"{least:.2f} x in the worst, {at.shape} at {at.heads} heads"
    return f"With {heads} heads, faster than the fastest peer in {faster} of {len(ratios)} cases; {worst}."


def _groups(rows: Sequence[DecodeRow]) -> list[list[DecodeRow]]:
    """The rows of each head count and shape."""
    return [group for heads in sorted({row.heads for row in rows}) for group in by_shape(rows, heads).values()]


def tokens_finding(row: DecodeRow, rows: Sequence[DecodeRow], kernel: str = OURS) -> str | None:
    """Several query tokens beside one; None for any other row."""
    if row.query_len == 1 or (row.kernel, row.partial_dtype) != (kernel, "bf16"):
        return None
    shape = row.shape.split("q")[0]
    one = ordinary(rows, row, kernel, shape)
    return f"- {row.query_len} query tokens of {row.heads} heads at {shape} take {row.us / one.us:.2f} of the time of 1." if one else None


def table(shapes: dict[str, list[DecodeRow]], kernel: str = OURS) -> list[str]:
    """A line a shape, a column a kernel."""
    rows = [row for group in shapes.values() for row in group if row.kernel not in ASIDE]
    columns = list(dict.fromkeys(column_of(row) for row in rows))
    heads = ["requests x keys", "floor", *columns, "FP32 / BF16 partials", "fastest peer / ours", "ours / floor", "SM clock, MHz"]
    lines = table_head(heads)
    for shape, group in shapes.items():
        times = {column_of(row): time_of(row) for row in group}
        ours, wide, peer = ours_of(group, "bf16", kernel), ours_of(group, "fp32", kernel), fastest_peer(group)
        cells = [shape, f"{group[0].floor_us:.1f}", *(times.get(name, "-") for name in columns)]
        cells += [ratio(wide, ours, 3), ratio(peer, ours), f"{ours.us / ours.floor_us:.2f}" if ours else "-", str(group[0].sm_clock_mhz or "-")]
        lines.append(table_line(cells))
    return lines


def invariance_table(rows: Sequence[DecodeRow], kernel: str) -> list[str]:
    """Requests cut at places that their own length decides, beside the balanced schedule."""
    lines = table_head(["heads", "requests x keys", "balanced", "batch-invariant", "batch-invariant / balanced"])
    return _with_rows(lines, rows, kernel, INVARIANT, lambda row, usual: [f"{usual.us:.1f}", f"{row.us:.1f}", f"{row.us / usual.us:.3f}"])


def planned_table(rows: Sequence[DecodeRow], kernel: str) -> list[str]:
    """A capture that allows for longer requests than it decodes, beside one of the shape's own length."""
    lines = table_head(["heads", "requests x keys", "longer capture allows for", "capture for its own length", "longer capture", "longer / own"])

    def cells(row: DecodeRow, usual: DecodeRow) -> list[str]:
        return [f"{row.planned_for:,} keys", f"{usual.us:.1f}", f"{row.us:.1f}", f"{row.us / usual.us:.3f}"]

    return _with_rows(lines, rows, kernel, PLANNED, cells)


def merge_table(rows: Sequence[DecodeRow], kernel: str) -> list[str]:
    """The forward alone, beside forward and merge. It has an error only where it splits no request: elsewhere its output is not whole."""
    lines = table_head(["heads", "requests x keys", "splits requests", "forward and merge", "forward alone", "merge", "its share"])

    def cells(row: DecodeRow, usual: DecodeRow) -> list[str]:
        merge = usual.us - row.us
        return ["yes" if row.relative_l2 is None else "no", f"{usual.us:.1f}", f"{row.us:.1f}", f"{merge:.1f}", f"{merge / usual.us:.0%}"]

    return _with_rows(lines, rows, kernel, FORWARD, cells)


def uneven_table(rows: Sequence[DecodeRow], kernel: str) -> list[str]:
    """Batches of requests of different lengths, as a share of what the GPU can read."""
    lines = table_head(["heads", "batch", "ours", "of the read ceiling", "fastest peer", "of the read ceiling"])
    found = []
    for heads in sorted({row.heads for row in rows}):
        for shape, group in by_shape(rows, heads).items():
            if ":" in shape and (ours := ours_of(group, "bf16", kernel)):
                peer = fastest_peer(group)
                beside = [time_of(peer, peer.kernel), f"{peer.floor_us / peer.us:.0%}"] if peer else ["-", "-"]
                found.append(table_line([str(heads), shape, time_of(ours), f"{ours.floor_us / ours.us:.0%}", *beside]))
    return [*lines, *found] if found else []


ASIDE_TABLES: tuple[tuple[str, Callable[[Sequence[DecodeRow], str], list[str]]], ...] = (
    ("Uneven batches", uneven_table),
    ("The price of batch invariance", invariance_table),
    ("Captured for longer requests", planned_table),
    ("The merge's share", merge_table),
)


def not_run_lines(labels: Sequence[str]) -> list[str]:
    """A line a head count for what the time limit left out, `HEADS heads, SHAPE` each."""
    left: dict[str, list[str]] = {}
    for label in labels:
        heads, _, shape = label.partition(", ")
        left.setdefault(heads, []).append(shape)
    return [f"- Not run with {heads}: {', '.join(shapes)}." for heads, shapes in left.items()]


def failure_line(failure: dict[str, Any]) -> str:
    """A failure as a sentence; a pipe would end a table's cell."""
    what = " ".join(filter(None, (failure["kernel"], failure["partial_dtype"])))
    return f"{what} has no time at {failure['heads']} heads, {failure['shape']}: {re.sub(r'[`|]', ' ', failure['error'])[:200]}"


def decode_rows(evidence: dict[str, Any]) -> list[DecodeRow]:
    """The rows, shapes in order of their first appearance."""
    return [DecodeRow(**row | {"us_samples": tuple(row["us_samples"])}) for row in evidence["rows"]]


def by_shape(rows: Sequence[DecodeRow], heads: int) -> dict[str, list[DecodeRow]]:
    """The rows of a head count by their shape."""
    shapes = dict.fromkeys(row.shape for row in rows if row.heads == heads)
    return {shape: [row for row in rows if (row.heads, row.shape) == (heads, shape)] for shape in shapes}


def ours_of(group: Sequence[DecodeRow], partial_dtype: str = "bf16", kernel: str = OURS) -> DecodeRow | None:
    """Our own row of a group."""
    return next((row for row in group if (row.kernel, row.partial_dtype) == (kernel, partial_dtype)), None)


def ordinary(rows: Sequence[DecodeRow], row: DecodeRow, kernel: str, shape: str | None = None) -> DecodeRow | None:
    """Our own row at the heads and partial dtype of another, and at its shape or the one named."""
    return ours_of([other for other in rows if (other.heads, other.shape) == (row.heads, shape or row.shape)], row.partial_dtype or "bf16", kernel)


def fastest_peer(group: Sequence[DecodeRow]) -> DecodeRow | None:
    """The peer's row with the shortest time."""
    return min((row for row in group if not row.kernel.startswith(OURS)), key=lambda row: row.us, default=None)


def has_errors(rows: Sequence[DecodeRow]) -> bool:
    """Whether errors stand beside the times: kernels that read an E4M3 cache differ in them by more than ten times."""
    return any(row.kv_dtype != "bf16" for row in rows)


def time_of(row: DecodeRow, name: str = "") -> str:
    """Microseconds; in brackets whose they are, and the error beside an E4M3 cache."""
    error = f"{row.relative_l2:.1%}" if row.kv_dtype != "bf16" and row.relative_l2 is not None else ""
    inside = ", ".join(filter(None, (name, error)))
    return f"{row.us:.1f} ({inside})" if inside else f"{row.us:.1f}"


def ratio(row: DecodeRow | None, other: DecodeRow | None, digits: int = 2) -> str:
    """Time of one row / time of another."""
    return f"{row.us / other.us:.{digits}f}" if row and other else "-"


def table_head(columns: Sequence[str]) -> list[str]:
    """Headings and the line below them."""
    return [table_line(columns), "|" + " --- |" * len(columns)]


def table_line(cells: Sequence[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def _with_rows(
    lines: list[str], rows: Sequence[DecodeRow], kernel: str, aside: str, cells: Callable[[DecodeRow, DecodeRow], list[str]]
) -> list[str]:
    """The table of the rows of `aside`, each beside the ordinary one; empty without such rows."""
    found = [(row, usual) for row in rows if row.kernel == aside and (usual := ordinary(rows, row, kernel))]
    return [*lines, *(table_line([str(row.heads), row.shape, *cells(row, usual)]) for row, usual in found)] if found else []

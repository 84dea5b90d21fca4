"""The rows of a bench_decode run as text: a line a shape, a column a kernel."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.evidence import DecodeRow

OURS = "dense_mla"
PORTABLE = f"{OURS}+sm80"


def column_of(row: DecodeRow) -> str:
    """Heading of the row's column: the kernel, and its partial dtype where it has one."""
    return f"{row.kernel} {row.partial_dtype}" if row.partial_dtype else row.kernel


def comparison_table(rows: Sequence[DecodeRow]) -> str:
    """Median microseconds, with the best peer / ours and ours / floor. Ours is the first row of a shape that
    is `dense_mla` or its portable kernel; `-` where a time is missing."""
    columns = list(dict.fromkeys(column_of(row) for row in rows))
    lines = [("heads", "shape", "floor", *columns, "best peer / ours", "ours / floor")]
    for heads, shape in dict.fromkeys((row.heads, row.shape) for row in rows):
        group = [row for row in rows if (row.heads, row.shape) == (heads, shape)]
        times = {column_of(row): f"{row.us:.1f}" for row in group}
        lines.append((str(heads), shape, f"{group[0].floor_us:.1f}", *(times.get(name, "-") for name in columns), *_ratios(group)))
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)


def _ratios(group: Sequence[DecodeRow]) -> tuple[str, str]:
    ours = next((row for row in group if row.kernel in (OURS, PORTABLE)), None)
    peers = [row.us for row in group if not row.kernel.startswith(OURS)]
    if ours is None:
        return "-", "-"
    return f"{min(peers) / ours.us:.2f}" if peers else "-", f"{ours.us / ours.floor_us:.2f}"

"""Write what the documents say about speed, out of the evidence and nothing else.

    python kernels/benchmarks/render.py            # writes
    python kernels/benchmarks/render.py --check    # writes nothing; exit status 1 and the names of the files that differ

Makes the README's block between its markers, docs/benchmarks.md and docs/decode_bandwidth.svg. What has no evidence file is not claimed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the benchmarks of this checkout

from benchmarks.bandwidth_chart import COLORS, bandwidth_chart
from benchmarks.comparison_table import OURS
from benchmarks.evidence import ROOT, DecodeRow
from benchmarks.served_pages import host_cost_section, load_section, served_section, throughput_section

NOTHING = "Nothing is claimed here yet."
START, END = "<!-- numbers:start -->\n", "<!-- numbers:end -->"
CHART = "docs/decode_bandwidth.svg"
DECODE = "docs/evidence/decode_h200.json"
MAIN_HEADS = 16
SECTIONS = (
    ("A step's cost on the host", "docs/evidence/host_cost_h200.json", host_cost_section),
    ("Decode through vLLM's engine", "docs/evidence/serve_throughput_h200.json", throughput_section),
    ("Under load", "docs/evidence/serve_load_h200.json", load_section),
    ("Answers beside TRITON_MLA's", "docs/evidence/serve_tiny_h200.json", served_section),
    ("Answers of a Kimi-K3-shaped model", "docs/evidence/serve_k3_shape_h200.json", served_section),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say which files differ")
    args = parser.parse_args()
    stale = {path: text for path, text in rendered(ROOT).items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        if not args.check:
            path.write_text(text)
        print(f"{'differs from the evidence' if args.check else 'written'}: {path.relative_to(ROOT)}")
    return 1 if args.check and stale else 0


def rendered(root: Path) -> dict[Path, str]:
    """Each file that is made of the evidence, and what has to be in it."""
    evidence = read(root, DECODE)
    readme = (root / "README.md").read_text()
    head, rest = readme.split(START)
    block = readme_block(evidence) if evidence else NOTHING
    files = {root / "README.md": f"{head}{START}{block}\n{END}{rest.split(END, 1)[1]}", root / "docs/benchmarks.md": page(root, evidence)}
    if evidence and (rows := chart_rows(evidence)):
        title = f"MLA decode on {evidence['gpu']}, {MAIN_HEADS} heads, BF16 KV cache: KV bytes read per second"
        files[root / CHART] = bandwidth_chart(rows, evidence["read_ceiling_GBps"], title)
    return files


def read(root: Path, name: str) -> dict[str, Any] | None:
    """An evidence file, or None where there is none."""
    path = root / name
    return json.loads(path.read_text()) if path.exists() else None


def readme_block(evidence: dict[str, Any]) -> str:
    """The README's table: the shapes at 16 heads, and where the rest is."""
    rows = [row for row in decode_rows(evidence) if row.query_len == 1]
    lines = [
        f"Microseconds of one layer's decode, forward and merge, on one {evidence['gpu']}: {MAIN_HEADS} query heads, BF16 KV cache, "
        f"pages of {rows[0].page_size}.",
        "",
        "| requests x keys | DENSE_MLA | fastest peer in vLLM | faster by | of the read ceiling |",
        "| --- | --- | --- | --- | --- |",
    ]
    for shape, group in by_shape(rows, MAIN_HEADS).items():
        ours, peer = ours_of(group), fastest_peer(group)
        if ours is None:
            continue
        beside = f"{peer.us:.1f} ({peer.kernel}) | {peer.us / ours.us:.2f} x" if peer else "- | -"
        lines.append(f"| {shape} | {ours.us:.1f} | {beside} | {ours.floor_us / ours.us:.0%} |")
    chart = [f"![KV bytes per second of each kernel, beside the GPU's read ceiling]({CHART})", ""] if chart_rows(evidence) else []
    where = f"From [{DECODE}]({DECODE}){_state(evidence)}; other head counts, serving, the host: [docs/benchmarks.md](docs/benchmarks.md)."
    return "\n".join([*lines, "", *chart, where])


def page(root: Path, evidence: dict[str, Any] | None) -> str:
    """docs/benchmarks.md."""
    parts = ["# Benchmarks", "", "Written by `python kernels/benchmarks/render.py` out of docs/evidence: change that, not this page.", ""]
    parts += ["## Decode beside vLLM's own kernels", "", *(decode_section(evidence) if evidence else [NOTHING]), ""]
    for title, name, section in SECTIONS:
        found = read(root, name)
        body = [*facts(found, name), "", *section(found)] if found else [NOTHING]
        parts += [f"## {title}", "", *body, ""]
    return "\n".join(parts)


def decode_section(evidence: dict[str, Any]) -> list[str]:
    """Facts, what was found, a table a head count, and everything that is not in them."""
    rows = decode_rows(evidence)
    lines = [
        *facts(evidence, DECODE),
        "",
        f"Read ceiling in the same process: {evidence['read_ceiling_GBps']:.0f} GB/s. Timing {evidence['timing']}.",
    ]
    lines += ["Microseconds of a call, the median of its samples; the floor is KV bytes / read ceiling.", ""]
    if chart_rows(evidence):
        lines += [f"![KV bytes per second of each kernel, beside the GPU's read ceiling]({Path(CHART).name})", ""]
    lines += [*findings(rows), ""]
    for heads in sorted({row.heads for row in rows}):
        lines += [f"### {heads} heads", "", *table(by_shape(rows, heads)), ""]
    lines += [f"- {failure_line(failure)}" for failure in evidence["failures"]]
    lines += [f"- Not run: {label}." for label in evidence["not_run"]]
    return lines


def facts(evidence: dict[str, Any], name: str) -> list[str]:
    """Who measured what, where."""
    versions = f"torch {evidence['torch']}, vLLM {evidence['vllm']}, CUTLASS DSL {evidence['cutlass_dsl']}"
    machine = (
        f"{evidence['gpu']}, driver {evidence['driver']}, {versions}, commit {evidence['commit'][:12]}{_state(evidence)}, {evidence['date'][:10]}."
    )
    return [f"[{name}](../{name}): {machine}", "", f"    {evidence['command']}"]


def findings(rows: Sequence[DecodeRow]) -> list[str]:
    """What the tables come to, good or bad."""
    groups = [group for heads in sorted({row.heads for row in rows}) for group in by_shape(rows, heads).values()]
    ratios = [(peer.us / ours.us, ours) for group in groups if (ours := ours_of(group)) and (peer := fastest_peer(group))]
    lines = []
    if ratios:
        slower = [f"{ours.shape} at {ours.heads} heads ({ratio:.2f})" for ratio, ours in ratios if ratio < 1]
        but = f": not in {', '.join(slower)}" if slower else ""
        lines.append(f"- Faster than the fastest peer in {len(ratios) - len(slower)} of {len(ratios)} cases{but}.")
    partials = [(ours_of(group, "fp32"), ours_of(group)) for group in groups]
    costs = [(fp32.us / bf16.us - 1, bf16) for fp32, bf16 in partials if fp32 and bf16]
    if costs:
        cost, worst = max(costs, key=lambda item: item[0])
        lines.append(f"- FP32 partials cost {cost:+.1%} over BF16 at most, in {worst.shape} at {worst.heads} heads.")
    return lines + [line for row in rows if (line := finding_of(row, rows))]


def finding_of(row: DecodeRow, rows: Sequence[DecodeRow]) -> str | None:
    """A row beside DENSE_MLA's ordinary one: captured for more keys, batch-invariant, or several query tokens beside one; None for any other."""

    def ordinary(shape: str) -> float | None:
        return next((other.us for other in rows if (other.kernel, other.heads, other.shape) == (OURS, row.heads, shape)), None)

    if row.kernel == f"{OURS}+planned" and (us := ordinary(row.shape)):
        return f"- Captured for requests of {row.planned_for:,} keys, {row.shape} takes {row.us / us:.3f} of the time of a capture of its own."
    if row.kernel == f"{OURS}+invariant" and (us := ordinary(row.shape)):
        return f"- Batch-invariant, {row.shape} takes {row.us / us:.3f} of the time of the balanced schedule."
    if row.query_len > 1 and (row.kernel, row.partial_dtype) == (OURS, "bf16") and (us := ordinary(row.shape.split("q")[0])):
        return f"- {row.query_len} query tokens of {row.heads} heads at {row.shape.split('q')[0]} take {row.us / us:.2f} of the time of 1."
    return None


def table(shapes: dict[str, list[DecodeRow]]) -> list[str]:
    """A line a shape, a column a kernel."""
    columns = list(dict.fromkeys(column(row) for group in shapes.values() for row in group))
    lines = ["| requests x keys | floor | " + " | ".join(columns) + " | fastest peer / ours | of the ceiling | SM clock, MHz |"]
    lines.append("| --- |" + " --- |" * (len(columns) + 4))
    for shape, group in shapes.items():
        times = {column(row): f"{row.us:.1f}" for row in group}
        ours, peer = ours_of(group), fastest_peer(group)
        ratio = f"{peer.us / ours.us:.2f}" if ours and peer else "-"
        share = f"{ours.floor_us / ours.us:.0%}" if ours else "-"
        cells = [shape, f"{group[0].floor_us:.1f}", *(times.get(name, "-") for name in columns), ratio, share, str(group[0].sm_clock_mhz or "-")]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def failure_line(failure: dict[str, Any]) -> str:
    """A failure as a sentence; a pipe would end a table's cell."""
    what = " ".join(filter(None, (failure["kernel"], failure["partial_dtype"])))
    return f"{what} has no time at {failure['heads']} heads, {failure['shape']}: {re.sub(r'[`|]', ' ', failure['error'])[:200]}"


def decode_rows(evidence: dict[str, Any]) -> list[DecodeRow]:
    """The rows, shapes in order of their first appearance."""
    return [DecodeRow(**row | {"us_samples": tuple(row["us_samples"])}) for row in evidence["rows"]]


def chart_rows(evidence: dict[str, Any]) -> list[DecodeRow]:
    """What the chart shows: our first partial dtype, and the peers."""
    groups = by_shape([row for row in decode_rows(evidence) if row.query_len == 1], MAIN_HEADS).values()
    return [row for group in groups for row in group if row is ours_of(group) or (row.kernel != OURS and row.kernel in COLORS)]


def by_shape(rows: Sequence[DecodeRow], heads: int) -> dict[str, list[DecodeRow]]:
    """The rows of a head count by their shape."""
    shapes = dict.fromkeys(row.shape for row in rows if row.heads == heads)
    return {shape: [row for row in rows if (row.heads, row.shape) == (heads, shape)] for shape in shapes}


def ours_of(group: Sequence[DecodeRow], partial_dtype: str = "bf16") -> DecodeRow | None:
    """DENSE_MLA's row of a group."""
    return next((row for row in group if (row.kernel, row.partial_dtype) == (OURS, partial_dtype)), None)


def fastest_peer(group: Sequence[DecodeRow]) -> DecodeRow | None:
    """The peer's row with the shortest time."""
    return min((row for row in group if not row.kernel.startswith(OURS)), key=lambda row: row.us, default=None)


def column(row: DecodeRow) -> str:
    """Heading of a row's column."""
    return " ".join(filter(None, (row.kernel, row.partial_dtype)))


def _state(evidence: dict[str, Any]) -> str:
    return ", with uncommitted changes" if evidence["dirty"] else ""


if __name__ == "__main__":
    sys.exit(main())

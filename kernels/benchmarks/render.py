"""Write what the documents say about speed, out of the evidence and nothing else.

    python kernels/benchmarks/render.py            # writes
    python kernels/benchmarks/render.py --check    # writes nothing; exit status 1 and the names of the files that differ

Makes the README's block between its markers, docs/benchmarks.md and docs/decode_bandwidth.svg. What has no evidence file is not claimed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the benchmarks of this checkout

from benchmarks.bandwidth_chart import COLORS, bandwidth_chart
from benchmarks.comparison_table import OURS, PORTABLE
from benchmarks.decode_aims import aims_section
from benchmarks.decode_pages import CHART_ALT, MAIN_HEADS, by_shape, decode_rows, decode_section, ours_of, overall, summary
from benchmarks.evidence import ROOT, DecodeRow, source_text
from benchmarks.served_pages import host_cost_section, load_section, served_section, throughput_section

NOTHING = "Nothing is claimed here yet."
START, END = "<!-- numbers:start -->\n", "<!-- numbers:end -->"
CHART = "docs/decode_bandwidth.svg"
DECODE = "docs/evidence/decode_h200.json"
DECODE_FP8 = "docs/evidence/decode_fp8_h200.json"
PORTABLE_SAYS = "Made for compute capability 8.0 to 12.1; a Hopper GPU runs it only where it is forced, as here."
# Title, file, our own kernel in it, what a reader has to know first.
DECODE_SECTIONS = (
    ("Decode beside vLLM's own kernels", DECODE, OURS, ""),
    ("Decode of an FP8 cache", DECODE_FP8, OURS, "E4M3 with one scale. FLASHMLA quantises q and the softmax's weights as well, DENSE_MLA neither."),
    ("The portable kernel", "docs/evidence/decode_sm80_on_h200.json", PORTABLE, PORTABLE_SAYS),
    ("The portable kernel, of an FP8 cache", "docs/evidence/decode_sm80_fp8_on_h200.json", PORTABLE, PORTABLE_SAYS),
)
SECTIONS = (
    ("A step's cost on the host", "docs/evidence/host_cost_h200.json", host_cost_section),
    ("Decode through vLLM's engine", "docs/evidence/serve_throughput_h200.json", throughput_section),
    ("Under load", "docs/evidence/serve_load_h200.json", load_section),
    ("Answers beside TRITON_MLA's", "docs/evidence/serve_tiny_h200.json", served_section),
    ("Answers in other ways to serve", "docs/evidence/serve_variants_h200.json", served_section),
    ("Answers of a Kimi-K3-shaped model", "docs/evidence/serve_k3_shape_h200.json", served_section),
    ("Answers over two GPUs beside those of one", "docs/evidence/serve_tp2_h200.json", served_section),
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
    block = readme_block(root) or NOTHING
    files = {root / "README.md": f"{head}{START}{block}\n{END}{rest.split(END, 1)[1]}", root / "docs/benchmarks.md": page(root)}
    if evidence and (rows := chart_rows(evidence)):
        title = f"MLA decode on {evidence['gpu']}, {MAIN_HEADS} heads, BF16 KV cache: KV bytes read per second"
        files[root / CHART] = bandwidth_chart(rows, evidence["read_ceiling_GBps"], title)
    return files


def read(root: Path, name: str) -> dict[str, Any] | None:
    """An evidence file, or None where there is none."""
    path = root / name
    return json.loads(path.read_text()) if path.exists() else None


def readme_block(root: Path) -> str:
    """The README's tables: the shapes at 16 heads, BF16 and FP8 caches, and where the rest is. Empty without evidence."""
    parts = []
    for name, cache, chart in ((DECODE, "BF16 KV cache", True), (DECODE_FP8, "FP8 (E4M3) KV cache; in brackets the relative L2 error", False)):
        evidence = read(root, name)
        if evidence is None:
            continue
        rows = decode_rows(evidence)
        lines = [
            f"Microseconds of one layer's decode, forward and merge, on one {evidence['gpu']}: {MAIN_HEADS} query heads, pages of "
            f"{rows[0].page_size}, {cache}. From [{name}]({name}){_state(evidence)}.",
            "",
            *summary(evidence),
        ]
        lines += ["", sentence] if (sentence := overall(evidence)) else []
        parts.append("\n".join([*lines, "", f"![{CHART_ALT}]({CHART})"] if chart and chart_rows(evidence) else lines))
    where = "Other head counts, serving, the host: [docs/benchmarks.md](docs/benchmarks.md)."
    return "\n\n".join([*parts, where]) if parts else ""


def page(root: Path) -> str:
    """docs/benchmarks.md."""
    parts = ["# Benchmarks", "", "Written by `python kernels/benchmarks/render.py` out of docs/evidence: change that, not this page.", ""]
    for title, name, kernel, says in DECODE_SECTIONS:
        found = read(root, name)
        body = [*([says, ""] if says else []), *decode_body(found, name, kernel)] if found else [NOTHING]
        parts += [f"## {title}", "", *body, ""]
    for title, name, section in SECTIONS:
        found = read(root, name)
        body = [*facts(found, name), "", *section(found)] if found else [NOTHING]
        parts += [f"## {title}", "", *body, ""]
    return "\n".join(parts)


def decode_body(evidence: dict[str, Any], name: str, kernel: str) -> list[str]:
    """A bench_decode run's facts, the chart where there is one, and its tables."""
    chart = [f"![{CHART_ALT}]({Path(CHART).name})", ""] if name == DECODE and chart_rows(evidence) else []
    aims = aims_section(decode_rows(evidence), kernel)
    return [*facts(evidence, name), "", *chart, *([*aims, ""] if aims else []), *decode_section(evidence, kernel)]


def facts(evidence: dict[str, Any], name: str) -> list[str]:
    """Who measured what, where."""
    versions = f"torch {evidence['torch']}, vLLM {evidence['vllm']}, CUTLASS DSL {evidence['cutlass_dsl']}"
    machine = (
        f"{evidence['gpu']}, driver {evidence['driver']}, {versions}, commit {source_text(evidence['commit'], evidence['dirty'])}, "
        f"{evidence['date'][:10]}."
    )
    return [f"[{name}](../{name}): {machine}", "", f"    {evidence['command']}"]


def chart_rows(evidence: dict[str, Any]) -> list[DecodeRow]:
    """What the chart shows: our first partial dtype, and the peers."""
    groups = by_shape([row for row in decode_rows(evidence) if row.query_len == 1], MAIN_HEADS).values()
    return [row for group in groups for row in group if row is ours_of(group) or (row.kernel != OURS and row.kernel in COLORS)]


def _state(evidence: dict[str, Any]) -> str:
    return ", with uncommitted changes" if evidence["dirty"] else ""


if __name__ == "__main__":
    sys.exit(main())

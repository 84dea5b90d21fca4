"""KV bytes per second of each kernel at each shape as an SVG: groups of bars, and a line where the GPU's own read ceiling is."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from benchmarks.comparison_table import OURS
from benchmarks.evidence import DecodeRow

COLORS = {OURS: "#0072b2", "FLASHMLA": "#e69f00", "FLASH_ATTN_MLA": "#009e73", "TRITON_MLA": "#999999", "FLASHINFER": "#cc79a7"}
LEFT, TOP, BOTTOM, WIDTH, HEIGHT = 70, 64, 56, 1000, 420
GRID_GBPS = 1000


def bandwidth_chart(rows: Sequence[DecodeRow], ceiling_gbps: float, title: str) -> str:
    """The chart of these rows; one row of a kernel at a shape, in the order in which the shapes come."""
    shapes = list(dict.fromkeys(row.shape for row in rows))
    kernels = [name for name in COLORS if any(row.kernel == name for row in rows)]
    top = max(ceiling_gbps, *(row.GBps for row in rows)) * 1.05
    scale = (HEIGHT - TOP - BOTTOM) / top
    group = (WIDTH - LEFT - 20) / len(shapes)
    bar = group * 0.8 / len(kernels)
    parts = [*_frame(title, top, scale), *_legend(kernels)]
    for row in rows:
        x = LEFT + shapes.index(row.shape) * group + group * 0.1 + kernels.index(row.kernel) * bar
        height = row.GBps * scale
        label = escape(f"{row.kernel}, {row.shape}: {row.GBps:.0f} GB/s, {row.us:.1f} us")
        box = f'x="{x:.1f}" y="{HEIGHT - BOTTOM - height:.1f}" width="{bar:.1f}" height="{height:.1f}"'
        parts.append(f'<rect {box} fill="{COLORS[row.kernel]}"><title>{label}</title></rect>')
    for index, shape in enumerate(shapes):
        parts.append(_text(LEFT + (index + 0.5) * group, HEIGHT - BOTTOM + 20, shape, "middle"))
    y = HEIGHT - BOTTOM - ceiling_gbps * scale
    parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d55e00" stroke-width="2" stroke-dasharray="6 4"/>')
    parts.append(_text(WIDTH - 20, y - 6, f"read ceiling {ceiling_gbps:.0f} GB/s", "end"))
    return "\n".join([*parts, "</svg>\n"])


def _frame(title: str, top: float, scale: float) -> list[str]:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13" role="img">'
    parts = [head, f"<title>{escape(title)}</title>", f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>', _text(LEFT, 24, title, "start")]
    for value in range(0, int(top) + 1, GRID_GBPS):
        y = HEIGHT - BOTTOM - value * scale
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(_text(LEFT - 8, y + 4, str(value), "end"))
    parts.append(_text(LEFT - 8, TOP - 14, "GB/s", "end"))
    parts.append(_text((LEFT + WIDTH) / 2, HEIGHT - 10, "requests x keys of each", "middle"))
    return parts


def _legend(kernels: Sequence[str]) -> list[str]:
    parts = []
    for index, name in enumerate(kernels):
        x = LEFT + index * 150
        parts.append(f'<rect x="{x}" y="36" width="12" height="12" fill="{COLORS[name]}"/>')
        parts.append(_text(x + 18, 47, name, "start"))
    return parts


def _text(x: float, y: float, content: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#222222">{escape(content)}</text>'

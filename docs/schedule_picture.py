"""Draws docs/schedule.svg, who works on what in one ragged batch: `python docs/schedule_picture.py`, from the project's root."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html import escape
from itertools import pairwise
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT / "kernels")]

from dense_mla.paged_kv import PageTiling  # noqa: E402
from dense_mla.problem import FIXED_COST  # noqa: E402
from dense_mla.reference import Piece, pieces  # noqa: E402
from dense_mla.schedule import NO_SLOT, Schedule, plan  # noqa: E402

LENS = (2900, 420, 0, 1600, 64, 1150, 640)  # keys of each request; 0 is a row with which a CUDA graph is padded
PAGE_SIZE = 64
CTAS = 12  # few enough to see; an H200 has 132
COLORS = ("#0072B2", "#E69F00", "#666666", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")  # told apart by colour-blind readers too
LIGHT = {"#E69F00", "#56B4E9"}

WIDTH, MARGIN = 1000, 24
LINE_Y, LINE_HEIGHT = 96, 34
ROWS_Y, ROW_HEIGHT, BAR_HEIGHT = 216, 30, 22
BAR_X, UNIT = 96, 40  # a unit of the lower part
SLOT_X, MERGE_X, OUT_X = 560, 720, 880


def draw() -> str:
    """The picture."""
    schedule = plan(LENS, PAGE_SIZE, CTAS)
    height = ROWS_Y + CTAS * ROW_HEIGHT + 48
    shapes = [*_heading(), *_line(schedule), *_ranges(schedule), *_merges(schedule), *_legend(height - 24)]
    style = "text{font:13px 'DejaVu Sans',Helvetica,Arial,sans-serif;fill:#222}"
    style += ".b{font-weight:bold}.w{fill:#fff}.s{font-size:11px}.m{text-anchor:middle}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">'
    title = f"<title>{escape(_title())}</title>"
    fixed = '<pattern id="fixed" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    fixed += '<rect width="5" height="5" fill="#fff" fill-opacity=".55"/><rect width="2" height="5" fill="#fff" fill-opacity=".5"/></pattern>'
    background = f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    return "\n".join([head, title, f"<style>{style}</style>", f"<defs>{fixed}</defs>", background, *shapes, "</svg>", ""])


def _tiles() -> list[int]:
    return [PageTiling(PAGE_SIZE).num_tiles(n) for n in LENS]


def _units() -> list[int]:
    """What each request takes of the line."""
    return [tiles + FIXED_COST if tiles else 1 for tiles in _tiles()]


def _quantum() -> int:
    return -(-sum(_units()) // CTAS)


def _title() -> str:
    return f"One step: {len(LENS)} requests, {sum(_tiles())} tiles of {PAGE_SIZE} keys, {CTAS} CTAs with a quantum of {_quantum()} units each"


def _heading() -> Iterator[str]:
    yield _text(MARGIN, 34, _title(), "b")
    yield _text(MARGIN, 58, "All requests' tiles laid end to end, each after a fixed cost, and cut every quantum, wherever that falls:")
    yield _text(MARGIN, ROWS_Y - 18, "Each CTA's stretch of the line, tile by tile")
    yield _text(SLOT_X, ROWS_Y - 18, "a piece goes to")
    yield _text(MERGE_X, ROWS_Y - 18, "the merge adds up")


def _line(schedule: Schedule) -> Iterator[str]:
    """The requests one after the other, and the cuts between the CTAs."""
    scale = (WIDTH - 2 * MARGIN) / sum(_units())
    starts = [MARGIN + scale * sum(_units()[:request]) for request in range(len(LENS) + 1)]
    for request, (x, end) in enumerate(pairwise(starts)):
        yield _rect(x, LINE_Y, end - x, LINE_HEIGHT, COLORS[request])
        if LENS[request]:
            yield _rect(x, LINE_Y, FIXED_COST * scale, LINE_HEIGHT, "url(#fixed)")
    for cta in range(len(schedule.ranges) + 1):
        cut = min(MARGIN + cta * _quantum() * scale, starts[-1])
        yield _rule(cut, LINE_Y - 14, cut, LINE_Y + LINE_HEIGHT + 8)
        if cut < starts[-1]:
            yield _text((cut + min(cut + _quantum() * scale, starts[-1])) / 2, LINE_Y - 6, f"CTA {cta}", "m s")
    for request, (x, end) in enumerate(pairwise(starts)):
        middle = (x + end + (FIXED_COST * scale if LENS[request] else 0)) / 2
        if end - x > 90:
            yield _rect(middle - 38, LINE_Y + 6, 76, LINE_HEIGHT - 12, COLORS[request])
            yield _text(middle, LINE_Y + 22, f"request {request}", f"{_ink(request)}m")
        elif end - x > 70:
            yield _text(middle, LINE_Y + 21, f"request {request}", f"{_ink(request)}m s")
        else:
            yield _text(middle, LINE_Y + LINE_HEIGHT + 24, f"request {request}", "m s")


def units_by_cta() -> list[list[tuple[int, int | None]]]:
    """The line, unit by unit, cut: the request and its tile, or None for a fixed cost or a request without keys."""
    line: list[tuple[int, int | None]] = []
    for request, tiles in enumerate(_tiles()):
        line += [(request, None)] * (FIXED_COST if tiles else 1)
        line += [(request, tile) for tile in range(tiles)]
    return [line[cta * _quantum() : (cta + 1) * _quantum()] for cta in range(CTAS)]


def _ranges(schedule: Schedule) -> Iterator[str]:
    """A row for each CTA: its pieces, and where each goes."""
    for cta, (own, units) in enumerate(zip(pieces_by_cta(schedule), units_by_cta(), strict=True)):
        y = ROWS_Y + cta * ROW_HEIGHT
        yield _text(MARGIN, y + 16, f"CTA {cta}")
        for place, (request, tile) in enumerate(units):
            x = BAR_X + place * UNIT
            yield _rect(x, y, UNIT - 1, BAR_HEIGHT, COLORS[request])
            if tile is not None:
                yield _text(x + UNIT / 2, y + 15, str(tile), f"{_ink(request)}m s")
            elif LENS[request]:
                yield _rect(x, y, UNIT - 1, BAR_HEIGHT, "url(#fixed)")
        labels = [f"out {piece.request}" if piece.slot == NO_SLOT else f"slot {piece.slot}" for piece in own]
        yield _text(SLOT_X, y + 16, ", ".join(labels))


def _merges(schedule: Schedule) -> Iterator[str]:
    """A bracket over the slots of every split request."""
    rows = {piece.slot: cta for cta, own in enumerate(pieces_by_cta(schedule)) for piece in own}
    for split in schedule.splits:
        slots = range(split.first_slot, split.first_slot + split.pieces)
        ys = [ROWS_Y + rows[slot] * ROW_HEIGHT + BAR_HEIGHT / 2 for slot in slots]
        middle = (ys[0] + ys[-1]) / 2
        for y in ys:
            yield _rule(SLOT_X + 106, y, MERGE_X, y, COLORS[split.request])
        yield _rect(MERGE_X, ys[0] - 9, 6, ys[-1] - ys[0] + 18, COLORS[split.request])
        yield _text(MERGE_X + 18, middle + 5, f"slots {slots[0]} to {slots[-1]}")
        yield _rule(MERGE_X + 116, middle, OUT_X - 8, middle, COLORS[split.request])
        yield _text(OUT_X, middle + 5, f"out {split.request}")


def _legend(y: float) -> Iterator[str]:
    yield _rect(MARGIN, y - 12, 30, 14, COLORS[0])
    yield _rect(MARGIN, y - 12, 30, 14, "url(#fixed)")
    yield _text(MARGIN + 38, y, f"fixed cost of a request, {FIXED_COST} units; a tile is 1")
    empty = LENS.index(0)
    yield _rect(WIDTH / 2 - 140, y - 12, 30, 14, COLORS[empty])
    yield _text(WIDTH / 2 - 102, y, f"request {empty} has no keys: 1 unit, its output is zeros")


def pieces_by_cta(schedule: Schedule) -> list[list[Piece]]:
    """The pieces of each CTA, in the order in which it walks them."""
    walk = pieces(schedule, _tiles())
    return [[next(walk) for _ in range(r.first_request, r.last_request + 1)] for r in schedule.ranges]


def _ink(request: int) -> str:
    """White text on a dark colour."""
    return "" if COLORS[request] in LIGHT else "w "


def _rect(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"{more}/>'


def _rule(x1: float, y1: float, x2: float, y2: float, color: str = "#222") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" stroke-width="1.5"/>'


def _text(x: float, y: float, text: str, classes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{f" class={chr(34)}{classes}{chr(34)}" if classes else ""}>{escape(text)}</text>'


if __name__ == "__main__":
    (DOCS / "schedule.svg").write_text(draw())

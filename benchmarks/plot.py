"""Draws time and peak memory against model size: `python benchmarks/plot.py bench.json docs/scale.svg`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = {"cp -r": "#8a8f98", "HF -> Megatron": "#2f81f7", "Megatron -> HF": "#d9730d"}  # seen on white and on black
PANELS = (("on disk", "time until it is on the disk (s)"), ("anonymous MiB", "peak anonymous memory (MiB)"))
WIDTH, HEIGHT, LEFT, TOP = 330, 220, 60, 40
_STYLE = (
    "text{font:12px sans-serif;fill:#57606a}line{stroke:#57606a;stroke-opacity:.35}"
    "@media (prefers-color-scheme:dark){text{fill:#c9d1d9}line{stroke:#c9d1d9}}"
)


def svg(rows: Sequence[Mapping[str, Any]]) -> str:
    """Draws two panels with both axes in doublings: a cost that grows with size is a line of slope one."""
    body = [
        part
        for index, (column, words) in enumerate(PANELS)
        for part in _panel(rows, column, words, index * (WIDTH + LEFT + 20) + LEFT)
    ]
    for index, (what, colour) in enumerate(COLOURS.items()):
        x = LEFT + index * 160
        body.append(
            f'<circle cx="{x}" cy="16" r="4" fill="{colour}"/>'
            f'<text x="{x + 10}" y="20">{what.replace(">", "&gt;")}</text>'
        )
    size = f'viewBox="0 0 {2 * (WIDTH + LEFT + 20)} {HEIGHT + TOP + 50}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{_STYLE}</style>\n' + "\n".join(body) + "\n</svg>\n"


def _panel(rows: Sequence[Mapping[str, Any]], column: str, words: str, left: float) -> Iterator[str]:
    sizes, values = [row["GB"] for row in rows], [row[column] for row in rows]
    across, up = _doublings(min(sizes), max(sizes)), _doublings(min(values), max(values))
    for tick in across:
        x = left + _place(tick, across) * WIDTH
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{TOP + HEIGHT}"/>'
        yield f'<text x="{x:.1f}" y="{TOP + HEIGHT + 17}" text-anchor="middle">{tick:g}</text>'
    for tick in up:
        y = TOP + HEIGHT - _place(tick, up) * HEIGHT
        yield f'<line x1="{left}" x2="{left + WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
    middle = TOP + HEIGHT / 2
    yield f'<text x="{left + WIDTH / 2}" y="{TOP + HEIGHT + 38}" text-anchor="middle">size of the model (GB)</text>'
    turned = f'text-anchor="middle" transform="rotate(-90 {left - 44} {middle})"'
    yield f'<text x="{left - 44}" y="{middle}" {turned}>{words}</text>'
    for what, colour in COLOURS.items():
        found = sorted((row["GB"], row[column]) for row in rows if row["what"] == what)
        points = [
            (left + _place(size, across) * WIDTH, TOP + HEIGHT - _place(value, up) * HEIGHT) for size, value in found
        ]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{line}"/>'
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points)


def _doublings(least: float, most: float) -> list[float]:
    """Powers of two around these; at least two."""
    low = math.floor(math.log2(max(least, 0.25)) + 0.01)
    return [2.0**power for power in range(low, max(math.ceil(math.log2(max(most, 0.25)) - 0.01), low + 1) + 1)]


def _place(value: float, ticks: Sequence[float]) -> float:
    """0 at the first tick, 1 at the last."""
    return math.log2(max(value, ticks[0]) / ticks[0]) / math.log2(ticks[-1] / ticks[0])


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(svg(json.loads(Path(sys.argv[1]).read_text())["scale"]))

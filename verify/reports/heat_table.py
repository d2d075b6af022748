"""The heat map of the HTML page: a row a layer, a column a kind of tensor, a link to the finding in each cell that has one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from verify.report import Report
from verify.reports.text import escaped

_LEVELS = 4  # shades of a cell that is not wrong

Cell = Mapping[str, Any]


def heat_table(report: Report, targets: Mapping[str, str]) -> str:
    """The section with the map; `targets` says where a link to a finding leads. Says so where nothing was compared tensor by tensor."""
    title = '<section aria-labelledby="heat-title"><h2 id="heat-title">Layers and kinds of tensors</h2>'
    if not report.heat:
        return f"{title}<p>No check looked at single tensors.</p></section>"
    kinds = list(dict.fromkeys(kind for cells in report.heat.values() for kind in cells))
    head = "".join(f'<th scope="col"><span>{escaped(kind)}</span></th>' for kind in kinds)
    worst = {
        key: max((cell[key] or 0.0 for cells in report.heat.values() for cell in cells.values()), default=0.0)
        for key in ("max_error", "max_steps")
    }
    rows = []
    for layer, cells in report.heat.items():
        found = "".join(_cell(layer, kind, cells.get(kind), worst, targets) for kind in kinds)
        rows.append(f'<tr><th scope="row">{escaped(layer)}</th>{found}</tr>')
    body = "\n".join(rows)
    table = f'<table class="heat"><thead><tr><th scope="col">layer</th>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>'
    region = f'<div class="wide" tabindex="0" role="region" aria-labelledby="heat-title">{table}</div>'
    return f"{title}\n{_legend(report)}\n{region}</section>"


def _legend(report: Report) -> str:
    """What the words in the cells mean; of those that occur here, since a reader has to learn each."""
    words = {_word(cell) for cells in report.heat.values() for cell in cells.values()}
    meanings = {
        "✗ N": ("N tensors are wrong", any(word.startswith("✗") for word in words)),
        "!": ("a warning names it", "!" in words),
        "=": ("equal to the source, bit for bit", "=" in words),
        "N st": (
            "largest error of a quantized weight, in quantization steps",
            any(word.endswith(" st") for word in words),
        ),
        "N": (
            "largest difference from the source",
            any(word[0].isdigit() and not word.endswith(" st") for word in words),
        ),
        "ok": ("read, with nothing to compare with", "ok" in words),
    }
    said = "; ".join(f"<b>{word}</b> {meaning}" for word, (meaning, occurs) in meanings.items() if occurs)
    return f'<p class="quiet">{said}. The stronger the shade, the larger; an empty cell was not compared.</p>'


def _word(cell: Cell) -> str:
    if cell["failed"]:
        return f"✗ {cell['failed']}"
    if cell["findings"]:
        return "!"
    if cell["max_steps"] is not None:
        return f"{cell['max_steps']:.2f} st"
    if cell["max_error"] is None:
        return "ok"
    return f"{cell['max_error']:.1e}" if cell["max_error"] else "="


def _cell(layer: str, kind: str, cell: Cell | None, worst: Mapping[str, float], targets: Mapping[str, str]) -> str:
    if cell is None:
        return "<td></td>"
    word, style = _word(cell), _style(cell, worst)
    target = next((found for anchor in cell["findings"] if (found := _target(anchor, targets))), None)
    said = escaped(f"{layer}, {kind}: {_described(cell)}")
    content = f'<a href="#{escaped(target)}" aria-label="{said}">{word}</a>' if target else word
    return f'<td{style} title="{said}">{content}</td>'


def _target(anchor: str, targets: Mapping[str, str]) -> str | None:
    return targets.get(anchor) or targets.get(f"{anchor.rpartition('-')[0]} more")


def _style(cell: Cell, worst: Mapping[str, float]) -> str:
    if cell["failed"]:
        return ' class="failed"'
    if cell["findings"]:
        return ' class="warning"'
    key = "max_steps" if cell["max_steps"] is not None else "max_error"
    share = (cell[key] or 0.0) / worst[key] if worst[key] else 0.0
    level = math.ceil(share * _LEVELS)
    return f' class="heat-{level}"' if level else ""


def _described(cell: Cell) -> str:
    """All that is known of a cell, for those who point at it or have it read out."""
    parts = [f"{cell['tensors']} tensors"]
    parts += [f"{cell['failed']} wrong"] if cell["failed"] else []
    parts += [f"largest difference {cell['max_error']:.3g}"] if cell["max_error"] is not None else []
    parts += [f"at most {cell['max_steps']:.3f} quantization steps off"] if cell["max_steps"] is not None else []
    parts += [", ".join(cell["findings"])] if cell["findings"] else []
    return "; ".join(parts)

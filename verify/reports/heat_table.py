"""The heat map as a table: a row for each layer, a column for each kind of tensor, and links to findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Shades of a cell that is not wrong, by its largest error: what each begins above, whatever the other cells are. Half a
# quantization step is what rounding does, and no difference from the source is none, so neither is shaded.
_STEPS = (0.55, 1.0, 2.0, 4.0)
_ERRORS = (0.0, 1e-4, 1e-2, 1.0)
_MEANINGS = {
    "✗ N": "N tensors are wrong",
    "!": "a warning names it",
    "=": "equal to the source, bit for bit",
    "N st": "largest error of a quantized weight, in quantization steps",
    "N": "largest difference from the source",
    "ok": "read, with nothing to compare with",
}


@dataclass(frozen=True)
class HeatCell:
    """What a cell shows: a word, its CSS class (may be ""), its full description, and the finding it links to."""

    word: str
    style: str
    described: str
    link: str | None


@dataclass(frozen=True)
class HeatTable:
    """Columns, rows (None: nothing was compared there), and the meaning of each kind of word that occurs."""

    kinds: Sequence[str]
    rows: Sequence[tuple[str, Sequence[HeatCell | None]]]
    legend: Sequence[tuple[str, str]]


def heat_table(heat: Mapping[str, Mapping[str, Mapping[str, Any]]], targets: Mapping[str, str]) -> HeatTable:
    """The map of a report as a table; `targets` says where a link to a finding leads."""
    kinds = list(dict.fromkeys(kind for cells in heat.values() for kind in cells))
    every = [cell for cells in heat.values() for cell in cells.values()]

    def shown(layer: str, kind: str) -> HeatCell | None:
        if (cell := heat[layer].get(kind)) is None:
            return None
        link = next((found for anchor in cell["findings"] if (found := _target(anchor, targets))), None)
        return HeatCell(_word(cell), _style(cell), f"{layer}, {kind}: {_described(cell)}", link)

    words = {_pattern(_word(cell)) for cell in every}
    legend = [(word, meaning) for word, meaning in _MEANINGS.items() if word in words]
    return HeatTable(kinds, [(layer, [shown(layer, kind) for kind in kinds]) for layer in heat], legend)


def _word(cell: Mapping[str, Any]) -> str:
    if cell["failed"]:
        return f"✗ {cell['failed']}"
    if cell["findings"]:
        return "!"
    if cell["max_steps"] is not None:
        return f"{cell['max_steps']:.2f} st"
    if cell["max_error"] is None:
        return "ok"
    return f"{cell['max_error']:.1e}" if cell["max_error"] else "="


def _pattern(word: str) -> str:
    """The word with N for its number, as the legend has it."""
    return " ".join("N" if part[0].isdigit() else part for part in word.split())


def _target(anchor: str, targets: Mapping[str, str]) -> str | None:
    return targets.get(anchor) or targets.get(f"{anchor.rpartition('-')[0]} more")


def _style(cell: Mapping[str, Any]) -> str:
    if cell["failed"] or cell["findings"]:
        return "failed" if cell["failed"] else "warning"
    by_steps = cell["max_steps"] is not None
    size = (cell["max_steps"] if by_steps else cell["max_error"]) or 0.0
    level = sum(size > least for least in (_STEPS if by_steps else _ERRORS))
    return f"heat-{level}" if level else ""


def _described(cell: Mapping[str, Any]) -> str:
    """All that is known of a cell, for those who point at it or have it read out."""
    parts = [f"{cell['tensors']} tensors"]
    parts += [f"{cell['failed']} wrong"] if cell["failed"] else []
    parts += [f"largest difference {cell['max_error']:.3g}"] if cell["max_error"] is not None else []
    parts += [f"at most {cell['max_steps']:.3f} quantization steps off"] if cell["max_steps"] is not None else []
    parts += [", ".join(cell["findings"])] if cell["findings"] else []
    return "; ".join(parts)

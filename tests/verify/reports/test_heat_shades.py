"""Shades of the heat map: on a scale of their own, so a sound page is calm, and a fault makes no other cell pale."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from verify.report import Report
from verify.reports import write_report

EXAMPLES = Path(__file__).resolve().parents[3] / "docs/examples"


class _Cells(HTMLParser):
    """The classes of the cells of the heat map, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag == "table":
            self._inside = named.get("class") == "heat"
        elif tag == "td" and self._inside:
            self.found.append(named.get("class") or "")


def classes(page: Path) -> list[str]:
    reader = _Cells()
    reader.feed(page.read_text())
    return reader.found


def shades(folder: Path, cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """The classes of these cells, on a page of one column."""
    sound = {"tensors": 1, "max_error": None, "max_steps": None, "failed": 0, "findings": []}
    heat = {str(layer): {"q_proj": {**sound, **cell}} for layer, cell in enumerate(cells)}
    write_report(Report("0", (), "a", "b", (), (), {}, heat), folder / "page.html")
    return classes(folder / "page.html")


def test_a_sound_page_is_calm(tmp_path: Path) -> None:
    """Rounding takes a weight half a step away, and what is equal is not off at all."""
    assert shades(tmp_path, [{"max_steps": 0.5}, {"max_steps": 0.55}, {"max_error": 0.0}, {}]) == [""] * 4
    found = classes(EXAMPLES / "passed.html")
    assert len(found) > 50
    assert set(found) == {""}


@pytest.mark.parametrize(
    ("key", "values"),
    [("max_steps", [0.5, 0.6, 1.5, 3.0, 5.0]), ("max_error", [0.0, 1e-5, 1e-3, 0.1, 2.0])],
)
def test_each_shade_is_of_a_size(key: str, values: Sequence[float], tmp_path: Path) -> None:
    assert shades(tmp_path, [{key: value} for value in values]) == ["", "heat-1", "heat-2", "heat-3", "heat-4"]


@pytest.mark.parametrize(
    ("key", "sizes", "shade"), [("max_steps", (0.7, 0.9), "heat-1"), ("max_error", (0.05,), "heat-3")]
)
def test_a_shade_does_not_depend_on_the_other_cells(
    key: str, sizes: Sequence[float], shade: str, tmp_path: Path
) -> None:
    cells = [{key: size} for size in sizes]
    for others in ([], [{key: 0.0}], [{key: 1e6}], [{key: 1e6, "failed": 1}]):
        assert shades(tmp_path, [*cells, *others])[: len(cells)] == [shade] * len(cells)


def test_a_cell_that_is_wrong_is_no_shade(tmp_path: Path) -> None:
    cells = [{"max_error": 2.0, "failed": 1}, {"max_error": 2.0, "findings": ["CK210-1"]}]
    assert shades(tmp_path, cells) == ["failed", "warning"]


def test_every_shade_has_a_colour_in_light_and_dark(tmp_path: Path) -> None:
    shades(tmp_path, [{"max_steps": 5.0}])
    page = (tmp_path / "page.html").read_text()
    for level in range(1, 5):
        assert len(re.findall(rf"--heat-{level}: #[0-9a-f]{{6}}", page)) == 2
        assert f".heat-{level} {{ background: var(--heat-{level}); }}" in page

"""Colours of the map: on a scale of their own, so a sound page is calm, and a fault makes no other cell pale."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from verify.report import Report
from verify.reports import write_report

EXAMPLES = Path(__file__).resolve().parents[3] / "docs/examples"
SOUND = {"tensors": 1, "max_error": None, "max_steps": None, "failed": 0, "findings": []}


def classes(page: Path) -> list[str]:
    """The classes of the areas of the map, in order."""
    return re.findall(r'<path class="([^"]*)" d="[^"]*"><title>', page.read_text())


def shades(folder: Path, cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """The classes of these cells, on a page with a kind of tensors for each."""
    heat = {"0": {f"k{number}": {**SOUND, **cell} for number, cell in enumerate(cells)}}
    write_report(Report("0", (), "a", "b", (), (), {}, heat), folder / "page.html")
    found = re.findall(r'<path class="([^"]*)" d="[^"]*"><title>k(\d+),', (folder / "page.html").read_text())
    return [style for style, _ in sorted(found, key=lambda pair: int(pair[1]))]


def test_a_sound_page_is_calm(tmp_path: Path) -> None:
    """Rounding takes a weight half a step away, and what is equal is not off at all."""
    cells = [{"max_steps": 0.5}, {"max_steps": 0.55}, {"max_error": 0.0}, {}]
    assert shades(tmp_path, cells) == ["near", "near", "equal", "read"]
    assert set(classes(EXAMPLES / "passed.html")) == {"near", "equal"}


@pytest.mark.parametrize(
    ("key", "values", "calm"),
    [("max_steps", [0.5, 0.6, 1.5, 3.0, 5.0], "near"), ("max_error", [0.0, 1e-5, 1e-3, 0.1, 2.0], "equal")],
)
def test_each_shade_is_of_a_size(key: str, values: Sequence[float], calm: str, tmp_path: Path) -> None:
    assert shades(tmp_path, [{key: value} for value in values]) == [calm, "heat-1", "heat-2", "heat-3", "heat-4"]


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


def test_every_colour_is_there_in_light_and_dark(tmp_path: Path) -> None:
    shades(tmp_path, [{"max_steps": 5.0}])
    page = (tmp_path / "page.html").read_text()
    for name in (*(f"heat-{level}" for level in range(1, 5)), "equal", "near", "read", "wrong", "warned"):
        assert len(re.findall(rf"--{name}: #[0-9a-f]{{6}}", page)) == 2
        assert f"fill: var(--{name});" in page

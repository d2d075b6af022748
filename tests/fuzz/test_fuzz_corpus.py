"""Every parser reads its corpus of fuzzing as a caller expects: it returns, or refuses in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.run import CORPUS
from fuzz.targets import TARGETS


def test_every_target_has_a_corpus() -> None:
    assert sorted(TARGETS) == sorted(folder.name for folder in CORPUS.iterdir())


@pytest.mark.parametrize("name", TARGETS)
def test_a_parser_returns_or_refuses_every_input_of_its_corpus(name: str, tmp_path: Path) -> None:
    inputs = sorted((CORPUS / name).iterdir())
    assert inputs
    unit = TARGETS[name].make(tmp_path)
    for file in inputs:
        content = file.read_bytes()
        for data in (content, content[: len(content) // 2], content[:-1]):
            unit(data)

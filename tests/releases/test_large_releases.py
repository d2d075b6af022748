"""Releases with the most tensors pass every verb that answers from headers."""

from __future__ import annotations

from pathlib import Path

import pytest

from releases.verbs import LARGE, check_every_verb


@pytest.mark.parametrize("model", LARGE)
def test_large_release_as_published_has_no_finding(model: str, tmp_path: Path) -> None:
    check_every_verb(model, tmp_path)

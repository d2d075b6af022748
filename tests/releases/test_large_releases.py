"""Releases with the most tensors pass every verb that answers from headers."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.nightly import daily

from releases.verbs import LARGE, check_every_verb

DAILY = ("RedHatAI/Qwen3-30B-A3B-quantized.w4a16",)


@pytest.mark.parametrize("model", daily(LARGE, DAILY))
def test_large_release_as_published_has_no_finding(model: str, tmp_path: Path) -> None:
    check_every_verb(model, tmp_path)

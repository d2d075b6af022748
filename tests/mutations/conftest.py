"""What the tests of mutations share."""

from __future__ import annotations

import pytest

from mutations.starts import Starts


@pytest.fixture(scope="session")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    """The clean checkpoints, made at their first use. Read only."""
    return Starts(tmp_path_factory.mktemp("starts"))

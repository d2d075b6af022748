"""Skips every test of this folder where there is no GPU: no file of it can forget to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Adds the mark."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))

"""Packages are hidden from imports inside a context, and only there."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from verify.witnesses.megatron.imports import hidden


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an installed package that fails without a driver, as flash_mla does."""
    package = tmp_path / "needs_a_driver"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    return package.name


@pytest.mark.parametrize("module", ["", ".interface"])
def test_hidden_package_is_not_installed_inside_the_context(broken: str, module: str) -> None:
    with hidden([broken]), pytest.raises(ModuleNotFoundError, match=broken) as caught:
        importlib.import_module(broken + module)
    assert caught.value.name == broken


def test_hidden_package_is_found_again_after_the_context(broken: str) -> None:
    before = list(sys.meta_path)
    with hidden([broken]), pytest.raises(ModuleNotFoundError):
        importlib.import_module(broken)
    assert sys.meta_path == before
    assert broken not in sys.modules
    with pytest.raises(OSError, match="libcuda"):
        importlib.import_module(broken)


def test_other_packages_are_imported_inside_the_context(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with hidden([broken]):
        assert importlib.import_module("colorsys").__name__ == "colorsys"

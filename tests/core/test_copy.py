"""A destination appears whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptkit.copy import new_directory
from ckptkit.errors import CkptkitError


def test_appears_only_when_finished(tmp_path: Path) -> None:
    with new_directory(tmp_path / "out") as partial:
        (partial / "x").write_text("1")
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "out/x").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, CkptkitError("no"), ZeroDivisionError])
def test_nothing_is_left_after_a_failure(tmp_path: Path, error: type[BaseException] | BaseException) -> None:
    with pytest.raises((KeyboardInterrupt, CkptkitError, ZeroDivisionError)), new_directory(tmp_path / "out") as partial:
        (partial / "x").write_text("1")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_overwrite_replaces_only_when_the_new_one_is_whole(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/old").write_text("old")
    with pytest.raises(CkptkitError, match="out exists already"), new_directory(tmp_path / "out"):
        pass
    with pytest.raises(ZeroDivisionError), new_directory(tmp_path / "out", overwrite=True):
        raise ZeroDivisionError
    assert (tmp_path / "out/old").read_text() == "old"
    with new_directory(tmp_path / "out", overwrite=True) as partial:
        (partial / "new").write_text("new")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_partial_of_a_dead_run_is_not_touched_without_overwrite(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    with pytest.raises(CkptkitError, match="out.partial exists already"), new_directory(tmp_path / "out"):
        pass
    with new_directory(tmp_path / "out", overwrite=True):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_missing_parent_is_named(tmp_path: Path) -> None:
    with pytest.raises(CkptkitError, match="absent does not exist"), new_directory(tmp_path / "absent/out"):
        pass

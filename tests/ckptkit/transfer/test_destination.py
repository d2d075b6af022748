"""A destination appears whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ckptkit.core.errors import CkptkitError, FinalError
from ckptkit.transfer.destination import check_destination, new_directory

ASKED = {"command": "ckptkit convert source out"}


def test_appears_only_when_finished(tmp_path: Path) -> None:
    with new_directory(tmp_path / "out", ASKED) as (partial, _):
        (partial / "x").write_text("1")
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "out/x").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, CkptkitError("no"), ZeroDivisionError])
def test_nothing_is_left_after_a_failure(tmp_path: Path, error: type[BaseException] | BaseException) -> None:
    with (
        pytest.raises((KeyboardInterrupt, CkptkitError, ZeroDivisionError)),
        new_directory(tmp_path / "out", ASKED) as (partial, _),
    ):
        (partial / "x").write_text("1")
        raise error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "resumable"), [(CkptkitError("no"), True), (FinalError.of(CkptkitError("no")), False)]
)
def test_finished_files_are_kept_only_where_the_same_job_may_go_on(
    tmp_path: Path, error: CkptkitError, resumable: bool
) -> None:
    with pytest.raises(CkptkitError), new_directory(tmp_path / "out", ASKED) as (_, journal):
        journal.record("x", {})
        raise error
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"] * resumable


def test_overwrite_replaces_only_when_the_new_one_is_whole(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/config.json").write_text("old")
    with pytest.raises(CkptkitError, match="out exists already"), new_directory(tmp_path / "out", ASKED):
        pass
    with pytest.raises(ZeroDivisionError), new_directory(tmp_path / "out", ASKED, overwrite=True):
        raise ZeroDivisionError
    assert (tmp_path / "out/config.json").read_text() == "old"
    with new_directory(tmp_path / "out", ASKED, overwrite=True) as (partial, _):
        (partial / "new").write_text("new")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_partial_of_a_dead_run_is_not_touched_without_overwrite(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    with pytest.raises(CkptkitError, match="out.partial exists already"), new_directory(tmp_path / "out", ASKED):
        pass
    with new_directory(tmp_path / "out", ASKED, overwrite=True):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_missing_parent_is_named(tmp_path: Path) -> None:
    with pytest.raises(CkptkitError, match="absent does not exist"), new_directory(tmp_path / "absent/out", ASKED):
        pass


@pytest.mark.parametrize("destination", ["source", "source/inside", ".", "source.partial/..", "link", "dangling", "/"])
def test_destinations_that_would_lose_something(tmp_path: Path, destination: str) -> None:
    for name in ("source", "source.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "source")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CkptkitError, match=r"overlaps|cannot be a destination"):
        check_destination(tmp_path / destination, [tmp_path / "source", None], overwrite=True)
    assert (tmp_path / "source/config.json").read_text() == "x"


def test_a_source_that_is_the_partial_of_the_destination(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    with pytest.raises(CkptkitError, match="overlaps"):
        check_destination(tmp_path / "out", [tmp_path / "out.partial"], overwrite=True)


def test_overwrite_replaces_checkpoints_and_empty_directories_only(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    check_destination(tmp_path / "home", overwrite=True)
    (tmp_path / "home/thesis.txt").write_text("x")
    with pytest.raises(CkptkitError, match="is not a checkpoint, so it is not replaced"):
        check_destination(tmp_path / "home", overwrite=True)
    (tmp_path / "home/latest_checkpointed_iteration.txt").write_text("release")
    check_destination(tmp_path / "home", overwrite=True)


def test_a_neighbour_with_a_similar_name_is_left_alone(tmp_path: Path) -> None:
    for name in ("out", "out.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    with new_directory(tmp_path / "out", ASKED, overwrite=True):
        pass
    assert (tmp_path / "out.old/config.json").read_text() == "out.old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.old"]


def test_what_was_there_is_put_back_when_the_last_step_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/config.json").write_text("old")
    rename = os.rename

    def fail(source: Path, target: Path) -> None:
        if Path(source).name == "out.partial":
            raise OSError(errno.EIO, "Input/output error", str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with (
        pytest.raises(CkptkitError, match=r"Input/output error.*\n.*out\.partial is whole: rename it to out"),
        new_directory(tmp_path / "out", ASKED, overwrite=True) as (partial, _),
    ):
        (partial / "config.json").write_text("new")
    assert (tmp_path / "out/config.json").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.partial"]
    assert (tmp_path / "out.partial/config.json").read_text() == "new"


def test_a_partial_that_is_not_ours_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/thesis.txt").write_text("x")
    with pytest.raises(CkptkitError, match="out.partial is not a checkpoint"):
        check_destination(tmp_path / "out", overwrite=True)

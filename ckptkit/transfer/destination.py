"""The directory that appears only when everything in it is whole."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.detect import TRACKER
from ckptkit.storage.lock import check_free, locked
from ckptkit.storage.overlap import overlaps
from ckptkit.storage.whole import sync_tree
from ckptkit.transfer.journal import JOURNAL, Journal

_PARTIAL = ".partial"


def check_destination(
    path: Path, sources: Iterable[Path | None] = (), *, overwrite: bool = False, resume: bool = False
) -> None:
    """Raises CkptkitError when `path` may not be written.

    That is: a run is writing it; something is there, without `overwrite`; or a dead run's `.partial` is there, with
    neither `overwrite` nor `resume`.

    Even with `overwrite` only a checkpoint or an empty directory is replaced, and never one of `sources`, or anything
    around or inside them, by whatever path, link or mount it is reached.
    """
    target = path.resolve()
    _check_name(path, target)
    read = [source.resolve() for source in sources if source]
    for source, taken in product(read, _taken(target)):
        if taken == source or taken in source.parents or source in taken.parents:
            raise _overlap(path, source)
    for taken in _taken(target):
        if taken.suffix == _PARTIAL:
            check_free(_lock(taken))
    _check_replaced(target, overwrite, resume)
    for source, taken in product(read, _taken(target)):
        if overlaps(taken, source):
            raise _overlap(path, source)


def _check_name(path: Path, target: Path) -> None:
    if not target.name or path.name in ("", "..") or path.is_symlink():
        raise CkptkitError(f"{path} cannot be a destination", "name a new directory, not a link, `.` or `..`")
    if not target.parent.is_dir():
        raise CkptkitError(f"{path.parent} does not exist", "create it first")


def _overlap(path: Path, source: Path) -> CkptkitError:
    return CkptkitError(f"{path} overlaps {source}, which is read", "choose a destination beside it")


def _check_replaced(target: Path, overwrite: bool, resume: bool) -> None:
    """Raises CkptkitError for what is there and must stay."""
    if target.exists() and not overwrite:
        raise CkptkitError(f"{target} exists already", "choose another destination, or replace it with --overwrite")
    if _partial(target).exists() and not (overwrite or resume):
        hint = "go on with it (--resume), replace it (--overwrite), or choose another destination"
        raise CkptkitError(f"{_partial(target)} exists already: a run was cut off", hint)
    for taken in _taken(target):
        if taken.exists() and not _replaceable(taken):
            raise CkptkitError(
                f"{taken} is not a checkpoint, so it is not replaced",
                "choose another destination, or move it away first",
            )


def _replaceable(path: Path) -> bool:
    if not path.is_dir():
        return False
    marks = (TRACKER, ".metadata", "config.json", "ckptkit.json", JOURNAL)
    return not any(path.iterdir()) or any((path / mark).exists() for mark in marks)


@contextmanager
def new_directory(
    path: Path, asked: Mapping[str, Any], *, overwrite: bool = False, resume: bool = False
) -> Iterator[tuple[Path, Journal]]:
    """A `.partial` directory that becomes `path` when the block ends well, and its journal.

    When it ends badly the directory is removed if no file in it is finished, or if the same job cannot go on
    (`CkptkitError.resumable`). `resume` goes on with what a run with the same `asked` (as JSON) has left, if anything.
    Raises CkptkitError while another run, on whatever machine, has such a directory for `path`.
    """
    check_destination(path, overwrite=overwrite, resume=resume)
    target = path.resolve()
    with locked(_lock(_partial(target))):
        # Another run may have ended since.
        _check_replaced(target, overwrite, resume)
        with _growing(target, asked, resume) as grown:
            yield grown


@contextmanager
def _growing(path: Path, asked: Mapping[str, Any], resume: bool) -> Iterator[tuple[Path, Journal]]:
    """As `new_directory`, for a run that is alone and may replace what is there."""
    partial, whole = _partial(path), False
    journal = Journal(partial)
    going_on = resume and journal.exists
    if going_on:
        journal.check(asked)
        journal.end_dead_runs()
    try:
        if not going_on:
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir()
            journal.begin(asked)
        yield partial, journal
        sync_tree(partial)
        journal.end()
        whole = True
        old = _replace(partial, path)
    except BaseException as error:
        kept = _whole(partial, path) if whole else _keep_or_remove(partial, journal, error)
        if isinstance(error, OSError):
            hint = (
                "free some space there"
                if error.errno in (errno.ENOSPC, errno.EDQUOT)
                else "check the paths and their permissions"
            )
            raise CkptkitError(f"writing {path}: {error}", f"{hint}; {kept}") from error
        error.add_note(kept)
        raise
    if old is not None:
        _remove_old(old, path)


def _remove_old(old: Path, path: Path) -> None:
    try:
        shutil.rmtree(old)
    except OSError as error:
        message = f"{path} is whole, but what it replaced cannot be removed: {error}"
        raise CkptkitError(message, f"remove {old} yourself") from error
    except BaseException as error:
        error.add_note(f"{path} is whole; what is left of {old} can be removed")
        raise


def _whole(partial: Path, path: Path) -> str:
    """Where a run is that ends badly with all of it written."""
    return f"{partial} is whole: rename it to {path.name}" if partial.exists() else f"{path} is whole"


def _keep_or_remove(partial: Path, journal: Journal, error: BaseException) -> str:
    """What becomes of a run that ends badly, and what to tell of it."""
    final = isinstance(error, CkptkitError) and not error.resumable
    if not final and (count := journal.count()):
        return f"{partial} keeps {count} finished file(s): give the same command with --resume to go on"
    shutil.rmtree(partial, ignore_errors=True)
    if partial.exists():
        return f"{partial} could not be removed: remove it, or give --overwrite"
    return "nothing was left behind"


def _taken(target: Path) -> tuple[Path, Path]:
    """What a run with this destination replaces."""
    return target, _partial(target)


def _partial(path: Path) -> Path:
    return path.with_name(path.name + _PARTIAL)


def _lock(partial: Path) -> Path:
    """The lock file of the run that writes a `.partial`: beside it, since the directory itself comes and goes."""
    return partial.with_name(partial.name + ".lock")


def _replace(partial: Path, path: Path) -> Path | None:
    """Renames `partial` to `path`. Returns the directory that now holds what was there; on an error it is put back."""
    if not path.exists():
        os.rename(partial, path)
        return None
    old = Path(tempfile.mkdtemp(prefix=f"{path.name}.old.", dir=path.parent))
    os.rename(path, old / path.name)
    try:
        os.rename(partial, path)
    except OSError:
        os.rename(old / path.name, path)
        old.rmdir()
        raise
    return old

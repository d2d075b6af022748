"""The directory that appears only when everything in it is whole."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import summarize
from ckptkit.formats.detect import MANIFEST
from ckptkit.storage.lock import check_free, hold_lock
from ckptkit.storage.tree import overlaps, walk_tree
from ckptkit.storage.write import sync_tree
from ckptkit.transfer.journal import JOURNAL, Journal
from ckptkit.transfer.manifest import has_identity
from ckptkit.transfer.replacement import require_replaceable

_PARTIAL = ".partial"
_Listed = Mapping[str, tuple[int, int] | None]  # of a directory: see `_files_in`
_MARK, _OLD, _GONE = ".ckptkit", "replaced", "removed"  # in the directory of what is moved aside


def check_destination(
    path: Path, sources: Iterable[Path | None] = (), *, overwrite: bool = False, resume: bool = False
) -> None:
    """Raises CkptkitError while a run writes `path`, or where a file or the `.partial` of a dead run is in the way.

    `overwrite` lets both go, `resume` the `.partial`. Only what `require_replaceable` allows is replaced, and never one
    of `sources` or anything around or inside them, by whatever path, link or mount it is reached.
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
    _check_asked(target, overwrite, resume)
    for source, taken in product(read, _taken(target)):
        if overlaps(taken, source):
            raise _overlap(path, source)
    _check_replaced(target)


def _check_name(path: Path, target: Path) -> None:
    if not target.name or path.name in ("", "..") or path.is_symlink():
        raise CkptkitError(f"{path} cannot be a destination", "name a new directory, not a link, `.` or `..`")
    if not target.parent.is_dir():
        raise CkptkitError(f"{path.parent} does not exist", "create it first")


def _overlap(path: Path, source: Path) -> CkptkitError:
    return CkptkitError(f"{path} overlaps {source}, which is read", "choose a destination next to it")


def _check_asked(target: Path, overwrite: bool, resume: bool) -> None:
    """Raises CkptkitError for what is there and may be replaced or gone on with only where that is asked for."""
    partial, aside = _partial(target), _aside(target)
    if target.exists() and not overwrite:
        hint = "choose another destination, or replace it with --overwrite"
        if resume and partial.is_dir():
            hint = f"{_go_on(target)}, or begin anew with --overwrite"
        raise CkptkitError(f"{target} exists already", hint)
    if overwrite or resume:
        return
    if partial.is_dir() and not partial.is_symlink():
        hint = "go on with it (--resume), replace it (--overwrite), or choose another destination"
        raise CkptkitError(f"{partial} exists already: a run was cut off", hint)
    if (aside / _OLD).exists():
        message = f"{aside / _OLD} holds the old files that a run was replacing at {target} when it was cut off"
        raise CkptkitError(message, f"rename it to {target.name} to keep it, or replace it with --overwrite")


def _check_replaced(target: Path) -> None:
    """Raises CkptkitError for what is there and must stay, whatever is asked for."""
    if os.path.lexists(partial := _partial(target)):
        require_replaceable(partial, is_partial=True)
    if target.exists():
        require_replaceable(target)
    if os.path.lexists(_aside(target)):
        _require_own_aside(_aside(target))


def finish_published(path: Path, asked: Mapping[str, Any], fault_of: Callable[[Path], str | None]) -> bool:
    """Whether a run with the same identity wrote all of `path` before it was cut off, by its manifest and `fault_of`.

    Then `path` gets its name, and what it replaced is removed. Raises CkptkitError as `check_destination`, and where
    `path` has a fault.
    """
    target = path.resolve()
    _check_name(path, target)
    partial, aside = _partial(target), _aside(target)
    if not any(has_identity(one / MANIFEST, asked) for one in (target, partial)):
        return False
    with hold_lock(_lock(partial)):
        written = partial if os.path.lexists(partial) else target
        if written == partial and (target.exists() or Journal(partial).exists):
            return False
        if not has_identity(written / MANIFEST, asked):
            return False
        if (fault := fault_of(written)) is not None:
            if written == partial:  # it is written anew
                return False
            message = f"{target} exists already, written by this command, but {fault}"
            raise CkptkitError(message, "restore that, or write it again with --overwrite")
        if os.path.lexists(aside):
            _require_own_aside(aside)
        if written == partial:
            require_replaceable(partial)
            os.rename(partial, target)
        _recover(target)
    return True


@contextmanager
def new_directory(
    path: Path, asked: Mapping[str, Any], *, overwrite: bool = False, resume: bool = False
) -> Iterator[tuple[Path, Journal]]:
    """A `.partial` directory that becomes `path` when the block ends well, and its journal.

    When it ends badly the directory is removed if no file in it is finished, or if the same job cannot go on
    (`CkptkitError.resumable`). `resume` goes on with what a run with the same `asked` (as JSON) has left, if anything.
    Raises CkptkitError while another run, on whatever machine, has such a directory for `path`, and at the end where
    another program has written `path` meanwhile.
    """
    check_destination(path, overwrite=overwrite, resume=resume)
    target = path.resolve()
    with hold_lock(_lock(_partial(target))):
        # Another run may have ended since.
        _check_asked(target, overwrite, resume)
        if os.path.lexists(_aside(target)):
            _require_own_aside(_aside(target))
        _recover(target)
        _check_asked(target, overwrite, resume)
        _check_replaced(target)
        with _growing(target, asked, resume) as grown:
            yield grown


@contextmanager
def _growing(path: Path, asked: Mapping[str, Any], resume: bool) -> Iterator[tuple[Path, Journal]]:
    """As `new_directory`, for a run that is alone and may replace what is there."""
    partial, whole, before = _partial(path), False, _files_in(path)
    journal = Journal(partial)
    going_on = resume and journal.exists
    if going_on:
        journal.check(asked)
        journal.end_dead_runs()
    try:
        if not going_on:
            if partial.exists():
                _remove_partial(partial)
            partial.mkdir()
            journal.begin(asked)
        yield partial, journal
        sync_tree(partial)
        journal.end()
        whole = True
        _replace(partial, path, before)
    except BaseException as error:
        kept = _whole(partial, path) if whole else _keep_or_remove(partial, path, journal, error)
        if isinstance(error, OSError):
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            hint = "free some space there" if is_full else "check the paths and their permissions"
            raise CkptkitError(f"writing {path}: {error}", f"{hint}; {kept}") from error
        error.add_note(kept)
        raise
    _remove_old(path, before)


def _remove_old(path: Path, before: _Listed) -> None:
    """Removes what was moved aside for a `path` that is whole, unless it is not as it was `before`."""
    aside = _aside(path)
    if (aside / _OLD).exists() and (changed := _changed(before, aside / _OLD)):
        message = f"{path} is complete, but the old files were written meanwhile ({changed}), so it is not removed"
        raise CkptkitError(message, f"it is in {aside / _OLD}: move out the files you need, and remove {aside}")
    try:
        _recover(path)
    except OSError as error:
        message = f"{path} is complete, but the old files cannot be removed: {error}"
        raise CkptkitError(message, f"remove {aside} yourself") from error
    except BaseException as error:
        error.add_note(f"{path} is complete; the rest of {aside} can be removed")
        raise


def _whole(partial: Path, path: Path) -> str:
    """Where a run is that ends badly with all of it written."""
    if not partial.exists():
        return f"{path} is whole"
    first = f", after you move {path} away" if path.exists() else ""
    old = _aside(path) / _OLD
    more = f"; the files to be replaced are in {old}" if old.exists() else ""
    return f"{partial} is whole: rename it to {path.name}{first}{more}"


def _keep_or_remove(partial: Path, path: Path, journal: Journal, error: BaseException) -> str:
    """What becomes of a run that ends badly, and what to tell of it."""
    final = isinstance(error, CkptkitError) and not error.resumable
    if not final and (count := journal.count()):
        kept = f"{partial} keeps {count} finished file(s)"
        if path.exists():
            return f"{kept}: {_go_on(path)}; the same command begins anew"
        return f"{kept}: give the same command with --resume to go on"
    try:
        require_replaceable(partial, is_partial=True)
        _remove_partial(partial)
    except CkptkitError as other:
        return f"{other.message}: move it elsewhere"
    except OSError:
        return f"{partial} could not be removed: move it elsewhere"
    return "nothing was left behind"


def _go_on(path: Path) -> str:
    """How to finish a run that was to replace `path`."""
    return f"to go on, move {path} away and give the same command with --resume instead of --overwrite"


def _remove_partial(partial: Path) -> None:
    """Removes what a run has left, its journal last: a killed run must not leave files that nothing shows to be its."""
    for entry in partial.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            if entry.name != JOURNAL:
                shutil.rmtree(entry)
        else:
            entry.unlink()
    shutil.rmtree(partial)


def _taken(target: Path) -> tuple[Path, ...]:
    """What a run with this destination replaces or removes."""
    return target, _partial(target), _aside(target)


def _partial(path: Path) -> Path:
    return path.with_name(path.name + _PARTIAL)


def _lock(partial: Path) -> Path:
    """The lock file of the run that writes a `.partial`: beside it, since the directory itself comes and goes."""
    return partial.with_name(partial.name + ".lock")


def _aside(path: Path) -> Path:
    """The directory that holds what is replaced, from before the new output has its name until the old one is gone."""
    return path.with_name(f"{path.name}{_PARTIAL}.old")


def _replace(partial: Path, path: Path, before: _Listed) -> None:
    """Renames `partial` to `path` and moves the old aside; restores it on an error, also if it is not as `before`."""
    aside = _aside(path)
    try:
        if path.exists():
            aside.mkdir()
            (aside / _MARK).touch()
            os.rename(path, aside / _OLD)
            if changed := _changed(before, aside / _OLD):
                message = f"{path} was written while the run worked ({changed}), so it is not replaced"
                raise CkptkitError(message, "let no other program write there")
        os.rename(partial, path)
    except BaseException:
        # It is put back, unless another program has put something in its place.
        if (aside / _OLD).exists() and not os.path.lexists(path):
            os.rename(aside / _OLD, path)
        if aside.is_dir() and not (aside / _OLD).exists():
            (aside / _MARK).unlink(missing_ok=True)
            aside.rmdir()
        raise


def _files_in(root: Path) -> _Listed:
    """Size and time of each file below a directory, and its folders without; nothing where there is no directory."""
    found = walk_tree(root) if os.path.lexists(root) else ()
    return {
        str(path.relative_to(root)): None if stat.S_ISDIR(entry.st_mode) else (entry.st_size, entry.st_mtime_ns)
        for path, entry in found
        if path != root or not stat.S_ISDIR(entry.st_mode)
    }


def _changed(before: _Listed, root: Path) -> str:
    """What was written, added or removed below a directory since it was as `before`, in words; empty if nothing was."""
    now = _files_in(root)
    return summarize(sorted(name for name in {**before, **now} if name not in before or before[name] != now.get(name)))


def _recover(path: Path) -> None:
    """Puts back what was moved aside where nothing took its place; else removes it."""
    aside = _aside(path)
    if not os.path.lexists(aside):
        return
    if (aside / _OLD).exists():
        # Once its removal has begun, it is not put back.
        os.rename(aside / _OLD, aside / _GONE if path.exists() else path)
    if (aside / _GONE).exists():
        shutil.rmtree(aside / _GONE)
    (aside / _MARK).unlink(missing_ok=True)
    aside.rmdir()


def _require_own_aside(aside: Path) -> None:
    """Raises CkptkitError unless a run made the directory at `aside` and what it holds may be removed."""
    names = {entry.name for entry in aside.iterdir()} if aside.is_dir() and not aside.is_symlink() else {""}
    if not names <= {_MARK, _OLD, _GONE} or (names and _MARK not in names):
        raise CkptkitError(
            f"{aside} is in the way: the old files are kept there until the new output is complete",
            "move it away, or choose another destination",
        )
    if (aside / _OLD).exists():
        require_replaceable(aside / _OLD)

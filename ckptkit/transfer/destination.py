"""Output directories that appear only when they are complete."""

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
_Listing = Mapping[str, tuple[int, int] | None]  # of a directory: see `_files_in`
_MARK, _OLD, _GONE = ".ckptkit", "replaced", "removed"  # names in the directory of moved old files


def check_destination(
    path: Path, sources: Iterable[Path | None] = (), *, overwrite: bool = False, resume: bool = False
) -> None:
    """Raises CkptkitError while a run writes `path`, and if `path` or the `.partial` of a dead run exists.

    `overwrite` allows to replace both, `resume` to continue the `.partial`. Only checkpoints (`require_replaceable`)
    are replaced, and never one of `sources` or anything around or inside them, via any path, link or mount.
    """
    target = path.resolve()
    _check_name(path, target)
    read = [source.resolve() for source in sources if source]
    replaced = (target, _partial(target), _aside(target))
    for source, one in product(read, replaced):
        if one == source or one in source.parents or source in one.parents:
            raise _overlap(path, source)
    for one in replaced:
        if one.suffix == _PARTIAL:  # of another run, if `path` itself has this suffix
            check_free(_lock(one))
    _check_existing(target, overwrite, resume)
    for source, one in product(read, replaced):
        if overlaps(one, source):
            raise _overlap(path, source)
    _check_replaceable(target)


def _check_name(path: Path, target: Path) -> None:
    if not target.name or path.name in ("", "..") or path.is_symlink():
        raise CkptkitError(f"{path} cannot be a destination", "pass a new directory, not a link, `.` or `..`")
    if not target.parent.is_dir():
        raise CkptkitError(f"{path.parent} does not exist", "create it first")


def _overlap(path: Path, source: Path) -> CkptkitError:
    return CkptkitError(f"{path} overlaps the source {source}", "choose a destination outside of it")


def _check_existing(target: Path, overwrite: bool, resume: bool) -> None:
    """Raises CkptkitError for existing output that may only be replaced or continued with an option."""
    partial, aside = _partial(target), _aside(target)
    if target.exists() and not overwrite:
        hint = "choose another destination, or pass --overwrite to replace it"
        if resume and partial.is_dir():
            hint = f"{_resume_hint(target)}, or start again with --overwrite"
        raise CkptkitError(f"{target} exists already", hint)
    if overwrite or resume:
        return
    if partial.is_dir() and not partial.is_symlink():
        hint = "pass --resume to continue that run or --overwrite to replace it, or choose another destination"
        raise CkptkitError(f"{partial} exists already: a run was interrupted", hint)
    if (aside / _OLD).exists():
        message = f"{aside / _OLD} has the old files of {target}, because a run that replaced them was interrupted"
        raise CkptkitError(message, f"rename it to {target.name} to keep these files, or pass --overwrite")


def _check_replaceable(target: Path) -> None:
    """Raises CkptkitError for existing files that may never be replaced."""
    if os.path.lexists(partial := _partial(target)):
        require_replaceable(partial, is_partial=True)
    if target.exists():
        require_replaceable(target)
    if os.path.lexists(_aside(target)):
        _require_own_aside(_aside(target))


def finish_published(path: Path, identity: Mapping[str, Any], fault_of: Callable[[Path], str | None]) -> bool:
    """Whether an interrupted run with the same identity wrote all of `path`, by its manifest and `fault_of`.

    If so, renames the output to `path`, and removes the old files. Raises CkptkitError like `check_destination`, and if
    `path` has a fault.
    """
    target = path.resolve()
    _check_name(path, target)
    partial, aside = _partial(target), _aside(target)
    if not any(has_identity(one / MANIFEST, identity) for one in (target, partial)):
        return False
    with hold_lock(_lock(partial)):
        written = partial if os.path.lexists(partial) else target
        if written == partial and (target.exists() or Journal(partial).exists):
            return False
        if not has_identity(written / MANIFEST, identity):
            return False
        if (fault := fault_of(written)) is not None:
            if written == partial:  # it will be written again
                return False
            message = f"{target} exists already, written by this command, but {fault}"
            raise CkptkitError(message, "restore it, or pass --overwrite to write the checkpoint again")
        if os.path.lexists(aside):
            _require_own_aside(aside)
        if written == partial:
            require_replaceable(partial)
            os.rename(partial, target)
        _recover(target)
    return True


@contextmanager
def new_directory(
    path: Path, identity: Mapping[str, Any], *, overwrite: bool = False, resume: bool = False
) -> Iterator[tuple[Path, Journal]]:
    """A `.partial` directory that becomes `path` after the block, and its journal.

    After an error, it is removed if it has no finished file or the job is not `CkptkitError.resumable`. `resume`
    continues the directory of a run with the same `identity` (as JSON), if any. Raises CkptkitError while another run,
    on any machine, writes `path`, and at the end if another program has written `path`.
    """
    check_destination(path, overwrite=overwrite, resume=resume)
    target = path.resolve()
    with hold_lock(_lock(_partial(target))):
        # Another run may have ended in the meantime.
        _check_existing(target, overwrite, resume)
        if os.path.lexists(_aside(target)):
            _require_own_aside(_aside(target))
        _recover(target)
        _check_existing(target, overwrite, resume)
        _check_replaceable(target)
        with _write_directory(target, identity, resume) as directory:
            yield directory


@contextmanager
def _write_directory(path: Path, identity: Mapping[str, Any], resume: bool) -> Iterator[tuple[Path, Journal]]:
    """Like `new_directory`, for a run that holds the lock and may replace the old files."""
    partial, is_complete, before = _partial(path), False, _files_in(path)
    journal = Journal(partial)
    continues = resume and journal.exists
    if continues:
        journal.check(identity)
        journal.end_dead_runs()
    try:
        if not continues:
            if partial.exists():
                _remove_partial(partial)
            partial.mkdir()
            journal.begin(identity)
        yield partial, journal
        sync_tree(partial)
        journal.end()
        is_complete = True
        _replace(partial, path, before)
    except BaseException as error:
        kept = _describe_complete(partial, path) if is_complete else _keep_or_remove(partial, path, journal, error)
        if isinstance(error, OSError):
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            hint = "free some space on that disk" if is_full else "check the paths and their permissions"
            raise CkptkitError(f"writing {path}: {error}", f"{hint}; {kept}") from error
        error.add_note(kept)
        raise
    _remove_old(path, before)


def _remove_old(path: Path, before: _Listing) -> None:
    """Removes the old files of a complete `path`, unless they have changed since `before`."""
    aside = _aside(path)
    if (aside / _OLD).exists() and (changed := _changed(before, aside / _OLD)):
        message = f"{path} is complete, but another program changed the old files during the run ({changed})"
        raise CkptkitError(message, f"move the files you need out of {aside / _OLD}, and remove {aside}")
    try:
        _recover(path)
    except OSError as error:
        message = f"{path} is complete, but the old files cannot be removed: {error}"
        raise CkptkitError(message, f"remove {aside}") from error
    except BaseException as error:
        error.add_note(f"{path} is complete; the rest of {aside} can be removed")
        raise


def _describe_complete(partial: Path, path: Path) -> str:
    """The location of complete output after an error."""
    if not partial.exists():
        return f"{path} is complete"
    first = f", after you move {path} away" if path.exists() else ""
    old = _aside(path) / _OLD
    more = f"; the files to be replaced are in {old}" if old.exists() else ""
    return f"{partial} is complete: rename it to {path.name}{first}{more}"


def _keep_or_remove(partial: Path, path: Path, journal: Journal, error: BaseException) -> str:
    """Keeps or removes incomplete output after an error. Returns a description of the result."""
    final = isinstance(error, CkptkitError) and not error.resumable
    if not final and (count := journal.count()):
        kept = f"{partial} keeps {count} finished file(s)"
        if path.exists():
            return f"{kept}: {_resume_hint(path)}; the same command starts again"
        return f"{kept}: run the same command with --resume to continue"
    try:
        require_replaceable(partial, is_partial=True)
        _remove_partial(partial)
    except CkptkitError as other:
        return f"{other.message}: move it elsewhere"
    except OSError:
        return f"{partial} could not be removed: move it elsewhere"
    return "nothing was left behind"


def _resume_hint(path: Path) -> str:
    """The next step to finish a run that replaces `path`."""
    return f"to continue, move {path} away and run the same command with --resume instead of --overwrite"


def _remove_partial(partial: Path) -> None:
    """Removes the output of a run, and its journal last, which identifies the remaining files if this is killed."""
    for entry in partial.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            if entry.name != JOURNAL:
                shutil.rmtree(entry)
        else:
            entry.unlink()
    shutil.rmtree(partial)


def _partial(path: Path) -> Path:
    return path.with_name(path.name + _PARTIAL)


def _lock(partial: Path) -> Path:
    """The lock file of the run that writes a `.partial`, outside of that directory."""
    return partial.with_name(partial.name + ".lock")


def _aside(path: Path) -> Path:
    """The directory for old files, from before the output is renamed until they are removed."""
    return path.with_name(f"{path.name}{_PARTIAL}.old")


def _replace(partial: Path, path: Path, before: _Listing) -> None:
    """Moves the old files aside, and renames `partial` to `path`. Restores them after an error, or if they changed."""
    aside = _aside(path)
    try:
        if path.exists():
            aside.mkdir()
            (aside / _MARK).touch()
            os.rename(path, aside / _OLD)
            if changed := _changed(before, aside / _OLD):
                message = f"{path} was written during the run ({changed}), so it is not replaced"
                raise CkptkitError(message, "run again when no other program writes to it")
        os.rename(partial, path)
    except BaseException:
        # Restored, unless another program has created `path`.
        if (aside / _OLD).exists() and not os.path.lexists(path):
            os.rename(aside / _OLD, path)
        if aside.is_dir() and not (aside / _OLD).exists():
            (aside / _MARK).unlink(missing_ok=True)
            aside.rmdir()
        raise


def _files_in(root: Path) -> _Listing:
    """Size and mtime of each file below a directory, and None for folders; empty if the directory is missing."""
    found = walk_tree(root) if os.path.lexists(root) else ()
    return {
        str(path.relative_to(root)): None if stat.S_ISDIR(entry.st_mode) else (entry.st_size, entry.st_mtime_ns)
        for path, entry in found
        if path != root or not stat.S_ISDIR(entry.st_mode)
    }


def _changed(before: _Listing, root: Path) -> str:
    """The files below a directory that were written, added or removed since `before`, folded; empty if none."""
    now = _files_in(root)
    return summarize(sorted(name for name in {**before, **now} if name not in before or before[name] != now.get(name)))


def _recover(path: Path) -> None:
    """Removes old files that were moved aside, or restores them if `path` is missing."""
    aside = _aside(path)
    if not os.path.lexists(aside):
        return
    if (aside / _OLD).exists():
        # Partly removed files are not restored.
        os.rename(aside / _OLD, aside / _GONE if path.exists() else path)
    if (aside / _GONE).exists():
        shutil.rmtree(aside / _GONE)
    (aside / _MARK).unlink(missing_ok=True)
    aside.rmdir()


def _require_own_aside(aside: Path) -> None:
    """Raises CkptkitError unless a run created the directory `aside` and its contents may be removed."""
    names = {entry.name for entry in aside.iterdir()} if aside.is_dir() and not aside.is_symlink() else {""}
    if not names <= {_MARK, _OLD, _GONE} or (names and _MARK not in names):
        message = f"{aside} exists already, but ckptkit needs this name for the old files during the run"
        raise CkptkitError(message, "move it elsewhere, or choose another destination")
    if (aside / _OLD).exists():
        require_replaceable(aside / _OLD)

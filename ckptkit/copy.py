"""The one loop that moves tensors, and the directory that appears only when everything in it is whole."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from ckptkit.checkpoint import Checkpoint, CheckpointWriter
from ckptkit.errors import CkptkitError
from ckptkit.formats import TRACKER
from ckptkit.plan import footprint
from ckptkit.progress import progress

IN_FLIGHT = 512 << 20  # bytes of groups that are read, computed or written at one time


def copy(source: Checkpoint, writer: CheckpointWriter, label: str, workers: int | None = None) -> None:
    """Writes every tensor of `source`; on any error the writer discards what it has.

    `workers` threads (None: one a core) each take a group from reading to writing, groups in order. What is written does not
    depend on how many there are.
    """
    try:
        with progress(label, sum(spec.nbytes for spec in source.specs.values())) as advance:
            for done in _copied(source, writer, workers or cores()):
                advance(done)
        writer.finish()
    except BaseException:
        writer.discard()
        raise


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _copied(source: Checkpoint, writer: CheckpointWriter, workers: int) -> Iterator[int]:
    """Moves all groups, at most IN_FLIGHT bytes of them at a time, or one. Yields the bytes of each that has been written."""

    def move(names: Sequence[str]) -> int:
        tensors = source.read(names)
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        return sum(tensor.nbytes for tensor in tensors.values())

    pool = ThreadPoolExecutor(workers, "ckptkit-copy")
    running: dict[Future[int], int] = {}
    try:
        for names in source.groups:
            size = footprint(source, names)
            # One group more than there are workers, so that none waits for this thread.
            while running and (len(running) > workers or sum(running.values()) + size > IN_FLIGHT):
                yield from _finished(running)
            running[pool.submit(move, names)] = size
        while running:
            yield from _finished(running)
    finally:
        # What is running ends first: the writer must not be closed under it.
        pool.shutdown(cancel_futures=True)


def _finished(running: dict[Future[int], int]) -> list[int]:
    """Waits until a group is written, and takes it off `running`. Raises what a worker raised."""
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        del running[future]
    return [future.result() for future in done]


def check_destination(path: Path, overwrite: bool, sources: Iterable[Path | None] = ()) -> None:
    """Raises CkptkitError when `path` may not be written: something is there (or a dead run's `.partial`) and not `overwrite`.

    Even with `overwrite` only a checkpoint or an empty directory is replaced, and never one of `sources`, or anything
    around or inside them.
    """
    target = path.resolve()
    if not target.name or path.name in ("", "..") or path.is_symlink():
        raise CkptkitError(f"{path} cannot be a destination", "name a new directory, not a link, `.` or `..`")
    if not target.parent.is_dir():
        raise CkptkitError(f"{path.parent} does not exist", "create it first")
    for source in filter(None, sources):
        for taken in (target, _partial(target)):
            if taken == source.resolve() or taken in source.resolve().parents or source.resolve() in taken.parents:
                raise CkptkitError(f"{path} overlaps {source}, which is read", "choose a destination beside it")
    for taken in (target, _partial(target)):
        if taken.exists() and not overwrite:
            raise CkptkitError(f"{taken} exists already", "choose another destination, or replace it with --overwrite")
        if taken.exists() and not _replaceable(taken):
            raise CkptkitError(f"{taken} is no checkpoint, so it is not replaced", "remove it yourself, or choose another destination")


def _replaceable(path: Path) -> bool:
    if not path.is_dir():
        return False
    marks = (TRACKER, ".metadata", "config.json", "ckptkit.json")
    return not any(path.iterdir()) or any((path / mark).exists() for mark in marks)


@contextmanager
def new_directory(path: Path, overwrite: bool = False) -> Iterator[Path]:
    """A `.partial` directory that becomes `path` when the block ends well, and is removed when it does not."""
    check_destination(path, overwrite)
    path = path.resolve()
    partial = _partial(path)
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()
        yield partial
        old = _replace(partial, path)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        hint = "free some space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check the paths and their permissions"
        raise CkptkitError(f"writing {path}: {error}", f"{hint}; nothing was left behind") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if old is not None:
        shutil.rmtree(old)


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _replace(partial: Path, path: Path) -> Path | None:
    """Puts `partial` in the place of `path`. Returns the directory that what was there has been moved into; on an error it is put back."""
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

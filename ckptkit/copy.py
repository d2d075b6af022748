"""The one loop that moves tensors, and the directory that appears only when everything in it is whole."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptkit.checkpoint import Checkpoint, CheckpointWriter
from ckptkit.errors import CkptkitError
from ckptkit.progress import progress


def copy(source: Checkpoint, writer: CheckpointWriter, label: str) -> None:
    """Writes every tensor of `source`, group by group; on any error the writer discards what it has."""
    try:
        with progress(label, sum(spec.nbytes for spec in source.specs.values())) as advance:
            for names in source.groups:
                for name, tensor in source.read(names).items():
                    writer.write(name, tensor)
                    advance(tensor.nbytes)
        writer.finish()
    except BaseException:
        writer.discard()
        raise


def check_destination(path: Path, overwrite: bool) -> None:
    """Raises CkptkitError when `path` may not be written: it exists, or a dead run left its `.partial`, and not `overwrite`."""
    for taken in (path, _partial(path)):
        if (taken.exists() or taken.is_symlink()) and not overwrite:
            raise CkptkitError(f"{taken} exists already", "choose another destination, or replace it with --overwrite")
    if path.exists() and not path.is_dir():
        raise CkptkitError(f"{path} is a file", "choose another destination")
    if not path.absolute().parent.is_dir():
        raise CkptkitError(f"{path.parent} does not exist", "create it first")


@contextmanager
def new_directory(path: Path, overwrite: bool = False) -> Iterator[Path]:
    """A `.partial` directory that becomes `path` when the block ends well, and is removed when it does not."""
    check_destination(path, overwrite)
    partial = _partial(path)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        yield partial
        _replace(partial, path)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        hint = "free some space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check the path and its permissions"
        raise CkptkitError(f"writing {path}: {error.strerror}", f"{hint}; nothing was left behind") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _replace(partial: Path, path: Path) -> None:
    old = path.with_name(path.name + ".old")
    if path.exists():
        os.rename(path, old)
    os.rename(partial, path)
    if old.exists():
        shutil.rmtree(old)

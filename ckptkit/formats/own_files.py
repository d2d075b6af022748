"""Which files of a directory belong to the checkpoint in it, and which somebody else's program keeps there."""

from __future__ import annotations

from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.detect import LEGACY_RANK, MANIFEST, SIGNATURE_ENDING, is_loaded, locate
from ckptkit.formats.hf.side_files import is_weight

_NAMES = frozenset({".metadata", MANIFEST, MANIFEST + SIGNATURE_ENDING})


def is_own(relative: Path) -> bool:
    """Whether a file of a checkpoint, relative to `weights_at`, is one that readers of checkpoints look at.

    A log is none, nor is another checkpoint in a folder of this one, as a trainer makes them.
    """
    *folders, name = relative.parts
    if folders and LEGACY_RANK.fullmatch(folders[0]):
        return len(folders) == 1
    return is_loaded(relative) or (not folders and (name in _NAMES or is_weight(name)))


def weights_at(path: Path) -> Path:
    """The directory of the weights, beside which a trainer may save more; `path` where there are none to be found."""
    try:
        return locate(path).path
    except CkptkitError:
        return path

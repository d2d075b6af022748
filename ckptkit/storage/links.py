"""Broken links, for example in a snapshot of the Hugging Face Hub's cache without its blobs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ckptkit.storage.tree import files_below

# Source: huggingface_hub, `file_download.py` (`repo_folder_name`, `_get_pointer_path`).
_SNAPSHOT = re.compile(r".*/models--([^/]+)/snapshots/([^/]+)")
_SHOWN = 3


def target_of(path: Path) -> str | None:
    """The target of a broken link at `path`, or None for anything else."""
    return os.readlink(path) if path.is_symlink() and not path.exists() else None


def dangling_in(root: Path, within: Path | None = None) -> Mapping[str, str]:
    """The broken links below a directory, with their targets. Raises CkptkitError like `files_below`."""
    found = {str(file): target_of(root / file) for file in files_below(root, within)}
    return {name: target for name, target in found.items() if target is not None}


def format_links(links: Mapping[str, str]) -> str:
    """`2 links lead nowhere: a to ../x, b to ../y`."""
    shown = [f"{name} to {target}" for name, target in list(links.items())[:_SHOWN]]
    more = f" and {len(links) - _SHOWN} more" if len(links) > _SHOWN else ""
    verb = "links lead" if len(links) > 1 else "link leads"
    return f"{len(links)} {verb} nowhere: {', '.join(shown)}{more}"


def why_unreadable(path: Path, error: OSError) -> str:
    """The reason why a file cannot be opened."""
    target = target_of(path)
    return str(error.strerror) if target is None else f"a link to {target}, which does not exist"


def next_move(path: Path, otherwise: str) -> str:
    """The next step for a file that cannot be opened: `otherwise`, unless it is a broken link."""
    return otherwise if target_of(path) is None else fetch_again(path.parent)


def absent(path: Path) -> str:
    """Describes a file that is missing in its directory, or a broken link."""
    target = target_of(path)
    return f"no {path.name} in it" if target is None else f"its {path.name} is a link to {target}, which does not exist"


def snapshot_of(root: Path) -> tuple[str, str] | None:
    """Model (`ORG/NAME`) and revision of a snapshot in the hub's cache, or None for another directory."""
    match = _SNAPSHOT.fullmatch(str(root.absolute()))
    return None if match is None else (match[1].replace("--", "/", 1), match[2])


def fetch_again(root: Path) -> str:
    """The next step to get the targets of broken links."""
    if (snapshot := snapshot_of(root)) is None:
        return "copy the targets of the links too (`cp -rL`), or download them again"
    name, revision = snapshot
    return f"run `hf download {name} --revision {revision}`: blobs of this snapshot are missing"

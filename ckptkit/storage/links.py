"""Links that lead nowhere: what a snapshot of the Hugging Face Hub's cache is when its blobs are gone."""

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
    """The target of a link at `path` that leads nowhere; None for anything else."""
    return os.readlink(path) if path.is_symlink() and not path.exists() else None


def dangling_in(root: Path, within: Path | None = None) -> Mapping[str, str]:
    """The links below a directory that lead nowhere, with their targets. Raises CkptkitError as `files_below`."""
    found = {str(file): target_of(root / file) for file in files_below(root, within)}
    return {name: target for name, target in found.items() if target is not None}


def format_links(links: Mapping[str, str]) -> str:
    """`2 links lead nowhere: a to ../x, b to ../y`."""
    shown = [f"{name} to {target}" for name, target in list(links.items())[:_SHOWN]]
    more = f" and {len(links) - _SHOWN} more" if len(links) > _SHOWN else ""
    verb = "links lead" if len(links) > 1 else "link leads"
    return f"{len(links)} {verb} nowhere: {', '.join(shown)}{more}"


def why_unreadable(path: Path, error: OSError) -> str:
    """Why a file cannot be opened, in words."""
    target = target_of(path)
    return str(error.strerror) if target is None else f"a link to {target}, where nothing is"


def next_move(path: Path, otherwise: str) -> str:
    """What to do about a file that cannot be opened: `otherwise`, unless it is a link that leads nowhere."""
    return otherwise if target_of(path) is None else fetch_again(path.parent)


def absent(path: Path) -> str:
    """That a file is not in its directory, or is there as a link that leads nowhere."""
    target = target_of(path)
    return f"no {path.name} in it" if target is None else f"its {path.name} is a link to {target}, where nothing is"


def snapshot_of(root: Path) -> tuple[str, str] | None:
    """Model (`ORG/NAME`) and revision of a directory that is a snapshot in the hub's cache; None where it is none."""
    found = _SNAPSHOT.fullmatch(str(root.absolute()))
    return None if found is None else (found[1].replace("--", "/", 1), found[2])


def fetch_again(root: Path) -> str:
    """How to get the files behind links that lead nowhere."""
    if (found := snapshot_of(root)) is None:
        return "copy the files behind the links too (`cp -rL`), or download them again"
    name, revision = found
    return f"the blobs of this snapshot are gone: `hf download {name} --revision {revision}` fetches them again"

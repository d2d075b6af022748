"""What verl loads: the directory that it is given, without a tracker.

Source: verl `dist_checkpointing_path`, `utils/megatron/dist_checkpointing.py`.
"""

from __future__ import annotations

from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.detect import TRACKER, tracked
from verify.launch.sides import Side, is_supported_hf, path_issue


def trainer(role: str, option: str, path: Path) -> Side:
    """The actor or the reference, whose directory `option` gives."""
    if (path / ".metadata").exists():
        return Side(role, "megatron", path, f"verl loads the directory of {option} itself")
    has_tracker = (path / TRACKER).exists()
    if is_supported_hf(path) and not has_tracker:
        return Side(role, "hf", path, f"{option} is an HF directory")
    if has_tracker:
        actual, hint = "a directory of iterations", f"give the iteration: {option} {_iteration(path)}"
    else:
        actual, hint = "no .metadata in it" if path.exists() else "no such directory", "check the path"
    issue = path_issue(option, path, "the torch_dist directory itself, which verl loads", actual, hint)
    return Side(role, None, None, f"verl stops: {option} {path} is no torch_dist directory", (issue,))


def _iteration(root: Path) -> Path:
    try:
        return tracked(root)
    except CkptkitError:
        return root / "iter_NNNNNNN"

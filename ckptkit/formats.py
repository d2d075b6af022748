"""Tells from a path what lies there: an HF directory or a Megatron torch_dist checkpoint, and which iteration of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckptkit.errors import CkptkitError

TRACKER = "latest_checkpointed_iteration.txt"
ITERATION = re.compile(r"iter_\d{7}")


@dataclass(frozen=True)
class Location:
    """`path` holds the weights themselves; `root` is what the user gave or, for Megatron, the directory with the tracker."""

    kind: Literal["hf", "megatron"]
    path: Path
    root: Path


def locate(path: str | Path) -> Location:
    """What kind of checkpoint lies at `path`. Raises CkptkitError when there is none or it is ambiguous."""
    given, root = Path(path), Path(path).absolute()
    if not root.exists():
        raise CkptkitError(f"{given} does not exist", "check the path")
    if not root.is_dir():
        raise CkptkitError(f"{given} is a file, not a checkpoint directory", "give the directory that holds config.json or .metadata")
    if (root / TRACKER).exists():
        return Location("megatron", tracked(root), root)
    is_hf = (root / "config.json").exists()
    if (root / ".metadata").exists() or ((root / "metadata.json").exists() and not is_hf):
        return Location("megatron", root, root.parent)
    if is_hf or any(root.glob("*.safetensors")) or (root / "model.safetensors.index.json").exists():
        return Location("hf", root, root)
    raise CkptkitError(f"{given} holds no checkpoint", _why_not(root))


def tracked(root: Path) -> Path:
    """The directory that the tracker file of a Megatron root names. Raises CkptkitError when it names none that exists."""
    text = (root / TRACKER).read_text(errors="replace").strip()
    if text != "release" and not text.isdecimal():
        raise CkptkitError(f"{root / TRACKER} says {text!r}", "it must say `release` or an iteration number")
    path = root / ("release" if text == "release" else f"iter_{int(text):07d}")
    if not path.is_dir():
        raise CkptkitError(f"{root / TRACKER} says {text!r}, but {path.name}/ is not there", "the save was cut short, or the directory was moved")
    return path


def _why_not(root: Path) -> str:
    inside = sorted(entry.name for entry in root.iterdir())
    if not inside:
        return "the directory is empty"
    if any(ITERATION.fullmatch(name) or name == "release" for name in inside):
        return f"it has iterations but no {TRACKER}: give one of them, or restore the tracker"
    if any(name.startswith("mp_rank_") for name in inside):
        return "this is Megatron's legacy mp_rank format; save it with --ckpt-format torch_dist"
    if any(name.endswith((".bin", ".pt", ".pth")) for name in inside):
        return "convert .bin weights to safetensors first: load with transformers and save_pretrained"
    return "expected config.json with *.safetensors, or a Megatron directory with .metadata"

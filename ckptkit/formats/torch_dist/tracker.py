"""Which checkpoint of a root Megatron-LM loads: the tracker says it."""

from __future__ import annotations

from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"


def not_found(checkpoint: Path) -> str | None:
    """Why a trainer that is told the root would not load the checkpoint in it; None where it would.

    Source: `read_metadata` and `get_checkpoint_name` in Megatron-LM's `megatron/training/checkpointing.py`.
    """
    tracker = checkpoint.parent / TRACKER
    if not tracker.is_file():
        return f"{tracker} is not there, so Megatron-LM would start from random weights"
    text = tracker.read_text(errors="replace").strip()
    if text != "release" and not text.isdecimal():
        return f"{tracker} says {text[:40]!r}, which is neither release nor an iteration, so Megatron-LM would stop"
    name = text if text == "release" else f"iter_{int(text):07d}"
    if name != checkpoint.name:
        return f"{tracker} says {text}, so Megatron-LM would load {name} instead"
    return None

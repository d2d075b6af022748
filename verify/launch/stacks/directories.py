"""Sides that load the directory of a setting, for the stacks with settings."""

from __future__ import annotations

import re
from pathlib import Path

from ckptkit.verify.launch.settings.config import Config
from ckptkit.verify.launch.settings.tree import NULL
from ckptkit.verify.launch.sides import HF, Side, hf_config_of, hf_directory, iterations_in, path_issue


def hf_side(role: str, settings: Config, key: str, why: str) -> Side | None:
    """A side that loads the HF directory of a key, or None if that is unknown."""
    path = settings.model(key)
    return None if path is None else hf_directory(role, settings.cite(key), path, why, HF)


def teacher_sides(settings: Config, keys: re.Pattern[str]) -> list[Side]:
    """A side for each enabled teacher, by the keys that match.

    No other role depends on a teacher, so one that is downloaded, or of an unsupported model_type, becomes a note.
    """
    teachers: list[Side] = []
    for key in sorted(name for name in settings.names() if keys.search(name)):
        enabled = settings.text(f"{key.partition('.')[0]}.enabled")
        if not settings.has(key) or enabled.lower() == "false":
            continue
        role = f"teacher {len(teachers) + 1}" if teachers else "teacher"
        quiet = settings.silent_copy()
        side = hf_side(role, quiet, key, key)
        config = hf_config_of(side.path) if side and side.path else None
        if side and config and config.unsupported_type:
            settings.notes.append(f"{settings.cite(key)} {side.path} has {config}, so the {role} was not checked")
        elif side:
            teachers.append(side)
        settings.notes += [f"{line} (the {role}, on which no other role depends)" for line in quiet.unread]
        settings.notes += quiet.notes
    return teachers


def torch_dist_side(role: str, place: str, path: Path, why: str, check: str) -> Side:
    """A side for which verl loads a torch_dist directory without a tracker."""
    if (path / ".metadata").exists() and (path / "metadata.json").exists():
        return Side(role, "megatron", path, why)
    if iterations := iterations_in(path):
        actual, hint = "this directory contains iterations", f"pass the iteration: {path / iterations[-1]}"
    elif not path.exists():
        actual, hint = "no such directory", "check the path"
    else:
        missing = next(name for name in (".metadata", "metadata.json") if not (path / name).exists())
        actual, hint = f"the directory has no {missing}", "check the path"
    issue = path_issue(place, path, "a torch_dist directory, which verl loads", actual, hint, check=check)
    return Side(role, None, None, f"verl stops: {path} is not a torch_dist directory", (issue,))


def is_set(text: str) -> bool:
    """Whether a value is neither empty nor null."""
    return text.lower() not in ("", NULL, "none")

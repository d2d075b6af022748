"""The step that a run of verl goes on from: `trainer.resume_mode` and what lies in its directory.

Source: verl `trainer/ppo/ray_trainer.py` (_load_checkpoint), `utils/checkpoint/checkpoint_manager.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ckptkit.formats.detect import TRACKER, tracker_text
from verify.launch.sides import PathIssue, path_issue
from verify.launch.stacks.directories import LOAD, STEP
from verify.launch.stacks.settings import Settings


@dataclass(frozen=True)
class Resumed:
    """The step that a run goes on from: its directory, None where it starts anew, and why."""

    path: Path | None
    why: str
    issues: tuple[PathIssue, ...] = ()
    stops: bool = False


def resumed_step(settings: Settings) -> Resumed:
    """What a run resumes, by its settings and the files that are there."""
    mode = settings.text("trainer.resume_mode", "auto")
    if mode == "resume_path":
        return _resumed_path(settings)
    if mode != "auto":
        return Resumed(None, f"trainer.resume_mode is {mode}")
    key = "trainer.default_local_dir"
    project, experiment = "trainer.project_name", "trainer.experiment_name"
    own = settings.is_new(key) or not settings.resolved(key) or settings.word(key) is not None
    if new := next((one for one in ([key] if own else [project, experiment]) if settings.is_new(one)), None):
        return Resumed(None, f"{new} has the time of the start in it, so its directory is new")
    if not settings.resolved(key):
        return Resumed(None, f"{key} is not known")
    names = ("", "") if own else (settings.text(project, "verl_examples"), settings.text(experiment, "gsm8k"))
    root = Path(settings.text(key) or f"checkpoints/{names[0]}/{names[1]}")
    place = settings.place(key)
    steps = _steps(root)
    if not (root / TRACKER).is_file():
        if not steps:
            return Resumed(None, f"resume_mode auto finds no tracker in {root}")
        actual = f"{', '.join(steps)} but no tracker, so verl starts from the beginning silently"
        hint = f"write the number into {root / TRACKER}, or set trainer.resume_mode=resume_path"
        issue = path_issue(place, root, f"{TRACKER} beside its steps", actual, hint, about=LOAD)
        return Resumed(None, f"resume_mode auto finds no tracker in {root}", (issue,))
    named = tracker_text(root)
    if not (named.isdecimal() and len(named) < 10):
        hint = "write the number of a step that is there"
        issue = path_issue(place, root / TRACKER, "the number of a step", f"{named!r}", hint, about=LOAD)
        return Resumed(None, f"{root / TRACKER} says {named!r}, at which verl stops", (issue,), stops=True)
    path = root / f"global_step_{int(named)}"
    if path.exists():
        return Resumed(path, f"the tracker of {key} says {named}")
    actual = f"only {', '.join(steps) or 'nothing'}, so verl starts from the beginning silently"
    hint = "write the number of a step that is there into the tracker"
    issue = path_issue(place, root / TRACKER, f"{path.name}, which the tracker names", actual, hint, about=STEP)
    return Resumed(None, f"the tracker says {named}, but {path.name} is not there", (issue,))


def _resumed_path(settings: Settings) -> Resumed:
    key = "trainer.resume_from_path"
    word = settings.word(key)
    if not settings.resolved(key):
        return Resumed(None, f"{key} is not known")
    path = Path(word.text) if word else Path()
    number = path.name.rpartition("global_step_")[2]
    if word and "global_step_" in word.text and number.isdecimal() and path.is_dir():
        return Resumed(path, f"{key}")
    there = ", ".join(_steps(path.parent)) or "nothing" if word else ""
    actual = "no such setting" if word is None else "another name" if path.is_dir() else f"not there; beside it {there}"
    expected, hint = "a directory global_step_N that is there", "choose a step that is there"
    issue = path_issue(settings.place(key), path, expected, actual, hint, about=STEP)
    return Resumed(None, f"verl stops: {key} {path} is not a step of a run", (issue,), stops=True)


def _steps(root: Path) -> list[str]:
    names = [path.name for path in root.glob("global_step_*")] if root.is_dir() else []
    return sorted(names, key=lambda name: (len(name), name))

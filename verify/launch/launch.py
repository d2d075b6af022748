"""What each side of a training job would really load, by the rules of Megatron, slime and verl; no weight is read.

Rules (slime `utils/arguments.py` and `backends/megatron_utils/checkpoint.py`, Megatron `training/checkpointing.py`):
- `--load` counts as Megatron only with a tracker file in it, as HF only with a supported config.json; otherwise the
  actor silently takes `--ref-load` instead.
- Megatron reads the tracker: `release`, or a number N for `iter_N`. `--ckpt-step N` replaces a number; 0 means none. Without an
  option of its own the reference takes the same step.
- Without a tracker slime and miles stop: with an assertion where the directory is empty or absent, else because it is no
  HF directory. Only of a directory called `iter_NNNNNNN` they take Megatron's word, which prints a warning and trains from
  random weights, as Megatron-LM's own scripts do of any directory.
- verl (`dist_checkpointing_path`, `utils/megatron/dist_checkpointing.py`) loads the directory that it is given, without a tracker.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.detect import ITERATION, TRACKER, is_legacy, tracked
from ckptkit.formats.hf.reader import read_json
from converters.registry import family_of
from verify.issue import Issue
from verify.launch.unread import overrides, unread
from verify.report import Severity

_ROLLOUT = "rollout engine"
_VERL = " (verl loads it itself: say so behind --, by its use_dist_checkpointing and dist_checkpointing_path)"


@dataclass(frozen=True)
class Launch:
    """The paths of a launch, as given, and the words of its command line."""

    hf_checkpoint: Path | None = None
    load: Path | None = None
    ref_load: Path | None = None
    ckpt_step: int | None = None
    words: tuple[str, ...] = ()

    @property
    def verl(self) -> bool:
        """Whether it is configured as verl is, by overrides."""
        return bool(overrides(self.words))

    @property
    def unread(self) -> list[str]:
        """A line for everything among the words that matters and is not read."""
        loaded = frozenset(os.path.abspath(path) for path in (self.load, self.ref_load) if path)
        return unread(self.words, self.given, loaded)

    @property
    def given(self) -> frozenset[str]:
        """The options that name what is loaded."""
        named = {
            "--hf-checkpoint": self.hf_checkpoint,
            "--load": self.load,
            "--ref-load": self.ref_load,
            "--ckpt-step": self.ckpt_step,
        }
        return frozenset(option for option, value in named.items() if value is not None)


@dataclass(frozen=True)
class Side:
    """One side of the job (actor, reference, rollout engine): the weights it would load, and why these.

    `issues`: what is wrong with an option, by its name. `random`: without weights it trains on, from random ones; otherwise it stops.
    """

    role: str
    kind: Literal["hf", "megatron"] | None
    path: Path | None
    why: str
    issues: tuple[tuple[str, Issue], ...] = ()
    random: bool = False

    def __str__(self) -> str:
        without = "starts from RANDOM weights" if self.random else "cannot start"
        what = f"loads {self.path} ({'HF' if self.kind == 'hf' else 'Megatron'})" if self.path else without
        return f"{self.role} {what}: {self.why}"


def _wrong(
    option: str, path: Path, expected: str, actual: str, hint: str, severity: Severity = "error"
) -> tuple[str, Issue]:
    """An option, and what is wrong with its path."""
    return option, Issue(f"{option}: {expected}", actual, hint, file=path, severity=severity)


def sides_of(launch: Launch) -> list[Side]:
    """Every side that the launch says something about."""
    sides = []
    if launch.verl:
        sides += [_direct("actor", "--load", launch.load)] if launch.load else []
        sides += [_direct("reference", "--ref-load", launch.ref_load)] if launch.ref_load else []
    else:
        sides += [_actor(launch)] if launch.load or launch.ref_load else []
        sides += [_megatron("reference", "--ref-load", launch.ref_load, launch.ckpt_step)] if launch.ref_load else []
    if launch.hf_checkpoint:
        sides.append(_rollout(launch.hf_checkpoint))
    return sides


def _direct(role: str, option: str, path: Path) -> Side:
    """The directory itself, as verl loads it."""
    if (path / ".metadata").exists():
        return Side(role, "megatron", path, f"verl loads the directory of {option} itself")
    if _supported_hf(path) and not (path / TRACKER).exists():
        return Side(role, "hf", path, f"{option} is an HF directory")
    actual = (
        "a directory of iterations"
        if (path / TRACKER).exists()
        else "no such directory"
        if not path.exists()
        else "no .metadata in it"
    )
    hint = f"give the iteration: {option} {_tracked_or(path)}" if (path / TRACKER).exists() else "check the path"
    issue = _wrong(option, path, "the torch_dist directory itself, which verl loads", actual, hint)
    return Side(role, None, None, f"verl stops: {option} {path} is no torch_dist directory", (issue,))


def _tracked_or(root: Path) -> Path:
    try:
        return tracked(root)
    except CkptkitError:
        return root / "iter_NNNNNNN"


def _actor(launch: Launch) -> Side:
    if launch.load and (launch.load / TRACKER).exists():
        return _megatron("actor", "--load", launch.load, launch.ckpt_step)
    if launch.load and _supported_hf(launch.load):
        return Side("actor", "hf", launch.load, "--load has no tracker but a supported config.json")
    issues = (_fall_through(launch.load, launch.ref_load),) if launch.load else ()
    if launch.ref_load is None:
        return Side(
            "actor",
            None,
            None,
            f"--load {launch.load} holds no checkpoint and --ref-load is not given, so slime and miles stop",
            issues,
        )
    fallen = _megatron("actor", "--ref-load", launch.ref_load, launch.ckpt_step)
    why = (
        f"--load {launch.load} holds no checkpoint, so --ref-load is taken; {fallen.why}"
        if launch.load
        else f"--load is not given; {fallen.why}"
    )
    return Side("actor", fallen.kind, fallen.path, why, (*issues, *fallen.issues), fallen.random)


def _supported_hf(path: Path) -> bool:
    try:
        family_of(read_json(path / "config.json"))
    except CkptkitError:
        return False
    return True


def _or_verl(path: Path) -> str:
    return _VERL if (path / ".metadata").exists() else ""


def _fall_through(load: Path, ref_load: Path | None) -> tuple[str, Issue]:
    """A directory that is not there yet is how a first run starts; one that holds something is a mistake."""
    inside = sorted(entry.name for entry in load.iterdir()) if load.is_dir() else []
    expected = f"{TRACKER} or a supported config.json"
    if ITERATION.fullmatch(load.name) or ".metadata" in inside or is_legacy(load):
        step = f" --ckpt-step {int(load.name[5:])}" if ITERATION.fullmatch(load.name) else ""
        return _wrong(
            "--load",
            load,
            expected,
            "an iteration directory, which has no tracker",
            f"give its parent: --load {load.parent}{step}{_or_verl(load)}",
        )
    if iterations := [name for name in inside if ITERATION.fullmatch(name) or name == "release"]:
        hint = f"write `release` or the number into {load / TRACKER}, if that save is whole"
        return _wrong(
            "--load", load, expected, f"{', '.join(iterations)} but no tracker: the last save did not finish", hint
        )
    if inside:
        return _wrong(
            "--load",
            load,
            expected,
            f"neither, but {len(inside)} other entries",
            "give the directory of the checkpoint",
        )
    actual = "an empty directory" if load.is_dir() else "no such directory"
    if ref_load is None:
        return _wrong("--load", load, expected, actual, "check the path, or give --ref-load")
    return _wrong(
        "--load",
        load,
        expected,
        actual,
        "right for the first start of a run; check the path if it should resume",
        "warning",
    )


def _megatron(role: str, option: str, root: Path, step: int | None) -> Side:
    """The iteration that Megatron would load from `root`; slime loads `root` as HF when it is one."""
    if not (root / TRACKER).exists():
        return _untracked(role, option, root, step)
    # Megatron loads release/ whatever the step is.
    if step and (root / TRACKER).read_text(errors="replace").strip() != "release":
        return _step(role, option, root, step)
    try:
        path = tracked(root)
    except CkptkitError as error:
        issue = _wrong(option, root / TRACKER, "a tracker that names a directory", error.message, error.hint or "")
        return Side(role, None, None, f"Megatron stops: {error.message}", (issue,))
    return Side(role, "megatron", path, f"the tracker of {option} says {path.name}")


def _untracked(role: str, option: str, root: Path, step: int | None) -> Side:
    """A directory without a tracker: HF, or nothing that a trainer loads."""
    expected = f"a directory with {TRACKER}"
    if ITERATION.fullmatch(root.name) or (root / ".metadata").exists() or is_legacy(root):
        issue = _wrong(
            option,
            root,
            expected,
            "an iteration directory, which has no tracker",
            f"give its parent: {option} {root.parent}{_or_verl(root)}",
        )
        random = bool(ITERATION.fullmatch(root.name)) and not step
        why = "Megatron finds no tracker and only prints a warning" if random else _stops(root)
        return Side(role, None, None, f"{option} {root} has no tracker; {why}", (issue,), random)
    if _supported_hf(root):
        return Side(role, "hf", root, f"{option} has no tracker but a supported config.json")
    actual = "no such directory" if not root.exists() else "no tracker in it"
    return Side(
        role,
        None,
        None,
        f"{option} {root} has no tracker; {_stops(root)}",
        (_wrong(option, root, expected, actual, "check the path"),),
    )


def _stops(root: Path) -> str:
    if not root.is_dir() or not any(root.iterdir()):
        return "slime and miles stop, since it is empty or not there"
    if ITERATION.fullmatch(root.name):
        return "Megatron stops, since it holds no iterations"
    return "slime and miles stop, since they read it as an HF directory; Megatron-LM itself would start from random weights"


def _step(role: str, option: str, root: Path, step: int) -> Side:
    path = root / f"iter_{step:07d}"
    if path.is_dir():
        return Side(role, "megatron", path, f"--ckpt-step {step} of {option}")
    there = sorted(entry.name for entry in root.iterdir() if ITERATION.fullmatch(entry.name) or entry.name == "release")
    hint = "choose an iteration that is there, or leave --ckpt-step out"
    issue = _wrong("--ckpt-step", root, f"{path.name}/", f"only {', '.join(there) or 'nothing'}", hint)
    return Side(role, None, None, f"Megatron stops: {path} is not there", (issue,))


def _rollout(path: Path) -> Side:
    if (path / "config.json").exists():
        return Side(_ROLLOUT, "hf", path, "--hf-checkpoint")
    megatron = (path / TRACKER).exists() or (path / ".metadata").exists() or is_legacy(path)
    actual = (
        "no such directory" if not path.exists() else "a Megatron checkpoint" if megatron else "no config.json in it"
    )
    issue = _wrong(
        "--hf-checkpoint", path, "an HF directory with config.json", actual, "give the HF directory of the same model"
    )
    return Side(_ROLLOUT, None, None, f"--hf-checkpoint {path} is no HF directory: {actual}", (issue,))

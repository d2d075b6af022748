"""What the sides of a job of slime, miles or Megatron-LM load.

Source: slime `utils/arguments.py` and `backends/megatron_utils/checkpoint.py`, Megatron `training/checkpointing.py`.
- `--load` counts as Megatron only with a tracker file in it, as HF only with a supported config.json; otherwise the
  actor silently takes `--ref-load` instead.
- Megatron reads the tracker: `release`, or a number N for `iter_N`. `--ckpt-step N` replaces a number; 0 means none.
  The reference takes the same step, unless `--ref-ckpt-step` gives it another.
- miles takes an HF directory from `--ref-load` alone (or `--hf-checkpoint`, which stands for it in mode bridge), and
  only with `--megatron-to-hf-mode bridge`. slime has no such option. Of `--load` it passes over one silently.
- miles' FSDP trainer builds actor and reference from HF directories, whatever the mode, and loads an iteration of its
  own from `--load` where there is one. Source: miles `backends/fsdp_utils/actor.py` and `checkpoint.py`, `load`.
- Without a tracker slime and miles stop: with an assertion where the directory is empty or absent, else because it is
  no HF directory. Only of a directory called `iter_NNNNNNN` they take Megatron's word, which prints a warning and
  trains from random weights, as Megatron-LM's own scripts do of any directory.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.detect import ITERATION, TRACKER, is_legacy, tracked, tracker_text
from ckptkit.storage.tree import ForeignFileError
from verify.launch.sides import PathIssue, Side, hf_config_of, hf_directory, is_hf, iterations_in, path_issue

_VERL = " (verl loads it itself: say so behind --, by its use_dist_checkpointing and dist_checkpointing_path)"


def actor(
    load: Path | None,
    ref_load: Path | None,
    step: int | None,
    option: str = "--ref-load",
    mode: str | None = None,
    lost: int | None = None,
) -> Side:
    """The actor: `--load`, or `ref_load`, which `option` gives, where that holds no checkpoint.

    `mode` is that of `--megatron-to-hf-mode`, which miles has and slime has not. `lost`: the iteration of --ckpt-step
    that only `--load` could have.
    """
    if load and (load / TRACKER).exists():
        return trainer("actor", "--load", load, step)
    if load and is_hf(load):
        if mode is None:
            return Side("actor", "hf", load, f"--load has no tracker but {hf_config_of(load)}")
        if ref_load and load.absolute() != ref_load.absolute():
            return _passed_over(load, ref_load, step, option, mode)
    issues = (_empty_load(load, ref_load, lost),) if load and not is_hf(load) else ()
    if ref_load is None:
        why = f"--load {load} holds no checkpoint and --ref-load is not given, so slime and miles stop"
        return Side("actor", None, None, why, issues)
    side = trainer("actor", option, ref_load, step, mode)
    why = f"--load {load} holds no checkpoint, so {option} is taken" if load else "--load is not given"
    return replace(side, why=f"{why}; {side.why}", issues=(*issues, *side.issues))


def _passed_over(load: Path, ref_load: Path, step: int | None, option: str, mode: str) -> Side:
    """The actor of miles where `--load` is an HF directory, which it takes only from `--ref-load`."""
    side = trainer("actor", option, ref_load, step, mode)
    actual = f"an HF directory without a tracker: miles takes {option} {ref_load} instead, silently"
    hint = f"give {load} as --ref-load, and leave --load out"
    issue = path_issue("--load", load, f"{TRACKER}, without which miles passes over it", actual, hint)
    why = f"--load {load} has no tracker, so {option} is taken; {side.why}"
    return replace(side, why=why, issues=(issue, *side.issues))


def trainer(role: str, option: str, root: Path, step: int | None, mode: str | None = None) -> Side:
    """The reference, or whichever `role` loads the iteration that Megatron finds in `root`, or `root` itself as HF.

    miles loads HF directories in `mode` bridge only.
    """
    if not (root / TRACKER).exists():
        if mode == "raw" and is_hf(root):
            hint = "convert it with `ckptkit convert`, or give --megatron-to-hf-mode bridge"
            issue = path_issue(option, root, f"a directory with {TRACKER}", "an HF directory, in mode raw", hint)
            why = f"miles stops: {option} {root} is an HF directory, which it takes in mode bridge only"
            return Side(role, None, None, why, (issue,))
        return _untracked(role, option, root, step)
    if step and takes_step(root):
        return _step(role, root, step, option)
    try:
        path = tracked(root)
    except ForeignFileError:  # which Megatron follows
        raise
    except CkptkitError as error:
        issue = path_issue(option, root / TRACKER, "a tracker that names a directory", error.message, error.hint or "")
        return Side(role, None, None, f"Megatron stops: {error.message}", (issue,))
    why = f"the tracker of {option} says {path.name}"
    if not step:
        return Side(role, "megatron", path, why)
    # Megatron's name of `release` has no number in it.
    hint = f"leave --ckpt-step out, or write {step} into {root / TRACKER} if that iteration is meant"
    actual = f"release, which Megatron loads whatever --ckpt-step {step} says"
    issue = path_issue("--ckpt-step", root / TRACKER, "a tracker that says an iteration", actual, hint, "warning")
    issues = (issue,) if option == "--load" else ()
    return Side(role, "megatron", path, f"{why}, beside which step {step} has no effect", issues)


def takes_step(root: Path) -> bool:
    """Whether `--ckpt-step` chooses an iteration of a directory. Megatron loads release/ whatever the step is."""
    return (root / TRACKER).exists() and tracker_text(root) != "release"


def of_fsdp(load: Path, step: int | None) -> Path | None:
    """The iteration in `--load` that miles' FSDP trainer goes on from; None where it passes over `--load`."""
    number = str(step) if step is not None else tracker_text(load) if (load / TRACKER).exists() else ""
    iteration = load / f"iter_{int(number):07d}" if number.isdecimal() else None
    return iteration if iteration and (iteration / "model").is_dir() else None


def fsdp_actor(hf: Path, load: Path | None, step: int | None) -> Side:
    """The actor of miles' FSDP trainer: `--hf-checkpoint`, over which an iteration of its own in `--load` is loaded."""
    why = "FSDP builds the model from --hf-checkpoint"
    side = replace(hf_directory("actor", "--hf-checkpoint", hf, why), why=why, issues=())
    if load is None or (resumed := of_fsdp(load, step)):
        return replace(side, why=f"{why}, and goes on from {resumed}" if load else why)
    if not load.is_dir() or not any(load.iterdir()):
        issue = _empty_load(load, hf, step)
    else:
        hint = "give it as --hf-checkpoint, if it is a model in HF format that the run is meant to start from"
        expected = f"{TRACKER} and the iteration of FSDP that it names"
        issue = path_issue("--load", load, expected, "none: FSDP passes over it silently, or stops", hint)
    issues = () if load.resolve() == hf.resolve() else (issue,)
    return replace(side, why=f"{why}; --load {load} holds no iteration of FSDP", issues=issues)


def _empty_load(load: Path, ref_load: Path | None, step: int | None) -> PathIssue:
    """What is wrong with a `--load` without a checkpoint. Where it is empty or absent, a first run starts like that.

    `step`: the iteration that the launch requires of it, which no first run has.
    """
    inside = sorted(entry.name for entry in load.iterdir()) if load.is_dir() else []
    expected = f"{TRACKER} or a supported config.json"
    if ITERATION.fullmatch(load.name) or ".metadata" in inside or is_legacy(load):
        chosen = f" --ckpt-step {int(load.name[5:])}" if ITERATION.fullmatch(load.name) else ""
        return _iteration_given("--load", load, expected, chosen)
    if iterations := iterations_in(load):
        hint = f"write `release` or the number into {load / TRACKER}, if that save is whole"
        actual = f"{', '.join(iterations)} but no tracker: the last save did not finish"
        return path_issue("--load", load, expected, actual, hint)
    if inside:
        hint = "give the directory of the checkpoint"
        return path_issue("--load", load, expected, f"neither, but {len(inside)} other entries", hint)
    actual = "an empty directory" if load.is_dir() else "no such directory"
    if step:
        hint = "check the path of --load; for a first start leave --ckpt-step out"
        return path_issue("--ckpt-step", load, f"iter_{step:07d}/ in --load", actual, hint)
    if ref_load is None:
        return path_issue("--load", load, expected, actual, "check the path, or give --ref-load")
    hint = "right for the first start of a run; check the path if it should resume"
    return path_issue("--load", load, expected, actual, hint, "warning")


def _iteration_given(option: str, path: Path, expected: str, step: str = "") -> PathIssue:
    verl = _VERL if (path / ".metadata").exists() else ""
    hint = f"give its parent: {option} {path.parent}{step}{verl}"
    return path_issue(option, path, expected, "an iteration directory, which has no tracker", hint)


def _untracked(role: str, option: str, root: Path, step: int | None) -> Side:
    """A directory without a tracker: HF, or nothing that a trainer loads."""
    expected, random = f"a directory with {TRACKER}", False
    if ITERATION.fullmatch(root.name) or (root / ".metadata").exists() or is_legacy(root):
        issue = _iteration_given(option, root, expected)
        random = bool(ITERATION.fullmatch(root.name)) and not step
    elif is_hf(root):
        return Side(role, "hf", root, f"{option} has no tracker but {hf_config_of(root)}")
    else:
        actual = "no tracker in it" if root.exists() else "no such directory"
        issue = path_issue(option, root, expected, actual, "check the path")
    why = "Megatron finds no tracker and only prints a warning" if random else _stops(root)
    return Side(role, None, None, f"{option} {root} has no tracker; {why}", (issue,), random)


def _stops(root: Path) -> str:
    if not root.is_dir() or not any(root.iterdir()):
        return "slime and miles stop, since it is empty or not there"
    if ITERATION.fullmatch(root.name):
        return "Megatron stops, since it holds no iterations"
    stops = "slime and miles stop, since they read it as an HF directory"
    return f"{stops}; Megatron-LM itself would start from random weights"


def _step(role: str, root: Path, step: int, option: str) -> Side:
    path = root / f"iter_{step:07d}"
    if path.is_dir():
        return Side(role, "megatron", path, f"--ckpt-step {step} of {option}")
    there = ", ".join(iterations_in(root)) or "nothing"
    hint = "choose an iteration that is there, or leave --ckpt-step out"
    issue = path_issue("--ckpt-step", root, f"{path.name}/", f"only {there}", hint)
    return Side(role, None, None, f"Megatron stops: {path} is not there", (issue,))

"""Reads the job of a launch: tells which stack it is for, and puts its settings together, YAML files and overrides."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.hub_cache import hub_model
from ckptkit.verify.launch.job import Job, Launch
from ckptkit.verify.launch.options.argv import last, options_of
from ckptkit.verify.launch.settings.config import Config
from ckptkit.verify.launch.settings.files import Composed, compose
from ckptkit.verify.launch.settings.overrides import applied, is_override
from ckptkit.verify.launch.settings.tree import flat_settings
from ckptkit.verify.launch.stacks import nemo_rl, roll, slime, verl
from ckptkit.verify.launch.stacks.others import find_stack_by_settings
from ckptkit.verify.launch.words import LaunchText, UnresolvedWord, Word

# How Hydra, NeMo-RL and ROLL are told their file of settings.
_FOLDER = frozenset({"--config-path", "-cp", "--config-dir", "-cd", "--config_path"})
_NAME = frozenset({"--config-name", "-cn", "--config_name"})
_FILE = frozenset({"--config"})
# In the order in which their settings are told apart; a launch without settings is of the last one.
STACKS = (verl.STACK, nemo_rl.STACK, roll.SUPERVISED, roll.STACK, verl.SFT, slime.STACK)


@dataclass(frozen=True)
class _Named:
    """The file of settings that a command line names: its path, or its name where it is not there."""

    path: Path | None = None
    name: str = ""
    absent: tuple[str, ...] = ()


def is_config(path: Path) -> bool:
    """Whether a path has the ending of a file of settings."""
    return path.suffix.lower() in (".yaml", ".yml")


def read_job(launch: Launch, config: Path | None = None) -> Job:
    """The job of a launch, whichever stack it is of. `config` is its YAML file where it was given by itself.

    Raises CkptkitError for files that cannot be read, a file of settings of another program, values that are not what
    they should be, and where preflight's own paths and sizes contradict the launch.
    """
    words = launch.text.words
    named = _Named(config) if config else _named(words)
    if named.path is None and not any(is_override(word.text) for word in words) and not named.name:
        return _confirmed(STACKS[-1].read(launch), launch)
    composed = compose(named.path) if named.path else Composed({})
    tree, groups = applied(composed.tree, words, lambda name: _is_group(name, named))
    own = [one for one in STACKS if named.path is None and one.is_own(named.name)]
    stack = next(iter([*(one for one in STACKS if one.fits(tree)), *own]), None)
    if stack is None and (other := find_stack_by_settings(tree)):
        raise other.refusal(named.path or "the command")
    if stack is None and config is not None:
        hint = "give the file of settings of a verl, NeMo-RL or ROLL job, or a bash script"
        raise CkptkitError(f"{config} has the settings of none of them: {', '.join(list(tree)[:5])}", hint)
    if stack is None:
        return _confirmed(STACKS[-1].read(launch), launch)
    absent = [word for word in composed.absent if not stack.is_own(word.text)]
    unread = [*named.absent, *(f"{word.place}: defaults: {word.text}: no such file next to it" for word in absent)]
    others = [word for word in groups if not any(one.is_own(word.text.partition("=")[2]) for one in STACKS)]
    unread += [f"{word.place}: {word.text}: the file of this group is not read" for word in others]
    files = (named.name, named.path.stem if named.path else "", *(word.text for word in composed.absent))
    model = _stand_in(launch)
    settings = Config(tree, launch.environment, model, stack.models, files, groups, unread)
    whole = not unread and not any(isinstance(word, UnresolvedWord) and word.anything for word in words)
    return _confirmed(_finished(stack.read(replace(launch, settings=settings)), launch.text, settings, whole), launch)


def _finished(job: Job, text: LaunchText, settings: Config, whole: bool) -> Job:
    """A job with what its settings say as such. Where not all of them are known, what is absent breaks no rule."""
    hf = job.hf if job.hf and (job.hf / "config.json").exists() else None
    return replace(
        job,
        text=text,
        root=hf or Path(),
        hf=hf,
        models={**job.models, **{side.role: side.path for side in job.sides if side.role.startswith("teacher")}},
        written=dict(flat_settings(settings.tree, lists=False)),
        unread=(*settings.unread, *_unresolved_besides(text)),
        notes=tuple(settings.notes),
        combinations=() if job.combinations and not whole else job.combinations,
    )


def _stand_in(launch: Launch) -> Path | None:
    """The directory of --hf-checkpoint, which counts before the settings. Raises CkptkitError where it is not here."""
    if not (given := launch.given.hf_checkpoint):
        return None
    hub = hub_model(str(given), launch.environment)
    if hub and hub.path is None:
        raise CkptkitError(f"--hf-checkpoint {hub.name}: {hub.why}", "give a local copy of it")
    return hub.path if hub else Path(given)


def _confirmed(job: Job, launch: Launch) -> Job:
    """The job, where preflight's own paths and sizes do not contradict it. Raises CkptkitError where they do.

    A stack that takes options takes preflight's own paths before those of the words.
    """
    given = launch.given
    if not job.stack.one_model:
        if given.ckpt_step is not None:
            message = f"--ckpt-step does not go with settings of {job.stack.name}"
            raise CkptkitError(message, "give the step in the settings")
        for option, path, role in (("--load", given.load, "actor"), ("--ref-load", given.ref_load, "reference")):
            _require_same_checkpoint(job, option, path, role)
    for name, size in given.sizes.items():
        own = getattr(job.actor, name)
        if size != 1 and own is not None and size != own:
            raise CkptkitError(f"--{name} {size}, but it is {own} {job.stack.source}", f"leave --{name} out")
    return job


def _require_same_checkpoint(job: Job, option: str, path: Path | None, role: str) -> None:
    """Raises CkptkitError where an option names another directory than the settings do."""
    side = next((one for one in job.sides if one.role == role), None)
    if path is None or (side and side.path is None):
        return
    if side is None or os.path.abspath(path) != os.path.abspath(side.path or ""):
        found = f"no {role} is loaded" if side is None else f"the {role} loads {side.path}"
        raise CkptkitError(f"{option} {path}, but by the settings of {job.stack.name} {found}", f"leave {option} out")


def _unresolved_besides(text: LaunchText) -> list[str]:
    """What could not be resolved of a launch's text, less overrides: one that decides something is told by its key."""
    overrides = (word for word in text.words if isinstance(word, UnresolvedWord) and is_override(word.text))
    known = {f"{word.place}: {word.text}: {word.why}" for word in overrides}
    return [line for line in text.unresolved if line not in known]


def _named(words: Sequence[Word]) -> _Named:
    """The file of settings that `--config-path`, `--config-name` or `--config` name."""
    options = options_of(words)
    found = (last(options, *names) for names in (_FOLDER, _NAME, _FILE))
    folder, name, file = (one.value.text if one and one.value else "" for one in found)
    if not (name or file):
        return _Named()
    path = Path(file) if file else Path(folder, name if is_config(Path(name)) else f"{name}.yaml")
    if path.is_file():
        return _Named(path, name)
    own = not file and any(stack.is_own(name) for stack in STACKS)
    return _Named(None, name or file, () if own else (f"the file of settings, {path}, is not there",))


def _is_group(name: str, named: _Named) -> bool:
    """Whether a setting chooses a file of a folder: one beside the file of settings, else one of the stack's own."""
    if named.path is not None:
        return (named.path.parent / name).is_dir()
    return any(name in stack.groups for stack in STACKS)

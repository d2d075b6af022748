"""Reads the job of a launch: composes its settings from YAML files and overrides, and chooses its stack."""

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
from ckptkit.verify.launch.settings.overrides import apply_overrides, is_override
from ckptkit.verify.launch.settings.tree import flat_settings
from ckptkit.verify.launch.stacks import nemo_rl, roll, slime, verl
from ckptkit.verify.launch.stacks.others import find_stack_by_settings
from ckptkit.verify.launch.words import LaunchText, UnresolvedWord, Word

_FOLDER = frozenset({"--config-path", "-cp", "--config-dir", "-cd", "--config_path"})  # of Hydra and ROLL
_NAME = frozenset({"--config-name", "-cn", "--config_name"})
_FILE = frozenset({"--config"})
# The first stack that fits the settings counts. A launch without settings is of the last one.
STACKS = (verl.STACK, nemo_rl.STACK, roll.SUPERVISED, roll.STACK, verl.SFT, slime.STACK)


@dataclass(frozen=True)
class _SettingsFile:
    """The file of settings in a command line."""

    path: Path | None = None  # None: it does not exist
    name: str = ""
    absent: tuple[str, ...] = ()


def is_config(path: Path) -> bool:
    """Whether a path has the suffix of YAML."""
    return path.suffix.lower() in (".yaml", ".yml")


def read_job(launch: Launch, config: Path | None = None) -> Job:
    """The job of a launch of any stack. `config` is its YAML file, if preflight got that instead of a command.

    Raises CkptkitError for a file that cannot be read or is for another program, for values of a wrong kind, and if
    preflight's own paths and sizes contradict the launch.
    """
    words = launch.text.words
    file = _SettingsFile(config) if config else _settings_file(words)
    if file.path is None and not any(is_override(word.text) for word in words) and not file.name:
        return _require_agreement(STACKS[-1].read(launch), launch)
    composed = compose(file.path) if file.path else Composed({})
    tree, groups = apply_overrides(composed.tree, words, lambda name: _is_group(name, file))
    owners = [one for one in STACKS if file.path is None and one.is_own(file.name)]
    stack = next(iter([*(one for one in STACKS if one.fits(tree)), *owners]), None)
    if stack is None and (other := find_stack_by_settings(tree)):
        raise other.refusal(file.path or "the command")
    if stack is None and config is not None:
        hint = "pass the settings file of a verl, NeMo-RL or ROLL job, or a bash script"
        raise CkptkitError(f"{config} has settings of an unknown trainer: {', '.join(list(tree)[:5])}", hint)
    if stack is None:
        return _require_agreement(STACKS[-1].read(launch), launch)
    absent = [word for word in composed.absent if not stack.is_own(word.text)]
    unread = [*file.absent, *(f"{word.place}: defaults: {word.text}: the file does not exist" for word in absent)]
    unknown = [word for word in groups if not any(one.is_own(word.text.partition("=")[2]) for one in STACKS)]
    unread += [f"{word.place}: {word.text}: preflight does not read the file of this group" for word in unknown]
    files = (file.name, file.path.stem if file.path else "", *(word.text for word in composed.absent))
    settings = Config(tree, launch.environment, _replacement_model(launch), stack.models, files, groups, unread)
    is_complete = not unread and not any(isinstance(word, UnresolvedWord) and word.anything for word in words)
    job = stack.read(replace(launch, settings=settings))
    return _require_agreement(_add_settings(job, launch.text, settings, is_complete), launch)


def _add_settings(job: Job, text: LaunchText, settings: Config, is_complete: bool) -> Job:
    """The job with fields that any stack's settings give. Combinations are only checked if all settings are known."""
    overrides = (word for word in text.words if isinstance(word, UnresolvedWord) and is_override(word.text))
    # `Config.unread` reports an unresolved override by its key, if a reader uses it.
    reported = {f"{word.place}: {word.text}: {word.why}" for word in overrides}
    hf = job.hf if job.hf and (job.hf / "config.json").exists() else None
    return replace(
        job,
        text=text,
        root=hf or Path(),
        hf=hf,
        models={**job.models, **{side.role: side.path for side in job.sides if side.role.startswith("teacher")}},
        written=dict(flat_settings(settings.tree, lists=False)),
        unread=(*settings.unread, *(line for line in text.unresolved if line not in reported)),
        notes=tuple(settings.notes),
        combinations=() if job.combinations and not is_complete else job.combinations,
    )


def _replacement_model(launch: Launch) -> Path | None:
    """The directory of --hf-checkpoint, which overrides the settings. Raises CkptkitError if it is not local."""
    if not (given := launch.options.hf_checkpoint):
        return None
    hub = hub_model(str(given), launch.environment)
    if hub and hub.path is None:
        raise CkptkitError(f"--hf-checkpoint {hub.name}: {hub.why}", "pass a local copy of it")
    return hub.path if hub else Path(given)


def _require_agreement(job: Job, launch: Launch) -> Job:
    """Returns the job. Raises CkptkitError if preflight's own sizes, or paths of a job with settings, contradict it."""
    given = launch.options
    if not job.stack.one_model:
        if given.ckpt_step is not None:
            message = f"--ckpt-step cannot be used with a launch of {job.stack.name}"
            raise CkptkitError(message, "remove it, and set the step in the settings of the job")
        _require_same_checkpoint(job, "--load", given.load, "actor")
        _require_same_checkpoint(job, "--ref-load", given.ref_load, "reference")
    for name, size in given.sizes.items():
        actor_size = getattr(job.actor, name)
        if size != 1 and actor_size is not None and size != actor_size:
            raise CkptkitError(f"--{name} is {size}, but {actor_size} {job.stack.source}", f"leave out --{name}")
    return job


def _require_same_checkpoint(job: Job, option: str, path: Path | None, role: str) -> None:
    """Raises CkptkitError if an option and the settings give different directories."""
    side = next((one for one in job.sides if one.role == role), None)
    if path is None or (side and side.path is None):
        return
    if side is None or os.path.abspath(path) != os.path.abspath(side.path or ""):
        actual = f"the job loads no {role}" if side is None else f"the {role} loads {side.path}"
        raise CkptkitError(f"{option} is {path}, but in {job.stack.name}'s settings {actual}", f"leave out {option}")


def _settings_file(words: Sequence[Word]) -> _SettingsFile:
    """The file of settings in `--config-path`, `--config-name` or `--config`."""
    given = (last(options_of(words), *names) for names in (_FOLDER, _NAME, _FILE))
    folder, name, file = (option.value.text if option and option.value else "" for option in given)
    if not (name or file):
        return _SettingsFile()
    path = Path(file) if file else Path(folder, name if is_config(Path(name)) else f"{name}.yaml")
    if path.is_file():
        return _SettingsFile(path, name)
    is_own = not file and any(stack.is_own(name) for stack in STACKS)
    return _SettingsFile(None, name or file, () if is_own else (f"the settings file {path} does not exist",))


def _is_group(name: str, file: _SettingsFile) -> bool:
    """Whether a setting chooses a file of a folder: one next to the file of settings, else one of the stack's own."""
    return (file.path.parent / name).is_dir() if file.path else any(name in stack.groups for stack in STACKS)

"""Who loads what in a job of slime, miles or Megatron-LM: its paths, and the sides that follow from them.

Paths are options, or in files of settings: `--custom-config-path`, for all roles, and `--megatron-config-path`, for
one. Such settings are set after the options were judged: a path in them is loaded as it is, and nothing stands in for
it. Source: slime `utils/arguments.py` (slime_validate_args, parse_megatron_role_args), miles `utils/arguments.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.detect import TRACKER
from ckptkit.formats.hf.hub_cache import HubModel, hub_model
from verify.launch.job import Launch
from verify.launch.options.argv import Option, last, options_of
from verify.launch.options.tables import GPUS, READ, option_of
from verify.launch.settings.overrides import is_override
from verify.launch.settings.tree import NULL, Tree, read_yaml
from verify.launch.sides import ENGINE, Side, hf_directory, is_trained
from verify.launch.stacks.slime import loading
from verify.launch.words import Word, known_words

# What a launch loads, as fields of `Paths`; those that preflight has an option for, and others.
_OWN = {"hf": "--hf-checkpoint", "load": "--load", "ref_load": "--ref-load"}
_PATHS = _OWN | {"critic": "--critic-load", "teacher": "--opd-teacher-load"}
_STEPS = {"ckpt_step": "--ckpt-step", "ref_step": "--ref-ckpt-step", "teacher_step": "--opd-teacher-ckpt-step"}
CUSTOM, MEGATRON = "--custom-config-path", "--megatron-config-path"
# Other settings that change what is loaded, or how it is cut.
_FILE_MATTERS = re.compile(r"parallel_size|checkpoint|ckpt|load$|layout|num_layers|mtp_num|lora|virtual_pipeline")
_FILE_HARMLESS = re.compile(
    r"recompute|no_load|finetune|save|exit_on_missing|activation|"
    r"^(?:load|ref_load|hf_checkpoint|critic_load|opd_teacher_load|(?:ref_|opd_teacher_)?ckpt_step)$"  # read
)
_ROLES = ("actor", "critic")


@dataclass(frozen=True)
class RoleFiles:
    """What these files say: settings of every role, and those of one. `read` are the options whose files were read.

    `unread` has a line for every setting that matters and is not looked at.
    """

    common: Mapping[str, Word] = field(default_factory=dict)
    roles: Mapping[str, Mapping[str, Word]] = field(default_factory=dict)
    read: frozenset[str] = frozenset()
    unread: tuple[str, ...] = ()

    def get(self, role: str, name: str) -> Word | None:
        """What a setting gives to a role; None where no file gives it anything."""
        return self.roles.get(role, {}).get(name, self.common.get(name))

    def step(self, role: str, name: str) -> int | None:
        """The iteration that a setting gives. Raises CkptkitError where it is not a number."""
        word = self.get(role, name)
        return _iteration(name, word) if word else None


def _iteration(name: str, word: Word) -> int:
    """The iteration that a word gives. Raises CkptkitError where it is not a number."""
    if not (word.text.isdecimal() and len(word.text) < 10):
        raise CkptkitError(f"{word.place}: {name} {word.text} is not a number", "give the iteration as a number")
    return int(word.text)


def role_files(words: Sequence[Word]) -> RoleFiles:
    """The files that a launch names, as far as they are there. Raises CkptkitError for one that cannot be read."""
    options = options_of(words)
    custom, megatron = (_named(options, option) for option in (CUSTOM, MEGATRON))
    common = _settings(read_yaml(custom)) if custom else {}
    roles = dict(_of_roles(megatron)) if megatron else {}
    every = [(name, word) for name, word in common.items() if option_of(name) not in READ]
    every += [pair for role in roles.values() for pair in role.items()]
    matters = [(name, word) for name, word in every if _FILE_MATTERS.search(name) and not _FILE_HARMLESS.search(name)]
    unread = [f"{word.place}: {name}: {word.text}: not looked at" for name, word in matters]
    read = frozenset(option for option, path in ((CUSTOM, custom), (MEGATRON, megatron)) if path)
    return RoleFiles(common, roles, read, tuple(dict.fromkeys(unread)))


def _named(options: Sequence[Option], name: str) -> Path | None:
    """The file of an option; None where it is not given, or not there: then it is listed as not read."""
    option = last(options, name)
    found = Path(option.value.text) if option and option.value else None
    return found if found and found.is_file() else None


def _settings(tree: Tree | None) -> dict[str, Word]:
    """The single values of a mapping; a null sets nothing that is loaded."""
    pairs = tree.items() if isinstance(tree, dict) else ()
    return {name: value for name, value in pairs if isinstance(value, Word) and value.text != NULL}


def _of_roles(path: Path) -> Iterator[tuple[str, dict[str, Word]]]:
    """The overrides of every role. Raises CkptkitError where slime stops: at another form, or a role that is twice."""
    entries = read_yaml(path).get("megatron")
    if not isinstance(entries, list):
        raise CkptkitError(f"{path} has no list `megatron`", "write `megatron: [{role: actor, overrides: {...}}]`")
    seen: set[str] = set()
    for entry in entries:
        role = entry.get("role") if isinstance(entry, dict) else None
        if not isinstance(entry, dict) or not isinstance(role, Word) or role.text not in _ROLES:
            continue
        if role.text in seen:
            raise CkptkitError(f"{role.place}: the role {role.text} stands twice", "give every role one entry")
        seen.add(role.text)
        yield role.text, _settings(entry.get("overrides") or entry.get("args"))


@dataclass(frozen=True)
class Paths:
    """The paths and iterations of a launch: those that preflight is given, else those of its words.

    hub: the name on a model hub that --hf-checkpoint gives; `hf` is then its snapshot in the local cache, or None.
    ref_step: the iteration of the reference, where it has an option of its own.
    critic, teacher: what a critic, and a teacher of on-policy distillation, load.
    files: what files of settings give to single roles.
    mode: how miles loads and sends weights, raw or bridge; None where the launch does not say it, or is slime's.
    fsdp: whether miles trains by FSDP instead of Megatron.
    replaced: a note for each option of preflight that contradicts the words.
    """

    hf: Path | None = None
    hub: HubModel | None = None
    load: Path | None = None
    ref_load: Path | None = None
    ckpt_step: int | None = None
    ref_step: int | None = None
    critic: Path | None = None
    teacher: Path | None = None
    teacher_step: int | None = None
    files: RoleFiles = field(default_factory=RoleFiles)
    mode: str | None = None
    fsdp: bool = False
    replaced: tuple[str, ...] = ()

    @property
    def bridge(self) -> bool:
        """Whether miles builds and loads the model by Megatron-Bridge, from --hf-checkpoint."""
        return self.mode == "bridge"

    @property
    def named(self) -> frozenset[str]:
        """The options whose path or iteration is known."""
        known = {option for name, option in (_PATHS | _STEPS).items() if getattr(self, name) is not None}
        return frozenset({*known, *(["--hf-checkpoint"] if self.hub else [])})

    @staticmethod
    def read(launch: Launch, files: RoleFiles, mode: str | None, fsdp: bool = False) -> Paths:
        """Those of a launch. Raises CkptkitError for an iteration that is not a number."""
        options, given, notes, paths = options_of(launch.text.words), launch.given, list[str](), dict[str, Any]()
        # Those that preflight is given count before those of the words.
        hf, chosen = given.hf_checkpoint, {"load": given.load, "ref_load": given.ref_load, "ckpt_step": given.ckpt_step}
        for name, option in (_PATHS | _STEPS).items():
            word = _last_value(options, option)
            found: Any = word and (Path(word.text) if name in _PATHS else _iteration(option, word))
            value: Any = (Path(hf) if hf else None) if name == "hf" else chosen.get(name)
            if word and value is not None and os.path.abspath(str(found)) != os.path.abspath(str(value)):
                notes.append(f"{option} {value} was looked at, although {word.place} says {word.text}")
            paths[name] = found if value is None else value
        # `./org/model` is a path, and Path forgets that.
        written = _last_value(options, "--hf-checkpoint")
        hub = hub_model(str(hf or (written.text if written else "")), launch.environment)
        paths["hf"] = hub.path if hub else paths["hf"]
        return Paths(**paths, hub=hub, files=files, mode=mode, fsdp=fsdp, replaced=tuple(notes))


def _last_value(options: Sequence[Option], name: str) -> Word | None:
    """The value of an option; None where it is not given, or could not be told."""
    option = last(options, name)
    return option.value if option and option.known else None


def sides_of(launch: Launch, paths: Paths) -> tuple[Side, ...]:
    """Every side that the launch says something about."""
    return (*_trainers(paths, bool(launch.text.words)), *_rollout(paths))


def unread_of(launch: Launch, paths: Paths) -> tuple[str, ...]:
    """A line for everything among the words that matters and is not read, or not known."""
    words, hub = [word.text for word in known_words(launch.text.words)], paths.hub
    lines = [line for line in unread(words, paths.named) if line.partition(" ")[0] not in paths.files.read]
    download = [f"--hf-checkpoint {hub.name}: {hub.why}"] if hub and hub.path is None else []
    resumed = loading.of_fsdp(paths.load, paths.ckpt_step) if paths.fsdp and paths.load else None
    saved = [f"--load {paths.load}: what FSDP saved in {resumed.name} is not looked at"] if resumed else []
    if paths.fsdp and paths.teacher:
        saved.append(f"--opd-teacher-load {paths.teacher}: not looked at, since FSDP trains")
    return (*download, *lines, *saved, *paths.files.unread, *launch.text.unresolved)


def notes_of(paths: Paths, sides: Sequence[Side]) -> tuple[str, ...]:
    """Remarks on what these sides load."""
    notes = []
    if paths.mode is None and not paths.fsdp and any(side.is_hf and side.role != ENGINE for side in sides):
        notes.append("slime loads the HF directory itself; miles does so with --megatron-to-hf-mode bridge only")
    if paths.critic:
        notes.append("--critic-load is an option of miles; slime passes over it and reads --megatron-config-path")
    return tuple(notes)


def sharing_of(paths: Paths, sides: Sequence[Side]) -> tuple[tuple[str, str], ...]:
    """The roles that hold the same weights: all of a run that does not resume.

    A run that resumes has weights of its own: an iteration in --load. Its reference still has the engine's first ones.
    """
    found = {side.role: side for side in sides if side.path}
    actor, reference = found.get("actor"), found.get("reference")
    further = reference is not None and is_trained(reference)
    resumes = paths.load is not None and actor and actor.path and actor.path.parent == paths.load
    if actor and is_trained(actor) and (resumes or (reference and reference.path != actor.path)):
        return () if further else (("reference", ENGINE),)
    apart = further and reference and actor and reference.path != actor.path
    return (*(() if apart else (("actor", "reference"),)), ("actor", ENGINE))


def _rollout(paths: Paths) -> list[Side]:
    if paths.hf is None:
        return [_download(paths.hub, ENGINE)] if paths.hub else []
    side = hf_directory(ENGINE, "--hf-checkpoint", paths.hf, "--hf-checkpoint")
    return [replace(side, why=f"--hf-checkpoint {paths.hub.why}") if paths.hub else side]


def _download(hub: HubModel, role: str) -> Side:
    """A side whose weights are downloaded at the start."""
    return Side(role, None, None, f"--hf-checkpoint {hub.name} is {hub.why}", elsewhere=True)


def _trainers(paths: Paths, words: bool) -> Iterator[Side]:
    """Actor, reference, critic and teacher, as far as the launch gives them something to load."""
    if paths.fsdp:
        yield from _of_fsdp(paths)
        return
    load, ref_load, mode = paths.load, paths.ref_load, paths.mode
    fallback = ref_load or (paths.hf if paths.bridge else None)
    # Whoever falls back to the reference takes its step, and lends it to roles without one; not in mode bridge.
    falls_back = load is None or not (load / TRACKER).exists()
    shared = paths.ref_step if falls_back and paths.ref_step is not None and not paths.bridge else paths.ckpt_step
    if paths.bridge and paths.hub and fallback is None and falls_back:
        yield _download(paths.hub, "actor")
    elif load or ref_load or (fallback and words) or paths.files.get("actor", "load"):
        option = "--ref-load" if ref_load else "--hf-checkpoint"
        chosen = fallback is not None and loading.takes_step(fallback) and shared == paths.ckpt_step
        side = loading.actor(load, fallback, shared, option, mode, None if chosen else paths.ckpt_step)
        yield _of_file(paths, "actor", "load", "--load", shared) or side
    others = (
        ("reference", "ref_load", "--ref-load", ref_load, paths.ref_step),
        ("critic", "load", "--critic-load", paths.critic, None),
        ("teacher", "", "--opd-teacher-load", paths.teacher, paths.teacher_step),
    )
    for role, name, option, path, own in others:
        step = shared if own is None else own
        if found := _of_file(paths, role, name, option, step):
            yield found
        elif path:
            yield loading.trainer(role, option, path, step, None if role == "critic" else mode)


def _of_fsdp(paths: Paths) -> Iterator[Side]:
    """Actor and reference of miles' FSDP trainer. miles refuses a critic beside it."""
    if paths.hf:
        yield loading.fsdp_actor(paths.hf, paths.load, paths.ckpt_step)
    elif paths.hub:
        yield _download(paths.hub, "actor")
    if paths.ref_load:
        yield hf_directory("reference", "--ref-load", paths.ref_load, "--ref-load")


def _of_file(paths: Paths, role: str, name: str, option: str, step: int | None) -> Side | None:
    """The side whose path a file of settings gives; None where none does. The actor's file gives the reference's."""
    files, of = paths.files, "actor" if role == "reference" else role
    word = files.get(of, name)
    if word is None or (role == "critic" and "critic" not in files.roles):
        return None
    own = files.step(of, "ref_ckpt_step") if role == "reference" else None
    steps = [own, files.step(of, "ckpt_step"), step]
    first = next((one for one in steps if one is not None), None)
    side = loading.trainer(role, option, Path(word.text), first, paths.mode)
    return replace(side, why=f"{side.why} ({name} at {word.place})")


_SIZE = re.compile(r"--(?:.*-)?(?:parallel-size|(?:tp|pp|ep|etp|vpp)(?:-size)?)")
# Sizes that cut no weight, and those that slime and miles overwrite by --rollout-num-gpus-per-engine.
_HARMLESS = frozenset(
    {
        *("--context-parallel-size", "--sglang-data-parallel-size", "--sglang-moe-data-parallel-size"),
        *("--sglang-tp-size", "--sglang-tensor-parallel-size"),
    }
)
_OTHER_PATHS = frozenset({"--pretrained-checkpoint", "--lora-adapter-path"})
_FILES = frozenset(
    {
        *("--config", "--config-path", "--config-name", "--custom-config-path", "--megatron-config-path"),
        *("--sglang-config", "--yaml-cfg"),
    }
)


def overrides(words: Sequence[str]) -> list[str]:
    """The words that have the form of a Hydra override of a configuration of no stack that is known."""
    return [word for word in words if is_override(word) and ("." in word.partition("=")[0] or word[0] in "+~")]


def unread(words: Sequence[str], given: frozenset[str]) -> list[str]:
    """A line for everything among the words of a launch that matters and is not read.

    `given`: options for paths that preflight was given itself.
    """
    lines: dict[str, None] = {}
    for option in options_of([Word(word) for word in words]):
        name = option.name
        shown = f"{name} {option.value.text}" if option.value else name
        usual = name.replace("_", "-")
        if usual in {*_OWN.values(), "--ckpt-step"} - given:
            lines[f"{shown}: give it to preflight itself, before --"] = None
        elif usual in _OTHER_PATHS or usual in {*_PATHS.values(), *_STEPS.values()} - given:
            lines[f"{shown}: what it names is not looked at; verify it by itself"] = None
        elif usual in _FILES:
            lines[f"{shown}: the settings of this file are not read"] = None
        elif name not in READ and name not in GPUS and _SIZE.fullmatch(usual) and usual not in _HARMLESS:
            lines[f"{shown}: no parallel size that is read"] = None
    lines |= {f"{word}: an override of a configuration file": None for word in overrides(words)}
    return list(lines)

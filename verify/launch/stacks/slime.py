"""Reads a job of slime, miles, vime, Relax or Megatron-LM from the options of its launch.

It also finds options that conflict: then samples, updates or an adapter are lost, mostly silently.

Source: slime 624b824 `utils/arguments.py` (slime_validate_args, parse_megatron_role_args), `train_async.py`,
`utils/dp_schedule.py`, `backends/megatron_utils/arguments.py` and `checkpoint.py`; miles 31f1ca9 `utils/arguments.py`
(miles_validate_args), `utils/dp_schedule.py`, `ray/rollout/rollout_data_conversion.py`, `backends/fsdp_utils/actor.py`
and `checkpoint.py`; Megatron `training/checkpointing.py`.
- `--load` is a Megatron checkpoint only if it has a tracker file, and HF only if it has a supported config.json.
  Otherwise the actor silently loads `--ref-load` instead.
- Megatron reads the tracker: `release`, or a number N for `iter_N`. `--ckpt-step N` replaces a number; 0 means none.
  The reference uses the same step, unless `--ref-ckpt-step` is given.
- miles loads an HF directory only from `--ref-load` (by default `--hf-checkpoint`), and only with
  `--megatron-to-hf-mode bridge`. It silently ignores one in `--load`. slime has no such option.
- miles' FSDP trainer builds actor and reference from HF directories in any mode, and loads its own iteration from
  `--load` if there is one.
- Without a tracker slime and miles stop: with an assertion if the directory is empty or missing, else because it is
  not an HF directory. They pass a directory called `iter_NNNNNNN` to Megatron, which prints a warning and trains from
  random weights, as Megatron-LM's own scripts do with any directory.
- Paths are options, or in files of settings: `--custom-config-path`, for all roles, and `--megatron-config-path`, for
  one. slime sets these after it has checked the options: it loads such a path without a fallback.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckptkit.converters.config.values import class_of, language_part
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.detect import ITERATION, TRACKER, is_legacy, tracked_iteration, tracker_text
from ckptkit.formats.hf.hub_cache import HubModel, hub_model
from ckptkit.storage.tree import ForeignFileError
from ckptkit.verify.core.issue import Issue
from ckptkit.verify.launch.arguments import launch_arguments
from ckptkit.verify.launch.checks.engine import engine_config
from ckptkit.verify.launch.job import Job, Launch, Stack, TrainedAdapter
from ckptkit.verify.launch.options.arguments import Arguments, parse_arguments
from ckptkit.verify.launch.options.argv import Option, last, options_of
from ckptkit.verify.launch.options.names import names, trainer_options
from ckptkit.verify.launch.options.speculative import speculation_from_options
from ckptkit.verify.launch.options.tables import GPUS, READ, SIZES, option_of
from ckptkit.verify.launch.settings.overrides import is_override
from ckptkit.verify.launch.settings.tree import NULL, Tree, read_yaml
from ckptkit.verify.launch.sides import ENGINE, PathIssue, Side, hf_config_of, hf_directory, iterations_in, path_issue
from ckptkit.verify.launch.stacks.sizes import option_placement
from ckptkit.verify.launch.words import LaunchText, UnresolvedWord, Word, known_words

# Models with a wrapper that miles converts in mode raw. Source: miles 31f1ca9 `megatron_to_hf/__init__.py`.
_RAW_WRAPPERS = frozenset({"kimi_vl", "kimi_k25", "qwen3_5", "qwen3_5_moe", "qwen3_6", "qwen3_6_moe", "inkling"})
# The options that mark a launch of slime, miles or vime.
_TRAINERS = (
    *("rollout_batch_size", "actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus_per_engine"),
    *("n_samples_per_prompt", "num_rollout", "advantage_estimator"),
)


def read(launch: Launch) -> Job:
    """The job of a launch by options. Raises CkptkitError if nothing is given, and for values of a wrong kind."""
    text = launch.text
    files = _role_files(text.words)
    given = parse_arguments(text.words, files.common)
    mode = given.get("megatron_to_hf_mode").value
    paths = _Paths.read(launch, files, mode, given.get("train_backend").value == "fsdp")
    if not (paths.hf or paths.hub or paths.load or paths.ref_load or text.unresolved or text.issues):
        hint = "pass --hf-checkpoint, --load or --ref-load, or a launch script"
        raise CkptkitError("preflight got no path and no launch script", hint)
    sides, unread = (*_trainers(paths, bool(text.words)), *_rollout(paths)), _unread(launch, paths)
    sizes = launch_arguments(given, text.words, launch.environment)
    tp, pp, ep = (getattr(sizes, name) or size for name, size in launch.options.sizes.items())
    # Megatron's default of etp is tp.
    sizes = replace(sizes, tp=tp, pp=pp, ep=ep, etp=sizes.etp or (tp if text.words and not unread else None))
    written: dict[str, Word] = {}  # the first word of every resolved option
    for option in options_of(text.words):
        if not isinstance(option.word, UnresolvedWord):
            written.setdefault(option.name, option.word)
    return Job(
        STACK,
        text,
        paths.hf or paths.load or paths.ref_load or Path(),
        sides,
        paths.hf,
        sizes=dict.fromkeys(["actor", *(side.role for side in sides)], sizes),
        sizes_at={name: word for name in ("tp", "pp", "ep", "etp") if (word := given.get(SIZES[name]).word)},
        sharing=_sharing(paths, sides),
        placement=option_placement(given, text.words, text.ranks, _is_miles(text)),
        speculation=speculation_from_options(given, text.words),
        adapter=_adapter(given),
        updates=bool(sizes.qat or paths.load or paths.ref_load),
        arguments=given,
        written=written,
        combinations=_combinations(text, paths, sides),
        unread=unread,
        notes=_notes(paths, sides),
        replaced=paths.replaced,
    )


def _combinations(text: LaunchText, paths: _Paths, sides: Sequence[Side]) -> tuple[Issue, ...] | None:
    """Options that conflict. slime checks them before it reads --custom-config-path."""
    given = parse_arguments(text.words)
    if given.values.keys().isdisjoint(_TRAINERS):
        return None
    config, is_miles = engine_config(paths.hf) if paths.hf else {}, _is_miles(text)
    trained = [side.path for side in sides if side.role == "actor" and side.is_trained and side.path]
    resumed = next((int(path.name[5:]) for path in trained if path.parent == paths.load), 0)
    samples = (*_batches(given), *_micro_batches(given), *_advantages(given), *_rollouts(given, resumed))
    models = (*_sequence(given, config, is_miles), *(_raw(given, config) if is_miles else ()))
    return (*samples, *_adapter_issues(given), *_switches(given, text.program_name), *models)


def _is_miles(text: LaunchText) -> bool:
    """Whether the program is in a directory of miles, or an option is given that only miles has."""
    if "miles" in text.program.split("/")[:-1]:
        return True
    miles, *others = (names(one).every for one in ("miles", "slime", "megatron-lm", "sglang-router"))
    return not miles.difference(*others).isdisjoint(one.name.removeprefix("--") for one in options_of(text.words))


STACK = Stack(
    "slime",
    read,
    trainer_options,
    "slime ignores an unknown option, and miles and Megatron-LM stop at it",
    source="among the launch arguments",
    one_model=True,
    vllm_readers=("vllm", "slime"),
)


# The paths of a launch, as fields of `_Paths`: those with an option of preflight, and all.
_OWN = {"hf": "--hf-checkpoint", "load": "--load", "ref_load": "--ref-load"}
_PATHS = _OWN | {"critic": "--critic-load", "teacher": "--opd-teacher-load"}
_STEPS = {"ckpt_step": "--ckpt-step", "ref_step": "--ref-ckpt-step", "teacher_step": "--opd-teacher-ckpt-step"}
_CUSTOM, _MEGATRON = "--custom-config-path", "--megatron-config-path"
# Other settings that change the loaded weights, or their cut.
_FILE_MATTERS = re.compile(r"parallel_size|checkpoint|ckpt|load$|layout|num_layers|mtp_num|lora|virtual_pipeline")
_FILE_HARMLESS = re.compile(
    r"recompute|no_load|finetune|save|exit_on_missing|activation|"
    r"^(?:load|ref_load|hf_checkpoint|critic_load|opd_teacher_load|(?:ref_|opd_teacher_)?ckpt_step)$"  # read
)


@dataclass(frozen=True)
class _RoleFiles:
    """The settings of --custom-config-path, for every role, and of --megatron-config-path, for one."""

    common: Mapping[str, Word] = field(default_factory=dict)
    roles: Mapping[str, Mapping[str, Word]] = field(default_factory=dict)
    read: frozenset[str] = frozenset()  # the options of files that were read
    unread: tuple[str, ...] = ()  # a line for every relevant setting that is not read

    def get(self, role: str, name: str) -> Word | None:
        """The value of a setting for a role, or None if no file has it."""
        return self.roles.get(role, {}).get(name, self.common.get(name))

    def step(self, role: str, name: str) -> int | None:
        """The iteration in a setting. Raises CkptkitError if it is not a number."""
        word = self.get(role, name)
        return _iteration(name, word) if word else None


def _iteration(name: str, word: Word) -> int:
    """The iteration in a word. Raises CkptkitError if it is not a number."""
    if not (word.text.isdecimal() and len(word.text) < 10):
        raise CkptkitError(f"{word.place}: {name} {word.text} is not a number", "write the iteration as a number")
    return int(word.text)


def _role_files(words: Sequence[Word]) -> _RoleFiles:
    """The existing files of settings of a launch. Raises CkptkitError for one that cannot be read."""
    given = {name: last(options_of(words), name) for name in (_CUSTOM, _MEGATRON)}
    paths = {name: Path(option.value.text) for name, option in given.items() if option and option.value}
    files = {name: path for name, path in paths.items() if path.is_file()}  # `_unread` lists missing ones
    common = _settings(read_yaml(files[_CUSTOM])) if _CUSTOM in files else {}
    roles = dict(_settings_by_role(files[_MEGATRON])) if _MEGATRON in files else {}
    pairs = [(name, word) for name, word in common.items() if option_of(name) not in READ]
    pairs += [pair for role in roles.values() for pair in role.items()]
    matters = [(name, word) for name, word in pairs if _FILE_MATTERS.search(name) and not _FILE_HARMLESS.search(name)]
    unread = [f"{word.place}: {name}: {word.text}: ckptkit does not read this setting" for name, word in matters]
    return _RoleFiles(common, roles, frozenset(files), tuple(dict.fromkeys(unread)))


def _settings(tree: Tree | None) -> dict[str, Word]:
    """The single values of a mapping, without null."""
    pairs = tree.items() if isinstance(tree, dict) else ()
    return {name: value for name, value in pairs if isinstance(value, Word) and value.text != NULL}


def _settings_by_role(path: Path) -> Iterator[tuple[str, dict[str, Word]]]:
    """The overrides of each role. Raises CkptkitError where slime stops: without a list, and for a repeated role."""
    entries = read_yaml(path).get("megatron")
    if not isinstance(entries, list):
        raise CkptkitError(f"{path} has no list `megatron`", "write `megatron: [{role: actor, overrides: {...}}]`")
    seen: set[str] = set()
    for entry in entries:
        role = entry.get("role") if isinstance(entry, dict) else None
        if not isinstance(entry, dict) or not isinstance(role, Word) or role.text not in ("actor", "critic"):
            continue
        if role.text in seen:
            raise CkptkitError(f"{role.place}: the role {role.text} has two entries", "write one entry for each role")
        seen.add(role.text)
        yield role.text, _settings(entry.get("overrides") or entry.get("args"))


@dataclass(frozen=True)
class _Paths:
    """The paths and iterations of a launch, from preflight's own options or from its words."""

    hf: Path | None = None  # for a model of a hub its snapshot in the local cache, or None
    hub: HubModel | None = None
    load: Path | None = None
    ref_load: Path | None = None
    ckpt_step: int | None = None
    ref_step: int | None = None
    critic: Path | None = None
    teacher: Path | None = None  # of on-policy distillation
    teacher_step: int | None = None
    files: _RoleFiles = field(default_factory=_RoleFiles)
    mode: str | None = None  # miles' mode of loading and sending weights, raw or bridge
    fsdp: bool = False  # miles trains with FSDP instead of Megatron
    replaced: tuple[str, ...] = ()  # a note for each option of preflight that contradicts the words

    @property
    def bridge(self) -> bool:
        """Whether miles builds and loads the model by Megatron-Bridge, from --hf-checkpoint."""
        return self.mode == "bridge"

    @property
    def named(self) -> frozenset[str]:
        """The options with a known path or iteration."""
        known = [option for name, option in (_PATHS | _STEPS).items() if getattr(self, name) is not None]
        return frozenset([*known, *(["--hf-checkpoint"] if self.hub else [])])

    @staticmethod
    def read(launch: Launch, files: _RoleFiles, mode: str | None, fsdp: bool = False) -> _Paths:
        """Reads the paths of a launch. Raises CkptkitError for an iteration that is not a number."""
        options, given, notes, paths = options_of(launch.text.words), launch.options, list[str](), dict[str, Any]()
        # Preflight's own options override the words.
        hf, chosen = given.hf_checkpoint, {"load": given.load, "ref_load": given.ref_load, "ckpt_step": given.ckpt_step}
        for name, option in (_PATHS | _STEPS).items():
            word = _last_value(options, option)
            written: Any = word and (Path(word.text) if name in _PATHS else _iteration(option, word))
            value: Any = (Path(hf) if hf else None) if name == "hf" else chosen.get(name)
            if word and value is not None and os.path.abspath(str(written)) != os.path.abspath(str(value)):
                notes.append(f"{option} {value} was checked, although {word.place} has {word.text}")
            paths[name] = written if value is None else value
        # `./org/model` is a path, but Path removes the dot.
        word = _last_value(options, "--hf-checkpoint")
        hub = hub_model(str(hf or (word.text if word else "")), launch.environment)
        paths["hf"] = hub.path if hub else paths["hf"]
        return _Paths(**paths, hub=hub, files=files, mode=mode, fsdp=fsdp, replaced=tuple(notes))


def _last_value(options: Sequence[Option], name: str) -> Word | None:
    """The value of an option, or None if not given or unresolved."""
    option = last(options, name)
    return option.value if option and option.known else None


def _unread(launch: Launch, paths: _Paths) -> tuple[str, ...]:
    """A line for each relevant part of the launch that is not read, or unresolved."""
    words, hub = [word.text for word in known_words(launch.text.words)], paths.hub
    lines = [line for line in unread(words, paths.named) if line.partition(" ")[0] not in paths.files.read]
    download = [f"--hf-checkpoint {hub.name}: {hub.why}"] if hub and hub.path is None else []
    resumed = _iteration_of_fsdp(paths.load, paths.ckpt_step) if paths.fsdp and paths.load else None
    saved = [f"--load {paths.load}: ckptkit does not read FSDP's files in {resumed.name}"] if resumed else []
    if paths.fsdp and paths.teacher:
        saved.append(f"--opd-teacher-load {paths.teacher}: ckptkit does not read it in FSDP launches")
    return (*download, *lines, *saved, *paths.files.unread, *launch.text.unresolved)


def _notes(paths: _Paths, sides: Sequence[Side]) -> tuple[str, ...]:
    """Notes on options that only slime or only miles has."""
    loads_hf = paths.mode is None and not paths.fsdp and any(one.kind == "hf" and one.role != ENGINE for one in sides)
    bridge = "slime loads the HF directory itself; miles does only with --megatron-to-hf-mode bridge"
    critic = "--critic-load is an option of miles; slime ignores it and reads --megatron-config-path instead"
    return (*([bridge] if loads_hf else []), *([critic] if paths.critic else []))


def _sharing(paths: _Paths, sides: Sequence[Side]) -> tuple[tuple[str, str], ...]:
    """The roles with the same weights. A resumed actor differs, but its reference has the engine's first weights."""
    loaded = {side.role: side for side in sides if side.path}
    actor, reference = loaded.get("actor"), loaded.get("reference")
    is_reference_trained = reference is not None and reference.is_trained
    resumes = paths.load is not None and actor and actor.path and actor.path.parent == paths.load
    differ = actor and reference and reference.path != actor.path
    if actor and actor.is_trained and (resumes or differ):
        return () if is_reference_trained else (("reference", ENGINE),)
    return (*(() if is_reference_trained and differ else (("actor", "reference"),)), ("actor", ENGINE))


def _rollout(paths: _Paths) -> list[Side]:
    if paths.hf is None:
        return [_download(paths.hub, ENGINE)] if paths.hub else []
    side = hf_directory(ENGINE, "--hf-checkpoint", paths.hf, "--hf-checkpoint")
    return [replace(side, why=f"--hf-checkpoint {paths.hub.why}") if paths.hub else side]


def _download(hub: HubModel, role: str) -> Side:
    """A side that downloads its weights at the start."""
    return Side(role, None, None, f"--hf-checkpoint {hub.name} is {hub.why}", is_remote=True)


def _trainers(paths: _Paths, words: bool) -> Iterator[Side]:
    """Actor, reference, critic and teacher, if the launch gives them weights."""
    if paths.fsdp:  # miles refuses a critic then
        if paths.hf:
            yield _fsdp_actor(paths.hf, paths.load, paths.ckpt_step)
        elif paths.hub:
            yield _download(paths.hub, "actor")
        if paths.ref_load:
            yield hf_directory("reference", "--ref-load", paths.ref_load, "--ref-load")
        return
    load, ref_load, mode = paths.load, paths.ref_load, paths.mode
    fallback = ref_load or (paths.hf if paths.bridge else None)
    # An actor that falls back to the reference uses its step, as do roles without a step, except in mode bridge.
    falls_back = load is None or not (load / TRACKER).exists()
    shared = paths.ref_step if falls_back and paths.ref_step is not None and not paths.bridge else paths.ckpt_step
    if paths.bridge and paths.hub and fallback is None and falls_back:
        yield _download(paths.hub, "actor")
    elif load or ref_load or (fallback and words) or paths.files.get("actor", "load"):
        option = "--ref-load" if ref_load else "--hf-checkpoint"
        is_used = fallback is not None and _takes_step(fallback) and shared == paths.ckpt_step
        side = _actor(load, fallback, shared, option, mode, None if is_used else paths.ckpt_step)
        yield _side_of_file(paths, "actor", "load", "--load", shared) or side
    others = (
        ("reference", "ref_load", "--ref-load", ref_load, paths.ref_step),
        ("critic", "load", "--critic-load", paths.critic, None),
        ("teacher", "", "--opd-teacher-load", paths.teacher, paths.teacher_step),
    )
    for role, name, option, path, role_step in others:
        step = shared if role_step is None else role_step
        if file_side := _side_of_file(paths, role, name, option, step):
            yield file_side
        elif path:
            yield _trainer(role, option, path, step, None if role == "critic" else mode)


def _side_of_file(paths: _Paths, role: str, name: str, option: str, step: int | None) -> Side | None:
    """The side with a path in a file of settings, or None. The reference's path is a setting of the actor."""
    files, owner = paths.files, "actor" if role == "reference" else role
    word = files.get(owner, name)
    if word is None or (role == "critic" and "critic" not in files.roles):
        return None
    steps = [files.step(owner, "ref_ckpt_step") if role == "reference" else None, files.step(owner, "ckpt_step"), step]
    side = _trainer(role, option, Path(word.text), next((one for one in steps if one is not None), None), paths.mode)
    return replace(side, why=f"{side.why} ({name} at {word.place})")


_SIZE = re.compile(r"--(?:.*-)?(?:parallel-size|(?:tp|pp|ep|etp|vpp)(?:-size)?)")
# Sizes that do not cut weights, and those that --rollout-num-gpus-per-engine overwrites.
_HARMLESS = re.compile(r"--(?:context-parallel|sglang-(?:(?:moe-)?data-parallel|tp|tensor-parallel))-size")
_OTHER_PATHS = frozenset({"--pretrained-checkpoint", "--lora-adapter-path"})
_FILES = re.compile(r"--(?:config(?:-path|-name)?|(?:custom|megatron)-config-path|sglang-config|yaml-cfg)")


def overrides(words: Sequence[str]) -> list[str]:
    """The words with the form of a Hydra override, for a configuration of an unknown stack."""
    return [word for word in words if is_override(word) and ("." in word.partition("=")[0] or word[0] in "+~")]


def unread(words: Sequence[str], given: frozenset[str]) -> list[str]:
    """A line for each relevant word that is not read. `given`: options with a known path or iteration."""
    lines = []
    for option in options_of([Word(word) for word in words]):
        name = option.name
        shown = f"{name} {option.value.text}" if option.value else name
        usual = name.replace("_", "-")
        if usual in {*_OWN.values(), "--ckpt-step"} - given:
            lines.append(f"{shown}: pass it to preflight itself, before --")
        elif usual in _OTHER_PATHS or usual in {*_PATHS.values(), *_STEPS.values()} - given:
            lines.append(f"{shown}: preflight does not check this checkpoint; run `ckptkit verify` on it")
        elif _FILES.fullmatch(usual):
            lines.append(f"{shown}: preflight does not read the settings of this file")
        elif name not in READ and name not in GPUS and _SIZE.fullmatch(usual) and not _HARMLESS.fullmatch(usual):
            lines.append(f"{shown}: preflight does not read this parallel size")
    lines += [f"{word}: preflight does not read this override" for word in overrides(words)]
    return list(dict.fromkeys(lines))


_VERL = " (for verl, which loads it directly, pass use_dist_checkpointing and dist_checkpointing_path after --)"


def _actor(
    load: Path | None, ref_load: Path | None, step: int | None, option: str, mode: str | None, lost: int | None
) -> Side:
    """The actor: `--load`, or `ref_load`, the path of `option`, if `--load` has no checkpoint.

    `mode` is the value of miles' `--megatron-to-hf-mode`. `lost` is a --ckpt-step that only `--load` could have.
    """
    if load and (load / TRACKER).exists():
        return _trainer("actor", "--load", load, step)
    config = hf_config_of(load) if load else None
    if load and config and mode is None:
        return Side("actor", "hf", load, f"--load has {config} and no tracker")
    issues = tuple(_empty_load(load, ref_load, lost)) if load and not config else ()
    if ref_load is None:
        why = f"--load {load} has no checkpoint and --ref-load is missing, so slime and miles stop"
        return Side("actor", None, None, why, issues)
    why = f"--load {load} has no checkpoint, so the actor loads {option}" if load else "the launch has no --load"
    if load and config and load.absolute() != ref_load.absolute():
        actual = f"an HF directory without a tracker, so miles silently loads {option} {ref_load} instead"
        hint = f"pass {load} as --ref-load, and leave out --load"
        issues = (path_issue("--load", load, f"{TRACKER}, without which miles ignores it", actual, hint),)
        why = f"--load {load} has no tracker, so the actor loads {option}"
    side = _trainer("actor", option, ref_load, step, mode)
    return replace(side, why=f"{why}; {side.why}", issues=(*issues, *side.issues))


def _trainer(role: str, option: str, root: Path, step: int | None, mode: str | None = None) -> Side:
    """The side that loads Megatron's iteration in `root`, or `root` as HF, which miles does in bridge mode only."""
    if not (root / TRACKER).exists():
        if mode == "raw" and hf_config_of(root):
            hint = "convert the directory with `ckptkit convert`, or pass --megatron-to-hf-mode bridge"
            issue = path_issue(option, root, f"a directory with {TRACKER}", "an HF directory in mode raw", hint)
            why = f"miles stops: {option} {root} is an HF directory, which it loads only in mode bridge"
            return Side(role, None, None, why, (issue,))
        return _untracked(role, option, root, step)
    if step and _takes_step(root):
        return _chosen_step(role, root, step, option)
    try:
        path = tracked_iteration(root)
    except ForeignFileError:
        raise
    except CkptkitError as error:
        issue = path_issue(option, root / TRACKER, "a tracker of a directory", error.message, error.hint or "")
        return Side(role, None, None, f"Megatron stops: {error.message}", (issue,))
    why = f"the tracker of {option} names {path.name}"
    if not step:
        return Side(role, "megatron", path, why)
    hint = f"leave out --ckpt-step, or write {step} into {root / TRACKER} to load that iteration"
    actual = f"the tracker names `release`, so Megatron ignores --ckpt-step {step}"
    issue = path_issue("--ckpt-step", root / TRACKER, "a tracker with an iteration", actual, hint, "warning")
    return Side(role, "megatron", path, f"{why}, so step {step} has no effect", (issue,) if option == "--load" else ())


def _takes_step(root: Path) -> bool:
    """Whether `--ckpt-step` chooses an iteration of a directory. Megatron loads release/ with any step."""
    return (root / TRACKER).exists() and tracker_text(root) != "release"


def _iteration_of_fsdp(load: Path, step: int | None) -> Path | None:
    """The iteration in `--load` that miles' FSDP trainer resumes from, or None if it ignores `--load`."""
    number = str(step) if step is not None else tracker_text(load) if (load / TRACKER).exists() else ""
    iteration = load / f"iter_{int(number):07d}" if number.isdecimal() else None
    return iteration if iteration and (iteration / "model").is_dir() else None


def _fsdp_actor(hf: Path, load: Path | None, step: int | None) -> Side:
    """The actor of miles' FSDP trainer: `--hf-checkpoint`, then an FSDP iteration in `--load`."""
    why = "FSDP builds the model from --hf-checkpoint"
    side = replace(hf_directory("actor", "--hf-checkpoint", hf, why), why=why, issues=())
    if load is None or (resumed := _iteration_of_fsdp(load, step)):
        return replace(side, why=f"{why}, and resumes from {resumed}" if load else why)
    issues = tuple(_empty_load(load, hf, step))
    if load.is_dir() and any(load.iterdir()):
        hint = "pass the directory as --hf-checkpoint if the run should start from it"
        expected = f"{TRACKER} and the iteration of FSDP that it names"
        issues = (path_issue("--load", load, expected, "both are missing, so FSDP ignores --load or stops", hint),)
    issues = () if load.resolve() == hf.resolve() else issues
    return replace(side, why=f"{why}; --load {load} has no iteration of FSDP", issues=issues)


def _empty_load(load: Path, ref_load: Path | None, step: int | None) -> Iterator[PathIssue]:
    """Issues with a `--load` without a checkpoint. It may be empty or missing unless the launch requires a `step`."""
    inside = sorted(entry.name for entry in load.iterdir()) if load.is_dir() else []
    expected = f"{TRACKER} or a supported config.json"
    absent = "an empty directory" if load.is_dir() else "no such directory"
    if ITERATION.fullmatch(load.name) or ".metadata" in inside or is_legacy(load):
        chosen = f" --ckpt-step {int(load.name[5:])}" if ITERATION.fullmatch(load.name) else ""
        yield _iteration_given("--load", load, expected, chosen)
    elif iterations := iterations_in(load):
        hint = f"write `release` or the number into {load / TRACKER}, if that save is complete"
        actual = f"{', '.join(iterations)} without a tracker, so the last save did not finish"
        yield path_issue("--load", load, expected, actual, hint)
    elif inside:
        hint = "pass the directory of the checkpoint"
        yield path_issue("--load", load, expected, f"only {len(inside)} other entries", hint)
    elif step:
        hint = "check the path of --load; for a first start leave out --ckpt-step"
        yield path_issue("--ckpt-step", load, f"iter_{step:07d}/ in --load", absent, hint)
    elif ref_load is None:
        yield path_issue("--load", load, expected, absent, "check the path, or pass --ref-load")


def _iteration_given(option: str, path: Path, expected: str, step: str = "") -> PathIssue:
    hint = f"pass its parent: {option} {path.parent}{step}{_VERL if (path / '.metadata').exists() else ''}"
    return path_issue(option, path, expected, "this is the directory of an iteration, which has no tracker", hint)


def _untracked(role: str, option: str, root: Path, step: int | None) -> Side:
    """The side of a directory without a tracker: HF, or a directory that no trainer loads."""
    expected, is_random = f"a directory with {TRACKER}", False
    if ITERATION.fullmatch(root.name) or (root / ".metadata").exists() or is_legacy(root):
        issue = _iteration_given(option, root, expected)
        is_random = bool(ITERATION.fullmatch(root.name)) and not step
    elif config := hf_config_of(root):
        return Side(role, "hf", root, f"{option} has {config} and no tracker")
    else:
        actual = "the directory has no tracker" if root.exists() else "no such directory"
        issue = path_issue(option, root, expected, actual, "check the path")
    why = "Megatron finds no tracker and only prints a warning" if is_random else _stop_reason(root)
    return Side(role, None, None, f"{option} {root} has no tracker; {why}", (issue,), is_random)


def _stop_reason(root: Path) -> str:
    if not root.is_dir() or not any(root.iterdir()):
        return "slime and miles stop, since it is empty or missing"
    if ITERATION.fullmatch(root.name):
        return "Megatron stops, since it contains no iterations"
    reason = "slime and miles stop, since they read it as an HF directory"
    return f"{reason}; Megatron-LM would start from random weights"


def _chosen_step(role: str, root: Path, step: int, option: str) -> Side:
    path = root / f"iter_{step:07d}"
    if path.is_dir():
        return Side(role, "megatron", path, f"--ckpt-step {step} of {option}")
    actual = f"only {', '.join(iterations_in(root)) or 'nothing'}"
    hint = "choose an existing iteration, or leave out --ckpt-step"
    issue = path_issue("--ckpt-step", root, f"{path.name}/ in the directory", actual, hint)
    return Side(role, None, None, f"Megatron stops: {path} is missing", (issue,))


# Options that may change the number of samples per prompt, or the size of the batch.
_OTHER_SAMPLES = (
    *("rollout_function_path", "custom_generate_function_path", "custom_convert_samples_to_train_data_path"),
    *("use_dynamic_global_batch_size", "rollout_data_postprocess_path", "lora_rank", "data_source_path"),
)
# Options that may change the advantage from a reward minus the mean of its group.
_OTHER_ADVANTAGES = (
    *("use_opd", "disable_rewards_normalization", "custom_advantage_function_path", "rollout_function_path"),
    *("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path"),
)


def _switches(given: Arguments, program: str) -> Iterator[Issue]:
    """Switches that conflict. `program`: the file that starts the trainer, or "" if unknown."""
    if given.has("colocate") and program == "train_async.py":
        expected = "no --colocate with train_async.py, which generates and trains at the same time"
        yield given.issue(("colocate",), expected, "leave out --colocate, or start train.py: the trainer stops")
    is_moe = given.value("num_experts") and given.value("train_backend", "megatron") == "megatron"
    is_moe = is_moe and given.lacks("debug_rollout_only")
    if is_moe and given.value("moe_token_dispatcher_type") == "allgather":
        hint = "pass --moe-token-dispatcher-type alltoall: slime uses it anyway, and only logs a line"
        expected = "alltoall or flex, since sequences have different lengths"
        yield given.issue(("moe_token_dispatcher_type",), expected, hint, "warning")


def _batches(given: Arguments) -> Iterator[Issue]:
    prompts, samples = given.value("rollout_batch_size"), given.value("n_samples_per_prompt", 1)
    steps, batch = given.value("num_steps_per_rollout"), given.value("global_batch_size")
    names = ("global_batch_size", "rollout_batch_size", "n_samples_per_prompt", "num_steps_per_rollout")
    rollout = prompts * samples if prompts and samples else None
    if rollout and steps and batch and batch != rollout // steps:
        product = f"{prompts} x {samples} / {steps} = {rollout // steps}"
        expected = f"global_batch_size = rollout_batch_size x n_samples_per_prompt / num_steps_per_rollout = {product}"
        yield given.issue(names, expected, "leave out --num-steps-per-rollout: the trainer stops")
    elif rollout and batch and not steps and all(map(given.lacks, _OTHER_SAMPLES)):
        product = f"{prompts} x {samples} = {rollout}"
        if rollout < batch:
            expected = f"global_batch_size of at most rollout_batch_size x n_samples_per_prompt = {product}"
            yield given.issue(names[:3], expected, "choose a smaller global_batch_size: the trainer stops")
        elif rollout % batch:
            expected = f"global_batch_size that divides rollout_batch_size x n_samples_per_prompt = {product}"
            hint = f"change one of them: training ignores the last {rollout % batch} samples of every rollout"
            yield given.issue(names[:3], expected, hint, "warning")
    oversampled = given.value("over_sampling_batch_size")
    if oversampled and prompts and oversampled < prompts:
        expected = "over_sampling_batch_size of at least rollout_batch_size"
        hint = "change one of them: the trainer stops"
        yield given.issue(("over_sampling_batch_size", "rollout_batch_size"), expected, hint)


def _micro_batches(given: Arguments) -> Iterator[Issue]:
    """Micro-batches of a fixed size over data parallel ranks."""
    if not all(map(given.lacks, ("use_dynamic_batch_size", *_OTHER_SAMPLES))):
        return
    batch, micro = given.value("global_batch_size"), given.value("micro_batch_size", 1)
    nodes, each = given.value("actor_num_nodes", 1), given.value("actor_num_gpus_per_node")
    sizes = [given.value(f"{one}_parallel_size", 1) for one in ("tensor_model", "pipeline_model", "context")]
    if not (batch and micro and nodes and each and all(sizes)):
        return
    ranks, remainder = divmod(nodes * each, sizes[0] * sizes[1] * sizes[2])
    if not remainder and ranks and batch % (ranks * micro):
        product = f"{ranks} x {micro} = {ranks * micro}"
        expected = f"global_batch_size divisible by data parallel ranks x micro_batch_size = {product}"
        hint = "change one of them, or pass --use-dynamic-batch-size: the trainer stops in its first step"
        yield given.issue(("global_batch_size", "micro_batch_size"), expected, hint)


def _advantages(given: Arguments) -> Iterator[Issue]:
    estimator, clip = given.value("advantage_estimator", "grpo"), given.value("eps_clip", 0.2)
    if estimator == "cispo" and clip is not None and clip < 1:
        hint = "pass --eps-clip 1.0: slime only warns and keeps the lower bound"
        expected = "eps_clip = 1.0, since cispo has no lower bound"
        yield given.issue(("advantage_estimator", "eps_clip"), expected, hint, "warning")
    is_grouped = estimator in ("grpo", "gspo", "cispo") and all(map(given.lacks, _OTHER_ADVANTAGES))
    is_grouped = is_grouped and given.value("loss_type", "policy_loss") == "policy_loss"
    if is_grouped and given.value("n_samples_per_prompt") == 1:
        expected = "n_samples_per_prompt above 1, since advantages compare the samples of a prompt"
        hint = "pass more samples per prompt: with one, every advantage is 0, which the trainer only logs"
        yield given.issue(("n_samples_per_prompt",), expected, hint, "warning")


def _rollouts(given: Arguments, resumed: int) -> Iterator[Issue]:
    """The number of rollouts. A run that resumes continues behind `resumed`; a critic may have another iteration."""
    if given.has("num_rollout") and given.has("num_epoch"):
        hint = "leave out --num-epoch, which the trainer ignores"
        yield given.issue(("num_rollout", "num_epoch"), "only one of the two options", hint, "warning")
    rollouts, others = given.value("num_rollout"), ("start_rollout_id", "finetune", "debug_rollout_only")
    has_critic = given.value("advantage_estimator", "grpo") in ("ppo", None)
    if resumed and rollouts and rollouts <= resumed + 1 and all(map(given.lacks, others)) and not has_critic:
        expected = f"num_rollout above {resumed + 1}, since --load resumes from iteration {resumed}"
        hint = "pass a larger --num-rollout, which counts from the first start: the run ends without a training step"
        yield given.issue(("num_rollout", "start_rollout_id"), expected, hint, "warning")


def _adapter_issues(given: Arguments) -> Iterator[Issue]:
    trains = given.value("lora_rank", 0) or given.has("lora_adapter_path") or given.has("multi_lora_n_adapters")
    if given.has("lora_train_only") and trains:
        hint = "leave out --lora-train-only: with it the engine generates with the base model, not the trained policy"
        names, expected = ("lora_train_only", "lora_rank"), "an engine with the trained adapter"
        yield given.issue(names, expected, hint, "warning")
    is_full = given.value("lora_rank", 0) == 0 and all(map(given.lacks, ("lora_adapter_path", "multi_lora_n_adapters")))
    for name in ("sglang_enable_lora", "sglang_lora_paths", "vllm_enable_lora"):
        if is_full and given.has(name):
            option = f"--{name.replace('_', '-')}"
            hint = f"leave out {option}: the trainer sends complete weights to an engine with LoRA layers"
            yield given.issue((name, "lora_rank"), f"both --lora-rank and {option}, or neither", hint)


def _adapter(given: Arguments) -> TrainedAdapter | None:
    """The adapter of miles. Source: miles 31f1ca9 `utils/lora.py`, `backends/sglang_utils/sglang_engine.py`."""
    rank, names = given.value("lora_rank", 0), ("lora_rank", "lora_adapter_path", "multi_lora_n_adapters")
    if not rank and not any(map(given.has, names[1:])):
        return None
    engine = f"miles sends it unmerged to SGLang, which has enable_lora and max_lora_rank {max(rank or 0, 1)}"
    engine = "the engine generates without it (--lora-train-only)" if given.has("lora_train_only") else engine
    asked_by = next(given.cite(name) for name in names if given.has(name))
    return TrainedAdapter(str(rank or ""), given.value("target_modules") or "", engine, asked_by)


def _raw(given: Arguments, config: Mapping[str, Any]) -> Iterator[Issue]:
    """A model with a wrapper that miles sends in mode raw, its default, although it has no raw converter for it."""
    is_wrapped = config.keys() & {"text_config", "vision_config"} and config.get("model_type") not in _RAW_WRAPPERS
    is_raw = given.value("megatron_to_hf_mode", "raw") == "raw" and given.lacks("debug_rollout_only")
    if is_wrapped and is_raw and given.value("train_backend", "megatron") == "megatron":
        expected = f"--megatron-to-hf-mode bridge for {config.get('model_type')}"
        hint = "pass --megatron-to-hf-mode bridge: miles has no raw converter, and stops at the first update"
        yield given.issue(("megatron_to_hf_mode",), expected, hint)


def _sequence(given: Arguments, config: Mapping[str, Any], is_miles: bool) -> Iterator[Issue]:
    """--allgather-cp splits tokens contiguously, for miles and sparse attention only. Older slime scrambled them."""
    ranks, is_sparse = given.value("context_parallel_size", 1) or 1, "index_topk" in language_part(config)
    model = None if is_sparse or is_miles or given.has("debug_rollout_only") else class_of(config)
    if model and ranks > 1 and given.has("allgather_cp"):
        expected = f"no --allgather-cp with context_parallel_size above 1 for {model}"
        hint = "leave out --allgather-cp, which gives this attention the tokens in a wrong order"
        yield given.issue(("allgather_cp", "context_parallel_size"), expected, hint)

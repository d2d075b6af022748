"""Tells which stack the settings of a launch are for, and reads them: a YAML file, Hydra overrides, or both."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from verify.launch.options.argv import last, options_of
from verify.launch.settings.config import Config
from verify.launch.settings.files import Composed, compose
from verify.launch.settings.overrides import applied, is_override
from verify.launch.settings.yaml_tree import Tree
from verify.launch.stacks import nemo_rl, roll, supervised, verl
from verify.launch.stacks.launched import Stacked
from verify.launch.stacks.settings import Settings
from verify.launch.words import LaunchText, UnresolvedWord, Word

# How Hydra, NeMo-RL and ROLL are told their file of settings.
_FOLDER = frozenset({"--config-path", "-cp", "--config-dir", "-cd", "--config_path"})
_NAME = frozenset({"--config-name", "-cn", "--config_name"})
_FILE = frozenset({"--config"})
_MODELS = {
    "verl": ("actor_rollout_ref.model.path",),
    "NeMo-RL": ("policy.model_name", "policy.generation.sglang_cfg.model_path"),
    "ROLL": (
        "pretrain",
        *(f"{role}.model_args.model_name_or_path" for role in ("actor_train", "actor_infer", "reference")),
    ),
}


@dataclass(frozen=True)
class _Named:
    """The file of settings that a command line names: its path, or its name where it is not there."""

    path: Path | None = None
    name: str = ""
    absent: tuple[str, ...] = ()


def is_config(path: Path) -> bool:
    """Whether a path has the ending of a file of settings."""
    return path.suffix.lower() in (".yaml", ".yml")


def read_stack(
    words: Sequence[Word],
    config: Path | None = None,
    environment: Mapping[str, str] | None = None,
    hf_checkpoint: Path | None = None,
) -> Stacked | None:
    """What a launch of verl, NeMo-RL or ROLL loads; None for a launch that has no such settings.

    `config` is its YAML file where it was given by itself, `words` those of its command line. `environment` holds the
    variables that its job sees. `hf_checkpoint` stands for the model that the settings name.
    Raises CkptkitError for files that cannot be read, a file of settings of another program, and values that are none.
    """
    named = _Named(config) if config else _named(words)
    if named.path is None and not any(is_override(word.text) for word in words) and not named.name:
        return None
    composed = compose(named.path) if named.path else Composed({})
    tree, groups = applied(composed.tree, words, lambda name: _is_group(name, named))
    stack = _stack(tree, named)
    if stack is None:
        if config is None:
            return None
        hint = "give the file of settings of a verl, NeMo-RL or ROLL job, or a bash script"
        raise CkptkitError(f"{config} has the settings of none of them: {', '.join(list(tree)[:5])}", hint)
    absent = [word for word in composed.absent if not (stack == "verl" and verl.OWN.fullmatch(word.text))]
    unread = [*named.absent, *(f"{word.place}: defaults: {word.text}: no such file beside it" for word in absent)]
    unread += [f"{word.place}: {word.text}: the file of this group is not read" for word in _other_files(groups)]
    models = frozenset((*_MODELS[stack], *supervised.MODELS.get(stack, ())))
    settings = Settings(Config(tree, environment or {}), hf_checkpoint, models, unread=list(unread))
    whole = not unread and not any(isinstance(word, UnresolvedWord) and word.anything for word in words)
    if stack == "NeMo-RL":
        return _written(nemo_rl.read(settings), settings, whole)
    if stack == "ROLL":
        found = supervised.read_roll(settings) if supervised.is_roll(tree) else roll.read(settings)
        return _written(found, settings, whole)
    chosen = [word for word in groups if "megatron" in word.text]
    if supervised.is_verl(tree) and "actor_rollout_ref" not in tree:
        found = supervised.read_verl(settings, any(word.text.startswith("engine") for word in chosen))
        return _written(found, settings, whole)
    own = [*composed.absent, *chosen, Word(named.name), Word(named.path.stem if named.path else "")]
    return _written(verl.read(settings, any("megatron" in word.text for word in own)), settings, whole)


def _written(stacked: Stacked, settings: Settings, whole: bool) -> Stacked:
    """A job with the keys that it writes. Where not all of them are known, what is absent breaks no rule."""
    return replace(stacked, keys=settings.written(), refused=stacked.refused if whole else ())


def agreed(stacked: Stacked, load: Path | None, ref_load: Path | None) -> None:
    """Raises CkptkitError where an option names another directory than the settings do."""
    for option, path, role in (("--load", load, "actor"), ("--ref-load", ref_load, "reference")):
        side = next((one for one in stacked.sides if one.role == role), None)
        if path is None or (side and side.path is None):
            continue
        if side is None or os.path.abspath(path) != os.path.abspath(side.path or ""):
            said = f"no {role} is loaded" if side is None else f"the {role} loads {side.path}"
            raise CkptkitError(f"{option} {path}, but by the settings of {stacked.name} {said}", f"leave {option} out")


def unresolved_besides(text: LaunchText) -> list[str]:
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
    own = verl.OWN.fullmatch(name) is not None and not file
    return _Named(None, name or file, () if own else (f"the file of settings, {path}, is not there",))


def _is_group(name: str, named: _Named) -> bool:
    """Whether a setting chooses a file of a folder: one beside the file of settings, else one of verl's own."""
    if named.path is not None:
        return (named.path.parent / name).is_dir()
    return name in verl.GROUPS


def _other_files(groups: Sequence[Word]) -> list[Word]:
    """The choices of files whose settings are not those that verl has without them."""
    return [word for word in groups if not verl.OWN.fullmatch(word.text.partition("=")[2])]


def _stack(tree: Mapping[str, Tree], named: _Named) -> str | None:
    if "actor_rollout_ref" in tree:
        return "verl"
    policy = tree.get("policy")
    if isinstance(policy, dict) and ("model_name" in policy or "megatron_cfg" in policy or "cluster" in tree):
        return "NeMo-RL"
    if "actor_train" in tree or "actor_infer" in tree or supervised.is_roll(tree):
        return "ROLL"
    if supervised.is_verl(tree):
        return "verl"
    return "verl" if named.path is None and verl.OWN.fullmatch(named.name) else None

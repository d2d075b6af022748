"""What a job of ROLL loads, by its YAML settings.

Source: ROLL `configs/base_config.py`, `configs/worker_config.py`, `pipeline/base_worker.py` and mcore_adapter's
`models/model_factory.py` (from_pretrained), `checkpointing.py`, as of 2026-08.
- All roles load `pretrain` as soon as one of actor_train, actor_infer and reference has no `model_args.
  model_name_or_path` of its own. The critic loads `reward_pretrain`.
- It must be an HF directory. Where mca_config.json lies in it, Megatron weights beside it count instead: those of
  `iter_0000001/dist_model`, or files of one rank each where all sizes are those of the run.
- The GPUs of a role are its `device_mapping`.
"""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

from ckptkit.formats.detect import TRACKER
from verify.launch.arguments import LaunchArguments
from verify.launch.sides import PathIssue, Side, path_issue
from verify.launch.stacks.launched import LOAD, STEP, Group, Stacked, given, hf_side, trainer_group
from verify.launch.stacks.settings import Settings

_ROLES = {"actor": "actor_train", "reference": "reference", "rollout engine": "actor_infer", "critic": "critic"}
_OWN = "model_args.model_name_or_path"
_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
}
_MCA = "mca_config.json"
_RANGE = re.compile(r"list\(range\((\d+)(?:,(\d+))?(?:,(\d+))?\)\)")
_MOST_DEVICES = 1 << 17
_ELSEWHERE = re.compile(
    r"\.model_args\.(?:adapter_name_or_path|model_config_kwargs)|^(?:teacher|student_train|student_infer)\.|"
    r"^actor_train\.strategy_args\.strategy_config\.additional_configs"
)


def read(settings: Settings) -> Stacked:
    """The sides, sizes and groups of a job. Raises CkptkitError for values that are no numbers or truth values."""
    settings.not_looked_at(_ELSEWHERE)
    roles = ["actor", *(["reference"] if _reference(settings) else []), *(["critic"] if _critic(settings) else [])]
    sides = {role: _initial(settings, role) for role in roles}
    resumed = False
    if first := sides["actor"]:
        first = replace(first, issues=(*first.issues, *_lost(settings)))
        sides["actor"] = _resumed(settings, first)
        resumed = sides["actor"] is not first
    rollout, engine, asked = _engine(settings)
    hf = settings.model(_key(settings, "actor")) if sides["actor"] else None
    same = all(sides.get(role) for role in ("actor", "reference")) and not resumed
    every = [*(side for side in sides.values() if side), *([rollout] if rollout else [])]
    return Stacked(
        "ROLL",
        tuple(every),
        hf if hf and (hf / "config.json").exists() else None,
        {role: replace(_arguments(settings, role), **engine) for role in roles}
        | {"rollout engine": LaunchArguments(**engine)},
        (*(_group(settings, role) for role in roles if _megatron(settings, role)), *([asked] if asked else [])),
        alike=(("actor", "reference"),) if same else (),
        unread=tuple(settings.unread),
        notes=tuple(settings.notes),
    )


def _reference(settings: Settings) -> bool:
    """Whether there is one: for a KL term, whose coefficient is 0.2 where none is given; never with LoRA."""
    if given(settings.text("actor_train.model_args.lora_target")) or settings.word("reference.strategy_args.strategy_name") is None:
        return False
    wanted = any(settings.switch(key) for key in ("use_kl_loss", "enable_reference"))
    return wanted or settings.above_zero("init_kl_coef", 0.2)


def _critic(settings: Settings) -> bool:
    return settings.text("adv_estimator", "gae") == "gae" and settings.word("critic.strategy_args.strategy_name") is not None


def _megatron(settings: Settings, role: str) -> bool:
    return settings.text(f"{_ROLES[role]}.strategy_args.strategy_name").startswith("megatron")


def _one_of_three_missing(settings: Settings) -> bool:
    return any(settings.word(f"{_ROLES[role]}.{_OWN}") is None for role in ("actor", "reference", "rollout engine"))


def _key(settings: Settings, role: str) -> str:
    """The key whose model a role loads."""
    own = f"{_ROLES[role]}.{_OWN}"
    if role == "critic":
        return own if settings.word(own) else "reward_pretrain"
    return "pretrain" if _one_of_three_missing(settings) else own


def _lost(settings: Settings) -> list[PathIssue]:
    """Models of a role that `pretrain` replaces, because another role has none of its own."""
    if not _one_of_three_missing(settings):
        return []
    pretrain, found = settings.text("pretrain", "null"), []
    for role in ("actor", "reference", "rollout engine"):
        key = f"{_ROLES[role]}.{_OWN}"
        word = settings.word(key)
        if word and word.text != pretrain:
            expected = f"the model that the {role} loads"
            actual = f"{word.text}, which ROLL replaces by pretrain = {pretrain}, since another role has none of its own"
            hint = "give all three of actor_train, actor_infer and reference, or only pretrain"
            found.append(path_issue(settings.place(key), Path(word.text), expected, actual, hint, about=LOAD))
    return found


def _initial(settings: Settings, role: str) -> Side | None:
    """What a role loads before anything is resumed."""
    key = _key(settings, role)
    side = hf_side(role, settings, key, key)
    if side is None or side.path is None or not _megatron(settings, role) or not (side.path / _MCA).exists():
        return side
    dist = side.path / "iter_0000001" / "dist_model"
    if (dist / "metadata.json").exists():
        return Side(role, "megatron", dist, f"{_MCA} in {key}, so ROLL takes the Megatron weights beside it")
    settings.unread.append(f"{settings.place(key)} {side.path}: whether its files of one rank each count is not looked at")
    return side


def _resumed(settings: Settings, start: Side) -> Side:
    key = "resume_from_checkpoint"
    word = settings.word(key)
    if word is None or word.text.lower() == "false":
        return start
    if word.text.lower() == "true":
        settings.unread.append(f"{settings.place(key)} true: the last step is looked for when the job starts; give its path")
        return start
    path, place = Path(word.text), settings.place(key)
    expected = f"a directory with {TRACKER}"
    if not (path / TRACKER).is_file():
        actual = "no tracker in it" if path.is_dir() else "no such directory"
        issue = path_issue(place, path, expected, actual, "choose a checkpoint that is there", about=STEP)
        return Side("actor", None, None, f"ROLL stops: cannot resume from {path}: {actual}", (*start.issues, issue))
    dist = path / "iter_0000001" / "dist_model"
    if (dist / "metadata.json").exists():
        return Side("actor", "megatron", dist, f"to resume: {key}", start.issues)
    settings.unread.append(f"{place} {path}: files of one rank each are not looked at")
    return start


def _arguments(settings: Settings, role: str) -> LaunchArguments:
    prefix = f"{_ROLES[role]}.strategy_args.strategy_config"
    if not _megatron(settings, role):
        return LaunchArguments()
    found = {
        short: settings.size(f"{prefix}.{name}", None if short in ("etp", "vpp") else 1)
        for short, name in _SIZES.items()
        if short != "cp"
    }
    return LaunchArguments(
        **found,
        embedding=settings.switch(f"{prefix}.account_for_embedding_in_pipeline_split"),
        loss=settings.switch(f"{prefix}.account_for_loss_in_pipeline_split"),
        layout=settings.text(f"{prefix}.pipeline_model_parallel_layout") or None,
    )


def _group(settings: Settings, role: str) -> Group:
    prefix = f"{_ROLES[role]}.strategy_args.strategy_config"
    devices, said = _devices(settings, role)
    sizes = {
        short: settings.size(f"{prefix}.{name}", None if short == "etp" else 1)
        for short, name in _SIZES.items()
        if short != "vpp"
    }
    places = [settings.place(f"{prefix}.{name}") for name in _SIZES.values()]
    written = ", ".join(place for place in places if place.endswith(")"))
    return trainer_group(role, devices, **sizes, said=f"{said}; sizes: {written}" if written else said)


def _devices(settings: Settings, role: str) -> tuple[int | None, str]:
    """How many GPUs `device_mapping` names. It is Python, of which lists and ranges are understood."""
    key = f"{_ROLES[role]}.device_mapping"
    if not settings.resolved(key):
        return None, ""
    if (word := settings.word(key)) is None:
        count = sum(1 for one in settings.config.keys(key) if one.startswith(f"{key}."))
        if not count:
            settings.unread.append(f"{key} is not given, so the number of GPUs is not known")
        return count or None, f": {key}"
    count = 0
    for part in re.sub(r"\s", "", word.text).replace(")+[", ")+ [").split("+"):
        found = _count(part.strip())
        if found is None:
            settings.unread.append(f"{settings.place(key)} {word.text}: only lists and ranges are understood")
            return None, ""
        count += found
    return count, f": {settings.place(key)} {word.text}"


def _count(text: str) -> int | None:
    if match := _RANGE.fullmatch(text):
        numbers = [int(one) for one in match.groups() if one is not None]
        return len(range(*numbers)) if max(numbers) < _MOST_DEVICES and numbers[2:] != [0] else None
    try:
        value = ast.literal_eval(text) if len(text) < _MOST_DEVICES else None
    except (ValueError, SyntaxError):
        return None
    return len(value) if isinstance(value, list) else None


def _engine(settings: Settings) -> tuple[Side | None, dict[str, int | None], Group | None]:
    prefix = _ROLES["rollout engine"]
    name = settings.text(f"{prefix}.strategy_args.strategy_name")
    if not name:
        return None, {}, None
    key = _key(settings, "rollout engine")
    dummy = settings.text(f"{prefix}.strategy_args.strategy_config.load_format") == "dummy"
    weights = "its weights come from the actor" if dummy else "its first weights too"
    side = hf_side("rollout engine", settings, key, f"{name} takes config and tokenizer from {key}, {weights}")
    config = f"{prefix}.strategy_args.strategy_config"
    if name == "vllm":
        tp, pp = settings.size(f"{config}.tensor_parallel_size"), settings.size(f"{config}.pipeline_parallel_size")
        where = f"{config}.tensor_parallel_size"
    else:
        tp, pp = settings.size(f"{prefix}.num_gpus_per_worker"), 1
        where = f"{prefix}.num_gpus_per_worker"
    if tp is None or pp is None:
        return side, {}, None
    devices, said = _devices(settings, "rollout engine")
    group = Group("rollout engine", devices, (("tp x pp", (tp, pp)),), f"{said}; {settings.place(where)}")
    return side, {"engine": tp * pp, "engine_pp": pp}, group

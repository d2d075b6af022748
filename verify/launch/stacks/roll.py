"""Reads a job of ROLL from its YAML settings.

Source: ROLL `configs/base_config.py`, `configs/worker_config.py`, `pipeline/base_worker.py` and mcore_adapter's
`models/model_factory.py` (from_pretrained), `checkpointing.py`, as of 2026-08.
- All roles load `pretrain` if one of actor_train, actor_infer and reference has no `model_args.model_name_or_path`. The
  critic loads `reward_pretrain`.
- It must be an HF directory. If it contains mca_config.json, ROLL loads its Megatron weights instead: those of
  `iter_0000001/dist_model`, or files of one rank each if all sizes are those of the run.
- The GPUs of a role are its `device_mapping`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from ckptkit.formats.detect import TRACKER
from ckptkit.verify.core.issue import Issue
from ckptkit.verify.launch.arguments import LaunchArguments
from ckptkit.verify.launch.job import Job, Launch, Stack, TrainedAdapter
from ckptkit.verify.launch.options.names import settings
from ckptkit.verify.launch.options.speculative import speculation_from_settings
from ckptkit.verify.launch.options.tables import numbers
from ckptkit.verify.launch.settings.config import Config
from ckptkit.verify.launch.sides import ENGINE, LOAD, STEP, PathIssue, Side, path_issue
from ckptkit.verify.launch.stacks.directories import hf_side, is_set, teacher_sides
from ckptkit.verify.launch.stacks.sizes import GpuGroup, GpuPlacement, Gpus, ModelSplit, RolloutEngine, Sizes, cite_all
from ckptkit.verify.launch.words import UnresolvedWord

_ROLES = {"actor": "actor_train", "reference": "reference", ENGINE: "actor_infer", "critic": "critic"}
_OWN = "model_args.model_name_or_path"
_MCA = "mca_config.json"
_SIZES = {role: f"{worker}.strategy_args.strategy_config" for role, worker in _ROLES.items()}
_ELSEWHERE = re.compile(
    r"^(?!teacher\.).*\.model_args\.(?:adapter_name_or_path|model_config_kwargs)|"
    r"^actor_train\.strategy_args\.strategy_config\.additional_configs"
)
_TEACHERS = re.compile(rf"^teacher\.(?:[^.]+\.)?{re.escape(_OWN)}$")


def _map_distillation(settings: Config) -> Config:
    """The settings with ROLL's own role names for those of on-policy distillation.

    Source: ROLL `configs/base_config.py` (_handle_opd_mapping), `examples/start_onpolicy_distill_pipeline.py`.
    """
    tree = dict(settings.tree)
    pure = "student_train" in tree and ("actor_train" not in tree or settings.switch("is_pure_opd"))
    if pure:
        students = {"actor_train": "student_train", "actor_infer": "student_infer"}
        tree |= {role: tree.pop(name) for role, name in students.items() if name in tree}
    teacher = tree.get("teacher")
    if isinstance(teacher, dict) and (pure or settings.switch("use_opd")):
        first = teacher if "model_args" in teacher else next(iter(teacher.values()), None)
        # ROLL builds it instead of the reference, from another model.
        arguments = first.get("model_args") if isinstance(first, dict) else None
        tree["reference"] = {} if arguments is None else {"model_args": arguments}
    return replace(settings, tree=tree)


def read(launch: Launch) -> Job:
    """The job of a launch. Raises CkptkitError for values that are not numbers or truth values."""
    settings = _map_distillation(launch.settings)
    settings.report_unchecked(_ELSEWHERE)
    teachers = teacher_sides(settings, _TEACHERS)
    is_gae = settings.text("adv_estimator", "gae") == "gae"
    critic = ["critic"] if is_gae and settings.has("critic.strategy_args.strategy_name") else []
    roles = ["actor", *(["reference"] if _reference(settings) else []), *critic]
    strategies = {role: settings.text(f"{_ROLES[role]}.strategy_args.strategy_name") for role in roles}
    megatron = [role for role, name in strategies.items() if name.startswith("megatron")]
    sides = {role: _loaded(settings, role, _key(settings, role), role in megatron) for role in roles}
    if first := sides["actor"]:
        first = replace(first, issues=(*first.issues, *_replaced_models(settings)))
        sides["actor"] = _resume(settings, first)
    is_shared = first and sides["actor"] is first and sides.get("reference")
    engine = _engine(settings)
    sizes = {role: Sizes.read(settings, _SIZES[role]) for role in megatron}
    groups = [size.group(role, _devices(settings, _ROLES[role])) for role, size in sizes.items()]
    fsdp = [role for role, name in strategies.items() if name.startswith("fsdp2")]
    keys = {role: f"{_ROLES[role]}.model_args.ulysses_size" for role in fsdp}
    shared = [cut for role, key in keys.items() for cut in ModelSplit.ulysses(settings, role, key)]
    groups += [cut.group(_devices(settings, _ROLES[cut.role]), "ulysses_size") for cut in shared]
    arguments = {role: size.arguments(engine.sizes, settings, _SIZES[role]) for role, size in sizes.items()}
    return Job(
        STACK,
        sides=tuple(filter(None, (*sides.values(), engine.side, *teachers))),
        hf=settings.model(_key(settings, "actor")) if first else None,
        hf_option=_key(settings, "actor"),
        models={"critic": settings.model(_key(settings, "critic"))} if critic else {},
        sizes=dict.fromkeys((*roles, ENGINE), engine.sizes) | arguments,
        sharing=(("actor", "reference"),) if is_shared else (),
        combinations=tuple(_adapter_issues(settings.silent_copy(), engine.sizes.server)),
        placement=GpuPlacement((*groups, *engine.groups), tuple(_visible_devices(launch)), (*shared, *engine.cuts)),
        adapter=_adapter(settings.silent_copy(), engine.sizes.server),
        speculation=speculation_from_settings(settings, _SIZES[ENGINE], engine.sizes.server),
    )


def _adapter_issues(settings: Config, server: str | None) -> Iterator[Issue]:
    """An adapter that only trainer or engine has. Source: ROLL `configs/model_args.py`, `vllm_strategy.py`."""
    keys = [f"{role}.model_args.lora_target" for role in ("actor_train", "actor_infer")]
    trains, serves = (is_set(settings.text(key)) if settings.get(key).known else None for key in keys)
    if trains and serves is False and server == "vllm":
        hint = "set the same LoRA settings for actor_infer: ROLL sends the adapter to an engine without LoRA layers"
        yield settings.issue(keys, f"both {keys[1]} and {keys[0]}, or neither", hint)
    elif serves and trains is False:
        hint = "set both or neither: ROLL sends complete weights to an engine with LoRA layers"
        yield settings.issue(keys[::-1], f"both {keys[0]} and {keys[1]}, or neither", hint)


def _reference(settings: Config) -> bool:
    """Whether there is a reference: for a KL term, with a coefficient of 0.2 by default. Never with LoRA."""
    has_lora = is_set(settings.text("actor_train.model_args.lora_target"))
    if has_lora or not settings.has("reference.strategy_args.strategy_name"):
        return False
    is_enabled = any(settings.switch(key) for key in ("use_kl_loss", "enable_reference"))
    return is_enabled or settings.above_zero("init_kl_coef", 0.2)


def _one_of_three_missing(settings: Config) -> bool:
    return any(not settings.has(f"{_ROLES[role]}.{_OWN}") for role in ("actor", "reference", ENGINE))


def _key(settings: Config, role: str) -> str:
    """The key of the model that a role loads."""
    key = f"{_ROLES[role]}.{_OWN}"
    if role == "critic":
        return key if settings.has(key) else "reward_pretrain"
    return "pretrain" if _one_of_three_missing(settings) else key


def _replaced_models(settings: Config) -> Iterator[PathIssue]:
    """Models of roles that `pretrain` replaces, because another of the three roles has no model."""
    if not _one_of_three_missing(settings):
        return
    pretrain = settings.text("pretrain", "null")
    for role in ("actor", "reference", ENGINE):
        key = f"{_ROLES[role]}.{_OWN}"
        word = settings.get(key).word
        if word and word.text != pretrain:
            expected = f"the model that the {role} loads"
            actual = f"{word.text}, but ROLL loads pretrain = {pretrain}, since another role has no model"
            hint = "set the models of actor_train, actor_infer and reference, or only pretrain"
            yield path_issue(settings.cite(key), Path(word.text), expected, actual, hint, check=LOAD)


def _loaded(settings: Config, role: str, key: str, megatron: bool) -> Side | None:
    """The side of a role at the start of a run, by the directory of a key."""
    side = hf_side(role, settings, key, key)
    if side is None or side.path is None or not megatron or not (side.path / _MCA).exists():
        return side
    return _dist_model(settings, key, side, side.path, f"{key} has {_MCA}, so ROLL loads its Megatron weights")


def _dist_model(settings: Config, key: str, side: Side, path: Path, why: str) -> Side:
    """The side with the Megatron weights in a directory, or `side` itself if these are files of one rank each."""
    dist = path / "iter_0000001" / "dist_model"
    if (dist / "metadata.json").exists():
        return replace(side, kind="megatron", path=dist, why=why)
    settings.unread.append(f"{settings.cite(key)} {path}: ckptkit does not read its files of single ranks")
    return side


def _resume(settings: Config, start: Side) -> Side:
    """The actor at the checkpoint that it resumes from, or `start` itself without one."""
    key = "resume_from_checkpoint"
    word, place = settings.get(key).word, settings.cite(key)
    if word is None or word.text.lower() == "false":
        return start
    if word.text.lower() == "true":
        settings.unread.append(f"{place} true: ROLL chooses the last step at the start; set the path of a step")
        return start
    path = Path(word.text)
    if not (path / TRACKER).is_file():
        actual = f"no {TRACKER} in it" if path.is_dir() else "no such directory"
        expected = f"a directory with {TRACKER}"
        issue = path_issue(place, path, expected, actual, "choose an existing checkpoint", check=STEP)
        return Side("actor", None, None, f"ROLL stops: cannot resume from {path}: {actual}", (*start.issues, issue))
    return _dist_model(settings, key, start, path, f"to resume: {key}")


def _devices(settings: Config, worker: str) -> Gpus:
    """The number of GPUs in `device_mapping`, which is Python: lists and ranges are supported."""
    key = f"{worker}.device_mapping"
    if not settings.get(key).known:
        return Gpus()
    if (word := settings.get(key).word) is None:
        count = len(list(settings.names(key)))
        if not count:
            settings.unread.append(f"{key} is not set, so the number of GPUs is unknown")
        return Gpus(count or None, key)
    try:
        return Gpus(len(numbers(word.text)), f"{settings.cite(key)} {word.text}")
    except (TypeError, ValueError):
        settings.unread.append(f"{settings.cite(key)} {word.text}: ckptkit reads only lists and ranges")
        return Gpus()


def _visible_devices(launch: Launch) -> Iterator[Issue]:
    """CUDA_VISIBLE_DEVICES must count from 0. Source: ROLL 8eb27cc `distributed/scheduler/resource_manager.py`."""
    word = launch.text.environment.get("CUDA_VISIBLE_DEVICES", UnresolvedWord(""))
    devices = word.text.replace(" ", "").split(",")
    if isinstance(word, UnresolvedWord) or devices == list(map(str, range(len(devices)))) or not devices[0].isdecimal():
        return
    expected = f"CUDA_VISIBLE_DEVICES from 0 to {len(devices) - 1}, as ROLL counts GPUs from 0"
    hint = "choose GPUs with device_mapping instead: ROLL gives its workers the node's first GPUs"
    yield Issue(expected, f"{word.text} ({word.place})", hint, file=word.file)


def _adapter(settings: Config, server: str | None) -> TrainedAdapter | None:
    """The adapter. Source: ROLL 8eb27cc `configs/model_args.py`, `distributed/strategy/vllm_strategy.py`."""
    trains, serves = (f"{role}.model_args" for role in ("actor_train", "actor_infer"))
    if not is_set(settings.listed(f"{trains}.lora_target")):
        return None
    max_rank = settings.text(f"{serves}.lora_rank", "8")
    engine = f"ROLL sends it unmerged to vllm, which has enable_lora and max_lora_rank {max_rank}"
    if server != "vllm" or not is_set(settings.listed(f"{serves}.lora_target")):
        engine = f"{server or 'the engine'} starts without it"
    rank, target = settings.text(f"{trains}.lora_rank", "8"), f"{trains}.lora_target"
    return TrainedAdapter(rank, settings.listed(target), engine, settings.cite(target))


def _engine(settings: Config) -> RolloutEngine:
    """The engine, without a side if nothing is generated."""
    prefix = _ROLES[ENGINE]
    name = settings.text(f"{prefix}.strategy_args.strategy_name")
    if not name:
        return RolloutEngine()
    key = _key(settings, ENGINE)
    dummy = settings.text(f"{_SIZES[ENGINE]}.load_format") == "dummy"
    weights = "config and tokenizer" if dummy else "config, tokenizer and first weights"
    why = f"{name} loads {weights} from {key}{', and the actor sends the weights' * dummy}"
    engine = RolloutEngine(hf_side(ENGINE, settings, key, why), LaunchArguments(server=name))
    keys = [f"{_SIZES[ENGINE]}.{one}_parallel_size" for one in ("tensor", "pipeline")]
    if name != "vllm":
        keys = [f"{prefix}.num_gpus_per_worker"]
    tp, pp = settings.size(keys[0]), settings.size(keys[1]) if keys[1:] else 1
    if tp is None or pp is None:
        return engine
    group = GpuGroup(ENGINE, _devices(settings, prefix), (("tp x pp", (tp, pp)),), cite_all(settings, keys))
    return replace(engine, groups=(group,)).cut(tp, pp, None, settings.cite(keys[0]), plain=False)


STACK = Stack(
    "ROLL",
    read,
    partial(settings, "roll"),
    "ROLL ignores an unknown setting",
    fits=lambda tree: not tree.keys().isdisjoint({"actor_train", "actor_infer", "student_train"}),
    models=frozenset({"pretrain", *(f"{_ROLES[role]}.{_OWN}" for role in ("actor", "reference", ENGINE))}),
    # Files of `examples/config` without paths and sizes of a role.
    own=re.compile(r"(?:vl_|step_)?(?:traj_)?envs(?:_gem_\w+)?|deepspeed_zero\d?(?:_\w+)?"),
)


def read_supervised(launch: Launch) -> Job:
    """The job of fine-tuning or distillation. Raises CkptkitError for values that are not numbers or truth values.

    sft_train loads `pretrain`, even if it has its own model. A student and a teacher load `student_pretrain` and
    `teacher_pretrain` unless both have their own model.

    Source: ROLL `pipeline/sft/sft_config.py`, `pipeline/distill/distill_config.py`.
    """
    settings = launch.settings
    if any(settings.names("sft_train")):
        workers, keys = {"actor": "sft_train"}, {"actor": "pretrain"}
    else:
        workers = {"actor": "student", "teacher": "teacher"}
        has_models = all(settings.has(f"{one}.{_OWN}") for one in workers.values())
        keys = {role: f"{one}.{_OWN}" if has_models else f"{one}_pretrain" for role, one in workers.items()}
    sides: list[Side] = []
    sizes: dict[str, LaunchArguments] = {}
    groups: list[GpuGroup] = []
    for role, key in keys.items():
        prefix = f"{workers[role]}.strategy_args"
        megatron = settings.text(f"{prefix}.strategy_name").startswith("megatron")
        if role == "teacher":
            sides += teacher_sides(settings, re.compile(rf"^{re.escape(key)}$"))
        elif side := _loaded(settings, role, key, megatron):
            sides.append(_resume(settings, side))
        if megatron:
            size = Sizes.read(settings, f"{prefix}.strategy_config")
            sizes[role] = size.arguments(LaunchArguments(), settings, f"{prefix}.strategy_config")
            groups.append(size.group(role, _devices(settings, workers[role])))
    key, placement = keys["actor"], GpuPlacement(tuple(groups))
    return Job(SUPERVISED, sides=tuple(sides), hf=settings.model(key), hf_option=key, sizes=sizes, placement=placement)


SUPERVISED = replace(
    STACK,
    read=read_supervised,
    fits=lambda tree: "sft_train" in tree or {"student", "teacher"} <= tree.keys(),
    models=frozenset({"pretrain", "student_pretrain", f"student.{_OWN}"}),
)

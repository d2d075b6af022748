"""What jobs without a rollout load: verl's supervised fine-tuning, and ROLL's, and its distillation.

Source: verl `trainer/sft_trainer.py`, `utils/checkpoint/checkpoint_handler.py` and `trainer/config/`; ROLL
`pipeline/sft/sft_config.py` and `pipeline/distill/distill_config.py`, as of 2026-08.
- verl's trainer loads `model.path` through a bridge, or, with `engine.use_dist_checkpointing`, the torch_dist directory
  of `engine.dist_checkpointing_path` itself.
- ROLL's sft_train loads `pretrain`, whatever its own model says. A student and a teacher load `student_pretrain` and
  `teacher_pretrain` as soon as one of the two has no model of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ckptkit.formats.detect import TRACKER
from verify.launch.arguments import LaunchArguments
from verify.launch.job import Job, Launch, Stack
from verify.launch.settings.config import Tree
from verify.launch.sides import Side
from verify.launch.stacks import roll, verl
from verify.launch.stacks.directories import LOAD, hf_side, teacher_sides, torch_dist_side
from verify.launch.stacks.settings import Settings
from verify.launch.stacks.sizes import Cut, Gpus, Group, Placement, Sizes

_MODEL = "model.path"
_OWN = "model_args.model_name_or_path"
# The ranks that share a sequence, of verl's engines fsdp and veomni.
_SEQUENCE = ("engine.ulysses_sequence_parallel_size", "engine.ulysses_parallel_size")
# What changes the model of verl's trainer, and is not read.
_ELSEWHERE = re.compile(r"^model\.(?:lora_adapter_path|hf_config_path|override_config)|\.override_mcore_model_config\.")
# The part of a pipeline of ROLL that trains, and what its model is called.
_TRAINS = {"sft_train": "pretrain", "student": "student_pretrain"}


def _is_verl(tree: Mapping[str, Tree]) -> bool:
    """Whether these are the settings of verl's supervised fine-tuning."""
    model = tree.get("model")
    return isinstance(model, dict) and "path" in model and {"data", "trainer"} <= tree.keys()


def _is_roll(tree: Mapping[str, Tree]) -> bool:
    """Whether these are the settings of a pipeline of ROLL that generates nothing."""
    return "sft_train" in tree or {"student", "teacher"} <= tree.keys()


def read_verl(launch: Launch) -> Job:
    """The job of a launch of verl. Raises CkptkitError for values that are not numbers or truth values."""
    settings = launch.settings
    chosen = any(word.text.startswith("engine") and "megatron" in word.text for word in settings.groups)
    megatron = chosen or settings.text("engine.strategy") == "megatron"
    key = "engine.dist_checkpointing_path"
    word = settings.word(key)
    if megatron and settings.switch("engine.use_dist_checkpointing") and word:
        side = torch_dist_side("actor", settings.place(key), Path(word.text), key, LOAD)
    else:
        found = hf_side("actor", settings, _MODEL, f"{_MODEL}, through a bridge" if megatron else _MODEL)
        side = found or Side("actor", None, None, "")
    _goes_on(settings)
    settings.not_looked_at(_ELSEWHERE)
    sizes = Sizes.read(settings, lambda name: f"engine.{name}") if megatron else None
    job = _job(VERL, settings, {"actor": side} if side.why else {}, {"actor": sizes} if sizes else {}, _MODEL)
    ranks = launch.text.ranks
    gpus = Gpus(int(ranks.text), f"processes started at {ranks.place}") if ranks else Gpus()
    if sizes:
        placement = Placement((sizes.group("actor", gpus),))
    else:
        key = next((one for one in _SEQUENCE if settings.word(one) is not None), _SEQUENCE[0])
        shared, at = settings.size(key), settings.place(key)
        products = ((key.partition(".")[2], (shared,)),) if shared else ()
        cuts = (Cut("actor", "ulysses", shared, at),) if shared and shared > 1 else ()
        placement = Placement((Group("actor", gpus, products, at if cuts else ""),), cuts=cuts)
    return replace(job, placement=placement)


def _goes_on(settings: Settings) -> None:
    """Says that a run goes on from steps that are there, whose layout is not looked at."""
    if settings.text("trainer.resume_mode", "auto") == "disable":
        return
    key = "trainer.default_local_dir"
    word = settings.word("trainer.resume_from_path") or settings.word(key)
    if word and ((Path(word.text) / TRACKER).is_file() or "global_step_" in word.text):
        settings.unread.append(f"{word.place}: {word.text}: the step that the run goes on from is not looked at")


def read_roll(launch: Launch) -> Job:
    """The job of a pipeline of ROLL. Raises CkptkitError for values that are not numbers or truth values."""
    settings = launch.settings
    worker = "sft_train" if any(True for _ in settings.config.names("sft_train")) else "student"
    own = worker == "student" and all(settings.word(f"{one}.{_OWN}") for one in ("student", "teacher"))
    keys = {"actor": f"{worker}.{_OWN}" if own else _TRAINS[worker]}
    workers = {"actor": worker}
    if worker == "student":
        keys["teacher"] = f"teacher.{_OWN}" if own else "teacher_pretrain"
        workers["teacher"] = "teacher"
    sides: dict[str, Side] = {}
    sizes: dict[str, Sizes] = {}
    for role, key in keys.items():
        prefix = f"{workers[role]}.strategy_args"
        megatron = settings.text(f"{prefix}.strategy_name").startswith("megatron")
        if role == "teacher":
            sides |= teacher_sides(settings, re.compile(rf"^{re.escape(key)}$"))
        elif side := roll.initial(settings, role, key, megatron):
            sides[role] = roll.resumed(settings, side)
        if megatron:
            sizes[role] = Sizes.read(settings, lambda name, at=prefix: f"{at}.strategy_config.{name}")  # type: ignore[misc]
    groups = tuple(size.group(role, roll.devices(settings, workers[role])) for role, size in sizes.items())
    models = {"teacher": sides["teacher"].path} if "teacher" in sides else {}
    return replace(_job(ROLL, settings, sides, sizes, keys["actor"]), placement=Placement(groups), models=models)


def _job(stack: Stack, settings: Settings, sides: Mapping[str, Side], sizes: Mapping[str, Sizes], model: str) -> Job:
    return Job(
        stack,
        sides=tuple(sides.values()),
        hf=settings.model(model),
        sizes={role: size.arguments(LaunchArguments()) for role, size in sizes.items()},
        placement=Placement(),
    )


VERL = replace(verl.STACK, read=read_verl, fits=_is_verl, models=frozenset({_MODEL}))
ROLL = replace(
    roll.STACK,
    read=read_roll,
    fits=_is_roll,
    models=frozenset({"pretrain", "student_pretrain", f"student.{_OWN}"}),
)

"""CK746: what the trainer's own check of its arguments, or Megatron's, refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator

from verify.check import Skip, Tally, check
from verify.checks.launch.engine import engine_config, unless_skipped
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.launch.launch import Launch
from verify.launch.options.argv import options_of
from verify.launch.options.given import given_arguments
from verify.launch.options.layout import LAYOUT, option_of
from verify.launch.options.releases import names
from verify.launch.rules import megatron, slime
from verify.launch.rules.options import Options

# Of a launch that gives one of these, slime, miles or vime checks the arguments.
_TRAINERS = frozenset(
    {
        *("rollout_batch_size", "actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus_per_engine"),
        *("n_samples_per_prompt", "num_rollout", "advantage_estimator"),
    }
)
# verl's programs that check settings by `validate_config`, with trainer and engine on the same GPUs.
_MAIN_PPO = re.compile(r"(?:verl\.trainer\.)?main_ppo(?:_v0)?(?:\.py)?")


def _launch(subject: Subject) -> Launch:
    """A launch with options or settings that somebody checks. Raises Skip for any other."""
    launch = subject.launch
    if launch is None or not (launch.stack or launch.text.words):
        raise Skip("no launch arguments were given")
    if not launch.stack and not _ruled(launch) - {"megatron_to_hf_mode"}:
        raise Skip("none of the arguments that a trainer's own check looks at is given")
    return launch


@check(
    "CK746",
    "the trainer's own check accepts the arguments",
    stage="launch",
    rationale=(
        "slime, miles, verl, NeMo-RL, ROLL and Megatron stop at arguments that contradict one another: minutes after "
        "the GPUs were booked, or in the first step of training."
    ),
    fix="Change the arguments that the finding names.",
    unless=unless_skipped(_launch),
)
def arguments_accepted(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Arithmetic of batches, options that need or exclude another one, and Megatron's rules (`verify/launch/rules`)."""
    launch = _launch(subject)
    if launch.stack:
        if launch.stack.name == "verl" and launch.program and not _MAIN_PPO.fullmatch(launch.program):
            raise Skip(f"{launch.program} checks other settings than verl.trainer.main_ppo, which are not known here")
        tally.compared(0, len(launch.stack.keys) or 1)
        yield from launch.stack.refused
        return
    # slime judges the words before --custom-config-path sets anything, Megatron after it.
    first, last = given_arguments(launch.text.words), launch.given
    tally.compared(0, len(_ruled(launch)))
    given = {"ref_load": launch.ref_load, "load": launch.load, "opd_teacher_load": launch.teacher}
    paths = frozenset(name for name, path in given.items() if path)
    trainer = not _TRAINERS.isdisjoint(first.places)
    if trainer:
        yield from slime.refused(Options(first, launch.program, paths, _of_miles(launch)))
    if first.get("train_backend", "megatron") == "megatron" and not first.get("debug_rollout_only", False):
        yield from megatron.refused(Options(last, launch.program, paths), trainer, _experts(launch))


def _ruled(launch: Launch) -> set[str]:
    """The arguments of a launch that a rule may look at."""
    return {name for name in launch.given.places if option_of(name) not in LAYOUT}


def _of_miles(launch: Launch) -> bool:
    """Whether an option is given that of these trainers only miles has."""
    others = names("slime") | names("megatron-lm") | names("sglang-router")
    given = {one.name.removeprefix("--") for one in options_of(launch.text.words)}
    return not given.isdisjoint(names("miles") - others)


def _experts(launch: Launch) -> int:
    """The experts of the model that miles builds from config.json in mode bridge; 0 where arguments say it."""
    config = engine_config(launch.hf_checkpoint) if launch.bridge and launch.hf_checkpoint else {}
    return megatron.experts_of(config)

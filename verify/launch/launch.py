"""What each side of a training job would really load, by the rules of its trainer; no weight is read."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from verify.launch import slime, verl
from verify.launch.options.given import GivenArguments, given_arguments
from verify.launch.options.tables import MODULES
from verify.launch.sides import Side
from verify.launch.unread import overrides, unread
from verify.launch.words import LaunchText, known_words


@dataclass(frozen=True)
class Launch:
    """The paths of a launch, and what else it says.

    `ref_step`: the iteration of the reference, where it has an option of its own. `critic` and `teacher`: what a critic
    and a teacher of on-policy distillation load.
    """

    hf_checkpoint: Path | None = None
    load: Path | None = None
    ref_load: Path | None = None
    ckpt_step: int | None = None
    text: LaunchText = field(default_factory=LaunchText)
    ref_step: int | None = None
    critic: Path | None = None
    teacher: Path | None = None
    teacher_step: int | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """The words that are known, as texts."""
        return tuple(word.text for word in known_words(self.text.words))

    @property
    def given(self) -> GivenArguments:
        """The arguments of Megatron, slime and SGLang among the words."""
        return given_arguments(self.text.words)

    @property
    def bridge(self) -> bool:
        """Whether miles builds and loads the model by Megatron-Bridge, from `--hf-checkpoint`."""
        return bool(self.given.get("megatron_to_hf_mode", "raw") == "bridge")

    @property
    def unjudged(self) -> list[str]:
        """The options among the words that have code of their own build the model."""
        return [word.text for word in self.text.words if word.text.partition("=")[0] in MODULES]

    @property
    def unread(self) -> list[str]:
        """A line for everything among the words that matters and is not read, or not known."""
        named = {
            "--hf-checkpoint": self.hf_checkpoint,
            "--load": self.load,
            "--ref-load": self.ref_load,
            "--ckpt-step": self.ckpt_step,
            "--ref-ckpt-step": self.ref_step,
            "--critic-load": self.critic,
            "--opd-teacher-load": self.teacher,
            "--opd-teacher-ckpt-step": self.teacher_step,
        }
        given = frozenset(option for option, value in named.items() if value is not None)
        loaded = frozenset(os.path.abspath(path) for path in (self.load, self.ref_load) if path)
        return [*unread(self.words, given, loaded), *self.text.unresolved]


def sides_of(launch: Launch) -> list[Side]:
    """Every side that the launch says something about. One that is configured by overrides is verl's."""
    load, ref_load, step = launch.load, launch.ref_load, launch.ckpt_step
    ref_step = step if launch.ref_step is None else launch.ref_step
    sides = []
    if overrides(launch.words):
        sides += [verl.trainer("actor", "--load", load)] if load else []
        sides += [verl.trainer("reference", "--ref-load", ref_load)] if ref_load else []
    else:
        fallback = ref_load or (launch.hf_checkpoint if launch.bridge else None)
        option = "--ref-load" if ref_load else "--hf-checkpoint"
        known = load or ref_load or (fallback and launch.text.words)
        sides += [slime.actor(load, fallback, step, launch.ref_step, option)] if known else []
        sides += [slime.trainer("reference", "--ref-load", ref_load, ref_step)] if ref_load else []
        sides += [slime.trainer("critic", "--critic-load", launch.critic, None)] if launch.critic else []
        teacher, steps = launch.teacher, launch.teacher_step
        sides += [slime.trainer("teacher", "--opd-teacher-load", teacher, steps)] if teacher else []
    return [*sides, slime.rollout(launch.hf_checkpoint)] if launch.hf_checkpoint else sides

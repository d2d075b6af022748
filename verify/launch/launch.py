"""What each side of a training job would really load, by the rules of its trainer; no weight is read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from verify.launch import slime, verl
from verify.launch.sides import Side
from verify.launch.unread import overrides, unread


@dataclass(frozen=True)
class Launch:
    """The paths of a launch, as given, and the words of its command line."""

    hf_checkpoint: Path | None = None
    load: Path | None = None
    ref_load: Path | None = None
    ckpt_step: int | None = None
    words: tuple[str, ...] = ()

    @property
    def unread(self) -> list[str]:
        """A line for everything among the words that matters and is not read."""
        named = {
            "--hf-checkpoint": self.hf_checkpoint,
            "--load": self.load,
            "--ref-load": self.ref_load,
            "--ckpt-step": self.ckpt_step,
        }
        given = frozenset(option for option, value in named.items() if value is not None)
        loaded = frozenset(os.path.abspath(path) for path in (self.load, self.ref_load) if path)
        return unread(self.words, given, loaded)


def sides_of(launch: Launch) -> list[Side]:
    """Every side that the launch says something about. One that is configured by overrides is verl's."""
    load, ref_load, step = launch.load, launch.ref_load, launch.ckpt_step
    sides = []
    if overrides(launch.words):
        sides += [verl.trainer("actor", "--load", load)] if load else []
        sides += [verl.trainer("reference", "--ref-load", ref_load)] if ref_load else []
    else:
        sides += [slime.actor(load, ref_load, step)] if load or ref_load else []
        sides += [slime.trainer("reference", "--ref-load", ref_load, step)] if ref_load else []
    return [*sides, slime.rollout(launch.hf_checkpoint)] if launch.hf_checkpoint else sides

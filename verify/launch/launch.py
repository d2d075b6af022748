"""What each side of a training job would really load, by the rules of its trainer; no weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from verify.launch import slime
from verify.launch.sides import Side
from verify.launch.stacks.launched import Stacked
from verify.launch.unread import unread


@dataclass(frozen=True)
class Launch:
    """The paths of a launch, as given, and the words of its command line; `stack` is what its settings say."""

    hf_checkpoint: Path | None = None
    load: Path | None = None
    ref_load: Path | None = None
    ckpt_step: int | None = None
    words: tuple[str, ...] = ()
    stack: Stacked | None = None

    @property
    def unread(self) -> list[str]:
        """A line for everything among the words that matters and is not read."""
        if self.stack:
            return list(self.stack.unread)
        named = {
            "--hf-checkpoint": self.hf_checkpoint,
            "--load": self.load,
            "--ref-load": self.ref_load,
            "--ckpt-step": self.ckpt_step,
        }
        given = frozenset(option for option, value in named.items() if value is not None)
        return unread(self.words, given)


def sides_of(launch: Launch) -> list[Side]:
    """Every side that the launch says something about."""
    if launch.stack:
        return list(launch.stack.sides)
    load, ref_load, step = launch.load, launch.ref_load, launch.ckpt_step
    sides = [slime.actor(load, ref_load, step)] if load or ref_load else []
    sides += [slime.trainer("reference", "--ref-load", ref_load, step)] if ref_load else []
    return [*sides, slime.rollout(launch.hf_checkpoint)] if launch.hf_checkpoint else sides

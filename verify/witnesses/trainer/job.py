"""What a trainer is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SLIME, MILES, MEGATRON = "slime", "miles", "megatron"
GPU_CAPABILITY = (9, 0)  # of the GPU that a trainer is told of


@dataclass(frozen=True)
class TrainerJob:
    """The words of a launch, and where its trainer is looked for.

    trainers: packages in the order in which they are looked for: SLIME, MILES or MEGATRON. The first that is there is
        asked.
    words: the program and its options.
    folders: directories that come first on the import path, absolute.
    directory: where the launch starts the program.
    """

    trainers: Sequence[str]
    words: Sequence[str]
    folders: Sequence[str]
    directory: str
    report: str = ""


@dataclass(frozen=True)
class Answer:
    """What a trainer's parsing made of the words of a launch.

    trainer: the package that was asked, at `home`.
    refusal: the trainer's own message, empty where it accepts the launch.
    at: FILE:LINE of the trainer's code that refuses.
    untaken: words that begin with a dash and that no parser takes.
    stand_ins: packages that are not installed there and that an empty one stood in for.
    """

    trainer: str
    home: str
    refusal: str = ""
    at: str = ""
    untaken: Sequence[str] = ()
    stand_ins: Sequence[str] = ()

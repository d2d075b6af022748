"""What a trainer is asked, and what it answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

MEGATRON = "megatron"
# Trainers of whose launches the program itself is run, and the programs that are known to begin by its configuration.
PROGRAMS = {
    "verl": re.compile(r"verl\.trainer\.main_ppo|(?:.*/)?main_ppo\.py"),
    "nemo_rl": re.compile(r"(?:.*/)?run_\w+\.py"),
    "roll": re.compile(r"(?:.*/)?start_\w+_pipeline\.py"),
}


@dataclass(frozen=True)
class TrainerJob:
    """The words of a launch, the program's name first, and where its trainer is looked for."""

    trainers: Sequence[str]  # packages; the first that is found is asked
    words: Sequence[str]
    folders: Sequence[str]  # absolute directories that come first on the import path
    directory: str  # where the launch starts the program
    report: str = ""


@dataclass(frozen=True)
class TrainerAnswer:
    """What a trainer's parsing made of the words of a launch."""

    trainer: str  # the package that was asked
    home: str  # its directory
    refusal: str  # the trainer's own message, empty if it accepts the launch
    at: str  # FILE:LINE of the trainer's code that refuses
    untaken: Sequence[str]  # words that begin with a dash and that no parser takes
    stand_ins: Sequence[str]  # packages that are not installed there and were replaced by empty ones

"""A launch for a trainer to parse, and the trainer's answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

MEGATRON = "megatron"
# Trainers without their own parser, and programs that are known to begin by reading their configuration.
PROGRAMS = {
    "verl": re.compile(r"verl\.trainer\.main_ppo|(?:.*/)?main_ppo\.py"),
    "nemo_rl": re.compile(r"(?:.*/)?run_\w+\.py"),
    "roll": re.compile(r"(?:.*/)?start_\w+_pipeline\.py"),
}


@dataclass(frozen=True)
class TrainerJob:
    trainers: Sequence[str]  # packages; the first that is found parses
    words: Sequence[str]
    folders: Sequence[str]  # absolute directories at the start of the import path
    directory: str  # the working directory of the launch
    report: str = ""


@dataclass(frozen=True)
class TrainerAnswer:
    trainer: str  # the package that parsed
    home: str  # its directory
    refusal: str  # the trainer's own message, empty if it accepts the launch
    at: str  # FILE:LINE of the trainer's code that refuses
    untaken: Sequence[str]  # words with a dash that no parser accepts
    stand_ins: Sequence[str]  # missing packages that were replaced by empty ones

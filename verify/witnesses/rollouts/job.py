"""The tasks and the reports of the processes that look at a recorded rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Ways to make a prompt that are seldom meant, as `Rendering.assumed` says them.
UNFINISHED, TWICE_SPECIAL = "add_generation_prompt=False", "add_special_tokens=True"


@dataclass(frozen=True)
class Part:
    """The beginning of a recorded sample."""

    index: int  # of the sample in its file
    tokens: Sequence[int]
    first: int  # from here on they are of the response
    temperature: float
    recorded: Mapping[str, Sequence[float]]  # log-probabilities of the response's tokens, by side
    mask: Sequence[bool]  # whether the model wrote each of them


@dataclass(frozen=True)
class RecomputeJob:
    """A checkpoint computes the log-probabilities of parts."""

    checkpoint: str  # HF or Megatron
    hf: str | None  # gives the config of a Megatron one that has none
    parts: Sequence[Part]
    report: str = ""


@dataclass(frozen=True)
class BestTemperature:
    """The temperature at which a side's log-probabilities fit best, and the mean difference that is left there."""

    temperature: float
    mean: float


@dataclass(frozen=True)
class Recomputed:
    """Log-probabilities of each part's response tokens."""

    dtype: str  # the engine's
    exact: Sequence[Sequence[float]]  # in float32
    rounded: Sequence[Sequence[float]]  # in `dtype`
    best: Mapping[str, BestTemperature]  # by side


@dataclass(frozen=True)
class Prompt:
    """A recorded prompt."""

    index: int
    prompt: str | Sequence[Mapping[str, Any]]  # text or messages
    options: Mapping[str, Any]  # what else the template was given
    tokens: Sequence[int]  # as recorded


@dataclass(frozen=True)
class PromptJob:
    """Prompts to render with a tokenizer."""

    home: str  # the HF directory that has it
    prompts: Sequence[Prompt]
    report: str = ""


@dataclass(frozen=True)
class Rendering:
    """What became of a prompt."""

    index: int
    at: int | None = None  # the first token that is not the recorded one; None: all are equal
    rendered: str = ""  # that token, decoded and with its id
    recorded: str = ""  # the recorded one, likewise
    before: str = ""  # the text before both
    assumed: str = ""  # what had to be assumed beyond the file for equal tokens
    refused: str = ""  # what the template says where it does not take the messages
    bare: bool = False  # a text without any of the special tokens that the template writes


@dataclass(frozen=True)
class Renderings:
    """What became of all prompts of a job."""

    found: Sequence[Rendering]

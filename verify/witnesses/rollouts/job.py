"""The tasks and the reports of the processes that look at a recorded rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


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
class Recomputed:
    """Log-probabilities of each part's response tokens, in nats."""

    dtype: str  # the engine's
    exact: Sequence[Sequence[float]]  # in float32
    rounded: Sequence[Sequence[float]]  # in `dtype`


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
    """A prompt as the tokenizer renders it, compared with its recorded tokens."""

    index: int
    different: str = ""  # "TOKEN (id) at token N, recorded TOKEN (id) after TEXT"; empty if all tokens are equal
    assumed: str = ""  # the option that the file does not record and that gives equal tokens
    refused: str = ""  # the template's own message


@dataclass(frozen=True)
class Renderings:
    """All prompts of a job."""

    found: Sequence[Rendering]

"""The tasks and the reports of the processes that look at a recorded rollout, all JSON files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Ways to make a prompt that are seldom meant, as `Rendering.assumed` says them.
UNFINISHED, TWICE_SPECIAL = "add_generation_prompt=False", "add_special_tokens=True"


@dataclass(frozen=True)
class Part:
    """The beginning of a sample, which is `index` in its file.

    `tokens` from `first` on are of the response. For each of these: `recorded` log-probabilities by side, and `mask`,
    whether the model wrote it.
    """

    index: int
    tokens: Sequence[int]
    first: int
    temperature: float
    recorded: Mapping[str, Sequence[float]]
    mask: Sequence[bool]


@dataclass(frozen=True)
class RecomputeJob:
    """`checkpoint`, HF or Megatron, judges the `parts`. `hf` gives the config of a Megatron one that has none."""

    checkpoint: str
    hf: str | None
    report: str
    parts: Sequence[Part]

    def save(self, path: Path) -> None:
        """Writes the job as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> RecomputeJob:
        """The job written by `save`."""
        values: dict[str, Any] = json.loads(path.read_text())
        return RecomputeJob(**values | {"parts": [Part(**one) for one in values["parts"]]})


@dataclass(frozen=True)
class BestTemperature:
    """The temperature at which a side's log-probabilities fit best, and the mean difference that is left there."""

    temperature: float
    mean: float


@dataclass(frozen=True)
class Recomputed:
    """Log-probabilities of each part's response tokens in float32 (`exact`) and in the engine's dtype (`rounded`)."""

    dtype: str
    exact: Sequence[Sequence[float]]
    rounded: Sequence[Sequence[float]]
    best: Mapping[str, BestTemperature]

    def save(self, path: Path) -> None:
        """Writes the report as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> Recomputed:
        """The report written by `save`."""
        values: dict[str, Any] = json.loads(path.read_text())
        return Recomputed(**values | {"best": {side: BestTemperature(**one) for side, one in values["best"].items()}})


@dataclass(frozen=True)
class Prompt:
    """A recorded prompt: text or messages, what else the template was given, and the recorded tokens."""

    index: int
    prompt: str | Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]
    tokens: Sequence[int]


@dataclass(frozen=True)
class PromptJob:
    """`home` is the HF directory that has the tokenizer."""

    home: str
    report: str
    prompts: Sequence[Prompt]

    def save(self, path: Path) -> None:
        """Writes the job as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> PromptJob:
        """The job written by `save`."""
        values: dict[str, Any] = json.loads(path.read_text())
        return PromptJob(**values | {"prompts": [Prompt(**one) for one in values["prompts"]]})


@dataclass(frozen=True)
class Rendering:
    """What became of a prompt.

    `at`: the first token that is not the recorded one, None where all are equal; then `rendered` and `recorded` are
    these two, decoded and with their ids, behind the text `before` them. `assumed`: what had to be assumed beyond the
    file for equal tokens. `refused`: what the template says where it does not take the messages. `bare`: a text without
    any of the special tokens that the template writes.
    """

    index: int
    at: int | None = None
    rendered: str = ""
    recorded: str = ""
    before: str = ""
    assumed: str = ""
    refused: str = ""
    bare: bool = False


def save_renderings(path: Path, found: Sequence[Rendering]) -> None:
    """Writes them as JSON."""
    path.write_text(json.dumps([asdict(one) for one in found]))


def load_renderings(path: Path) -> Sequence[Rendering]:
    """The renderings written by `save_renderings`."""
    return [Rendering(**one) for one in json.loads(path.read_text())]

"""The tasks and reports of the engine witness and of its reference, all JSON files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verify.witnesses.sglang.job import ONE_RANK, EngineSizes
from verify.witnesses.stages import Stage

Ids = Sequence[Sequence[int]]  # of tokens, a sequence a prompt
LENGTH = 96  # tokens that a model writes after an opening
SHORT = 64  # tokens of the longest prompt whose routing is compared
TOP = 20  # tokens a position whose log-probabilities are compared, besides the prompt's own
FIRST, AGAIN = "after the start", "after the start, asked again"  # names of passes; others are steps
RESUMED = "releasing, resuming and updating by tensor"  # the step's name
DRAFT = "draft."  # stands before names of a draft model's tensors, as in SGLang's own checksums


@dataclass(frozen=True)
class EngineJob:
    """An engine serves the HF directory `checkpoint`. `scratch` is an empty directory for read-backs.

    `prompts` and `openings` are token ids: the first are answered, the second continued by at most `length` tokens.
    `routed_layers`: of how many layers the experts chosen for short prompts are recorded; 0: of none. `update`: the
    whole checkpoint is loaded again, twice by tensor and twice from disk. `release_resume`: memory is released and
    resumed, then weights are updated. `draft`: the engine decodes speculatively, with the multi-token prediction layers
    of the directory as its draft model.
    """

    checkpoint: str
    scratch: str
    report: str
    prompts: Sequence[Sequence[int]]
    sizes: EngineSizes = ONE_RANK
    update: bool = False
    release_resume: bool = False
    openings: Sequence[Sequence[int]] = ()
    length: int = LENGTH
    routed_layers: int = 0
    draft: bool = False

    def save(self, path: Path) -> None:
        """Writes the job as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> EngineJob:
        """The job written by `save`."""
        values: dict[str, Any] = json.loads(path.read_text())
        return EngineJob(**values | {"sizes": EngineSizes(**values["sizes"])})


@dataclass(frozen=True)
class Judged:
    """What a model makes of a prompt of n tokens.

    `tokens`: log-probabilities of tokens 1 to n-1. `top_ids`: the most probable tokens at each of these positions;
    `top`: log-probabilities, natural logarithm, as many a position.
    """

    tokens: Sequence[float]
    top_ids: Sequence[Sequence[int]]
    top: Sequence[Sequence[float]]


@dataclass(frozen=True)
class Continuation:
    """What a model wrote after an opening, the most probable token each time, with the log-probability of each."""

    ids: Sequence[int]
    logprobs: Sequence[float]


# The experts of a prompt's tokens, by token and layer; of a layer without routed experts none, or anything.
Routed = Sequence[Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Reload:
    """What a second load left. `refused`: why it did not load; not `tried`: since that would end the engine.

    `changed`: the tensors that our read-back found unlike those of the first load; `unequal`: those that SGLang's
    checker named. Both by SGLang's names.
    """

    name: str
    refused: str = ""
    changed: Sequence[str] = ()
    unequal: Sequence[str] = ()
    tried: bool = True


@dataclass(frozen=True)
class EngineReport:
    """`passes`: the answers to all prompts, by when they were given. `held`: what is read back of all ranks.

    `draft_held`: how much of it is of a draft model, whose names begin with DRAFT.
    `volatile`: what changes from one request to the next, such as a kernel's workspace; it is left out of `Reload`.
    `written`: the continuations of the openings. `routed`: the experts of each short prompt. Not `complete`: the engine
    died in a later step.
    """

    version: str
    device: str
    passes: Mapping[str, Sequence[Judged]]
    held: int = 0
    held_bytes: int = 0
    volatile: Sequence[str] = ()
    reloads: Sequence[Reload] = ()
    written: Sequence[Continuation] = ()
    routed: Sequence[Routed] = ()
    complete: bool = False
    draft_held: int = 0

    def save(self, path: Path) -> None:
        """Writes the report as JSON, whole or not at all."""
        part = path.with_name(f"{path.name}.part")
        part.write_text(json.dumps(asdict(self)))
        part.rename(path)

    @staticmethod
    def load(path: Path) -> EngineReport:
        """The report written by `save`."""
        values: dict[str, Any] = json.loads(path.read_text())
        passes = {name: [Judged(**one) for one in answers] for name, answers in values["passes"].items()}
        reloads = [Reload(**one) for one in values["reloads"]]
        written = [Continuation(**one) for one in values["written"]]
        return EngineReport(**values | {"passes": passes, "reloads": reloads, "written": written})


@dataclass(frozen=True)
class ReferenceJob:
    """`top_ids`: for each prompt and each position but the first, the tokens whose log-probabilities are wanted.

    `openings` are continued by at most `length` tokens; `written` is what an engine wrote after each. `routing`: the
    experts of short prompts are wanted too. `hf` gives the config of a Megatron checkpoint that carries none. `dtype`
    is that of the witness, None: the one in which an engine computes. `streams`: files with what Megatron computed for
    the prompts at its stages.
    """

    checkpoint: str
    report: str
    prompts: Ids = ()
    top_ids: Sequence[Ids] = ()
    openings: Ids = ()
    written: Ids = ()
    length: int = LENGTH
    routing: bool = False
    hf: str | None = None
    dtype: str | None = None
    streams: Sequence[str] = ()
    texts: Ids | None = None

    def save(self, path: Path) -> None:
        """Writes the job as JSON."""
        path.write_text(json.dumps(asdict(self)))


@dataclass(frozen=True)
class Predicted:
    """How well a model predicts fixed texts.

    `losses`: of each text, the sum of -ln p over its tokens but the first. `structure`: of the model's median matrix
    (`verify.evidence.plausible.siblings.structure`), by which trained weights are told from random ones.
    """

    losses: Sequence[float]
    structure: float


@dataclass(frozen=True)
class Answers:
    """What transformers makes of a job in one dtype.

    `judged`: of each prompt; `top_ids` are transformers' own most probable tokens. `routed`: the experts of each short
    prompt. `scored`: the log-probabilities of what the engine wrote after each opening. `written`: what transformers
    writes.
    """

    judged: Sequence[Judged]
    routed: Sequence[Routed] = ()
    scored: Sequence[Sequence[float]] = ()
    written: Sequence[Continuation] = ()


@dataclass(frozen=True)
class Reference:
    """What transformers makes of a job: `rounded` in the witness's `dtype`, `exact` in a more exact one.

    `stages`: where Megatron wrote down what it computed, that against transformers; `unseen`: why there are none.
    `predicted`: what the model makes of the job's texts.
    """

    dtype: str
    exact: Answers
    rounded: Answers
    stages: Sequence[Stage] = ()
    unseen: str | None = None
    predicted: Predicted | None = None

    @property
    def exact_dtype(self) -> str:
        """The dtype of `exact`."""
        return "float64" if self.dtype == "float32" else "float32"

    def save(self, path: Path) -> None:
        """Writes it as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> Reference:
        """What `save` wrote."""
        values: dict[str, Any] = json.loads(path.read_text())
        answers = {name: _answers(**values[name]) for name in ("exact", "rounded")}
        predicted = Predicted(**values["predicted"]) if values["predicted"] else None
        stages = [Stage(**one) for one in values["stages"]]
        return Reference(**values | answers | {"stages": stages, "predicted": predicted})


def _answers(judged: Sequence[Any], written: Sequence[Any], **others: Any) -> Answers:
    return Answers([Judged(**one) for one in judged], written=[Continuation(**one) for one in written], **others)

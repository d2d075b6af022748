"""Known symptoms, and phases of a job, from `symptoms.toml`."""

from __future__ import annotations

import math
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, slots=True)
class Symptom:
    """A known message of a log, or a known behaviour of a job; `symptoms.toml` explains the fields."""

    title: str
    meaning: str
    command: str
    key: str = ""
    needles: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()
    pattern: str | None = None
    near: tuple[str, ...] = ()
    effect: bool = False
    loads: bool = False
    number: str = ""
    section: str = ""
    job: str = ""
    tests: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """The argument of `explain`: its number on the page, else its key."""
        return self.number or self.key

    def for_vllm(self) -> Symptom:
        """The symptom with the command and the checks for vLLM."""
        command = self.command.replace("--against-sglang", "--against-vllm")
        if "--against-" not in command:
            command = command.replace(" --update", " --against-vllm --update")
        return replace(self, command=command, codes=tuple(re.sub("^CK50", "CK52", code) for code in self.codes))

    def matches(self, line: str) -> bool:
        """Whether a line with one of the needles has the symptom, without regard to `near`."""
        return self.pattern is None or re.search(self.pattern, line) is not None


@dataclass(frozen=True, slots=True)
class JobPhase:
    """A phase of a job, by frames of a traceback; `symptoms.toml` explains the fields."""

    key: str
    during: str
    frames: tuple[str, ...]
    meaning: str
    command: str
    codes: tuple[str, ...]
    name: str | None = None
    of_tensor: str = ""

    def has(self, line: str) -> bool:
        """Whether a line of a traceback is one of its frames."""
        return any(frame in line for frame in self.frames)

    def of(self, symptom: Symptom, name: str) -> Symptom:
        """A symptom that `loads`, with the meaning and the command of this phase; `name` is the function."""
        title, meaning = f"{symptom.title}, {self.during}", self.of_tensor.format(name=name)
        return replace(symptom, title=title, meaning=meaning, command=self.command, codes=self.codes)

    def error(self, name: str) -> Symptom:
        """An error that is not a known symptom; `name` is the function."""
        meaning = f"No known symptom. {self.meaning.format(name=name)}"
        return Symptom(f"an error {self.during}", meaning, self.command, key=self.key, codes=self.codes)


@dataclass(frozen=True, slots=True)
class Served:
    """The directory that an engine serves, and its tensor parallel size."""

    path: str
    tp: str = ""

    def of(self, symptom: Symptom) -> Symptom:
        """The symptom with the directory and the size in its command."""
        command = re.sub(r"\bHF\b", lambda _: shlex.quote(self.path), symptom.command)
        return replace(symptom, command=command.replace("--tp N", f"--tp {self.tp}") if self.tp else command)


NEAR = 100  # lines: a traceback of a deep call, twice, since ranks print at the same time
_CONTENT: dict[str, Any] = tomllib.loads(files("ckptkit.verify.triage").joinpath("symptoms.toml").read_text())


def _rows(table: str) -> Iterator[dict[str, Any]]:
    for row in _CONTENT[table]:
        yield {name: tuple(one) if isinstance(one, list) else one for name, one in row.items()}


SYMPTOMS = tuple(Symptom(**row) for row in _rows("symptom"))
TABLE = tuple(symptom for symptom in SYMPTOMS if symptom.key)  # symptoms in logs
PHASES = tuple(JobPhase(**row) for row in _rows("phase"))
UPDATE, *_, START = PHASES


def page_symptoms() -> list[Symptom]:
    """The symptoms of docs/symptoms.md, sorted by number."""
    return sorted((symptom for symptom in SYMPTOMS if symptom.number), key=lambda symptom: int(symptom.number[1:]))


_SLIME = re.compile(r"\b(step|rollout) (\d{1,9}): \{")
_VERL = re.compile(r"\bstep:(\d{1,9}) - ")
_NUMBER = r"-?(?:\d{1,20}(?:\.\d{0,25})?(?:[eE][-+]?\d{1,4})?|nan|inf)"
# A number at the end of a piece may continue in the next one.
_METRIC = re.compile(rf"(?<![\w/])([A-Za-z][\w/]{{0,80}})'?: ?(?:np\.float\d\d\()?({_NUMBER})(?=[,}})\s])")
_MEGATRON = re.compile(r"\b(grad norm|loss): {1,20}(nan|inf|-inf)\b", re.IGNORECASE)
_JITTER = 1e-4  # KL divergence of different kernels
_ROUTED = 5e-3  # difference of mean log-probabilities that the trainers' own tests permit with replayed routing
_GAP = 0.1  # mean |log-probability| between trainer and engine; correct runs stay below 0.04
_TRAINED = ("grad_norm", "loss", "pg_loss", "ppo_kl", "kl_loss", "log_probs", "ref_log_probs")
_BY_KEY = {symptom.key: symptom for symptom in TABLE}


def metric_symptoms(line: str) -> list[Symptom]:
    """The symptoms in the metrics of a line; may be empty."""
    keys: list[str] = []
    if _MEGATRON.search(line):
        keys = ["not-finite"]
    elif slime := _SLIME.search(line):
        keys = _judge(_metrics(line[slime.end() - 1 :]), first=slime[2] == "0", exact=True)
    elif verl := _VERL.search(line):
        keys = _judge(_metrics(line[verl.end() :]), first=verl[1] == "1", exact=False)
    return [_BY_KEY[key] for key in keys]


def _metrics(text: str) -> dict[str, float]:
    return {match[1]: float(match[2]) for match in _METRIC.finditer(text)}


def _judge(metrics: Mapping[str, float], *, first: bool, exact: bool) -> list[str]:
    """Keys of symptoms. `exact`: a step is one update, not an average of several, so the first must be on-policy."""
    truncated = max(_metric(metrics, "rollout/truncated"), _metric(metrics, "response_length/clip_ratio"))
    kl = max(abs(_metric(metrics, name)) for name in ("ppo_kl", "kl_loss"))
    actor, reference = (metrics.get(name, math.nan) for name in ("rollout/log_probs", "rollout/ref_log_probs"))
    not_finite = [key for key, value in metrics.items() if not math.isfinite(value)]
    symptoms = {
        "not-finite": any(key.rpartition("/")[2] in _TRAINED for key in not_finite),
        "trainer-engine-gap": _metric(metrics, "train_rollout_logprob_abs_diff") > _GAP,
        "never-stops": truncated >= 1,
        "kl-large": first and 1 < kl < math.inf,
        "kl-not-zero": first and exact and _JITTER < kl <= 1,
        "logprobs-differ": first and abs(actor - reference) > _ROUTED,
        "logprobs-large": first and actor < -1,
    }
    return [key for key, is_present in symptoms.items() if is_present]


def _metric(metrics: Mapping[str, float], name: str) -> float:
    """The metric of this name, with or without a prefix, else 0."""
    return next((value for key, value in metrics.items() if f"/{key}".endswith(f"/{name}")), 0.0)

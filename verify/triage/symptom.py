"""What a known symptom is, and the tables of them and of a job's phases, `symptoms.toml`."""

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
    """What is seen in a log or in a job, and is known to mean something; `symptoms.toml` explains the fields."""

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
        """What `explain` calls it: its number on the page, or else its key."""
        return self.number or self.key

    def for_vllm(self) -> Symptom:
        """The same with the command and the checks of vLLM."""
        command = self.command.replace("--against-sglang", "--against-vllm")
        if "--against-" not in command:
            command = command.replace(" --update", " --against-vllm --update")
        return replace(self, command=command, codes=tuple(re.sub("^CK50", "CK52", code) for code in self.codes))

    def matches(self, line: str) -> bool:
        """Whether a line with one of the needles has it, `near` aside."""
        return self.pattern is None or re.search(self.pattern, line) is not None


@dataclass(frozen=True, slots=True)
class JobPhase:
    """What a job is doing, as frames of a traceback tell; `symptoms.toml` explains the fields."""

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
        """A symptom that `loads`, with the meaning and the command of this phase; `name`: of the function."""
        title, meaning = f"{symptom.title}, {self.during}", self.of_tensor.format(name=name)
        return replace(symptom, title=title, meaning=meaning, command=self.command, codes=self.codes)

    def error(self, name: str) -> Symptom:
        """An error that is no known symptom; `name`: of the function."""
        meaning = f"No known symptom. {self.meaning.format(name=name)}"
        return Symptom(f"an error {self.during}", meaning, self.command, key=self.key, codes=self.codes)


@dataclass(frozen=True, slots=True)
class Served:
    """What a log shows of the engine's start: the directory that it serves, and over how many ranks."""

    path: str
    tp: str = ""

    def of(self, symptom: Symptom) -> Symptom:
        """A symptom whose command names the directory and the ranks."""
        command = re.sub(r"\bHF\b", lambda _: shlex.quote(self.path), symptom.command)
        return replace(symptom, command=command.replace("--tp N", f"--tp {self.tp}") if self.tp else command)


NEAR = 100  # lines: a traceback of a deep call, twice, since ranks print into each other

_CONTENT: dict[str, Any] = tomllib.loads(files("ckptkit.verify.triage").joinpath("symptoms.toml").read_text())


def _rows(table: str) -> Iterator[dict[str, Any]]:
    for row in _CONTENT[table]:
        yield {name: tuple(one) if isinstance(one, list) else one for name, one in row.items()}


SYMPTOMS = tuple(Symptom(**row) for row in _rows("symptom"))
TABLE = tuple(symptom for symptom in SYMPTOMS if symptom.key)  # those that a log shows
PHASES = tuple(JobPhase(**row) for row in _rows("phase"))
UPDATE, *_, START = PHASES


def page_symptoms() -> list[Symptom]:
    """The symptoms of docs/symptoms.md, by their numbers."""
    return sorted((symptom for symptom in SYMPTOMS if symptom.number), key=lambda symptom: int(symptom.number[1:]))


_SLIME = re.compile(r"\b(step|rollout) (\d{1,9}): \{")
_VERL = re.compile(r"\bstep:(\d{1,9}) - ")
_NUMBER = r"-?(?:\d{1,20}(?:\.\d{0,25})?(?:[eE][-+]?\d{1,4})?|nan|inf)"
# A number that nothing follows may go on in the next piece of a long line.
_METRIC = re.compile(rf"(?<![\w/])([A-Za-z][\w/]{{0,80}})'?: ?(?:np\.float\d\d\()?({_NUMBER})(?=[,}})\s])")
_MEGATRON = re.compile(r"\b(grad norm|loss): {1,20}(nan|inf|-inf)\b", re.IGNORECASE)

LEADS = ("step ", "rollout ", "step:", "grad norm:", "loss:")  # a line with metrics has one of these

_JITTER = 1e-4  # of a KL divergence: different kernels
_ROUTED = 5e-3  # of mean log-probabilities: what the trainers' own tests allow with replayed routing
_GAP = 0.1  # of mean |log-probability| between trainer and engine; sound runs stay below 0.04

_TRAINED = ("grad_norm", "loss", "pg_loss", "ppo_kl", "kl_loss", "log_probs", "ref_log_probs")
_BY_KEY = {symptom.key: symptom for symptom in TABLE}


def metric_symptoms(line: str) -> list[Symptom]:
    """The symptoms in the metrics of a line; empty where it prints none."""
    keys: list[str] = []
    if _MEGATRON.search(line):
        keys = ["not-finite"]
    elif slime := _SLIME.search(line):
        keys = _judged(_metrics(line[slime.end() - 1 :]), first=slime[2] == "0", exact=True)
    elif verl := _VERL.search(line):
        keys = _judged(_metrics(line[verl.end() :]), first=verl[1] == "1", exact=False)
    return [_BY_KEY[key] for key in keys]


def _metrics(text: str) -> dict[str, float]:
    return {match[1]: float(match[2]) for match in _METRIC.finditer(text)}


def _judged(metrics: Mapping[str, float], *, first: bool, exact: bool) -> list[str]:
    """`exact`: a step is one update, so that the first must be on-policy; else it is an average over several."""
    found = []
    if any(not math.isfinite(value) and key.rpartition("/")[2] in _TRAINED for key, value in metrics.items()):
        found.append("not-finite")
    gap = _named(metrics, "train_rollout_logprob_abs_diff")
    if gap > _GAP:
        found.append("trainer-engine-gap")
    if max(_named(metrics, "rollout/truncated"), _named(metrics, "response_length/clip_ratio")) >= 1:
        found.append("never-stops")
    return found + _of_first(metrics, exact) if first else found


def _of_first(metrics: Mapping[str, float], exact: bool) -> list[str]:
    found, kl = [], max(abs(_named(metrics, name)) for name in ("ppo_kl", "kl_loss"))
    if 1 < kl < math.inf:
        found.append("kl-large")
    elif exact and _JITTER < kl <= 1:
        found.append("kl-not-zero")
    actor, reference = metrics.get("rollout/log_probs"), metrics.get("rollout/ref_log_probs")
    if actor is not None and reference is not None and abs(actor - reference) > _ROUTED:
        found.append("logprobs-differ")
    if actor is not None and actor < -1:
        found.append("logprobs-large")
    return found


def _named(metrics: Mapping[str, float], name: str) -> float:
    """The metric of this name, with or without a prefix; 0 where it is not printed."""
    return next((value for key, value in metrics.items() if f"/{key}".endswith(f"/{name}")), 0.0)

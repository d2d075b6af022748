"""What a known symptom in a log is, and the table of them, `symptoms.toml`."""

from __future__ import annotations

import math
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, slots=True)
class Symptom:
    """A message that is known to mean something; `symptoms.toml` explains the fields."""

    key: str
    title: str
    meaning: str
    command: str
    needles: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()
    pattern: str | None = None
    near: tuple[str, ...] = ()
    effect: bool = False
    loads: bool = False

    def matches(self, line: str) -> bool:
        """Whether a line with one of the needles has it, `near` aside."""
        return self.pattern is None or re.search(self.pattern, line) is not None


@dataclass(frozen=True, slots=True)
class JobPhase:
    """What the lines around a message show: the engine, and the function that was updating its weights, or ""."""

    engine: str = ""
    update: str = ""

    def of(self, symptom: Symptom) -> Symptom:
        """A symptom with the title, meaning and command that go with this engine, and with an update."""
        vllm = self.engine == "vLLM"
        if not self.update:
            wanted = symptom.command.replace("--against-sglang", "--against-vllm") if vllm else symptom.command
            return replace(symptom, command=wanted)
        return replace(
            symptom,
            title=f"{symptom.title}, in a weight update",
            meaning=f"The trainer sent it in a weight update ({self.update}); the stored checkpoint is not at fault. "
            "Names or shapes that the trainer sends are not those of the engine's class. In the job, "
            "`ckptkit.hooks.WeightSyncCheck` names what did not arrive.",
            command=f"ckptkit verify HF{' --against-vllm' if vllm else ''} --update --tp N",
            codes=("CK512", "CK503"),
        )


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

_ROWS: list[dict[str, Any]] = tomllib.loads(files("verify.triage").joinpath("symptoms.toml").read_text())["symptom"]
_FIELDS: list[dict[str, Any]] = [
    {name: tuple(one) if isinstance(one, list) else one for name, one in row.items()} for row in _ROWS
]
TABLE = tuple(Symptom(**row) for row in _FIELDS)


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

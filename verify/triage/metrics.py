"""Symptoms in the metrics that trainers print: NaN, a first step that is not on-policy, log-probabilities that differ.

slime and miles print `step 0: {'train/ppo_kl': 0.0, ...}` and `rollout 0: {...}`, counted from 0; verl prints
`step:1 - actor/ppo_kl:0.0 - ...`, counted from 1; Megatron `iteration 1/ 10 | ... | grad norm: 1.0 |`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from verify.triage.symptom import PREFLIGHT, VERIFY, Symptom

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

NOT_FINITE = Symptom(
    "not-finite",
    "a metric of training is NaN or infinite",
    ("found NaN in", "found Inf in"),
    "One NaN in a weight makes every number NaN. If it is there from the first step, look at the weights; if it comes "
    "later, at data, learning rate or precision.",
    "ckptkit verify CKPT",
    ("CK204",),
)
KL_LARGE = Symptom(
    "kl-large",
    "the KL divergence of the first step is above 1",
    (),
    "Before the first update the policy is the reference, so it should be 0. The two loaded different weights, or "
    "sizes, precision or rotary settings are wrong.",
    PREFLIGHT,
    ("CK711", "CK712", "CK701"),
)
KL_NOT_ZERO = Symptom(
    "kl-not-zero",
    "the KL divergence of the first step is not 0",
    (),
    "Actor and reference did not compute the same. Different weights on the two sides, or kernels that are not "
    "deterministic (try --attention-backend flash; for a mixture of experts --moe-permute-fusion).",
    PREFLIGHT,
    ("CK711", "CK712"),
)
LOGPROBS_DIFFER = Symptom(
    "logprobs-differ",
    "log_probs and ref_log_probs of the first rollout differ",
    (),
    "Actor and reference hold different weights, or one of them started from another checkpoint than meant.",
    PREFLIGHT,
    ("CK711", "CK712"),
)
LOGPROBS_LARGE = Symptom(
    "logprobs-large",
    "the log-probabilities of the first rollout are below -1",
    (),
    "The trainer finds its own engine's text unlikely. Far below: weights are wrong on one side. A little below, on an "
    "instruct model from 0.8: the prompts do not follow its chat template.",
    VERIFY,
    ("CK202", "CK708"),
)
GAP = Symptom(
    "trainer-engine-gap",
    "trainer and engine disagree about log-probabilities",
    (),
    "The weights in the engine are not those of the trainer: a wrong update, another INT4 grid, dropped names. Kernels "
    "alone account for about 0.01 to 0.04.",
    "ckptkit verify HF --source CKPT --against-sglang",
    ("CK503", "CK504", "CK305"),
)
CUT = Symptom(
    "never-stops",
    "every response is cut at the length limit",
    (),
    "The engine meets no stop token: eos_token_id of config, generation_config and tokenizer disagree, or the weights "
    "are garbage.",
    "ckptkit preflight --hf-checkpoint DIR",
    ("CK707",),
)
METRICS = (NOT_FINITE, KL_LARGE, KL_NOT_ZERO, LOGPROBS_DIFFER, LOGPROBS_LARGE, GAP, CUT)


def metric_symptoms(line: str) -> list[Symptom]:
    """The symptoms in the metrics of a line; empty where it prints none."""
    if _MEGATRON.search(line):
        return [NOT_FINITE]
    if (slime := _SLIME.search(line)) is not None:
        return _judged(_metrics(line[slime.end() - 1 :]), first=slime[2] == "0", exact=True)
    if (verl := _VERL.search(line)) is not None:
        return _judged(_metrics(line[verl.end() :]), first=verl[1] == "1", exact=False)
    return []


def _metrics(text: str) -> dict[str, float]:
    return {match[1]: float(match[2]) for match in _METRIC.finditer(text)}


def _judged(metrics: Mapping[str, float], *, first: bool, exact: bool) -> list[Symptom]:
    """`exact`: a step is one update, so that the first must be on-policy; else it is an average over several."""
    found = []
    if any(not math.isfinite(value) and _is_trained(key) for key, value in metrics.items()):
        found.append(NOT_FINITE)
    gap = _named(metrics, "train_rollout_logprob_abs_diff")
    if gap > _GAP:
        found.append(GAP)
    if max(_named(metrics, "rollout/truncated"), _named(metrics, "response_length/clip_ratio")) >= 1:
        found.append(CUT)
    return found + _of_first(metrics, exact) if first else found


def _of_first(metrics: Mapping[str, float], exact: bool) -> list[Symptom]:
    found, kl = [], max(abs(_named(metrics, name)) for name in ("ppo_kl", "kl_loss"))
    if 1 < kl < math.inf:
        found.append(KL_LARGE)
    elif exact and _JITTER < kl <= 1:
        found.append(KL_NOT_ZERO)
    actor, reference = metrics.get("rollout/log_probs"), metrics.get("rollout/ref_log_probs")
    if actor is not None and reference is not None and abs(actor - reference) > _ROUTED:
        found.append(LOGPROBS_DIFFER)
    if actor is not None and actor < -1:
        found.append(LOGPROBS_LARGE)
    return found


def _is_trained(key: str) -> bool:
    return key.rpartition("/")[2] in ("grad_norm", "loss", "pg_loss", "ppo_kl", "kl_loss", "log_probs", "ref_log_probs")


def _named(metrics: Mapping[str, float], name: str) -> float:
    """The metric of this name, with or without a prefix; 0 where it is not printed."""
    return next((value for key, value in metrics.items() if f"/{key}".endswith(f"/{name}")), 0.0)

"""transformers' log-probabilities of recorded responses: `python -m verify.witnesses.rollouts.recompute JOB.json`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ckptkit.core.dtypes import dtype_name
from verify.witnesses.process.entry import run_job
from verify.witnesses.process.exit_report import Phase, PhaseLog
from verify.witnesses.reference.process import as_hf, dtype_of, model_of
from verify.witnesses.rollouts.job import BestTemperature, Part, Recomputed, RecomputeJob

_ROWS = 256  # positions whose softmax over the vocabulary is held at once
_SEEN = 128  # response tokens of all parts together by which the temperature is found
# Temperatures looked at: by their logarithm first evenly, then by golden sections between the best one's neighbours.
_COLDEST, _HOTTEST, _EVEN, _SECTIONS = math.log(0.05), math.log(5), 24, 16


@dataclass(frozen=True)
class _Seen:
    """Some positions of a part: logits [positions, vocabulary] in float32, the next tokens, which these are."""

    part: Part
    logits: Tensor
    tokens: Tensor
    positions: Sequence[int]


def run(job: RecomputeJob, phases: PhaseLog) -> Recomputed:
    """Computes them. Raises CkptkitError where transformers would not hold the whole checkpoint."""
    checkpoint, home = as_hf(Path(job.checkpoint), Path(job.hf) if job.hf else None)
    found: dict[torch.dtype, list[list[float]]] = {}
    seen: list[_Seen] = []
    for dtype in (torch.float32, dtype_of(checkpoint)):
        phases.enter(Phase("loading the checkpoint into transformers"))
        model = model_of(checkpoint, home, dtype)
        phases.enter(Phase("computing log-probabilities in transformers"))
        found[dtype] = []
        for part in job.parts:
            logits = _logits(model, part)
            found[dtype].append(log_probs(logits, part))
            if dtype is torch.float32:
                seen.append(_see(logits, part, max(1, _SEEN // len(job.parts))))
        del model
    (exact, rounded), dtypes = found.values(), list(found)
    sides = dict.fromkeys(side for part in job.parts for side in part.recorded)
    return Recomputed(dtype_name(dtypes[1]), exact, rounded, {side: best_temperature(seen, side) for side in sides})


def _logits(model: nn.Module, part: Part) -> Tensor:
    """[tokens of the response, vocabulary]: each row is of the position before its token."""
    tokens = torch.tensor([part.tokens], device=next(model.parameters()).device)
    with torch.no_grad():
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits[0, part.first - 1 : -1]
    return logits


def log_probs(logits: Tensor, part: Part) -> list[float]:
    """Natural logarithms of the response tokens' probabilities, at the part's temperature."""
    tokens = torch.tensor(part.tokens[part.first :], device=logits.device)
    starts = range(0, len(tokens), _ROWS)
    pieces = ((logits[at : at + _ROWS].float(), tokens[at : at + _ROWS]) for at in starts)
    return [value for rows, ids in pieces for value in _of_tokens(rows, ids, part.temperature).tolist()]


def _of_tokens(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    return (logits / temperature).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def _see(logits: Tensor, part: Part, most: int) -> _Seen:
    positions = [place for place, written in enumerate(part.mask) if written][:most]
    tokens = torch.tensor(part.tokens[part.first :])[positions]
    return _Seen(part, logits[positions].float().cpu(), tokens, positions)


def best_temperature(seen: Sequence[_Seen], side: str) -> BestTemperature:
    """The temperature with the smallest mean difference from what a side recorded, by golden-section search."""
    shown = [one for one in seen if side in one.part.recorded]
    recorded = torch.tensor([one.part.recorded[side][place] for one in shown for place in one.positions])

    def mean(temperature: float) -> float:
        found = torch.cat([_of_tokens(one.logits, one.tokens, temperature) for one in shown])
        return float((found - recorded).abs().mean())

    even = [_COLDEST + (_HOTTEST - _COLDEST) * step / _EVEN for step in range(_EVEN + 1)]
    place = min(range(len(even)), key=lambda one: mean(math.exp(even[one])))
    low, high = even[max(place - 1, 0)], even[min(place + 1, _EVEN)]
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(_SECTIONS):
        first, second = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, second) if mean(math.exp(first)) < mean(math.exp(second)) else (first, high)
    best = math.exp((low + high) / 2)
    return BestTemperature(best, mean(best))


if __name__ == "__main__":
    run_job(RecomputeJob, run)

"""transformers' log-probabilities of recorded responses: `python -m verify.witnesses.rollouts.recompute JOB.json`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ckptkit.core.dtypes import dtype_name
from verify.witnesses.process.entry import run_job
from verify.witnesses.process.exit_report import Phase, PhaseLog
from verify.witnesses.reference.process import as_hf, dtype_of, model_of
from verify.witnesses.rollouts.job import Part, Recomputed, RecomputeJob

_ROWS = 256  # positions whose softmax over the vocabulary is in memory at once


def run(job: RecomputeJob, phases: PhaseLog) -> Recomputed:
    """Computes them. Raises CkptkitError where transformers would not load the complete checkpoint."""
    checkpoint, home = as_hf(Path(job.checkpoint), Path(job.hf) if job.hf else None)
    found = []
    for dtype in (torch.float32, dtype_of(checkpoint)):
        phases.enter(Phase("loading the checkpoint into transformers"))
        model = model_of(checkpoint, home, dtype)
        phases.enter(Phase("computing log-probabilities in transformers"))
        found.append([log_probs(model, part) for part in job.parts])
        del model
    return Recomputed(dtype_name(dtype_of(checkpoint)), *found)


def log_probs(model: nn.Module, part: Part) -> list[float]:
    """Natural logarithms of the response tokens' probabilities, at the part's temperature."""
    tokens = torch.tensor([part.tokens], device=next(model.parameters()).device)
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits[0, part.first - 1 : -1]
    found: list[float] = []
    for at in range(0, len(logits), _ROWS):
        rows = (logits[at : at + _ROWS].float() / part.temperature).log_softmax(-1)
        found += rows.gather(-1, tokens[0, part.first :][at : at + _ROWS, None])[:, 0].tolist()
    return found


if __name__ == "__main__":
    run_job(RecomputeJob, run)

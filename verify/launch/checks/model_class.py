"""CK748: the class of Megatron that a launch builds, against the checkpoints that it loads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.formats.detect import is_legacy
from converters.megatron.hybrid_model import PATTERNS, gpt_only, stored_pattern
from converters.planner import dims_of
from verify.check import Skip, Tally, check
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.launch.checks.engine import engine_config, job_of, unless_skipped
from verify.launch.job import Job
from verify.launch.options.argv import options_of
from verify.launch.sides import Side
from verify.report import Severity

# Layers whose tensors are stacked in one key.
_STACKED = re.compile(r"decoder\.layers\.(?!\d+\.)")
_CLASSES = ("GPTModel", "HybridModel")
_PROVIDER = "--custom-model-provider-path"


def _of_megatron(subject: Subject) -> tuple[Job, Sequence[Side]]:
    """A launch that says what it builds, and the Megatron checkpoints that it loads. Raises Skip for any other."""
    job = job_of(subject)
    given = job.arguments
    if not given.describes_model or given.anything or not given.unknown.isdisjoint(PATTERNS):
        raise Skip("the launch does not say which class of Megatron it builds")
    if job.bridge or any(one.name == _PROVIDER for one in options_of(job.text.words)):
        raise Skip("code of the launch's own builds the model")
    if sides := [side for side in job.sides if side.path and side.is_megatron and not is_legacy(side.path)]:
        return job, sides
    raise Skip("the launch loads no checkpoint in torch_dist")


@check(
    "CK748",
    "the launch builds the class of Megatron that its checkpoints hold",
    stage="launch",
    rationale="GPTModel and HybridModel name the same tensors differently. The trainer stops, or leaves at random what "
    "it does not find.",
    fix="Convert the checkpoint with `ckptkit convert CKPT OUT --dialect`, or correct --hybrid-layer-pattern.",
    unless=unless_skipped(_of_megatron),
)
def class_matches(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """HybridModel where the launch has a layer pattern, else GPTModel, against the names in each checkpoint.

    Megatron-LM tells the two apart in the same way. A launch of HybridModel is also held against what it cannot be.
    """
    job, sides = _of_megatron(subject)
    builds = stored_pattern(job.arguments.values) is not None
    for side in {side.path: side for side in sides if side.path}.values():
        tally.compared(0)
        yield from _against(side.path or Path(), builds)
    config = engine_config(job.hf) if builds and job.hf else {}
    if config:
        yield from _impossible(config, job)


def _against(path: Path, builds: bool) -> Iterator[Issue]:
    files = Subject(path).megatron_files
    try:
        holds = files.hybrid
    except UnsupportedError:
        raise
    except CkptkitError:  # CK111 reports it
        return
    if holds == builds:
        return
    dialect = "hybrid" if builds else "mcore"
    hint = f"convert it: `ckptkit convert {path} OUT --dialect {dialect}`"
    severity: Severity = "error"
    if builds and any(_STACKED.match(key) for key in files.metadata.tensors):
        severity = "warning"
        hint += "; Megatron-LM renames stacked layers while it loads, from 0.19 on and not with MTP or latent attention"
    expected, actual = f"a {_CLASSES[builds]}, as the launch builds", f"a {_CLASSES[holds]}"
    yield Issue(expected, actual, hint, file=path, severity=severity)


def _impossible(config: Any, job: Job) -> Iterator[Issue]:
    try:
        dims = dims_of(config)
    except UnsupportedError:
        raise
    except CkptkitError:  # CK101 reports it
        return
    reasons = list(gpt_only(dims))
    if dims.tied and "/" in (job.actor.pattern or "") and (job.actor.pp or 1) > 1:
        reasons.append(
            "tied embeddings with multi-token prediction over several pipeline stages, which megatron-core neither "
            "saves nor loads"
        )
    for reason in reasons:
        yield Issue(
            f"a model that HybridModel can hold, in {job.hf}",
            reason,
            "build GPTModel (leave out --hybrid-layer-pattern, and start pretrain_gpt.py), or for several stages leave "
            "multi-token prediction out",
        )

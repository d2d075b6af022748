"""The job and the rollout engine of a launch, for several checks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptkit.converters.config.dims import ModelDims
from ckptkit.converters.registry import named_family_of
from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.verify.core.skip import NotApplicable
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.evidence.side_files import SideFiles
from ckptkit.verify.launch.job import Job


def job_of(subject: Subject) -> Job:
    """The job of the launch. Raises NotApplicable without a launch."""
    if subject.job is None:
        raise NotApplicable("only preflight reads a launch")
    return subject.job


def engine_directory(subject: Subject) -> Path:
    """The --hf-checkpoint of the launch. Raises NotApplicable without one."""
    if subject.job is None or subject.job.hf is None:
        raise NotApplicable("the launch has no --hf-checkpoint")
    return subject.job.hf


def engine_config(root: Path) -> Mapping[str, Any]:
    """config.json of the engine, or {} if it is missing or cannot be read."""
    try:
        return SideFiles(root).config
    except CkptkitError:
        return {}


def engine_dims(config: Mapping[str, Any]) -> ModelDims:
    """The model of the engine's config. Raises UnsupportedError, or NotApplicable for a broken config (CK101)."""
    try:
        return named_family_of(config).read_dims(config)
    except UnsupportedError:
        raise
    except (CkptkitError, TypeError, ValueError) as error:
        reason = error.message if isinstance(error, CkptkitError) else error
        raise NotApplicable(f"config.json cannot be used: {reason}") from error

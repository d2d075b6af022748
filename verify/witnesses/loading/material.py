"""A checkpoint as an engine is given it: a directory with its config, the weights, and what to compare with.

An HF directory is read by the engine's own weight iterator and, for the comparison, by the safetensors library. A
Megatron checkpoint is streamed Megatron -> HF -> engine as a live weight update does, with no HF copy of the weights on
disk; what Megatron does not hold (a vision tower) comes from beside it, or from the release.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.plan import Joined, View
from ckptkit.formats.detect import locate
from ckptkit.formats.hf.reader import HfCheckpoint, read_json
from ckptkit.formats.hf.side_files import copy_files, side_files, write_config
from converters.experts import is_fused, only_fused, unfuse
from converters.open import open_megatron
from converters.passthrough import passthrough_beside
from converters.planner import to_hf
from verify.evidence.plain import plain
from verify.witnesses.loading.engine import Engine, Weights
from verify.witnesses.loading.job import LoadJob

Wanted = Callable[[str], bool]  # tells by its name whether a tensor is wanted


def _all(name: str) -> bool:
    return True


@dataclass(frozen=True)
class Material:
    """What a checkpoint is to an engine."""

    path: Path  # the directory that its config is read from
    config: Mapping[str, Any]
    fused: bool  # the shared expert is kept as one more routed expert
    feed: Callable[[Wanted], Weights | None]  # what is streamed; None where the engine reads the directory itself
    reference: Callable[[Wanted], Weights]  # what to compare with


def material_of(job: LoadJob, engine: Engine) -> Material:
    """The checkpoint of a job. A Megatron one gets a directory for its config in the job's scratch directory."""
    location = locate(job.checkpoint)
    if location.is_hf:
        fused = engine.fuses_shared(HfCheckpoint(location.path).specs)
        config = read_json(location.path / "config.json")
        return Material(location.path, config, fused, lambda wanted: None, partial(safetensors_of, location.path))
    checkpoint = open_megatron(location, job.hf)
    view: Checkpoint = to_hf(checkpoint, job.checkpoint, fused=only_fused(checkpoint.config))
    if untouched := passthrough_beside(checkpoint, checkpoint.hf, location.root, plain):
        view = Joined(view, untouched)
    path = Path(job.scratch) / f"model-{job.rank}"
    copy_files(checkpoint.hf_path, side_files(checkpoint.hf_path, location.root), path)
    write_config(path, checkpoint.config, view.specs)
    source = source_of(Path(job.source)) if job.source else view
    return Material(path, checkpoint.config, False, partial(stream, view), partial(stream, source))


def safetensors_of(root: Path, wanted: Wanted = _all) -> Weights:
    """Every wanted tensor that the index names, read by the safetensors library."""
    for file in HfCheckpoint(root).shards:
        with safe_open(root / file, "pt") as shard:
            for name in filter(wanted, shard.keys()):
                yield name, shard.get_tensor(name)


def stream(checkpoint: Checkpoint, wanted: Wanted) -> Weights:
    """Every wanted tensor of a checkpoint in the order it is cheapest to read."""
    for names in checkpoint.groups:
        if chosen := list(filter(wanted, names)):
            yield from checkpoint.read(chosen).items()


def source_of(path: Path) -> Checkpoint:
    """The HF directory to compare with, with one tensor an expert where engines know experts one by one."""
    source = HfCheckpoint(path)
    if not is_fused(source.specs) or only_fused(source.config):
        return source
    return View(source, unfuse(source.specs, source.config, str(path)))

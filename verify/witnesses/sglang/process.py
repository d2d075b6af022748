"""Real SGLang as a witness: `python -m verify.witnesses.sglang.process JOB.json` loads a checkpoint and reports.

Every parameter and persistent buffer is poisoned before the model's own `load_weights` runs. Afterwards three
records are compared: which elements still hold the poison; where each part of each incoming tensor was written (seen
at the level of torch operations, so no loader can hide a write); and whether its bits are there. That SGLang puts them
where its forward pass wants them is shown by the tests, which compare its logits with those of transformers. With CUDA
the quantization methods then repack weights, and that is checked too.

An HF directory is read by SGLang's own weight iterator and, for the comparison, by the safetensors library. A Megatron
checkpoint is streamed Megatron -> HF -> SGLang as a live weight update does, with no HF copy of the weights on disk;
what Megatron does not hold (a vision tower) comes from beside it, or from the release.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.join import Joined
from ckptkit.core.plan import View
from ckptkit.formats.detect import locate
from ckptkit.formats.hf.reader import HfCheckpoint, read_json
from ckptkit.formats.hf.side_files import copy_side_files, write_config
from converters.experts import is_fused, only_fused, unfuse
from converters.open import open_megatron
from converters.passthrough import passthrough_beside
from converters.planner import to_hf
from verify.evidence.plain import plain
from verify.witnesses.ending import PhaseLog, ending_path
from verify.witnesses.sglang.compare import Loaded
from verify.witnesses.sglang.draft import beyond_layers
from verify.witnesses.sglang.examine import Examination
from verify.witnesses.sglang.job import SglangJob, SglangReport
from verify.witnesses.sglang.load import Weights, load
from verify.witnesses.sglang.names import fuses_shared, of_draft

Wanted = Callable[[str], bool]


@dataclass(frozen=True)
class Material:
    """What a checkpoint is to SGLang: the directory that its config is read from, and the weights.

    `feed`: what is streamed, of the wanted names; None where SGLang reads the directory itself. `reference`: the
    tensors of wanted names to compare with.
    """

    path: Path
    config: Mapping[str, Any]
    fused: bool
    feed: Callable[[Wanted], Weights | None]
    reference: Callable[[Wanted], Weights]


def run(job: SglangJob, alter: Callable[[Weights], Weights] = lambda weights: weights) -> None:
    """Loads the checkpoint and writes a report, or an `Ending`. `alter` changes the weights for SGLang.

    Where there are multi-token prediction layers, they are loaded next, as the draft model that an engine has beside
    the model. That has a report of its own, so an `Ending` beside a first report is about the draft model.
    """
    report = Path(job.report)
    with PhaseLog(ending_path(report)) as phases:
        material = material_of(job)
        model, examination = witness(material, job, alter, phases)
        seen = examination.report(model)
        seen.save(report)
        if seen.draft:
            model, examination = witness(material, job, alter, phases, (model, examination.loaded))
            examination.report(model).save(SglangReport.draft_path(report))


def witness(
    material: Material,
    job: SglangJob,
    alter: Callable[[Weights], Weights],
    phases: PhaseLog,
    target: tuple[torch.nn.Module, Loaded] | None = None,
) -> tuple[torch.nn.Module, Examination]:
    """Loads a checkpoint into SGLang, into the draft model of a `target` where there is one.

    Raises whatever SGLang raises.
    """
    draft, config, scratch = target is not None, material.config, Path(job.scratch)
    of_layers = of_draft(config)
    reference = partial(material.reference, (lambda name: name.startswith(of_layers)) if draft else _all)
    feed = material.feed(beyond_layers(config) if draft else _all)
    examination = Examination(config, material.fused, reference, alter, phases, job.sizes, target)
    fused = material.fused
    model = load(material.path, scratch, fused, feed, examination, phases, job.sizes, job.rank, draft=draft)
    return model, examination


def _all(name: str) -> bool:
    return True


def material_of(job: SglangJob) -> Material:
    """The checkpoint of a job. A Megatron one gets a directory for its config in the job's scratch directory."""
    location = locate(job.checkpoint)
    if location.kind == "hf":
        fused = fuses_shared(HfCheckpoint(location.path).specs)
        config = read_json(location.path / "config.json")
        return Material(location.path, config, fused, lambda wanted: None, partial(safetensors_of, location.path))
    checkpoint = open_megatron(location, job.hf)
    view: Checkpoint = to_hf(checkpoint, job.checkpoint, fused=only_fused(checkpoint.config))
    if untouched := passthrough_beside(checkpoint, checkpoint.hf, location.root, plain):
        view = Joined(view, untouched)
    path = Path(job.scratch) / f"model-{job.rank}"
    copy_side_files(checkpoint.hf_path, path)
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
    """The HF directory to compare with, with one tensor an expert where SGLang knows experts one by one."""
    source = HfCheckpoint(path)
    if not is_fused(source.specs) or only_fused(source.config):
        return source
    return View(source, unfuse(source.specs, source.config, str(path)))


def main() -> None:
    """Runs the job named on the command line, and ends at once: what libraries do at exit is no part of it."""
    run(SglangJob.load(Path(sys.argv[1])))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

"""A real engine as a witness: `python -m ckptkit.verify.witnesses.loading.process JOB.json` loads and reports.

Every parameter and persistent buffer is poisoned before the model's own `load_weights` runs. Afterwards three
records are compared: which elements still hold the poison; where each part of each incoming tensor was written (seen
at the level of torch operations, so no loader can hide a write); and whether its bits are there. That an engine puts
them where its forward pass wants them is shown by the tests, which compare its logits with those of transformers. With
CUDA the quantization methods then repack weights, and that is checked too.

An HF directory is read by the engine's own weight iterator and, for the comparison, by the safetensors library. A
Megatron checkpoint is streamed Megatron -> HF -> engine as a live weight update does, with no HF copy of the weights on
disk; what Megatron does not hold (a vision tower) comes from beside it, or from the release.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from ckptkit.converters.experts import is_fused, only_fused, unfuse
from ckptkit.converters.open import open_megatron
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.plan import View
from ckptkit.formats.detect import locate
from ckptkit.formats.hf.reader import HfCheckpoint, read_json
from ckptkit.formats.hf.side_files import copy_files, side_files, write_config
from ckptkit.verify.evidence.plain import as_release
from ckptkit.verify.witnesses.loading.compare import Loaded
from ckptkit.verify.witnesses.loading.draft import draft_build
from ckptkit.verify.witnesses.loading.engine import Engine, ModelBuild, Weights
from ckptkit.verify.witnesses.loading.examine import examine
from ckptkit.verify.witnesses.loading.job import LoadJob
from ckptkit.verify.witnesses.process.codec import load_record, save
from ckptkit.verify.witnesses.process.exit_report import PhaseLog

Wanted = Callable[[str], bool]  # tells by its name whether a tensor is wanted


def build_of(job: LoadJob, engine: Engine) -> ModelBuild:
    """The model of a job. A Megatron checkpoint gets a directory for its config in the job's scratch directory."""
    location = locate(job.checkpoint)
    if location.is_hf:
        path = location.path
        return ModelBuild(
            path,
            job.scratch,
            config=read_json(path / "config.json"),
            reference=partial(safetensors_of, path),
            fused_shared=engine.FACTS.fuses_shared(HfCheckpoint(path).specs),
            sizes=job.sizes,
            rank=job.rank,
        )
    checkpoint = open_megatron(location, job.hf)
    view = as_release(checkpoint, location.root)
    path = job.scratch / f"model-{job.rank}"
    copy_files(checkpoint.hf_path, side_files(checkpoint.hf_path, location.root), path)
    write_config(path, checkpoint.config, view.specs)
    source = source_of(job.source) if job.source else view
    return ModelBuild(
        path,
        job.scratch,
        config=checkpoint.config,
        weights=partial(stream, view),
        reference=partial(stream, source),
        sizes=job.sizes,
        rank=job.rank,
    )


def safetensors_of(root: Path, wanted: Wanted = lambda name: True) -> Weights:
    """Every wanted tensor that the index names, read by the safetensors library."""
    for file in HfCheckpoint(root).shards:
        with safe_open(root / file, "pt") as shard:
            for name in filter(wanted, shard.keys()):
                yield name, shard.get_tensor(name)


def stream(checkpoint: Checkpoint, wanted: Wanted = lambda name: True) -> Weights:
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


def run(job: LoadJob, alter: Callable[[Weights], Weights] = lambda weights: weights) -> None:
    """Loads the checkpoint and writes a report, or an `ExitReport`. `alter` changes the weights for the engine.

    Where there are multi-token prediction layers, they are loaded next, as the draft model that an engine has beside
    the model, and the report is written again with what was seen of that. So an `ExitReport` beside a report is about
    the draft model.
    """
    report = Path(job.report)
    with PhaseLog(report) as phases:
        engine: Any = import_module(job.adapter)
        build = build_of(job, engine)
        target = load(engine, build, alter, phases)
        save(target.report, report)
        if target.report.draft:
            draft = load(engine, draft_build(build), alter, phases, target)
            save(replace(target.report, draft_model=draft.report), report)


def load(
    engine: Engine,
    build: ModelBuild,
    alter: Callable[[Weights], Weights],
    phases: PhaseLog,
    target: Loaded | None = None,
) -> Loaded:
    """Has an engine build and load a model, which may be the draft model of `target`. Raises whatever it raises."""
    loaded = list[Loaded]()

    def loading(model: nn.Module, weights: Weights, device: torch.device) -> None:
        loaded.append(examine(engine, build, phases, model, alter(weights), device, target))

    engine.build(build, loading, phases)
    return loaded[0]


def main() -> None:
    """Runs the job named on the command line, and ends at once: what libraries do at exit is not a part of it."""
    run(load_record(LoadJob, Path(sys.argv[1])))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

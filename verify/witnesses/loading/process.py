"""A real engine as a witness: `python -m ckptkit.verify.witnesses.loading.process JOB.json` loads and reports.

Every parameter and persistent buffer is poisoned before the model's own `load_weights` runs. The report has elements
that still hold the poison, and places where the bits of a tensor differ. Places are recorded from torch operations, so
that no loader can hide a write. With CUDA the quantization methods then repack weights, which is checked too. The tests
compare an engine's logits with transformers', which shows that these places are right.
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
from ckptkit.converters.planner import dims_of
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.plan import View
from ckptkit.formats.detect import locate
from ckptkit.formats.hf.reader import HfCheckpoint, read_json
from ckptkit.formats.hf.side_files import copy_files, side_files, write_config
from ckptkit.verify.evidence.folding import LAYER
from ckptkit.verify.evidence.plain import as_release
from ckptkit.verify.witnesses.loading.compare import Loaded
from ckptkit.verify.witnesses.loading.engine import Engine, ModelBuild, Weights
from ckptkit.verify.witnesses.loading.examine import examine
from ckptkit.verify.witnesses.loading.job import LoadJob
from ckptkit.verify.witnesses.loading.names import draft_prefixes
from ckptkit.verify.witnesses.process.codec import load_record, save
from ckptkit.verify.witnesses.process.exit_report import ExitReport

Wanted = Callable[[str], bool]  # by a tensor's name


def build_of(job: LoadJob, engine: Engine) -> ModelBuild:
    """The model of a job. A Megatron checkpoint is streamed Megatron -> HF -> engine as in a live weight update."""
    location = locate(job.checkpoint)
    if location.kind == "hf":
        path = location.path
        config, is_fused_shared = read_json(path / "config.json"), engine.FACTS.fuses_shared(HfCheckpoint(path).specs)
        reference = partial(safetensors_of, path)
        return ModelBuild(path, job.scratch, config, None, reference, is_fused_shared, job.sizes, job.rank)
    checkpoint = open_megatron(location, job.hf)
    # Tensors that Megatron does not hold (a vision tower) come from the directory next to it, or from the release.
    view = as_release(checkpoint, location.root)
    path = job.scratch / f"model-{job.rank}"
    copy_files(checkpoint.hf_path, side_files(checkpoint.hf_path, location.root), path)
    write_config(path, checkpoint.config, view.specs)
    reference = partial(stream, source_of(job.source) if job.source else view)
    weights = partial(stream, view)
    return ModelBuild(path, job.scratch, checkpoint.config, weights, reference, sizes=job.sizes, rank=job.rank)


def draft_build(build: ModelBuild) -> ModelBuild:
    """The draft model of a model. It may read all tensors but those of the target's decoder layers."""
    prefixes, layers = draft_prefixes(build.config), dims_of(build.config).layers

    def may_read(name: str) -> bool:
        layer = LAYER.match(name)
        return name.startswith(prefixes) or layer is None or int(layer[1]) >= layers

    weights = partial(build.weights, may_read) if build.weights else None
    reference = partial(build.reference, lambda name: name.startswith(prefixes))
    return replace(build, draft=True, weights=weights, reference=reference)


def safetensors_of(root: Path, wanted: Wanted = lambda name: True) -> Weights:
    for file in HfCheckpoint(root).shards:
        with safe_open(root / file, "pt") as shard:
            for name in filter(wanted, shard.keys()):
                yield name, shard.get_tensor(name)


def stream(checkpoint: Checkpoint, wanted: Wanted = lambda name: True) -> Weights:
    """Every wanted tensor of a checkpoint, in the cheapest order to read."""
    for names in checkpoint.groups:
        if chosen := list(filter(wanted, names)):
            yield from checkpoint.read(chosen).items()


def source_of(path: Path) -> Checkpoint:
    """The HF directory to compare with, with one tensor an expert where engines require that."""
    source = HfCheckpoint(path)
    if not is_fused(source.specs) or only_fused(source.config):
        return source
    return View(source, unfuse(source.specs, source.config, str(path)))


def run(job: LoadJob, alter: Callable[[Weights], Weights] = lambda weights: weights) -> None:
    """Loads the checkpoint and writes a report, or an `ExitReport`. `alter` changes the weights for the engine."""
    report = Path(job.report)
    with ExitReport(report) as phases:
        engine: Any = import_module(job.adapter)
        build = build_of(job, engine)
        target = load(engine, build, alter, phases)
        save(target.report, report)
        if target.report.draft:  # an `ExitReport` next to a report is thus about the draft model
            draft = load(engine, draft_build(build), alter, phases, target)
            save(replace(target.report, draft_model=draft.report), report)


def load(
    engine: Engine,
    build: ModelBuild,
    alter: Callable[[Weights], Weights],
    phases: ExitReport,
    target: Loaded | None = None,
) -> Loaded:
    """Has an engine build and load a model, or the draft model of `target`. Raises as the engine does."""
    loaded = list[Loaded]()

    def loading(model: nn.Module, weights: Weights, device: torch.device) -> None:
        loaded.append(examine(engine, build, phases, model, alter(weights), device, target))

    engine.build(build, loading, phases)
    return loaded[0]


def main() -> None:
    """Runs the job of the command line, and exits without the exit handlers of libraries."""
    run(load_record(LoadJob, Path(sys.argv[1])))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

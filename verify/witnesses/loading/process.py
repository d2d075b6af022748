"""A real engine as a witness: `python -m verify.witnesses.loading.process JOB.json` loads a checkpoint and reports.

Every parameter and persistent buffer is poisoned before the model's own `load_weights` runs. Afterwards three
records are compared: which elements still hold the poison; where each part of each incoming tensor was written (seen
at the level of torch operations, so no loader can hide a write); and whether its bits are there. That an engine puts
them where its forward pass wants them is shown by the tests, which compare its logits with those of transformers. With
CUDA the quantization methods then repack weights, and that is checked too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from verify.witnesses.loading.compare import Loaded
from verify.witnesses.loading.draft import beyond_layers
from verify.witnesses.loading.engine import Build, Engine, Weights
from verify.witnesses.loading.examine import Examination
from verify.witnesses.loading.job import LoadJob, LoadReport
from verify.witnesses.loading.material import Material, material_of
from verify.witnesses.loading.names import of_draft
from verify.witnesses.process.codec import load, save
from verify.witnesses.process.exit_report import PhaseLog


def run(job: LoadJob, alter: Callable[[Weights], Weights] = lambda weights: weights) -> None:
    """Loads the checkpoint and writes a report, or an `ExitReport`. `alter` changes the weights for the engine.

    Where there are multi-token prediction layers, they are loaded next, as the draft model that an engine has beside
    the model. That has a report of its own, so an `ExitReport` beside a first report is about the draft model.
    """
    report = Path(job.report)
    with PhaseLog(report) as phases:
        adapter: Any = import_module(job.adapter)
        material = material_of(job, adapter)
        examined = partial(examine, adapter, material, job, alter, phases)
        model, examination = examined()
        seen = examination.report(model)
        save(seen, report)
        if seen.draft:
            model, examination = examined((model, examination.loaded))
            save(examination.report(model), LoadReport.draft_path(report))


def examine(
    engine: Engine,
    material: Material,
    job: LoadJob,
    alter: Callable[[Weights], Weights],
    phases: PhaseLog,
    target: tuple[nn.Module, Loaded] | None = None,
) -> tuple[nn.Module, Examination]:
    """Loads a checkpoint into an engine, into the draft model of a `target` where there is one.

    Raises whatever the engine raises.
    """
    config, draft = material.config, target is not None
    prefixes = of_draft(config) if draft else ("",)
    reference = partial(material.reference, lambda name: name.startswith(prefixes))
    feed = material.feed(beyond_layers(config) if draft else lambda name: True)
    examination = Examination(engine, config, material.fused, reference, alter, phases, job.sizes, target)
    wanted = Build(material.path, Path(job.scratch), feed, material.fused, job.sizes, job.rank, draft)
    return engine.build(wanted, examination, phases), examination


def main() -> None:
    """Runs the job named on the command line, and ends at once: what libraries do at exit is not a part of it."""
    run(load(LoadJob, Path(sys.argv[1])))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

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
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

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
from verify.witnesses.sglang.examine import Examination
from verify.witnesses.sglang.job import SglangJob, SglangReport
from verify.witnesses.sglang.load import Weights, load
from verify.witnesses.sglang.names import fuses_shared


def run(job: SglangJob, alter: Callable[[Weights], Weights] = lambda weights: weights) -> None:
    """Loads the checkpoint and writes the report, or an `Ending`. `alter` changes the weights for SGLang."""
    with PhaseLog(ending_path(Path(job.report))) as phases:
        witness(job, alter, phases).save(Path(job.report))


def witness(job: SglangJob, alter: Callable[[Weights], Weights], phases: PhaseLog) -> SglangReport:
    """Loads the checkpoint into SGLang. Raises whatever SGLang raises."""
    location = locate(job.checkpoint)
    scratch = Path(job.scratch)
    if location.kind == "hf":
        fused = fuses_shared(HfCheckpoint(location.path).specs)
        examination = Examination(
            read_json(location.path / "config.json"),
            fused,
            lambda: safetensors_of(location.path),
            alter,
            phases,
            job.sizes,
        )
        model = load(location.path, scratch, fused, None, examination, phases, job.sizes, job.rank)
        return examination.report(model)
    checkpoint = open_megatron(location, job.hf)
    view: Checkpoint = to_hf(checkpoint, job.checkpoint, fused=only_fused(checkpoint.config))
    if untouched := passthrough_beside(checkpoint, checkpoint.hf, location.root, plain):
        view = Joined(view, untouched)
    path = scratch / f"model-{job.rank}"
    copy_side_files(checkpoint.hf_path, path)
    write_config(path, checkpoint.config, view.specs)
    source = source_of(Path(job.source)) if job.source else view
    examination = Examination(checkpoint.config, False, lambda: stream(source), alter, phases, job.sizes)
    return examination.report(load(path, scratch, False, stream(view), examination, phases, job.sizes, job.rank))


def safetensors_of(root: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that the index names, read by the safetensors library."""
    for file in HfCheckpoint(root).shards:
        with safe_open(root / file, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - no mapping
                yield name, shard.get_tensor(name)


def stream(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint in the order it is cheapest to read."""
    for names in checkpoint.groups:
        yield from checkpoint.read(names).items()


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

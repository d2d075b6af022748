"""Weight updates of one live `vllm.LLM`, with faults planted: `python -m support.vllm_live OUT PATH`.

OUT/FAULT gets the report of each of FAULTS, and OUT/none that of none. `reports` starts this.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ckptkit.formats.hf.reader import HfCheckpoint
from support.processes import run_logged
from support.vllm_logits import SETTINGS
from verify.witnesses.live import process
from verify.witnesses.live.job import EngineJob, EngineReport
from verify.witnesses.process.codec import load, save
from verify.witnesses.process.exit_report import PhaseLog

LAYER = 3
Pair = tuple[str, Tensor]
# What becomes of a tensor on its way, by fault; None: it is dropped. `second` counts updates from 0.
Change = Callable[[str, Tensor, int], Tensor | None]


def dropping(*parts: str) -> Change:
    return lambda name, tensor, update: None if any(part in name for part in parts) else tensor


def scaling_the_second(part: str) -> Change:
    return lambda name, tensor, update: tensor * 2 if part in name and update == 1 else tensor


FAULTS: Mapping[str, Change] = {
    "a bucket": dropping(f".layers.{LAYER}."),
    "up without gate": dropping(f".layers.{LAYER}.mlp.gate_proj.", f".layers.{LAYER}.mlp.experts.2.gate_proj."),
    "k without v": dropping(f".layers.{LAYER}.self_attn.v_proj.weight"),
    "no norm": dropping("model.norm.weight"),
    "no embeddings": dropping("embed_tokens"),
    "a second update that is not the first": scaling_the_second(f".layers.{LAYER}.self_attn.o_proj."),
    "a delta that was swallowed": dropping(""),
}


def reports(root: Path, path: Path, *, program: str, gpu: bool = False) -> dict[str, EngineReport]:
    """The report of each fault, by vLLM in the Python `program`."""
    ended = run_logged(root / "log", "support.vllm_live", root, path, gpu=gpu, limit_s=1200, program=program)
    assert ended, (root / "log").read_text(errors="replace")[-5000:]
    return {fault: load(EngineReport, root / fault) for fault in ("none", *FAULTS)}


def main() -> None:
    os.environ.update(SETTINGS)
    sys.modules["deep_gemm"] = None  # type: ignore[assignment]
    import vllm.model_executor.models.registry as registry

    from verify.witnesses.vllm.live import server as adapter

    registry._run_in_subprocess = lambda function: function()
    root, path = Path(sys.argv[1]), Path(sys.argv[2])
    job = EngineJob(str(path), [[1, 2, 3]], report=str(root / "report"), update=True)
    server = adapter.serve(job, HfCheckpoint(str(path)))
    from verify.witnesses.vllm.live import worker

    whole = worker.buckets

    def planted(change: Change) -> Callable[[HfCheckpoint], Iterator[list[Pair]]]:
        updates = iter(range(99))

        def buckets(checkpoint: HfCheckpoint) -> Iterator[list[Pair]]:
            update = next(updates)
            for bucket in whole(checkpoint):
                changed = [(name, change(name, tensor, update)) for name, tensor in bucket]
                yield [(name, tensor) for name, tensor in changed if tensor is not None]

        return buckets

    faults: Mapping[str, Any] = {"none": lambda name, tensor, update: tensor, **FAULTS}
    for fault, change in faults.items():
        worker.buckets = planted(change)
        with PhaseLog(root / "phases") as phases:
            *_, report = process._reports(job, server, phases, adapter.version())
        save(report, root / fault)
        worker.buckets = whole
        server.update_by_tensor()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)

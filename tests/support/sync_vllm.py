"""Updates of real `vllm.LLM`s, each checked: `python -m support.sync_vllm OUT STAGES PATH...`.

OUT gets a JSON line a check: its step, and what the check said. With several STAGES the last one has an output layer of
its own, which the trainer's tied embeddings are. `outcomes` starts this.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckptkit import CkptkitError
from ckptkit.hooks import WeightSyncCheck
from support import models
from support.processes import run_logged
from support.vllm_logits import SETTINGS

HEAD = "lm_head.weight"
LAYER = 3
# What a sender leaves out, by what is planted.
LOST: Mapping[str, Callable[[str], bool]] = {
    "a bucket": lambda name: f".layers.{LAYER}." in name,
    "up": lambda name: name.endswith(f".layers.{LAYER}.mlp.up_proj.weight") or f".{LAYER}.mlp.experts.2.up" in name,
    "v": lambda name: name.endswith(f".layers.{LAYER}.self_attn.v_proj.weight"),
    "everything": lambda name: True,
}
WAYS = ("load_plainly", "load_by_layer")
Weights = Mapping[str, Tensor]
Steps = Iterator[tuple[str, dict[str, Any]]]


def outcomes(
    root: Path, stages: int, paths: Sequence[Path], *, program: str, gpu: bool = False
) -> dict[str, dict[str, Any]]:
    """What each check said, by model and step, with vLLM in the Python `program`."""
    words = (root / "out", stages, *paths)
    ended = run_logged(root / "log", "support.sync_vllm", *words, gpu=gpu, limit_s=800, program=program)
    assert ended, (root / "log").read_text(errors="replace")[-5000:]
    return dict(map(json.loads, (root / "out").read_text().splitlines()))


def weights(path: Path, version: int) -> dict[str, Tensor]:
    """What a trainer holds after this many steps."""
    return {name: (one.float() * (1 + version / 64)).to(one.dtype) for name, one in models.tensors(path).items()}


class Job:
    """A trainer and its engine."""

    def __init__(self, path: Path, llm: Any) -> None:
        self.path, self.llm, self.version = path, llm, 0
        self.check = WeightSyncCheck(llm.collective_rpc, program="vllm")

    def update(self, way: str, lost: Callable[[str], bool] = lambda name: False, *, again: bool = False) -> Any:
        """One update, `again` with the values of the last one; what the check says."""
        self.version += not again
        sent = self.sent()
        for name, tensor in sent.items():
            self.check.record(name, tensor)
        self.deliver(way, {name: tensor for name, tensor in sent.items() if not lost(name)})
        return self.said()

    def sent(self) -> dict[str, Tensor]:
        return weights(self.path, self.version)

    def deliver(self, way: str, pairs: Weights) -> None:
        self.llm.collective_rpc(way, args=(list(pairs.items()),))

    def said(self) -> dict[str, Any]:
        try:
            return {"raised": "", **asdict(self.check.after_update())}  # type: ignore[arg-type]
        except CkptkitError as error:
            return {"raised": error.message, "details": error.details}


def of_one_rank(job: Job) -> Steps:
    """Sound updates, then each fault with a sound one after it."""
    for way in WAYS:
        yield f"{way}: 1", job.update(way)
        yield f"{way}: 2", job.update(way)
        yield f"{way}: 2 again", job.update(way, again=True)
        for fault, lost in LOST.items():
            yield f"{way}: without {fault}", job.update(way, lost)
            yield f"{way}: after {fault}", job.update(way)
    if "moe" in job.path.name:
        job.version += 1
        for name, tensor in job.sent().items():
            job.check.record(name, tensor)
        job.deliver("load_by_layer", job.sent())
        job.llm.collective_rpc("exchange", args=(f"model.layers.{LAYER}.mlp.experts.routed_experts.w13_weight",))
        yield "gate and up exchanged", job.said()
        yield "after that", job.update("load_by_layer")
    yield "resumed", {"compared": job.check.after_resume()}
    job.llm.collective_rpc("lose")
    try:
        job.check.after_resume()
    except CkptkitError as error:
        yield "lost", {"raised": error.message, "details": error.details}


def of_stages(job: Job) -> Steps:
    """A trainer whose tied embeddings have one name, and then both."""
    yield "both names", job.update("load_by_layer")
    job.check = WeightSyncCheck(job.llm.collective_rpc, program="vllm")
    job.sent = lambda: {name: one for name, one in weights(job.path, job.version).items() if name != HEAD}  # type: ignore[method-assign]
    yield "one name, the same values", job.update("load_by_layer", again=True)
    yield "one name", job.update("load_by_layer")


def main() -> None:
    os.environ.update(SETTINGS)
    sys.modules["deep_gemm"] = None  # type: ignore[assignment]
    import vllm
    import vllm.model_executor.models.registry as registry
    from vllm.distributed import cleanup_dist_env_and_memory

    registry._run_in_subprocess = lambda function: function()
    out, stages = Path(sys.argv[1]), int(sys.argv[2])
    with out.open("w") as lines:
        for path in map(Path, sys.argv[3:]):
            llm = vllm.LLM(
                model=str(path),
                skip_tokenizer_init=True,
                enforce_eager=True,
                dtype="bfloat16",
                max_model_len=128,
                max_num_seqs=2,
                disable_log_stats=True,
                enable_prefix_caching=False,
                worker_extension_cls="support.vllm_kept.Updated",
                pipeline_parallel_size=stages,
                distributed_executor_backend="mp" if stages > 1 else None,
                **({"gpu_memory_utilization": 0.3} if torch.cuda.is_available() else {}),
            )
            job = Job(path, llm)
            for step, said in of_stages(job) if stages > 1 else of_one_rank(job):
                lines.write(json.dumps([f"{path.name}: {step}", said]) + "\n")
                lines.flush()
            del job, llm
            cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)

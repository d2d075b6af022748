"""A live engine as a witness: `python -m verify.witnesses.engine.process JOB.json` serves a checkpoint and reports.

The engine answers the prompts; then, as asked, the whole checkpoint is pushed into it again through the requests that
trainers use, and everything that it holds is read back and compared with what it held after its first load. SGLang's
own checker compares too. Parameters are poisoned before the first update of a kind, so what an update leaves out shows.

Written for SGLang 0.5.16, which is imported inside the functions alone. Nothing that an engine does is a verdict by
itself: one that dies makes the report inconclusive.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import summarize
from ckptkit.formats.hf.reader import HfCheckpoint
from verify.witnesses.ending import Phase, PhaseLog, ending_path
from verify.witnesses.engine.job import (
    AGAIN,
    FIRST,
    RESUMED,
    SHORT,
    TOP,
    Continuation,
    EngineJob,
    EngineReport,
    Judged,
    Reload,
    Routed,
)
from verify.witnesses.engine.readback import PACKED, POISON, RECORD
from verify.witnesses.sglang.names import fuses_shared

BEGIN, END = "quant.online.sglang_reload.begin", "quant.online.sglang_reload.end"
RELOADABLE = "CompressedTensorsWNA16MoE"  # the only packed layers that `sglang_reload` opens again
BUCKET_BYTES = 512 << 20
_NAMED = re.compile(r"^name=(\S+) ", re.MULTILINE)  # in the checker's message, a line a tensor


def _reloads(job: EngineJob) -> bool:
    return job.update or job.release_resume


class Refused(Exception):  # noqa: N818
    """SGLang answered that it did not do what was asked; the message is its own."""


class NotTried(Refused):
    """A request that is known to end this SGLang was not sent; the message says why."""


class Server:
    """A running engine, the requests that the witness sends, and the read-back of its first load."""

    def __init__(self, job: EngineJob, checkpoint: HfCheckpoint) -> None:
        self._job = job
        self._checkpoint = checkpoint
        self._engine = _start(job, checkpoint)
        if _reloads(job) and hasattr(self._engine, "begin_weight_update"):
            self.stop()
            raise CkptkitError(
                f"SGLang {version('sglang')} updates weights in sessions, which --update and --release-resume do not "
                "drive yet",
                "take SGLang 0.5.16",
            )
        self._count = 0
        self.packed: Mapping[str, str] = {}

    def stop(self) -> None:
        """Ends the engine."""
        self._engine.shutdown()

    def answers(self) -> list[Judged]:
        """What the model makes of each prompt."""
        asked = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}
        return [
            _judged(
                self._engine.generate(
                    input_ids=list(prompt),
                    sampling_params=asked,
                    return_logprob=True,
                    logprob_start_len=0,
                    top_logprobs_num=TOP,
                )["meta_info"]
            )
            for prompt in self._job.prompts
        ]

    def written(self) -> list[Continuation]:
        """What the model writes after each opening, until it ends the text or has written enough."""
        asked = {"temperature": 0.0, "max_new_tokens": self._job.length}
        return [
            _continued(self._engine.generate(input_ids=list(opening), sampling_params=asked, return_logprob=True))
            for opening in self._job.openings
        ]

    def routed(self) -> list[Routed]:
        """The experts that the tokens of each short prompt are sent to; nothing where the job does not ask."""
        if not self._job.routed_layers:
            return []
        short = [prompt for prompt in self._job.prompts if len(prompt) <= SHORT]
        return [self._routed(prompt) for prompt in short]

    def _routed(self, prompt: Sequence[int]) -> Routed:
        asked = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}
        answer = self._engine.generate(input_ids=list(prompt), sampling_params=asked, return_routed_experts=True)
        ids = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), np.int32)
        return ids.reshape(len(prompt), self._job.routed_layers, -1).tolist()

    def held(self) -> dict[str, tuple[str, int]]:
        """Digest and bytes of everything that all ranks hold, by rank, class and name."""
        self._count += 1
        path = Path(self._job.scratch) / f"held-{self._count}"
        self._send([(str(path), torch.zeros(1, device="cuda"))], RECORD)
        found: dict[str, tuple[str, int]] = {}
        for file in sorted(path.parent.glob(f"{path.name}.*.json")):
            rank = file.name.removeprefix(f"{path.name}.").partition(".")[0]
            record = json.loads(file.read_text())
            self.packed = {**self.packed, **record[PACKED]}
            found |= {f"{rank} {name}": (digest, size) for name, (digest, size) in record["held"].items()}
        if len({name.partition(" ")[0] for name in found}) != self._job.sizes.tp:
            raise CkptkitError("not every rank of the engine wrote what it holds", "please report this")
        return found

    def check(self, action: str) -> Sequence[str]:
        """SGLang's own checker: `snapshot`, or `compare`, which gives the names of unequal tensors."""
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        asked = self._engine.tokenizer_manager.check_weights(CheckWeightsReqInput(action=action), None)
        success, message, *_ = self._engine.loop.run_until_complete(asked)
        if success:
            return ()
        names = _NAMED.findall(message)
        if action != "compare" or not names:
            raise RuntimeError(f"SGLang's weight checker cannot {action}: {message}")
        return names

    def update_by_tensor(self) -> None:
        """The whole checkpoint in buckets, as a trainer sends it. Raises Refused."""
        if self.packed:
            self._send([], BEGIN)
        for bucket in buckets(self._checkpoint):
            self._send([(name, tensor.cuda()) for name, tensor in bucket])
        if self.packed:
            self._send([], END)
        self._engine.flush_cache()

    def update_from_disk(self) -> None:
        """The directory again. Raises Refused, for repacked layers before they are touched: that ends an engine."""
        if self.packed:
            raise NotTried(
                "not tried, since SGLang 0.5.16 loads tensors from disk into repacked INT4 layers and ends with an "
                "error of shapes"
            )
        _granted(self._engine.update_weights_from_disk(self._job.checkpoint))

    def release_and_resume(self) -> None:
        """Gives weights, cache and graphs back, and takes memory for them again, which then holds poison."""
        self._engine.release_memory_occupation()
        self._engine.resume_memory_occupation()
        self.poison()

    def snapshot_and_poison(self) -> None:
        """SGLang's checker remembers every tensor; then every parameter is poisoned, so that none can stay as it was.

        The checker's own `reset_tensors` is not called: it also overwrites buffers that no checkpoint holds.
        """
        self.check("snapshot")
        self.poison()

    def poison(self) -> None:
        """Poisons every parameter in every rank. Raises CkptkitError for layers that could not be loaded again."""
        if other := [name for name, scheme in self.packed.items() if scheme != RELOADABLE]:
            raise CkptkitError(
                f"ckptkit knows no way to load {summarize(other)} into SGLang again", "leave only experts in INT4"
            )
        self._send([("", torch.zeros(1, device="cuda"))], POISON)

    def _send(self, weights: Sequence[tuple[str, Tensor]], loader: str | None = None) -> None:
        _granted(self._engine.update_weights_from_tensor(weights, load_format=loader, flush_cache=False))


def _granted(answer: Sequence[Any]) -> None:
    success, message = answer[:2]
    if not success:
        raise Refused(str(message))


def _start(job: EngineJob, checkpoint: HfCheckpoint) -> Any:
    import sglang

    dtype = str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "auto")
    return sglang.Engine(
        model_path=job.checkpoint,
        dtype="bfloat16" if dtype == "float32" else "auto",
        tp_size=job.sizes.tp,
        ep_size=job.sizes.ep,
        dp_size=job.sizes.tp if job.sizes.dp_attention else 1,
        enable_dp_attention=job.sizes.dp_attention,
        skip_tokenizer_init=True,
        attention_backend="triton",
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        disable_radix_cache=True,  # every prompt is computed anew
        disable_shared_experts_fusion=not fuses_shared(checkpoint.specs),
        enable_memory_saver=job.release_resume,
        enable_return_routed_experts=job.routed_layers > 0,
        custom_weight_loader=[BEGIN, END, RECORD, POISON],
        max_total_tokens=max(map(len, job.prompts)) + 4096,
        max_running_requests=8,
        random_seed=0,
        watchdog_timeout=1500,
        log_level="info",
    )


def _judged(answer: Mapping[str, Any]) -> Judged:
    top = [[(found[0], found[1]) for found in position] for position in answer["input_top_logprobs"][1:]]
    return Judged(
        [float(found[0]) for found in answer["input_token_logprobs"][1:]],
        [[int(token) for _, token in position] for position in top],
        [[float(value) for value, _ in position] for position in top],
    )


def _continued(answer: Mapping[str, Any]) -> Continuation:
    written = answer["meta_info"]["output_token_logprobs"]
    return Continuation([int(found[1]) for found in written], [float(found[0]) for found in written])


def buckets(checkpoint: HfCheckpoint) -> Iterator[list[tuple[str, Tensor]]]:
    """Every tensor once, in lists of at least BUCKET_BYTES, the last one less."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in chain.from_iterable(checkpoint.read(names).items() for names in checkpoint.groups):
        bucket.append((name, tensor))
        size += tensor.nbytes
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def run(job: EngineJob, phases: PhaseLog) -> None:
    """Starts the engine and does what the job asks; saves the report after each step. Raises whatever SGLang raises."""
    phases.enter(Phase("starting the engine"))
    server = Server(job, HfCheckpoint(job.checkpoint))
    try:
        for report in _reports(job, server, phases):
            report.save(Path(job.report))
    finally:
        server.stop()


def _reports(job: EngineJob, server: Server, phases: PhaseLog) -> Iterator[EngineReport]:
    """The report so far, after the first answers and after each step; the last one is complete."""
    phases.enter(Phase("reading back what the engine holds"))
    first = server.held() if _reloads(job) else {}
    phases.enter(Phase("answering prompts"))
    passes = {FIRST: server.answers(), AGAIN: server.answers()}
    volatile = _changed(first, server.held()) if first else []
    report = EngineReport(
        version("sglang"),
        torch.cuda.get_device_name(),
        passes,
        len(first),
        sum(size for _, size in first.values()),
        volatile,
        written=server.written(),
        routed=server.routed(),
    )
    yield report
    for name, step in _steps(job):
        phases.enter(Phase(name))
        reload = _reload(name, step, server, first, volatile)
        if not reload.refused:
            passes = {**passes, name: server.answers()}
        report = replace(report, passes=passes, reloads=[*report.reloads, reload])
        yield report
        if reload.refused:
            break  # what SGLang holds now is not known
    yield replace(report, complete=True)


def _steps(job: EngineJob) -> Iterator[tuple[str, Sequence[str]]]:
    """Names of steps, and the methods of Server that each is made of.

    From disk comes last, since that may be refused.
    """
    if job.release_resume:
        yield RESUMED, ("release_and_resume", "update_by_tensor")
    if job.update:
        yield "updating by tensor over poison", ("snapshot_and_poison", "update_by_tensor")
        yield "updating by tensor again", ("update_by_tensor",)
        yield "updating from disk over poison", ("snapshot_and_poison", "update_from_disk")
        yield "updating from disk again", ("update_from_disk",)


def _reload(
    name: str, step: Sequence[str], server: Server, first: Mapping[str, tuple[str, int]], volatile: Sequence[str]
) -> Reload:
    """Does a step and compares. A reload that is refused leaves nothing to compare."""
    checked = step[0] == "snapshot_and_poison"
    try:
        for method in step:
            getattr(server, method)()
    except Refused as refusal:
        return Reload(name, refused=str(refusal), tried=not isinstance(refusal, NotTried))
    unequal = server.check("compare") if checked else []
    return Reload(name, "", [one for one in _changed(first, server.held()) if one not in volatile], unequal)


def _changed(before: Mapping[str, tuple[str, int]], after: Mapping[str, tuple[str, int]]) -> list[str]:
    """Names of what is not in both with the same digest."""
    return sorted({name for name, _ in before.items() ^ after.items()})


def main() -> None:
    """Runs the job named on the command line."""
    job = EngineJob.load(Path(sys.argv[1]))
    with PhaseLog(ending_path(Path(job.report))) as phases:
        run(job, phases)


if __name__ == "__main__":
    main()

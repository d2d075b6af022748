"""A running engine, the requests of the witness, and the read-back of its tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import summarize
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.quant.formats.part_names import WEIGHT_PACKED, WEIGHT_SCALE_INV
from ckptkit.verify.quirks import quirk
from ckptkit.verify.witnesses.live.job import DRAFT, EngineJob
from ckptkit.verify.witnesses.live.server import NotTried, RefusedByEngine, buckets
from ckptkit.verify.witnesses.loading.names import draft_names
from ckptkit.verify.witnesses.reference.job import TOP, Judged
from ckptkit.verify.witnesses.sglang.adapter import draft_class, server_options
from ckptkit.verify.witnesses.sglang.facts import fuses_shared
from ckptkit.verify.witnesses.sglang.live.readback import PACKED, POISON, RECORD

RELOADABLE = "CompressedTensorsWNA16MoE"  # the only packed layers that can be opened again
_NAMED = re.compile(r"^name=(\S+) ", re.MULTILINE)  # in the checker's message, a line a tensor
# Requests around a weight update, chosen by an engine's methods and not by its version. 0.5.16 accepts
# `update_weights_from_tensor` at any time, and loads repacked INT4 experts only between these two loaders. 0.5.23
# accepts it only within a session: `begin_weight_update` undoes repacking, `end_weight_update` repacks again, in the
# models that a selector names.
BEGIN, END = "ckptkit.quant.online.sglang_reload.begin", "ckptkit.quant.online.sglang_reload.end"
_LOADERS = [BEGIN, END, RECORD, POISON]  # the engine's `custom_weight_loader`
# One draft token a step, by the multi-token prediction layer of the same directory.
_SPECULATIVE: dict[str, Any] = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 1,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 2,
}


class SglangServer:
    """A `live.server.Server` for SGLang. `device`: where tensors are sent from."""

    def __init__(self, job: EngineJob, checkpoint: HfCheckpoint, engine: Any, device: str = "cuda") -> None:
        self._job, self._checkpoint, self._engine, self._device = job, checkpoint, engine, device
        self._count = 0
        self.packed: Mapping[str, str] = {}

    def stop(self) -> None:
        self._engine.shutdown()

    def answers(self) -> list[Judged]:
        options = {
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": TOP,
        }
        answers = (self._engine.generate(input_ids=list(prompt), **options) for prompt in self._job.prompts)
        return [_judged(answer["meta_info"]) for answer in answers]

    def held(self) -> dict[str, tuple[str, int]]:
        self._count += 1
        path = Path(self._job.report).parent / f"held-{self._count}"
        self._run_loader(str(path), RECORD)
        held: dict[str, tuple[str, int]] = {}
        models: set[tuple[str, str]] = set()
        for file in sorted(path.parent.glob(f"{path.name}.*.json")):
            rank, kind = file.name.removeprefix(f"{path.name}.").split(".")[:2]
            prefix = DRAFT if self._job.draft and kind != self._checkpoint.config["architectures"][0] else ""
            models.add((rank, prefix))
            record = json.loads(file.read_text())
            self.packed = {**self.packed, **{prefix + name: scheme for name, scheme in record[PACKED].items()}}
            held |= {f"{rank} {prefix}{name}": (digest, size) for name, (digest, size) in record["held"].items()}
        if len(models) != self._job.sizes.tp * (2 if self._job.draft else 1):
            names = ", ".join(f"rank {rank}{' (draft)' if prefix else ''}" for rank, prefix in sorted(models))
            raise CkptkitError(f"only these models of the engine wrote their tensors: {names}", "report this")
        return held

    def check(self, action: str) -> Sequence[str]:
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        request = self._engine.tokenizer_manager.check_weights(CheckWeightsReqInput(action=action), None)
        success, message, *_ = self._engine.loop.run_until_complete(request)
        if success:
            return ()
        names = _NAMED.findall(message)
        if action != "compare" or not names:
            raise RuntimeError(f"SGLang's weight checker cannot {action}: {message}")
        return names

    def update_by_tensor(self) -> None:
        needs_loaders = bool(self.packed) and not _has_sessions(self._engine)
        with self._session("all"):
            if needs_loaders:
                self._send([], BEGIN)
            for bucket in buckets(self._checkpoint):
                self._send([(name, tensor.to(self._device)) for name, tensor in bucket])
            if needs_loaders:
                self._send([], END)
        self._engine.flush_cache()

    def update_from_disk(self) -> None:
        """Raises NotTried for repacked layers before they are changed, since that would end the engine."""
        if self.packed and not _has_sessions(self._engine) and (known := quirk("sglang", "reload-of-int4")):
            raise NotTried(f"not tried, since {known.message}")
        _granted(self._engine.update_weights_from_disk(self._job.checkpoint))

    def release_and_resume(self) -> None:
        self._engine.release_memory_occupation()
        self._engine.resume_memory_occupation()
        self.poison()

    def snapshot_and_poison(self) -> None:
        """The checker's own `reset_tensors` is not used: it also overwrites buffers that no checkpoint holds."""
        self.check("snapshot")
        self.poison()

    def poison(self) -> None:
        """Poisons every parameter in every rank. Raises CkptkitError for layers that could not be loaded again."""
        if other := [name for name, scheme in self.packed.items() if scheme != RELOADABLE]:
            raise CkptkitError(f"SGLang cannot reload packed {summarize(other)}", "quantize only routed experts")
        self._run_loader("", POISON)

    def _run_loader(self, name: str, loader: str) -> None:
        """Runs a loader on every model of the engine, with one tensor of this name."""
        # The end of a session repacks the models that its selector names, and a second repacking destroys the weights.
        # So only the draft model is named: if there is one, it must not be quantized.
        with self._session("draft"):
            self._send([(name, torch.zeros(1, device=self._device))], loader)

    @contextmanager
    def _session(self, selector: str) -> Iterator[None]:
        """A session for weights, if the engine has sessions. An exception leaves it open, with undefined weights."""
        if _has_sessions(self._engine):
            _granted(self._engine.begin_weight_update(selector=selector))
        yield
        if _has_sessions(self._engine):
            _granted(self._engine.end_weight_update())

    def _send(self, weights: Sequence[tuple[str, Tensor]], loader: str | None = None) -> None:
        _granted(self._engine.update_weights_from_tensor(weights, load_format=loader, flush_cache=False))


def serve(job: EngineJob, checkpoint: HfCheckpoint) -> SglangServer:
    """Starts a `sglang.Engine`. Raises CkptkitError if it cannot run the job; SGLang itself ends this process."""
    import sglang

    if job.draft:
        _check_draft(job, checkpoint)
    dtype = str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "auto")
    engine = sglang.Engine(
        model_path=job.checkpoint,
        dtype="bfloat16" if dtype == "float32" else "auto",
        **server_options(job.sizes),
        attention_backend="triton",
        disable_shared_experts_fusion=not fuses_shared(checkpoint.specs),
        enable_memory_saver=job.release_resume,
        custom_weight_loader=_LOADERS,
        max_total_tokens=max(map(len, job.prompts), default=0) + 4096,
        max_running_requests=8,
        random_seed=0,
        watchdog_timeout=1500,
        log_level="info",
        **(_SPECULATIVE | {"speculative_draft_model_path": job.checkpoint} if job.draft else {}),
    )
    return SglangServer(job, checkpoint, engine)


def _check_draft(job: EngineJob, checkpoint: HfCheckpoint) -> None:
    """Raises CkptkitError unless the engine can hold the draft model, and it can be read back."""
    import sglang

    if draft_class(Path(job.checkpoint)) is None:
        name = checkpoint.config["architectures"][0]
        message = f"SGLang has no class for the multi-token prediction layers of {name}"
        raise CkptkitError(message, "serve the model without speculative decoding")
    quantized = (WEIGHT_PACKED, WEIGHT_SCALE_INV)
    packed = [name for name in draft_names(checkpoint.config, checkpoint.specs) if name.endswith(quantized)]
    if packed and _has_sessions(sglang.Engine):
        message = f"to read the draft model back, SGLang would repack {summarize(packed)} a second time"
        raise CkptkitError(message, "store the multi-token prediction layers unquantized")


def _judged(answer: Mapping[str, Any]) -> Judged:
    top = answer["input_top_logprobs"][1:]
    return Judged(
        [float(entry[0]) for entry in answer["input_token_logprobs"][1:]],
        [[int(entry[1]) for entry in position] for position in top],
        [[float(entry[0]) for entry in position] for position in top],
    )


def version() -> str:
    return installed("sglang")


def _granted(answer: Sequence[Any]) -> None:
    """Raises RefusedByEngine unless SGLang's answer to a request reports success."""
    success, message = answer[:2]
    if not success:
        raise RefusedByEngine(str(message))


def _has_sessions(engine: Any) -> bool:
    """Whether this engine accepts weights only within sessions. It then also repacks by itself, also from disk."""
    return hasattr(engine, "begin_weight_update")

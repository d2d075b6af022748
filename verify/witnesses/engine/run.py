"""Starts the engine witness and its reference in processes of their own, and turns what becomes of them into data."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.installation import package_release
from ckptkit.core.printable import one_line
from ckptkit.core.progress import size
from ckptkit.core.specs import summarize
from converters.planner import dims_of, expected_hf
from converters.registry import family_of
from quant.formats.part_names import PACKED
from quant.formats.zero_points import is_expert
from verify.evidence.expected import config_of, is_quantized
from verify.evidence.subject import Subject
from verify.skip import Skip, Unable
from verify.witnesses.confined import memory_limit
from verify.witnesses.ending import Ending, ending_path
from verify.witnesses.engine.job import FIRST, EngineJob, EngineReport, Ids, Reference, ReferenceJob
from verify.witnesses.engine.predict import texts_of
from verify.witnesses.engine.text import openings_of, tokenizer_of
from verify.witnesses.megatron.waves import free_memory
from verify.witnesses.sglang.job import EngineSizes
from verify.witnesses.sglang.names import draft_names, fuses_shared
from verify.witnesses.sglang.run import check_class, engine_sizes, start

# What SGLang says of layers that its kernels or ranks cannot cut, and where it looks for tensors of other names.
_BY_SHAPE = re.compile(
    r"Invalid thread config|(?:not|must be) divisible by|not evenly divisible|Unsupported shapes"
    r"|KeyError\b.*in load_weights\b"
)
NO_COUNT = "SGLang gives the choices of experts only with num_experts_per_tok in config.json"
_START_S = 1200  # importing SGLang and compiling its kernels on a cold machine
_BYTES_A_SECOND = 20e6
_SHORT, _LONG = 48, 4096  # tokens of a prompt
_SHORT_PROMPTS = 8
_WITH_ROOM = 1.2  # of a model's size: activations and what loading needs


@dataclass(frozen=True)
class EngineRun:
    """The report of the engine, as far as it came; `failed`: why it is missing or not complete.

    `prompts`, `openings` and `routed_layers` are what it was asked. `refused`: it has no report because of the sizes or
    names of the checkpoint's own tensors.
    """

    report: EngineReport | None
    prompts: Sequence[Sequence[int]] = ()
    failed: str | None = None
    openings: Sequence[Sequence[int]] = ()
    routed_layers: int = 0
    refused: bool = False

    def said(self) -> EngineReport:
        """The report. Raises Unable where there is none, Skip where that is a finding of CK511."""
        if self.refused:
            raise Skip("not run because the engine cannot serve the checkpoint (CK511)")
        if self.report is None:
            raise Unable(self.failed or "the engine gave no report")
        return self.report


def run_engine(subject: Subject) -> EngineRun:
    """Serves the subject with a real engine and does what was asked. Raises Unable where that cannot be done here."""
    return _served(subject, draft=False)


def run_draft_engine(subject: Subject) -> EngineRun | None:
    """Loads weights again as asked, with the checkpoint's multi-token prediction layers as draft model.

    None where it holds no such layers. This engine answers no prompts: those are the model's own business. Raises
    Unable where that cannot be done here.
    """
    return _served(subject, draft=True) if draft_names(config_of(subject), subject.checkpoint.specs) else None


def _served(subject: Subject, draft: bool) -> EngineRun:
    sizes = _sizes(subject)
    config = config_of(subject)
    check_class(config)
    logits = "logits" in subject.against and not draft
    again = subject.once(no_second_load) is None
    prompts = [] if draft else prompts_of(config, logits)
    openings = openings_of(tokenizer_of(subject.path), config, prompts) if logits else []
    layers = _routed_layers(config) if logits else 0
    with TemporaryDirectory(prefix="ckptkit-engine-") as scratch:
        root = Path(scratch)
        (root / "scratch").mkdir()
        report = root / "report-0.json"
        EngineJob(
            str(subject.path),
            str(root / "scratch"),
            str(report),
            prompts,
            sizes,
            update=again and "update" in subject.against,
            release_resume=again and "release-resume" in subject.against,
            openings=openings,
            routed_layers=layers,
            draft=draft,
        ).save(root / "job-0.json")
        failed = run_process(root, subject, "verify.witnesses.engine.process", report)
        if not report.exists():
            if failed and _BY_SHAPE.search(failed):
                return EngineRun(None, failed=failed, refused=True)
            return EngineRun(None, failed=f"the engine failed, which says nothing about the checkpoint: {failed}")
        return EngineRun(EngineReport.load(report), prompts, failed, openings, layers)


def _routed_layers(config: Mapping[str, Any]) -> int:
    """The layers of a model with experts whose choices SGLang gives; 0 where it gives none."""
    counted = "num_experts_per_tok" in (config.get("text_config") or config)
    dims = dims_of(config)
    return dims.layers if dims.experts and counted and no_choices(config) is None else 0


def no_choices(config: Mapping[str, Any]) -> str | None:
    """Why SGLang's class cannot tell which experts a token is sent to; None where it can."""
    family = family_of(config)
    if package_release("sglang") >= family.engine("sglang").layer_id_since:
        return None
    since = ".".join(map(str, family.engine("sglang").layer_id_since))
    return (
        f"{family.architectures[0]} has no layer_id in its routers before SGLang {since}, so it cannot report experts"
    )


def no_second_load(subject: Subject) -> str | None:
    """Why SGLang cannot be updated with this checkpoint, known before it starts; None where it may be."""
    specs = subject.hf_files.specs
    joined = fuses_shared(specs)
    packed = (name for name in specs if name.endswith(PACKED) and not is_expert(name))
    other = [name for name in packed if not (joined and ".shared_experts." in name)]
    if not other:
        return None
    return (
        f"not tried, since SGLang cannot load INT4 layers other than routed experts a second time: {summarize(other)}; "
        "leave only experts in INT4 (`ckptkit quantize --preset rl`)"
    )


def run_reference(subject: Subject) -> Reference:
    """What transformers makes of the checkpoint for what the engine was asked. Raises Unable."""
    run = subject.once(run_engine)
    report = run.said()
    check_reference(subject, run.prompts)
    top_ids = [answer.top_ids for answer in report.passes[FIRST]]
    tokenizer = tokenizer_of(subject.path)
    texts = texts_of(tokenizer, config_of(subject)) if tokenizer else None
    job = partial(ReferenceJob, str(subject.path), prompts=run.prompts, top_ids=top_ids, openings=run.openings)
    return _reference(subject, partial(job, written=_written(report), routing=run.routed_layers > 0, texts=texts))


def run_prediction(subject: Subject) -> Reference:
    """What transformers alone makes of fixed texts, in float32 where that fits into memory.

    Raises Unable where it cannot say, also because memory does not hold the model.
    """
    config = config_of(subject)
    home = Path(getattr(subject.checkpoint, "hf_path", subject.path))
    texts = texts_of(tokenizer_of(home), config)
    check_reference(subject, texts)
    numbers = sum(map(math.prod, expected_hf(config).values()))
    # What is dequantized or comes from Megatron is in memory twice while it is loaded.
    twice = 2 if subject.kind == "megatron" or is_quantized(config) else 0
    free = free_memory()
    sizes = {dtype: int(_WITH_ROOM * (width + twice) * numbers) for dtype, width in (("float32", 4), (None, 2))}
    fitting = [dtype for dtype, size in sizes.items() if not free or size <= memory_limit(free)]
    if not fitting:
        raise Unable(
            f"transformers needs {size(sizes[None])} of memory for this model and {size(free)} are "
            "free: run it on a larger machine, or an engine on GPUs (--engine --logits)"
        )
    hf = str(subject.hf_path) if subject.hf_path else None
    return _reference(subject, partial(ReferenceJob, str(subject.path), texts=texts, hf=hf, dtype=fitting[0]))


def run_source(subject: Subject) -> Reference:
    """What transformers makes of the source for the openings alone. Raises Unable."""
    run = subject.once(run_engine)
    job = partial(ReferenceJob, str(subject.source_path), openings=run.openings, written=_written(run.said()))
    return _reference(subject, job)


def check_reference(subject: Subject, prompts: Ids) -> None:
    """Raises Unable where transformers is known to compute another model for prompts."""
    config = config_of(subject)
    why = family_of(config).unlike_transformers(config, max(map(len, prompts)))
    if why:
        raise Unable(f"transformers is no reference for this model: {why}")


def _written(report: EngineReport) -> Ids:
    return [one.ids for one in report.written]


def judged_by_transformers(
    subject: Subject, prompts: Ids, top_ids: Sequence[Ids], dtype: str, streams: Sequence[str]
) -> Reference:
    """What transformers makes of prompts with the source's weights, or without an HF source with the subject's own.

    `dtype` and `streams` as in `ReferenceJob`. Raises Unable.
    """
    path = subject.source_path if subject.source_kind == "hf" and subject.source_path else subject.path
    hf = str(subject.hf_path) if subject.hf_path else None
    job = partial(ReferenceJob, str(path), prompts=prompts, top_ids=top_ids, hf=hf)
    return _reference(subject, partial(job, dtype=dtype, streams=streams))


def _reference(subject: Subject, job: Callable[..., ReferenceJob]) -> Reference:
    with TemporaryDirectory(prefix="ckptkit-reference-") as scratch:
        root = Path(scratch)
        report = root / "report-0.json"
        job(report=str(report)).save(root / "job-0.json")
        failed = run_process(root, subject, "verify.witnesses.engine.reference", report)
        if failed or not report.exists():
            raise Unable(f"transformers gave no reference, which says nothing about the checkpoint: {failed}")
        return Reference.load(report)


def _sizes(subject: Subject) -> EngineSizes:
    """The engine's sizes. Raises Unable unless an engine can serve the subject here."""
    import torch

    if find_spec("sglang") is None:
        raise Unable("SGLang is not installed here: pip install sglang")
    if subject.kind != "hf":
        raise Unable("an engine serves HF directories: export it (`ckptkit convert`) and verify the export")
    if torch.cuda.device_count() < max(1, subject.tp):
        raise Unable(f"needs CUDA: one GPU a rank for {subject.tp}, and there are {torch.cuda.device_count()} here")
    if (sizes := engine_sizes(subject)) is None:
        raise Unable("an engine has no such sizes: --ep divides --tp, and there is no --pp")
    return sizes


def run_process(root: Path, subject: Subject, module: str, report: Path, more_s: float = 0) -> str | None:
    """Runs a process with `root`/job-0.json, with `more_s` seconds beyond what loading the subject may take.

    Returns in which phase it ended and what it said; None where it ended well.
    """
    stored = sum(spec.nbytes for spec in subject.checkpoint.specs.values())
    failed = start(root, 1, _START_S + 8 * stored / _BYTES_A_SECOND + more_s, module)
    if not failed:
        return None
    ending = Ending.load(ending_path(report))
    return f"while {ending.phase}: {ending.said or last_error(root / 'log-0') or failed[0]}"


def last_error(log: Path) -> str | None:
    """The last exception in an engine's log, which goes on after it, with the place that raised it."""
    lines = log.read_text(errors="replace").splitlines()
    starts = [index for index, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    if not starts:
        return None
    block = list(takewhile(lambda line: not line.startswith("["), lines[starts[-1] + 1 :]))
    frames = [line.strip() for line in block if line.startswith("  File ")]
    said = [line for line in block if line and not line.startswith(" ")]
    return one_line(" | ".join([*said[:2], *(f"at {frame}" for frame in frames[-1:])]))


def prompts_of(config: Mapping[str, Any], with_long: bool) -> list[list[int]]:
    """Fixed tokens, the same in every run: short prompts and, `with_long`, one of 4096 tokens or all the model takes.

    Tokens that the config names (end, padding, images) are left out. Raises CkptkitError without a vocabulary size.
    """
    text = config.get("text_config") or config
    if not isinstance(vocabulary := text.get("vocab_size"), int):
        raise CkptkitError("config.json has no vocab_size", "take it from the release")
    special = {one for part in (config, text) for key, value in part.items() if "token" in key for one in _ids(value)}
    choice = [token for token in range(vocabulary) if token not in special]
    longest = min(_LONG, int(text.get("max_position_embeddings") or _LONG) - 8)
    lengths = [min(_SHORT, longest)] * _SHORT_PROMPTS + [longest] * with_long
    source = random.Random(0)
    return [source.choices(choice, k=length) for length in lengths]


def _ids(value: Any) -> list[int]:
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int)]

"""Starts the engine witness and its reference in processes of their own, and turns what becomes of them into data."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ckptkit.core.errors import CkptkitError
from verify.evidence.expected import config_of
from verify.evidence.subject import Subject
from verify.skip import Unable
from verify.witnesses.ending import Ending, ending_path
from verify.witnesses.engine.job import FIRST, EngineJob, EngineReport, Judged
from verify.witnesses.sglang.job import EngineSizes
from verify.witnesses.sglang.run import check_class, engine_sizes, start

_START_S = 1200  # importing SGLang and compiling its kernels on a cold machine
_BYTES_A_SECOND = 20e6
_SHORT, _LONG = 48, 4096  # tokens of a prompt
_SHORT_PROMPTS = 8


@dataclass(frozen=True)
class EngineRun:
    """The report of the engine, as far as it came, to these prompts; `failed`: why it is missing or not complete."""

    report: EngineReport | None
    prompts: Sequence[Sequence[int]] = ()
    failed: str | None = None


def run_engine(subject: Subject) -> EngineRun:
    """Serves the subject with a real engine and does what was asked. Raises Unable where that cannot be done here."""
    sizes = _sizes(subject)
    config = config_of(subject)
    check_class(config)
    prompts = prompts_of(config, "logits" in subject.against)
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
            update="update" in subject.against,
            release_resume="release-resume" in subject.against,
        ).save(root / "job-0.json")
        failed = run_process(root, subject, "verify.witnesses.engine.process", report)
        if not report.exists():
            return EngineRun(None, failed=f"the engine failed, which says nothing about the checkpoint: {failed}")
        return EngineRun(EngineReport.load(report), prompts, failed)


def run_reference(subject: Subject) -> Mapping[str, Sequence[Judged]]:
    """What transformers makes of the same prompts, by dtype. Raises Unable where it cannot say."""
    from verify.witnesses.engine.reference import ReferenceJob, load_report

    run = subject.once(run_engine)
    if run.report is None:
        raise Unable(run.failed or "the engine gave no report")
    with TemporaryDirectory(prefix="ckptkit-reference-") as scratch:
        root = Path(scratch)
        report = root / "report-0.json"
        top_ids = [answer.top_ids for answer in run.report.passes[FIRST]]
        ReferenceJob(str(subject.path), str(report), run.prompts, top_ids).save(root / "job-0.json")
        failed = run_process(root, subject, "verify.witnesses.engine.reference", report)
        if failed or not report.exists():
            raise Unable(f"transformers gave no reference, which says nothing about the checkpoint: {failed}")
        return load_report(report)


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
    size = sum(spec.nbytes for spec in subject.checkpoint.specs.values())
    failed = start(root, 1, _START_S + 8 * size / _BYTES_A_SECOND + more_s, module)
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
    return " | ".join([*said[:2], *(f"at {frame}" for frame in frames[-1:])])


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

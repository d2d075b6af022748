"""Starts the SGLang witness in a process of its own, and turns whatever becomes of it into data."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ckptkit.core.printable import one_line
from ckptkit.formats.hf.reader import read_json
from converters.open import open_megatron
from converters.passthrough import passthrough_beside
from converters.registry import FAMILIES
from verify.evidence.expected import config_of, is_quantized
from verify.evidence.plain import plain
from verify.evidence.subject import Subject
from verify.skip import Unable
from verify.witnesses.confined import end, environment, stuck_at
from verify.witnesses.confined import start as run_module
from verify.witnesses.ending import Ending, ending_path, how_it_ended
from verify.witnesses.ranks import causes, wait
from verify.witnesses.sglang.job import ONE_RANK, EngineSizes, SglangJob, SglangReport

TESTED = ("0.5.15.post1", "0.5.16", "0.5.23")  # versions of SGLang: docs/sglang-versions.md
_WITNESS = "verify.witnesses.sglang.process"  # the module that ranks run
_START_S = 900  # importing SGLang and building its kernels on a cold machine
_BYTES_A_SECOND = 20e6  # slower than any disk worth waiting for
_LAST_LINES = 8


@dataclass(frozen=True)
class SglangRun:
    """The witness's report, or SGLang's refusal (`crash`), or why SGLang could not be asked (`unable`).

    `draft`: its report on the draft model, where the checkpoint has multi-token prediction layers; else
    `draft_crash`: its refusal to load that, or `undrafted`: why it could not be asked.
    """

    report: SglangReport | None
    crash: str | None = None
    unable: str | None = None
    draft: SglangReport | None = None
    draft_crash: str | None = None
    undrafted: str | None = None


def run_sglang(subject: Subject) -> SglangRun:
    """Loads the subject into real SGLang, in a subprocess a rank whose output only serves to describe how it ended.

    On GPUs (NCCL) where there is one for each rank, else on the CPU (gloo). Raises Unable where SGLang is missing,
    would take a class or a layout that ckptkit does not know, or would lack tensors that no Megatron model holds;
    CkptkitError where the config is of no supported family.
    """
    if find_spec("sglang") is None:
        raise Unable("SGLang is not installed here: pip install sglang")
    config = config_of(subject)
    check_class(config)
    check_passthrough(subject, config)
    with TemporaryDirectory(prefix="ckptkit-sglang-") as scratch:
        root = Path(scratch)
        (root / "scratch").mkdir()
        first = SglangJob(
            checkpoint=str(subject.path.absolute()),
            hf=str(subject.hf_path.absolute()) if subject.hf_path else None,
            source=_source(subject),
            scratch=str(root / "scratch"),
            report="",
            sizes=engine_sizes(subject) or ONE_RANK,
        )
        jobs = [replace(first, rank=rank, report=str(root / f"report-{rank}.json")) for rank in range(first.sizes.tp)]
        for job in jobs:
            job.save(root / f"job-{job.rank}.json")
        size = sum(spec.nbytes for spec in subject.checkpoint.specs.values())
        failed = start(root, len(jobs), _START_S + size / _BYTES_A_SECOND)
        run = outcome(failed, [Path(job.report) for job in jobs], [root / f"log-{job.rank}" for job in jobs])
    return _of_untested(run, version("sglang"))


def _of_untested(run: SglangRun, found: str) -> SglangRun:
    """What an SGLang that is not known refuses without a GPU may be how ckptkit builds models there."""
    import torch

    refusal = run.crash or run.draft_crash
    if refusal is None or found in TESTED or torch.cuda.is_available():
        return run
    why = f"SGLang {found} was not tested without a GPU ({', '.join(TESTED)} were), and fails: {refusal}"
    return SglangRun(None, unable=why) if run.crash else SglangRun(run.report, undrafted=why)


def engine_sizes(subject: Subject) -> EngineSizes | None:
    """The sizes asked for, as SGLang has them; None where it has no such sizes."""
    sizes = EngineSizes(subject.tp, subject.ep, subject.options.dp_attention and subject.tp > 1)
    etp = subject.options.etp or subject.tp // subject.ep
    possible = subject.options.pp == 1 and subject.tp % subject.ep == 0 and etp == subject.tp // subject.ep
    return sizes if possible else None


def outcome(failed: Mapping[int, str], reports: Sequence[Path], logs: Sequence[Path]) -> SglangRun:
    """What became of a witness whose ranks were to write `reports`; `failed`: how those ended that did not."""
    from verify.witnesses.sglang.merge import merged  # needs torch, which header verbs do not import

    drafts = [SglangReport.draft_path(report) for report in reports]
    if not all(report.exists() for report in reports):
        ending, said = _cause(failed, reports, logs)
        if ending.verdict:
            return SglangRun(None, crash=said)
        return SglangRun(
            None, unable=f"the witness failed while {ending.phase}, which says nothing about the checkpoint: {said}"
        )
    report = merged([SglangReport.load(report) for report in reports])
    if not report.draft:
        return SglangRun(report)
    if all(draft.exists() for draft in drafts):
        return SglangRun(report, draft=merged([SglangReport.load(draft) for draft in drafts]))
    ending, said = _cause(failed, reports, logs)
    if ending.verdict:
        return SglangRun(report, draft_crash=f"while {ending.phase}, {said}")
    return SglangRun(report, undrafted=f"the draft model was not looked at: while {ending.phase}, {said}")


def _cause(failed: Mapping[int, str], reports: Sequence[Path], logs: Sequence[Path]) -> tuple[Ending, str]:
    """How the rank ended that is to blame for reports that are missing, and in words."""
    endings = {rank: Ending.load(ending_path(reports[rank])) for rank in failed or range(len(reports))}
    told = causes({rank: ending.said for rank, ending in endings.items()}) or endings
    rank = min(told, key=lambda one: (not endings[one].verdict, one))
    ending, how = endings[rank], failed.get(rank, "no report")
    on = f"rank {rank}: " if len(reports) > 1 else ""
    return ending, f"{on}{how}; {ending.said or last_words(logs[rank])}"


def check_class(config: Mapping[str, Any]) -> None:
    """Raises Unable unless SGLang has to choose the class that is known here.

    For a name that is no class of its own SGLang would take transformers' class, and to find it run the Python files
    that `auto_map` names, which come with the checkpoint.
    """
    wanted, named = FAMILIES[config["model_type"]].architectures, config.get("architectures")
    if named not in [[one] for one in wanted]:
        raise Unable(
            f"config.json has architectures {named!r:.80}, not ['{wanted[0]}']: SGLang would run another class, or "
            "code that comes with the checkpoint"
        )


def check_passthrough(subject: Subject, config: Mapping[str, Any]) -> None:
    """Raises Unable for a Megatron checkpoint of a model with a vision tower that is not at hand.

    SGLang builds the tower, and a Megatron language model has no weights for it.
    """
    carried = FAMILIES[config["model_type"]].carried
    if subject.kind == "hf" or not carried or "vision_config" not in config:
        return
    opened = open_megatron(subject.location, subject.hf_path)
    if passthrough_beside(opened, opened.hf, subject.location.root, plain) is None:
        raise Unable(
            f"Megatron holds no {carried[0]}*, and neither a folder beside it nor {opened.hf_path} has it: give --hf "
            "the release with its weights"
        )


def _source(subject: Subject) -> str | None:
    """The unquantized HF directory that a Megatron checkpoint's values are held against, if any."""
    path = subject.source_path
    if subject.kind == "hf" or path is None or subject.source_kind != "hf":
        return None
    return None if is_quantized(read_json(path / "config.json")) else str(path.absolute())


def start(root: Path, ranks: int, limit_s: float, module: str | None = None) -> dict[int, str]:
    """Runs `module`, or the witness, with `root`/job-RANK.json, a process each, which print into log-RANK.

    Returns how those ended that failed first.
    """
    import torch

    variables = {key: value for key, value in environment().items() if key != "SGLANG_USE_CPU_ENGINE"}
    if ranks > 1:
        variables |= {"OMP_NUM_THREADS": "1"}
        if torch.cuda.device_count() < ranks:
            variables |= {"CUDA_VISIBLE_DEVICES": ""}
    processes = {
        rank: run_module(module or _WITNESS, [root / f"job-{rank}.json"], root / f"log-{rank}", variables)
        for rank in range(ranks)
    }
    try:
        first, _ = wait(range(ranks), processes, root, time.monotonic() + limit_s)
    finally:
        for process in processes.values():
            end(process)
    late = f"it did not end within {limit_s:.0f} s"
    return {
        rank: late + stuck_at(root / f"log-{rank}") if code is None else str(how_it_ended(code))
        for rank, code in first.items()
    }


def last_words(log: Path) -> str:
    """The last exception in a log with the place it came from, or the last lines where there is none; on one line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    starts = [index for index, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if not starts:
        return f"it last printed: {one_line(' | '.join(lines[-_LAST_LINES:]))}" if lines else "it printed nothing"
    frames = [line.strip() for line in lines[starts[-1] :] if line.startswith("  File ")]
    message = [line for line in lines[starts[-1] + 1 :] if not line.startswith(" ")]
    return one_line(" | ".join([*message[:_LAST_LINES], *(f"at {frame}" for frame in frames[-1:])]))

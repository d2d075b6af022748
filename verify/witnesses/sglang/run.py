"""Starts the SGLang witness in a process of its own, and turns whatever becomes of it into data."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ckptkit.formats.hf.reader import read_json
from converters.registry import FAMILIES
from verify.evidence.expected import config_of, is_quantized
from verify.evidence.subject import Subject
from verify.skip import Unable
from verify.witnesses.ending import Ending, ending_path, how_it_ended
from verify.witnesses.sglang.job import SglangJob, SglangReport

_START_S = 900  # importing SGLang and building its kernels on a cold machine
_BYTES_A_SECOND = 20e6  # slower than any disk worth waiting for
_LAST_LINES = 8


@dataclass(frozen=True)
class SglangRun:
    """The witness's report, or SGLang's refusal (`crash`), or why SGLang could not be asked (`unable`)."""

    report: SglangReport | None
    crash: str | None = None
    unable: str | None = None


def run_sglang(subject: Subject) -> SglangRun:
    """Loads the subject into real SGLang, in a subprocess whose output only serves to describe how it ended.

    Raises Unable where SGLang is not installed or would take a class or a layout that ckptkit does not know,
    CkptkitError where the config is of no supported family.
    """
    if find_spec("sglang") is None:
        raise Unable("SGLang is not installed here: pip install sglang")
    config = config_of(subject)
    _check_class(config)
    with TemporaryDirectory(prefix="ckptkit-sglang-") as scratch:
        root = Path(scratch)
        (root / "scratch").mkdir()
        job = SglangJob(
            checkpoint=str(subject.path.absolute()),
            hf=str(subject.hf_path.absolute()) if subject.hf_path else None,
            source=_source(subject),
            scratch=str(root / "scratch"),
            report=str(root / "report.json"),
        )
        job.save(root / "job.json")
        size = sum(spec.nbytes for spec in subject.checkpoint.specs.values())
        ended = start(root / "job.json", root / "log", _START_S + size / _BYTES_A_SECOND)
        return outcome(ended, Path(job.report), root / "log")


def outcome(ended: str | None, report: Path, log: Path) -> SglangRun:
    """What became of a witness that was to write `report`; `ended`: how it ended, None when well."""
    if ended is None and report.exists():
        return SglangRun(SglangReport.load(report))
    ending = Ending.load(ending_path(report))
    if ending.verdict:
        return SglangRun(None, crash=f"{ended}; {ending.said}")
    how = f"{ended or 'no report'}; {ending.said or last_words(log)}"
    return SglangRun(
        None, unable=f"the witness failed while {ending.phase}, which says nothing about the checkpoint: {how}"
    )


def _check_class(config: Mapping[str, Any]) -> None:
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


def _source(subject: Subject) -> str | None:
    """The unquantized HF directory that a Megatron checkpoint's values are held against, if any."""
    path = subject.source_path
    if subject.kind == "hf" or path is None or subject.source_kind != "hf":
        return None
    return None if is_quantized(read_json(path / "config.json")) else str(path.absolute())


def start(job: Path, log: Path, limit_s: float) -> str | None:
    """Runs the witness, which prints into `log`. None when it ended well, else how it ended."""
    environment = {key: value for key, value in os.environ.items() if key != "SGLANG_USE_CPU_ENGINE"}
    paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    with log.open("wb") as output:
        command = [sys.executable, "-m", "verify.witnesses.sglang.process", str(job)]
        try:
            code = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                timeout=limit_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"it did not end within {limit_s:.0f} s"
    return how_it_ended(code)


def last_words(log: Path) -> str:
    """The last exception in a log with the place it came from, or the last lines where there is none; on one line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    starts = [index for index, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if not starts:
        return f"it last printed: {' | '.join(lines[-_LAST_LINES:])}" if lines else "it printed nothing"
    frames = [line.strip() for line in lines[starts[-1] :] if line.startswith("  File ")]
    message = [line for line in lines[starts[-1] + 1 :] if not line.startswith(" ")]
    return " | ".join([*message[:_LAST_LINES], *(f"at {frame}" for frame in frames[-1:])])

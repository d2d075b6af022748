"""CK711 to CK714 and CK717: every side finds its weights at the paths of a launch, and all words are read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ckptkit.formats.hf.side_files import describe_quantization, quantization_of
from ckptkit.verify.core.check import CheckResult, check
from ckptkit.verify.core.issue import Issue
from ckptkit.verify.core.skip import CannotCheck, NotApplicable
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.evidence.expected import weights_of
from ckptkit.verify.evidence.folding import by_key
from ckptkit.verify.launch.checks.engine import engine_config, job_of
from ckptkit.verify.launch.job import Job
from ckptkit.verify.launch.sides import HF, LOAD, REF, STEP, PathIssue, Side
from ckptkit.verify.launch.words import UNSET

NOT_READ = "not read"  # the fact that lists relevant words of a launch that are not read
# A line of `Job.unread` about an unset variable.
_UNSET = re.compile(rf"(?P<words>.+): \$\{{?(?P<name>\w+)\}}? \({UNSET}\)")


def _sides(subject: Subject) -> Sequence[Side]:
    """The sides of a launch. Raises NotApplicable for a launch without a known path."""
    if not (sides := job_of(subject).sides):
        raise NotApplicable("the launch has no known path")
    return sides


def _check_paths(code: str) -> None:
    """Registers the check that reports the path issues of this code."""

    def paths_found(subject: Subject, result: CheckResult) -> Iterator[Issue]:
        """Issues of paths, once for all sides that load them."""
        sides = _sides(subject)
        result.compared(len(sides))
        issues = [*(one for side in sides for one in side.issues), *_packed(job_of(subject))]
        yield from dict.fromkeys(issue for reported_by, issue in issues if reported_by == code)

    check(code, applies_to=_sides)(paths_found)


def _packed(job: Job) -> Iterator[PathIssue]:
    """HF weights of four bits that a trainer would load, which needs BF16. The base of an adapter may have them.

    Megatron-Bridge unpacks those of Kimi K2 and of gpt-oss (`kimi_bridge.py`, `gpt_oss_bridge.py`).
    """
    trains = [
        side for side in job.sides if side.role in ("reference", "critic", "actor") and side.kind == "hf" and side.path
    ]
    for side in {side.path: side for side in reversed(trains)}.values() if job.adapter is None else ():
        path = side.path or Path()
        config = engine_config(path)
        content, kind = quantization_of(config), str(config.get("model_type"))
        if not isinstance(content, Mapping) or kind.startswith(("kimi", "gpt_oss")):
            continue
        if content.get("quant_algo") == "NVFP4" or weights_of(config).get("num_bits") == 4:
            hint = "pass the BF16 release, or dequantize with `ckptkit quantize CKPT OUT --scheme none` first"
            expected = f"BF16 weights, which the {side.role} trains"
            actual = f"weights of 4 bits ({path}/config.json: {describe_quantization(config)})"
            yield LOAD if side.role == "actor" else REF, Issue(expected, actual, hint, file=path)


for _code in (LOAD, REF, STEP, HF):
    _check_paths(_code)


def _job(subject: Subject) -> Job:
    job = job_of(subject)
    if not (job.text.words or job.unread or job.written):
        raise NotApplicable("no launch arguments were given")
    return job


@check("CK717", applies_to=_job)
def arguments_read(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Options with a checkpoint, a parallel size or a file of settings, and Hydra overrides."""
    job = _job(subject)
    result.compared(len(job.text.words) or 1)
    for note in job.notes:
        result.note(note)
    if lines := job.unread:
        reason, result.facts[NOT_READ] = _unread(lines)
        raise CannotCheck(f"a part of the launch could not be read: {reason}")
    yield from ()


def _unread(lines: Sequence[str]) -> tuple[str, list[str]]:
    """The reason why words are not read, and a line for each. The words of an unset variable are one line."""
    others = [line for line in lines if not _UNSET.fullmatch(line)]
    unset = by_key((match["name"], match["words"]) for match in map(_UNSET.fullmatch, lines) if match)
    if not unset:
        more = f", and {len(others) - 1} more" if others[1:] else ""
        return f"{others[0]}{more}", others
    names = ", ".join(f"${{{name}}}" for name in unset)
    more = f", and {len(others)} more" if others else ""
    reason = f"{names} ({UNSET}){more}; set it first: export "
    reason += " ".join(f"{name}=VALUE" for name in unset)
    return reason, [*(", ".join(words) for words in unset.values()), *others]

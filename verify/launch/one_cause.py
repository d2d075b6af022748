"""Makes one finding of the many that a wrong path gives: a checkpoint of another model than the launch's config."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from verify.check import Outcome
from verify.evidence.subject import Subject
from verify.report import Finding

# The fact that lists what one finding stands for.
FOLDED = "of another model"
# What differs where config and weights are of two models: tensors by name and shape, arguments, keys of config.json.
_TENSORS, _ARGUMENTS = ("CK104", "CK105"), ("CK701", "CK702")
# So few are told one by one.
_FEW, _NAMED = 4, 3


def of_another_model(subject: Subject, outcome: Outcome) -> Outcome:
    """The outcome of a directory's checks, where its findings have one cause with that as the only one of them.

    The cause is a path: more than a few tensors, and arguments too, are not those of the config that another path of
    the launch gives. `facts["of another model"]` then has what was found.
    """
    config = subject.hf_path or subject.source_path
    errors = [one for one in outcome.findings if one.severity == "error" and one.code in _TENSORS + _ARGUMENTS]
    arguments = [one for one in errors if one.code in _ARGUMENTS]
    if config is None or not arguments or len(errors) <= _FEW:
        return outcome
    kept = _finding(arguments, errors, config, subject.path)
    outcome.facts[FOLDED] = [_line(one) for one in errors]
    at = outcome.findings.index(errors[0])
    left = [one for one in outcome.findings if one not in errors]
    return replace(outcome, findings=[*left[:at], kept, *left[at:]])


def _finding(arguments: list[Finding], errors: list[Finding], config: Path, path: Path) -> Finding:
    tensors = sum(one.count for one in errors if one.code in _TENSORS)
    named = [one.actual for one in arguments[:_NAMED]]
    more = [f"{len(arguments) - _NAMED} more arguments"] if arguments[_NAMED:] else []
    held = [f"{tensors} tensors with other names or shapes"] if tensors else []
    expected, actual = f"the model of {config}/config.json", f"another one: {', '.join([*named, *more, *held])}"
    hint = f"give the checkpoint of that model, or the HF directory of this one; --all lists {len(errors)} differences"
    return Finding(arguments[0].code, expected, actual, hint, file=str(path))


def _line(one: Finding) -> str:
    about = f"{one.tensor}: " if one.tensor else ""
    return f"{one.code}: {about}expected {one.expected}, found {one.actual}"

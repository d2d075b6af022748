"""`preflight`: the weights that each side of a job would load, and whether they match, before GPUs are booked.

It reads headers, JSON files and samples of weights, in seconds for a model of any size.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError, UsageError
from ckptkit.core.isolation import HIDDEN, is_secret
from ckptkit.core.signature import public
from ckptkit.formats.detect import refuse_url, require_own_files
from ckptkit.storage.regular import read_regular
from ckptkit.verify.checks.config.config import STAGES
from ckptkit.verify.checks.headers.torch_dist import TRAINING_STATE
from ckptkit.verify.core.check import NOT_APPLICABLE, OF_WITNESSES, Check, all_checks
from ckptkit.verify.core.report import NOTES, CheckResult, Finding, Report
from ckptkit.verify.core.run import checked_stages, report_of, results_of
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.evidence.expected import model_of
from ckptkit.verify.evidence.folding import by_key
from ckptkit.verify.launch.arguments import LaunchArguments
from ckptkit.verify.launch.checks.architecture import describe_difference
from ckptkit.verify.launch.checks.paths import NOT_READ
from ckptkit.verify.launch.checks.same_weights import COMPARED, NOT_COMPARED
from ckptkit.verify.launch.job import Job, Launch, PreflightOptions
from ckptkit.verify.launch.python.launcher import read_launcher
from ckptkit.verify.launch.shell.read import read_script
from ckptkit.verify.launch.sides import ENGINE
from ckptkit.verify.launch.stacks.others import find_stack_by_command
from ckptkit.verify.launch.stacks.which import is_config, read_job
from ckptkit.verify.launch.words import LaunchText, UnresolvedWord, Word
from ckptkit.verify.options import VerifyOptions

_MAX_BYTES = 300_000  # of a script, as in `read_script`


@public(PreflightOptions)
def preflight(
    script: str | Path | None = None,
    *,
    arguments: str | Sequence[str] = (),
    text: LaunchText | None = None,
    ask_trainer: str | Path | None = None,
    **options: Any,
) -> Report:
    """Checks the words of a launch, and headers, JSON files and samples of the weights that it would load.

    `script` is a launch script of bash, which is read and never run, or the YAML file of a job of verl, NeMo-RL or
    ROLL. `arguments` are the words behind it, or a launch without a script; of one string, those of a shell. `text` is
    a launch that is already read. `ask_trainer` is a Python in which the trainer parses the launch, which executes its
    code. Paths of weights (`hf_checkpoint`, `load`, `ref_load`) and sizes default to those of the launch. Its variables
    may be set in the environment. The report is inconclusive if the launch has a size or a path that cannot be read
    before it runs. Raises CkptkitError if no path is given or one is a URL, if two sizes contradict each other, and if
    the script is not a launch.
    """
    if isinstance(arguments, str):
        arguments = shlex.split(arguments)
    path = Path(script or "-")
    if str(path) != "-" and (path.is_dir() or not path.exists()):
        hint = "give weights as --hf-checkpoint, --load or --ref-load, and arguments of the launch after --"
        raise UsageError(f"{path} {'is a directory, not a launch' if path.is_dir() else 'does not exist'}", hint)
    # Reports show values of a launch, so no reader of a launch sees a value that may be a secret.
    environment = {name: HIDDEN if is_secret(name, value) else value for name, value in os.environ.items()}
    config = Path(script) if script and is_config(Path(script)) else None
    if text is None:
        text = _text(None if config else script, arguments, environment)
    start = takewhile(lambda word: not word.startswith("--"), (word.text for word in text.words))
    if other := find_stack_by_command(text.program or " ".join(start)):
        raise other.refusal(script or "the command")
    options = {name: value for name, value in options.items() if value not in (None, "")}
    for name in {"hf_checkpoint", "load", "ref_load"} & options.keys():
        refuse_url(options[name])
        options[name] = Path(options[name])
    known = {name: word.text for name, word in text.environment.items() if not isinstance(word, UnresolvedWord)}
    job, reasons = read_job(Launch(text, PreflightOptions(**options), {**environment, **known}), config), []
    if ask_trainer is not None:
        from ckptkit.verify.launch.ask_trainer import ask_trainer as ask

        try:
            job = ask(job, ask_trainer)
        except UsageError:
            raise
        except CkptkitError as error:
            reasons = [f"{error.message}: {error.hint}"]
    report = check_job(job)
    return replace(report, reasons=[*report.reasons, *reasons], launch=None if str(path) == "-" else str(path))


def _text(script: str | Path | None, arguments: Sequence[str], environment: Mapping[str, str]) -> LaunchText:
    """The launch of a script, of standard input (`-`), or of words."""
    if script is None:
        return LaunchText(tuple(Word(word) for word in arguments))
    path, given = (None, sys.stdin.read()) if str(script) == "-" else (Path(script), None)
    try:
        if path and path.suffix == ".py":
            return read_launcher(path, arguments, environment)
        return read_script(path, given, arguments, environment)
    except CkptkitError as error:
        if other := find_stack_by_command(given or _content(path)):
            raise other.refusal(path or "the text") from error
        raise


def _content(path: Path | None) -> str:
    """The text of a refused script, or "" if it cannot be read."""
    try:
        return read_regular(path, _MAX_BYTES).decode(errors="replace") if path else ""
    except (OSError, ValueError):
        return ""


FOLDED = "of another model"  # the fact that lists the differences behind one finding
# Checks that fail if config and weights are of two models: tensors by name and shape, arguments, keys of config.json.
_TENSORS, _ARGUMENTS = ("CK104", "CK105"), ("CK701", "CK702")
# Findings are folded from this number of arguments on, and above this number of findings.
_MIN_ARGUMENTS, _MAX_LISTED = 2, 4
_FACTS = (STAGES, TRAINING_STATE, NOTES, NOT_READ, FOLDED)


def check_job(job: Job) -> Report:
    """Checks the launch of a job, and every directory that it loads."""
    checks, directories = all_checks(OF_WITNESSES), list(_directories(job))
    launched = Subject(job.root, job=job, arguments=job.actor, loaded={one.path: one for one in directories})
    launch_checks = [one for one in checks if one.stage == "launch"]
    results = results_of(launched, [one for one in launch_checks if not one.needs])
    for subject in directories:
        results += check_headers(subject)
    gates = {one.code for one in checks if one.gate}
    broken = next((one.code for one in results if one.code in gates and one.status == "failed"), None)
    # Checks that read weights need sound headers.
    results += results_of(launched, [one for one in launch_checks if one.needs], broken)
    report = report_of(results, ", ".join(dict.fromkeys(str(side.path) for side in job.sides_with_weights())))
    notes = [*job.replaced, *report.facts.get(NOTES, [])]
    compared = report.facts.get(COMPARED, [])
    skipped = ["some weights"] * bool(report.facts.get(NOT_COMPARED)) if compared else ["weights"]
    return replace(
        report,
        command=("ckptkit", "preflight"),
        checks=_merged(checks, report.checks),
        findings=list(dict.fromkeys(report.findings)),
        facts={"what would be loaded": [str(side) for side in (*job.sides, job.adapter) if side]}
        | {key: lines for key, lines in report.facts.items() if key in _FACTS}
        | ({NOTES: notes} if notes else {})
        | {NOT_APPLICABLE: report.facts.get(NOT_APPLICABLE, [])},
        model=next(filter(None, map(model_of, directories)), None),
        asked=[*checked_stages(report.checks), *compared],
        not_asked=[*skipped, "engine"],
    )


def _directories(job: Job) -> Iterator[Subject]:
    """Each directory once for all roles with the same sizes, with the config for its weights."""
    seen: dict[tuple[Path, LaunchArguments], Path] = {}
    server = job.sizes.get(ENGINE, LaunchArguments()).server
    for side in job.sides:
        sizes = job.sizes.get(side.role, LaunchArguments(server=server))
        if side.path is not None:
            require_own_files(side.path)
        # A critic has a different output layer, and a teacher is a different model.
        if side.path is None or (job.stack.one_model and side.role in ("critic", "teacher")):
            continue
        if (side.path, sizes) in seen or (side.role == ENGINE and side.path in seen.values()):
            continue
        seen[side.path, sizes] = side.path
        readers = job.stack.vllm_readers if sizes.server == "vllm" else None
        model = job.models.get(side.role, job.hf)
        usable = model if model and (model / "config.json").exists() else None
        yield Subject(
            side.path,
            hf_path=usable if side.kind == "megatron" else None,
            source_path=usable if side.kind == "hf" and side.path != usable else None,
            arguments=sizes,
            options=VerifyOptions(tp=sizes.tp or 1, pp=sizes.pp or 1, ep=sizes.ep or 1, etp=sizes.etp, readers=readers),
            # In mode bridge miles packs the tensors that the checkpoint stores packed, and ignores the `ignore` list.
            updated=None if job.bridge else job.updates,
            sizes_at=job.sizes_at,
        )


def check_headers(subject: Subject) -> list[CheckResult]:
    """Checks the headers and JSON files of one directory, without weights."""
    results = results_of(subject, [one for one in all_checks(OF_WITNESSES) if one.stage == "headers" or one.preflight])
    _fold_other_model(subject, results)
    return results


def _merged(checks: Sequence[Check], results: Sequence[CheckResult]) -> list[CheckResult]:
    """One result per check: the worst status of all directories, with the sums of counts and seconds."""
    by_code = by_key((one.code, one) for one in results)
    return [
        replace(
            max(by_code[check.code], key=lambda one: ("passed", "skipped", "failed").index(one.status)),
            tensors_compared=sum(one.tensors_compared for one in by_code[check.code]),
            bytes_compared=sum(one.bytes_compared for one in by_code[check.code]),
            seconds=round(sum(one.seconds for one in by_code[check.code]), 3),
            findings=[finding for one in by_code[check.code] for finding in one.findings],
        )
        for check in checks
        if check.code in by_code
    ]


def _fold_other_model(subject: Subject, results: Sequence[CheckResult]) -> None:
    """Replaces errors that a checkpoint of another model causes by one finding; the FOLDED fact lists them."""
    config = subject.hf_path or subject.source_path
    judged = [result for result in results if result.code in _TENSORS + _ARGUMENTS]
    errors = [one for result in judged for one in result.findings if one.severity == "error"]
    arguments = [one for one in errors if one.code in _ARGUMENTS]
    if config is None or len(arguments) < _MIN_ARGUMENTS or len(errors) <= _MAX_LISTED:
        return
    tensors = sum(one.count for one in errors if one.code in _TENSORS)
    difference = describe_difference([one.actual for one in arguments], tensors)
    expected, actual = f"the model of {config}/config.json", f"another model: {difference}"
    hint = f"pass the checkpoint of that model, or the HF directory of this one; --all lists {len(errors)} differences"
    finding = Finding(arguments[0].code, expected, actual, hint, file=str(subject.path))
    last = [one for one in results if one.status != "not applicable"][-1]
    last.facts[FOLDED] = [
        f"{one.code}: {f'{one.tensor}: ' * bool(one.tensor)}expected {one.expected}, found {one.actual}"
        for one in errors
    ]
    for result in judged:
        kept = (finding if one is errors[0] else one for one in result.findings)
        result.findings = [one for one in kept if one not in errors]

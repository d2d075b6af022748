"""`preflight`: before GPUs are booked, which weights each side of a job would load, and whether they belong together.

Headers and JSON files only: it takes seconds, whatever the size of the model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from ckptkit.core.collector import uncollected
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.detect import refuse_url
from verify.check import NOTES, Check, Skip, Tally, Unable, all_checks, check, run_checks
from verify.checks.config.config import STAGES
from verify.checks.launch.int4_training import updates
from verify.evidence.subject import Subject
from verify.launch.arguments import LaunchArguments
from verify.launch.launch import Launch, sides_of
from verify.launch.sides import Side, Trouble
from verify.report import CheckResult, Finding, Report
from verify.run import LAUNCH, choose

# The fact that lists the words of a launch that matter and are not read.
NOT_READ = "not read"
_HEADERS_ONLY = ("CK1", "CK301", "CK302", "CK303", "CK307", "CK70")


def _no_launch(subject: Subject) -> str | None:
    return None if subject.launch else "only preflight looks at a launch"


def _troubles(subject: Subject, tally: Tally, code: str, options: Sequence[str]) -> Iterator[Finding]:
    if subject.launch is None:
        raise Skip("only preflight looks at a launch")
    said: dict[Trouble, None] = {}
    for side in sides_of(subject.launch):
        tally.compared(0)
        said |= dict.fromkeys(trouble for trouble in side.troubles if trouble.option in options)
    for trouble in said:
        expected, actual = f"{trouble.option}: {trouble.expected}", trouble.actual
        yield Finding(code, expected, actual, trouble.hint, file=str(trouble.path), severity=trouble.severity)


@check(
    "CK711",
    "--load is what the actor loads",
    rationale="Where --load has no tracker file, the actor takes --ref-load without a word: a resumed run starts again, or from the wrong weights.",
    fix="Give the directory that holds latest_checkpointed_iteration.txt, not one of its iterations.",
    unless=_no_launch,
)
def load_found(subject: Subject, tally: Tally) -> Iterator[Finding]:
    """`--load` has a tracker that resolves, or is a supported HF directory; a first start, with an empty one, is a warning."""
    yield from _troubles(subject, tally, "CK711", ["--load"])


@check(
    "CK712",
    "--ref-load is what the reference loads",
    rationale="Of an iteration directory, which has no tracker, Megatron makes random weights with a warning: the KL term pulls towards noise. Others stop.",
    fix="Give the directory that `ckptkit convert` wrote, the one with latest_checkpointed_iteration.txt.",
    unless=_no_launch,
)
def reference_found(subject: Subject, tally: Tally) -> Iterator[Finding]:
    """`--ref-load` has a tracker that resolves, or is a supported HF directory."""
    yield from _troubles(subject, tally, "CK712", ["--ref-load"])


@check(
    "CK713",
    "--ckpt-step is an iteration that is there",
    rationale="--ckpt-step replaces what the tracker says; an iteration that was deleted since is found missing only after the job started.",
    fix="Choose an iteration that is there, or leave --ckpt-step out.",
    unless=_no_launch,
)
def step_found(subject: Subject, tally: Tally) -> Iterator[Finding]:
    """The directory `iter_N` of `--ckpt-step N`."""
    yield from _troubles(subject, tally, "CK713", ["--ckpt-step"])


@check(
    "CK714",
    "--hf-checkpoint is an HF directory",
    rationale="The rollout engine and the tokenizer come from it; engine and trainer must hold the same model.",
    fix="Give the HF directory of the model that --load or --ref-load was converted from.",
    unless=_no_launch,
)
def rollout_found(subject: Subject, tally: Tally) -> Iterator[Finding]:
    """`--hf-checkpoint` has a config.json."""
    yield from _troubles(subject, tally, "CK714", ["--hf-checkpoint"])


def _no_words(subject: Subject) -> str | None:
    return _no_launch(subject) or (
        None if subject.launch and subject.launch.words else "no launch arguments were given"
    )


@check(
    "CK717",
    "every path and size among the launch arguments is read",
    rationale="A size that only a configuration file or an override says is not the one that was looked at: the job may stop after the GPUs were booked.",
    fix="Give paths and sizes as options of preflight, or as the options of Megatron-LM, slime and SGLang; the reasons say which words were not read.",
    unless=_no_words,
)
def arguments_read(subject: Subject, tally: Tally) -> Iterator[Finding]:
    """The words of a launch: options that name a checkpoint, a parallel size or a file of settings, and overrides as Hydra has them."""
    launch = subject.launch
    if launch is None:
        raise Skip("only preflight looks at a launch")
    tally.compared(0, len(launch.words))
    if lines := launch.unread:
        tally.facts[NOT_READ] = lines
        more = f", and {len(lines) - 1} more" if lines[1:] else ""
        raise Unable(f"not read among the launch arguments: {lines[0]}{more}")
    yield from ()


@uncollected()
def preflight(
    hf_checkpoint: str | Path | None = None,
    load: str | Path | None = None,
    ref_load: str | Path | None = None,
    ckpt_step: int | None = None,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    arguments: Sequence[str] = (),
) -> Report:
    """What a launch with these arguments would load, and every trouble that headers and JSON files can tell; reads no weight.

    `arguments` are those of the launch script, of which the ones about parallel sizes and INT4 training are read; variables of
    INT4 training count in the environment too. Where others name a size or a path, the report is inconclusive. Raises
    CkptkitError when no path is given or one is a URL, and when a size is given twice, differently.
    """
    if hf_checkpoint is None and load is None and ref_load is None:
        raise CkptkitError("nothing to look at", "give at least one of --hf-checkpoint, --load and --ref-load")
    for path in (given for given in (hf_checkpoint, load, ref_load) if given):
        refuse_url(path)
    hf, actor, reference = (Path(path) if path else None for path in (hf_checkpoint, load, ref_load))
    launch = Launch(hf, actor, reference, ckpt_step, tuple(arguments))
    options = LaunchArguments.read(arguments, os.environ)
    tp, pp, ep = (
        _agreed(name, given, said)
        for name, given, said in (("tp", tp, options.tp), ("pp", pp, options.pp), ("ep", ep, options.ep))
    )
    # Megatron's default is that of tp; where the launch was not read as a whole, nobody knows.
    etp = options.etp or (tp if arguments and not launch.unread else None)
    checks = all_checks()
    sides = sides_of(launch)
    launched = Subject(hf or actor or reference or Path(), launch=launch, arguments=options)
    outcome = run_checks(launched, choose(launched, [one for one in checks if one.code.startswith(LAUNCH)])[0])
    for subject in _subjects(sides, hf, tp, pp, ep):
        subject.arguments, subject.etp, subject.updated = options, etp, updates(launch, options)
        wanted = [one for one in checks if one.code.startswith(_HEADERS_ONLY) and not one.code.startswith(LAUNCH)]
        outcome.add(run_checks(subject, choose(subject, wanted)[0]))
    return Report(
        version=version("ckptkit"),
        command=("ckptkit", "preflight"),
        checkpoint=", ".join(dict.fromkeys(str(side.path) for side in sides if side.path)),
        source=None,
        checks=_merged(checks, outcome.checks),
        findings=list(dict.fromkeys(outcome.findings)),
        facts={"what would be loaded": [str(side) for side in sides]}
        | {key: lines for key, lines in outcome.facts.items() if key in (STAGES, NOTES, NOT_READ)},
        reasons=outcome.reasons,
    )


def _agreed(name: str, given: int, said: int | None) -> int:
    """A parallel size, by option or among the launch arguments."""
    if said is not None and given not in (1, said):
        raise CkptkitError(f"--{name} {given}, but the launch arguments say {said}", f"leave --{name} out")
    return given if said is None else said


def _subjects(sides: Sequence[Side], hf: Path | None, tp: int, pp: int, ep: int) -> Iterator[Subject]:
    """Each directory once. The rollout's config judges the trainer's weights: the two must hold the same model."""
    seen: set[Path] = set()
    usable = hf if hf and (hf / "config.json").exists() else None
    for side in sides:
        if side.path is None or side.path in seen:
            continue
        seen.add(side.path)
        if side.kind == "megatron":
            yield Subject(side.path, hf_path=usable, tp=tp, pp=pp, ep=ep)
        else:
            yield Subject(side.path, source_path=usable if side.path != usable else None, tp=tp, pp=pp, ep=ep)


def _merged(checks: Sequence[Check], results: Sequence[CheckResult]) -> list[CheckResult]:
    """One result a check: the worst status over all directories, counts and seconds added up."""
    merged: dict[str, CheckResult] = {}
    rank = {"passed": 0, "skipped": 1, "failed": 2}
    for result in results:
        before = merged.get(result.code)
        if before is None:
            merged[result.code] = result
            continue
        worst = max(before, result, key=lambda one: rank[one.status])
        merged[result.code] = replace(
            worst,
            tensors_compared=before.tensors_compared + result.tensors_compared,
            bytes_compared=before.bytes_compared + result.bytes_compared,
            seconds=round(before.seconds + result.seconds, 3),
        )
    return [merged[one.code] for one in checks if one.code in merged]

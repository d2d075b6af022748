"""`preflight`: before GPUs are booked, which weights each side of a job would load, and whether they belong together.

Headers and JSON files only: it takes seconds, whatever the size of the model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.detect import refuse_url
from verify.check import NOTES, Check, Outcome, all_checks, run_checks
from verify.checks.config.config import STAGES
from verify.checks.launch.int4_training import updates
from verify.checks.launch.paths import NOT_READ
from verify.evidence.subject import Subject
from verify.launch.arguments import LaunchArguments
from verify.launch.launch import Launch, sides_of
from verify.launch.sides import Side
from verify.report import CheckResult, Report
from verify.run import choose


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
    """Reports what a launch would load, and what headers and JSON files show to be wrong; reads no weight.

    `arguments` are those of the launch script, of which the ones about parallel sizes and INT4 training are read;
    variables of INT4 training count in the environment too. Where others name a size or a path, the report is
    inconclusive. Raises CkptkitError when no path is given or one is a URL, and when a size is given twice,
    differently.
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
    outcome = run_checks(launched, choose(launched, [one for one in checks if one.stage == "launch"])[0])
    for subject in _subjects(sides, hf, tp, pp, ep):
        outcome.add(check_headers(replace(subject, arguments=options, etp=etp, updated=updates(launch, options))))
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


def check_headers(subject: Subject) -> Outcome:
    """Runs what preflight checks of one directory: headers and JSON files, no weight."""
    wanted = [one for one in all_checks() if one.stage == "headers" or one.preflight]
    return run_checks(subject, choose(subject, wanted)[0])


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

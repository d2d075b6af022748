"""CK721: the text of a launch says what its author meant: no lost line, no misspelled option."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set

from verify.check import Skip, Tally, check
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.launch.checks.engine import job_of, unless_skipped
from verify.launch.job import Job
from verify.launch.options.names import engine_settings
from verify.launch.options.nearest import nearest
from verify.launch.options.tables import OPTIONS
from verify.launch.words import Word

# Letters that may differ, in a short name and in a long one.
_FEW, _MANY, _SHORT, _SHORTEST = 1, 2, len("ckpt-step"), 4
_MAX_NAMES = 2_000
# Mappings whose names are those of another program, or the user's own.
_FREE = re.compile(
    r"kwargs|env_vars|system_envs|^envs?$|override|runtime_env|^custom|^tools?$|domain|^rewards$|tags?$|^data$|"
    r"^defaults$|^hydra$|plugin|^agent|^wandb|^swanlab|additional_configs?|^nsight|interleave|^datasets?$"
)
_NAME = re.compile(r"[A-Za-z]\w*")


def _job(subject: Subject) -> Job:
    job = job_of(subject)
    if not (job.text.words or job.text.issues or job.written):
        raise Skip("no launch arguments were given")
    return job


@check(
    "CK721",
    "every line and option of the launch reaches the trainer",
    stage="launch",
    rationale=(
        "Where a line lacks its backslash the options behind it are lost. slime passes over an option that it does not "
        "know, as NeMo-RL and ROLL do over a setting of a file, and the default counts instead."
    ),
    fix="Correct the line, the option or the setting that the finding names.",
    unless=unless_skipped(_job),
)
def text_sound(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Line continuations, arrays that are set nowhere, and names that differ in a letter or two from a known one.

    The finding names the release of which the known name is (`verify/launch/options/names`).
    """
    job = _job(subject)
    tally.compared(0, len(job.text.words) + 1 + sum(not name.startswith("-") for name in job.written))
    yield from job.text.issues
    own = job.stack.names()
    known, seen = own.keys() | OPTIONS | engine_settings(), set[str]()
    for name, word in _bounded(job.written, tally):
        for part in _parts(name):
            if part in seen:
                continue
            seen.add(part)
            if (meant := _meant(part, own.keys(), known)) is not None:
                what = name if part == name else f"{part} in {name}"
                hint = f"write {meant}, as {own[meant]} has it: {job.stack.unknown}"
                yield Issue(meant, f"{what} is not known, at {word.place}", hint, file=word.file, severity="warning")


def _parts(name: str) -> Iterator[str]:
    """An option other than vLLM's, which have no list, or the parts of a dotted key up to a mapping with free names."""
    if name.startswith("-"):
        yield from () if name.startswith("--vllm-") else (name,)
        return
    for part in name.split("."):
        if _FREE.search(part):
            return
        if _NAME.fullmatch(part):
            yield part


def _bounded(named: Mapping[str, Word], tally: Tally) -> list[tuple[str, Word]]:
    """The options of a launch, as many as anybody writes; a note where there are more."""
    if len(named) > _MAX_NAMES:
        tally.note(f"{len(named)} different options: only the first {_MAX_NAMES} were looked through for misspellings")
    return list(named.items())[:_MAX_NAMES]


def _meant(name: str, own: Set[str], known: Set[str]) -> str | None:
    """The stack's own name that another one was meant to be; None for a known one, and for one that is near to none."""
    bare = name.strip("-")
    if name in known or len(bare) < _SHORTEST:
        return None
    return nearest(name, own, _FEW if len(bare) < _SHORT else _MANY)

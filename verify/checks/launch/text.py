"""CK721: the text of a launch says what its author meant: no lost line, no misspelled option."""

from __future__ import annotations

import re
from collections.abc import Iterator

from verify.check import Skip, Tally, check
from verify.checks.launch.engine import unless_skipped
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.launch.launch import Launch
from verify.launch.options.argv import options_of
from verify.launch.options.nearest import nearest
from verify.launch.options.releases import engine_settings, names, trainer_options
from verify.launch.options.tables import OPTIONS
from verify.launch.stacks.launched import Stacked
from verify.launch.words import UnresolvedWord, Word

# Letters that may differ, in a short name and in a long one.
_FEW, _MOST, _SHORT, _SHORTEST = 1, 2, len("ckpt-step"), 4
_MOST_NAMES = 2_000
# The list of options of a stack, and what becomes of a name that it does not know.
_LISTS = {"verl": "verl", "NeMo-RL": "nemo-rl", "ROLL": "roll"}
_PASSED_OVER = {
    "verl": "verl stops at a setting that it does not know, unless + stands before it",
    "NeMo-RL": "NeMo-RL passes over it in a file, and stops at it on the command line",
    "ROLL": "ROLL passes over a setting that it does not know",
}
# Mappings whose names are those of another program, or the user's own.
_FREE = re.compile(
    r"kwargs|env_vars|system_envs|^envs?$|override|runtime_env|^custom|^tools?$|domain|^rewards$|tags?$|^data$|"
    r"^defaults$|^hydra$|plugin|^agent|^wandb|^swanlab|additional_configs|^nsight|interleave|^datasets?$"
)
_NAME = re.compile(r"[A-Za-z]\w*")


def _launch(subject: Subject) -> Launch:
    launch = subject.launch
    if launch is None or not (launch.text.words or launch.text.issues or (launch.stack and launch.stack.keys)):
        raise Skip("no launch arguments were given")
    return launch


@check(
    "CK721",
    "every line and option of the launch reaches the trainer",
    stage="launch",
    rationale=(
        "Where a line lacks its backslash the options behind it are lost. slime passes over an option that it does not "
        "know, as NeMo-RL and ROLL do over a setting of a file, and the default counts instead; miles and verl stop."
    ),
    fix="Correct the line, the option or the setting that the finding names.",
    unless=unless_skipped(_launch),
)
def text_sound(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Line continuations, arrays that are set nowhere, and names that differ in a letter or two from a known one.

    A name that any release of the stack has is right (`verify/launch/options/releases`).
    """
    launch = _launch(subject)
    tally.compared(0, len(launch.text.words) + 1)
    yield from launch.text.issues
    if launch.stack:
        yield from _settings(launch.stack, tally)
        return
    named: dict[str, Word] = {}
    for option in options_of(launch.text.words):
        if not isinstance(option.word, UnresolvedWord):
            named.setdefault(option.name, option.word)
    known = trainer_options() | OPTIONS
    for name, word in _bounded(named, tally):
        if (meant := _meant(name, known)) is not None:
            hint = f"write {meant}; slime passes over what it does not know, miles and Megatron-LM stop"
            yield Issue(meant, f"{name}, at {word.place}", hint, file=word.file, severity="warning")


def _settings(stack: Stacked, tally: Tally) -> Iterator[Issue]:
    """Every part of every key that the launch writes, but for those under a mapping whose names are free."""
    tally.compared(0, len(stack.keys))
    own, known = names(_LISTS[stack.name]), names(_LISTS[stack.name]) | engine_settings()
    seen: set[str] = set()
    for key, word in _bounded(dict(stack.keys), tally):
        for part in key.split("."):
            if _FREE.search(part):
                break
            if part in seen or part.isdecimal() or not _NAME.fullmatch(part):
                continue
            seen.add(part)
            if part not in known and (meant := _meant(part, own)) is not None:
                hint = f"write {meant}: {_PASSED_OVER[stack.name]}"
                yield Issue(meant, f"{part} in {key}, at {word.place}", hint, file=word.file, severity="warning")


def _bounded(named: dict[str, Word], tally: Tally) -> list[tuple[str, Word]]:
    """The options of a launch, as many as anybody writes; a note where there are more."""
    if len(named) > _MOST_NAMES:
        tally.note(f"{len(named)} different options: only the first {_MOST_NAMES} were looked through for misspellings")
    return list(named.items())[:_MOST_NAMES]


def _meant(name: str, known: frozenset[str]) -> str | None:
    """The known name that another one was meant to be; None for a known one, and for one that is near to none."""
    bare = name.strip("-")
    if name in known or len(bare) < _SHORTEST:
        return None
    return nearest(name, known, _FEW if len(bare) < _SHORT else _MOST)

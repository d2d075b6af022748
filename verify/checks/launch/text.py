"""CK721: the text of a launch says what its author meant: no lost line, no misspelled option."""

from __future__ import annotations

import re
from collections.abc import Iterator

from verify.check import Skip, Tally, check
from verify.checks.launch.engine import unless_skipped
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.launch.launch import Launch
from verify.launch.options.nearest import nearest
from verify.launch.options.tables import NEIGHBOURS, OPTIONS
from verify.launch.words import UnresolvedWord, Word

# Letters that may differ, in a short name and in a long one.
_FEW, _MOST, _SHORT = 1, 2, len("--ckpt-step")


def _launch(subject: Subject) -> Launch:
    if subject.launch is None or not (subject.launch.text.words or subject.launch.text.issues):
        raise Skip("no launch arguments were given")
    return subject.launch


@check(
    "CK721",
    "every line and option of the launch reaches the trainer",
    stage="launch",
    rationale=(
        "Where a line lacks its backslash the options behind it are lost. slime passes over an option that it does not "
        "know, and Megatron's default counts instead; miles stops."
    ),
    fix="Correct the line or the option that the finding names.",
    unless=unless_skipped(_launch),
)
def text_sound(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Line continuations, arrays that are set nowhere, and options that differ in a letter or two from a known one."""
    launch = _launch(subject)
    tally.compared(0, len(launch.text.words) + 1)
    yield from launch.text.issues
    named: dict[str, Word] = {}
    for word in launch.text.words:
        name = word.text.partition("=")[0]
        if re.match(r"--?[A-Za-z]", name) and not isinstance(word, UnresolvedWord):
            named.setdefault(name, word)
    for name, word in named.items():
        if name in OPTIONS or name in NEIGHBOURS:
            continue
        if (meant := nearest(name, OPTIONS, _FEW if len(name) < _SHORT else _MOST)) is not None:
            hint = f"write {meant}; slime passes over what it does not know, miles and Megatron-LM stop"
            yield Issue(meant, f"{name}, at {word.place}", hint, file=word.file, severity="warning")

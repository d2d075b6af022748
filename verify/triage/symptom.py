"""What a known symptom in a log is."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Symptom:
    """A message that is known to mean something.

    A line has it that holds one of the `needles`, plain fragments of the message, and in which `pattern` is found where
    there is one: a regular expression without unbounded repeats. `near`: a line before, at most `NEAR` back, must hold
    one of these fragments too. `command` proves the symptom or rules it out; `codes` are the checks that would fail.
    `effect`: the message is a consequence, whose cause stands earlier.
    """

    key: str
    title: str
    needles: tuple[str, ...]
    meaning: str
    command: str
    codes: tuple[str, ...] = ()
    pattern: str | None = None
    near: tuple[str, ...] = ()
    effect: bool = False
    _regex: re.Pattern[str] | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if self.pattern is not None:
            object.__setattr__(self, "_regex", re.compile(self.pattern))

    def matches(self, line: str) -> bool:
        """Whether a line with one of the needles has it, `near` aside."""
        return self._regex is None or self._regex.search(line) is not None


NEAR = 100  # lines: a traceback of a deep call, twice, since ranks print into each other
PREFLIGHT = "ckptkit preflight --hf-checkpoint DIR --load DIR --ref-load DIR"
VERIFY = "ckptkit verify CKPT --source RELEASE"
NO_CHECKPOINT = "none: this is not about the checkpoint"

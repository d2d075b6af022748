"""What a known symptom in a log is."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Symptom:
    """A message that is known to mean something."""

    key: str
    title: str
    needles: tuple[str, ...]  # plain fragments of the message, one of which a line must hold
    meaning: str
    command: str  # proves the symptom or rules it out
    codes: tuple[str, ...] = ()  # checks that would fail
    pattern: str | None = None  # a regular expression without unbounded repeats, which the line must match too
    near: tuple[str, ...] = ()  # fragments, one of which must be in one of the `NEAR` lines before
    effect: bool = False  # whether the message is a consequence, whose cause stands earlier
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

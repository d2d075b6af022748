"""One thing that is wrong, as whoever sees it says it, and how it becomes findings of a report."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptkit.core.printable import public_url
from ckptkit.core.specs import summarize
from verify.evidence.folding import group_by_pattern
from verify.report import Finding, Severity


@dataclass(frozen=True)
class Issue:
    """What should be, what is, and the next move.

    `names` are the tensors concerned: those that differ in layer and expert numbers only become one finding, or all of
    them where `together` is set; of no names there is no finding. None: it concerns `count` other things. `explains`
    are tensors that are wrong for the same reason, and that other checks judge.
    """

    expected: str
    actual: str
    hint: str = ""
    names: Collection[str] | None = None
    file: Path | str | None = None
    rank: str | None = None
    severity: Severity = "error"
    together: bool = False
    count: int = 1
    explains: Collection[str] = ()

    def findings(self, code: str) -> Iterator[Finding]:
        """The findings of the check `code`, with names folded."""
        # Its last part is shown without the scheme that would make it a URL.
        file = None if self.file is None else public_url(str(self.file))
        for text, count, names in self._folded():
            yield Finding(
                code,
                self.expected,
                self.actual,
                self.hint,
                text,
                count,
                file,
                self.rank,
                self.severity,
                names=names.union(self.explains),
            )

    def _folded(self) -> Iterator[tuple[str | None, int, frozenset[str]]]:
        if self.names is None:
            yield None, self.count, frozenset()
        elif self.together and self.names:
            yield summarize(self.names), len(self.names), frozenset(self.names)
        else:
            yield from ((summarize(group), len(group), frozenset(group)) for group in group_by_pattern(self.names))

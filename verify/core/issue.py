"""An issue as a check reports it, and how the issues of a check become findings of a report."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ckptkit.core.printable import public_url
from ckptkit.core.specs import summarize
from ckptkit.verify.core.report import Finding, Severity
from ckptkit.verify.evidence.folding import group_by_pattern


def warning_if(is_harmless: object) -> Severity:
    """The severity of an issue that is an error, unless something is the case."""
    return "warning" if is_harmless else "error"


@dataclass(frozen=True)
class Issue:
    """What should be, what is, and the next move: without `hint` the check's `fix`.

    `names` are the tensors concerned. Issues of a check that differ in names alone are one: a check may yield one a
    tensor. Names that differ in layer and expert numbers only become one finding, or all of this issue where `together`
    is set; of no names there is no finding. None: it concerns `count` other things. `file` is the checkpoint where it
    is left out (of a launch and of Megatron: nothing), and as text relative to that. `explains` are tensors that are
    wrong for the same reason, and that other checks judge.
    """

    expected: str
    actual: str
    hint: str = ""
    names: Collection[str] | None = None
    file: Path | str | None = ""
    rank: str | None = None
    severity: Severity = "error"
    together: bool = False
    count: int = 1
    explains: Collection[str] = ()

    def findings(self, code: str) -> Iterator[Finding]:
        """The findings of the check `code`, with names folded."""
        # Its last part is shown without the scheme that would make it a URL.
        file = public_url(str(self.file)) if self.file else None
        groups: Iterable[Collection[str] | None] = [None]
        if self.names is not None:
            groups = [self.names] if self.together and self.names else group_by_pattern(self.names)
        for names in groups:
            yield Finding(
                code,
                self.expected,
                self.actual,
                self.hint,
                None if names is None else summarize(names),
                self.count if names is None else len(names),
                file,
                self.rank,
                self.severity,
                names=frozenset(names or ()),
                explains=frozenset(self.explains),
            )


def collect(issues: Iterable[Issue], code: str, fix: str, root: Path | None) -> Iterator[Finding]:
    """The findings of the check `code`, of all issues before an exception too, which is raised behind them.

    `root`: the checkpoint; None where issues name their files as they are.
    """
    groups: dict[object, list[Issue]] = {}
    raised: Exception | None = None
    try:
        for number, one in enumerate(issues):
            alike = (one.expected, one.actual, one.hint, one.file, one.rank, one.severity)
            groups.setdefault(number if one.names is None or one.together else alike, []).append(one)
    except Exception as error:  # noqa: BLE001 - raised again behind what was found before it
        raised = error
    for several in groups.values():
        first, file = several[0], several[0].file
        names = first.names if first.names is None else [name for one in several for name in one.names or ()]
        file = root / file if root and isinstance(file, str) else file
        yield from replace(first, names=names, file=file, hint=first.hint or _as_hint(fix)).findings(code)
    if raised is not None:
        raise raised


def _as_hint(fix: str) -> str:
    """The `fix` of a check as findings write their next moves: without the capital and the stop of a sentence."""
    begins_with_word = fix[:2].istitle() or fix[1:2] == " "
    return (fix[:1].lower() + fix[1:] if begins_with_word else fix).removesuffix(".")

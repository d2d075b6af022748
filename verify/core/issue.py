"""Issues, which checks report, and their conversion to the findings of a report."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ckptkit.core.printable import public_url
from ckptkit.core.specs import summarize
from ckptkit.verify.core.report import Finding, Severity
from ckptkit.verify.evidence.folding import group_by_pattern


def warning_if(is_harmless: object) -> Severity:
    """The severity `warning` if the issue is harmless, else `error`."""
    return "warning" if is_harmless else "error"


@dataclass(frozen=True)
class Issue:
    """The expected and actual state, and a `hint` for fixing it; the default hint is the check's `fix`.

    `names` are the tensors concerned, or None if the issue concerns `count` other things; no names give no finding.
    Issues that differ only in `names` are merged. Names that differ only in layer and expert numbers become one
    finding; with `as_one`, all names do. `file` is relative to the checkpoint and defaults to it (to nothing for a
    launch and Megatron). `also_affected` are tensors with the same fault that other checks judge.
    """

    expected: str
    actual: str
    hint: str = ""
    names: Collection[str] | None = None
    file: Path | str | None = ""
    rank: str | None = None
    severity: Severity = "error"
    as_one: bool = False
    count: int = 1
    also_affected: Collection[str] = ()

    def findings(self, code: str) -> Iterator[Finding]:
        """The findings of the check `code`, with names folded."""
        # The file is shown without the scheme that would make it a URL.
        file = public_url(str(self.file)) if self.file else None
        groups: Iterable[Collection[str] | None] = [None]
        if self.names is not None:
            groups = [self.names] if self.as_one and self.names else group_by_pattern(self.names)
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
                also_affected=frozenset(self.also_affected),
            )


def collect(issues: Iterable[Issue], code: str, fix: str, root: Path | None) -> Iterator[Finding]:
    """Yields the findings of all issues before an exception, then raises that; `root` is that of relative files."""
    begins_with_word = fix[:2].istitle() or fix[1:2] == " "
    default_hint = (fix[:1].lower() + fix[1:] if begins_with_word else fix).removesuffix(".")
    groups: dict[object, list[Issue]] = {}
    raised: Exception | None = None
    try:
        for number, one in enumerate(issues):
            alike = (one.expected, one.actual, one.hint, one.file, one.rank, one.severity)
            groups.setdefault(number if one.names is None or one.as_one else alike, []).append(one)
    except Exception as error:  # noqa: BLE001 - raised again after the findings
        raised = error
    for several in groups.values():
        first, file = several[0], several[0].file
        names = first.names if first.names is None else [name for one in several for name in one.names or ()]
        file = root / file if root and isinstance(file, str) else file
        yield from replace(first, names=names, file=file, hint=first.hint or default_hint).findings(code)
    if raised is not None:
        raise raised

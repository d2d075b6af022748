"""What a lint rule reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckptkit.core.specs import fold
from quant.lint.subject import Severity

ORDER: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class LintFinding:
    """One thing that is wrong with an `ignore` list."""

    kind: str
    severity: Severity
    message: str
    hint: str
    pattern: str | None = None  # the entry; None: no entry covers the tensors
    tensors: tuple[str, ...] = ()  # folded names
    count: int = 0  # of tensors
    readers: tuple[str, ...] = ()  # those concerned


def finding(
    kind: str,
    severity: Severity,
    message: str,
    hint: str,
    tensors: Sequence[str],
    readers: Iterable[str] = (),
    pattern: str | None = None,
) -> LintFinding:
    return LintFinding(kind, severity, message, hint, pattern, tuple(fold(tensors)), len(tensors), tuple(readers))

"""The types of the fixtures that are functions."""

from collections.abc import Callable
from pathlib import Path

from ckptkit.verify.core.report import CheckResult, Finding, Report

PathOf = Callable[..., Path]
CopyOf = Callable[[Path], Path]
OnlyFinding = Callable[[Report], Finding]
CodesOf = Callable[[Report], list[str]]
RunAlone = Callable[..., tuple[CheckResult | None, list[Finding]]]

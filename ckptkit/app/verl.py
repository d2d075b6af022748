"""Checks verl's own launch when verl imports this: `VERL_USE_EXTERNAL_MODULES=ckptkit.hooks_verl`.

Source: verl b178a3c, `verl/__init__.py`: it imports the modules of that variable, in every process. Only the driver has
verl's overrides among its arguments; in the others there is nothing to check.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ckptkit.app.hooks import raise_errors
from ckptkit.core.printable import printable
from verify.check import Outcome
from verify.launch.preflight import preflight

_MODEL = "actor_rollout_ref.model.path"


def check_launch(words: Sequence[str]) -> None:
    """Preflight of verl's overrides, where they name a model.

    Raises CkptkitError with the findings that are errors. Says on standard error how it ended, and what it could not
    look at, such as a model that is not a local directory.
    """
    settings = {name.lstrip("+"): value for name, _, value in (word.partition("=") for word in words)}
    model = settings.get(_MODEL)
    if not model:
        return
    if not Path(model).is_dir():
        _say(f"{model} is not a directory here, so nothing was checked")
        return
    report = preflight(arguments=words)
    raise_errors(report.checkpoint, Outcome(findings=list(report.findings)))
    _say(f"preflight of {report.checkpoint}: {'; '.join([report.status, *report.reasons])}")


def _say(text: str) -> None:
    print(printable(f"ckptkit: {text}"), file=sys.stderr)

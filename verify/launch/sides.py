"""One side of a training job: the weights that it would load, and what is wrong with the paths to them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.core.printable import shortened
from ckptkit.formats.detect import ITERATION, Kind, OfKind, require_own_files
from ckptkit.formats.hf.reader import read_config
from converters.registry import named_family_of
from verify.issue import Issue
from verify.report import Severity

ENGINE = "rollout engine"
# The option whose path is wrong, and what is wrong with it.
PathIssue = tuple[str, Issue]


def path_issue(
    option: str,
    path: Path,
    expected: str,
    actual: str,
    hint: str,
    severity: Severity = "error",
    about: str | None = None,
) -> PathIssue:
    """What is wrong with the path that an option gives, or that a setting gives which does what `about` does."""
    return about or option, Issue(f"{option}: {expected}", actual, hint, file=path, severity=severity)


@dataclass(frozen=True)
class Side(OfKind):
    """The actor, the reference or the rollout engine: the weights it would load, and why these.

    Without weights (`path` is None) it starts from random ones where `random` is set, from some that are not on this
    machine where `elsewhere` is, and stops otherwise.
    """

    role: str
    kind: Kind | None
    path: Path | None
    why: str
    issues: tuple[PathIssue, ...] = ()
    random: bool = False
    elsewhere: bool = False

    def __str__(self) -> str:
        without = "starts from RANDOM weights" if self.random else "cannot start"
        without = "loads what is not on this machine" if self.elsewhere else without
        what = f"loads {self.path} ({'HF' if self.is_hf else 'Megatron'})" if self.path else without
        return f"{self.role} {what}: {self.why}"


def is_trained(side: Side) -> bool:
    """Whether a side loads an iteration of a run. NeMo-RL calls what it converts iteration 0."""
    name = side.path.name if side.path else ""
    return ITERATION.fullmatch(name) is not None and int(name[5:]) > 0


def is_hf(path: Path) -> bool:
    """Whether a directory has a config.json of a model: of a supported family, or one that is not known here."""
    return hf_config_of(path) is not None


def hf_config_of(path: Path) -> str | None:
    """The config.json of a directory in words; None where there is none, or it is of no model.

    A trainer may load what is not known here. CK101 then makes the report inconclusive.
    """
    require_own_files(path)
    try:
        config = read_config(path)
        named_family_of(config)
    except UnsupportedError:
        return f"a config.json of model_type {shortened(config['model_type'])}, which is not known here"
    except CkptkitError:
        return None
    return "a supported config.json"

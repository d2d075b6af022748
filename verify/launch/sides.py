"""One side of a training job: the weights that it would load, and what is wrong with the paths to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptkit.converters.registry import named_family_of
from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.core.printable import shortened
from ckptkit.formats.detect import ITERATION, TRACKER, Kind, OfKind, is_legacy, require_own_files
from ckptkit.formats.hf.reader import read_config
from ckptkit.storage.links import absent, next_move
from ckptkit.verify.core.issue import Issue
from ckptkit.verify.core.report import Severity

ENGINE = "rollout engine"
# The checks of what the actor, the reference and the like load, of an iteration, and of an HF directory.
LOAD, REF, STEP, HF = "CK711", "CK712", "CK713", "CK714"
# What slime and miles call these; settings of other stacks say it themselves.
_CHECKED_BY = {
    "--load": LOAD,
    **dict.fromkeys(("--ref-load", "--critic-load", "--opd-teacher-load"), REF),
    "--ckpt-step": STEP,
    "--hf-checkpoint": HF,
}
# The check that reports what is wrong with a path, and that.
PathIssue = tuple[str, Issue]


def path_issue(
    option: str,
    path: Path,
    expected: str,
    actual: str,
    hint: str,
    severity: Severity = "error",
    check: str | None = None,
) -> PathIssue:
    """What is wrong with the path that an option gives, or a setting, which `check` is about."""
    return check or _CHECKED_BY[option], Issue(f"{option}: {expected}", actual, hint, file=path, severity=severity)


@dataclass(frozen=True)
class Side(OfKind):
    """The actor, the reference or the rollout engine: the weights it would load, and why these.

    Without weights (`path` is None) it starts from random ones where `is_random` is set, from some that are not on this
    machine where `is_remote` is, and stops otherwise.
    """

    role: str
    kind: Kind | None
    path: Path | None
    why: str
    issues: tuple[PathIssue, ...] = ()
    is_random: bool = False
    is_remote: bool = False

    def __str__(self) -> str:
        without = "starts from RANDOM weights" if self.is_random else "cannot start"
        without = "loads weights that are not on this machine" if self.is_remote else without
        what = f"loads {self.path} ({'HF' if self.is_hf else 'Megatron'})" if self.path else without
        return f"{self.role} {what}: {self.why}"


def is_trained(side: Side) -> bool:
    """Whether a side loads an iteration of a run. NeMo-RL calls what it converts iteration 0."""
    name = side.path.name if side.path else ""
    return ITERATION.fullmatch(name) is not None and int(name[5:]) > 0


def hf_directory(role: str, option: str, path: Path, why: str, check: str | None = None) -> Side:
    """The side that loads an HF directory, which an option gives, or a setting, which `check` is about."""
    if (path / "config.json").exists():
        return Side(role, "hf", path, why)
    is_megatron = (path / TRACKER).exists() or (path / ".metadata").exists() or is_legacy(path)
    actual = "a Megatron checkpoint" if is_megatron else absent(path / "config.json")
    actual = actual if path.exists() else "no such directory"
    hint = next_move(path / "config.json", "give the HF directory of the model")
    issue = path_issue(option, path, "an HF directory with config.json", actual, hint, check=check)
    return Side(role, None, None, f"{option.partition(' (')[0]} {path} is not an HF directory: {actual}", (issue,))


def iterations_in(path: Path) -> Sequence[str]:
    """The names of the directories `iter_N` and `release` in a directory, in order."""
    names = (entry.name for entry in path.iterdir() if entry.is_dir()) if path.is_dir() else ()
    return sorted(name for name in names if name == "release" or ITERATION.fullmatch(name))


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

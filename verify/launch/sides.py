"""One side of a training job: the weights that it would load, and the faults of their paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptkit.converters.registry import named_family_of
from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.core.printable import shortened
from ckptkit.formats.detect import ITERATION, TRACKER, Kind, is_legacy, require_own_files
from ckptkit.formats.hf.reader import read_config
from ckptkit.storage.links import absent, next_move
from ckptkit.verify.core.issue import Issue
from ckptkit.verify.core.report import Severity

ENGINE = "rollout engine"
# The checks of the actor's path, of the paths of other roles, of an iteration, and of an HF directory.
LOAD, REF, STEP, HF = "CK711", "CK712", "CK713", "CK714"
# By options of slime and miles. Callers of other stacks pass the check.
_CHECKED_BY = {
    "--load": LOAD,
    **dict.fromkeys(("--ref-load", "--critic-load", "--opd-teacher-load"), REF),
    "--ckpt-step": STEP,
    "--hf-checkpoint": HF,
}
PathIssue = tuple[str, Issue]  # with the code of the check that reports it


def path_issue(
    option: str, path: Path, expected: str, actual: str, hint: str, severity: Severity = "error", check: str = ""
) -> PathIssue:
    """An issue with the path of an option, or of a setting, for which `check` is required."""
    return check or _CHECKED_BY[option], Issue(f"{option}: {expected}", actual, hint, file=path, severity=severity)


@dataclass(frozen=True)
class Side:
    """The actor, the reference or the rollout engine: the weights that it would load, and why these."""

    role: str
    kind: Kind | None
    path: Path | None  # None: it has no weights on this machine
    why: str
    issues: tuple[PathIssue, ...] = ()
    is_random: bool = False  # without a path: it starts from random weights
    is_remote: bool = False  # without a path: its weights are downloaded; otherwise the trainer stops

    def __str__(self) -> str:
        start = "starts from RANDOM weights" if self.is_random else "cannot start"
        start = "loads weights that are not on this machine" if self.is_remote else start
        start = f"loads {self.path} ({'HF' if self.kind == 'hf' else 'Megatron'})" if self.path else start
        return f"{self.role} {start}: {self.why}"

    @property
    def is_trained(self) -> bool:
        """Whether it loads an iteration of a run. NeMo-RL stores a converted model as iteration 0."""
        name = self.path.name if self.path else ""
        return ITERATION.fullmatch(name) is not None and int(name[5:]) > 0


def hf_directory(role: str, option: str, path: Path, why: str, check: str = "") -> Side:
    """The side that loads the HF directory of an option, or of a setting, for which `check` is required."""
    if (path / "config.json").exists():
        return Side(role, "hf", path, why)
    is_megatron = (path / TRACKER).exists() or (path / ".metadata").exists() or is_legacy(path)
    actual = "a Megatron checkpoint" if is_megatron else absent(path / "config.json")
    actual = actual if path.exists() else "no such directory"
    hint = next_move(path / "config.json", "pass the HF directory of the model")
    issue = path_issue(option, path, "an HF directory with config.json", actual, hint, check=check)
    return Side(role, None, None, f"{option.partition(' (')[0]} {path} is not an HF directory: {actual}", (issue,))


def iterations_in(path: Path) -> Sequence[str]:
    """The names of the directories `iter_N` and `release` in a directory, sorted."""
    names = (entry.name for entry in path.iterdir() if entry.is_dir()) if path.is_dir() else ()
    return sorted(name for name in names if name == "release" or ITERATION.fullmatch(name))


@dataclass(frozen=True)
class HfConfig:
    """The config.json of a model, with its model_type if ckptkit does not support it. A trainer may (CK101)."""

    unsupported_type: str = ""

    def __str__(self) -> str:
        kind = f"a config.json with the unsupported model_type {self.unsupported_type}"
        return kind if self.unsupported_type else "a supported config.json"


def hf_config_of(path: Path) -> HfConfig | None:
    """The config.json of a directory, or None if it is missing, unreadable or not of a model."""
    require_own_files(path)
    try:
        config = read_config(path)
        named_family_of(config)
    except UnsupportedError:
        return HfConfig(shortened(config["model_type"]))
    except CkptkitError:
        return None
    return HfConfig()

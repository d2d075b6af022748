"""Runs the pass over all the bytes as tasks on a Ray cluster: each opens both sides and reads some groups."""

from __future__ import annotations

import socket
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.side_files import is_own, weights_at
from ckptkit.storage.fingerprint import fingerprint
from ckptkit.transfer.ray import connected, cpus, outcomes, pieces_of
from verify.evidence.subject import Subject
from verify.evidence.values import Groups, Values, common_groups, look, sides


@dataclass(frozen=True)
class TaskInput:
    """What every task of a pass is given; paths are those of `Subject`."""

    path: Path
    source_path: Path | None
    hf_path: Path | None
    stored: bool  # whether names are those on disk
    files: str  # fingerprint of both sides, which the task's node must see too


def parts_on_ray(
    subject: Subject, stored: bool, checkpoint: Checkpoint, groups: Groups
) -> Generator[Values, None, None]:
    """What each task found, in the order of `groups`. Raises CkptkitError as `outcomes`, and where nodes differ."""
    # Workers run in another directory.
    source, hf = (path and path.absolute() for path in (subject.source_path, subject.hf_path))
    task = TaskInput(subject.path.absolute(), source, hf, stored, _files(subject))
    sizes = {names: sum(checkpoint.specs[name].nbytes for name in names) for names in groups}
    with connected(subject.options.ray or "auto") as ray:
        pieces = [[name for names in piece for name in names] for piece in pieces_of(sizes, cpus(ray))]
        early: dict[int, Values] = {}
        following = 0
        for index, part in outcomes(ray, look_at, task, pieces):
            early[index] = part
            while following in early:
                yield early.pop(following)
                following += 1


def look_at(task: TaskInput, names: Sequence[str]) -> Values:
    """Looks at whole groups, on this node. Raises CkptkitError when it does not see the coordinator's files."""
    checkpoint, source, groups = _opened(task)
    wanted, found = set(names), Values()
    for group in groups:
        if group[0] in wanted:
            found.add(look(checkpoint, source, group))
    return found


@lru_cache(maxsize=1)
def _opened(task: TaskInput) -> tuple[Checkpoint, Checkpoint | None, Groups]:
    """Both sides, opened once a process."""
    if _files(task) != task.files:
        also = f" or {task.source_path}" if task.source_path else ""
        raise CkptkitError(
            f"node {socket.gethostname()} sees other files at {task.path}{also} than the coordinator"
            " (names, sizes or times differ)",
            "name paths on a file system that all nodes share, or copy with times (rsync -a)",
        )
    checkpoint, source = sides(Subject(task.path, task.source_path, task.hf_path), task.stored)
    return checkpoint, source, list(common_groups(checkpoint, source))


def _files(sides: Subject | TaskInput) -> str:
    return fingerprint(map(weights_at, filter(None, (sides.path, sides.source_path, sides.hf_path))), is_own)

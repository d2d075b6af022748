"""Writes the files of a job on a Ray cluster: tasks of whole files, on a file system that all nodes share; docs/ray.md says what that needs."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from ckptkit.app.execute import write_files
from ckptkit.app.jobs import planned
from ckptkit.core.allocator import set_up_memory
from ckptkit.core.errors import CkptkitError
from ckptkit.core.progress import progress
from ckptkit.transfer.journal import Journal
from ckptkit.transfer.ray.cluster import connected
from ckptkit.transfer.ray.tasks import check_gpus, cpus, outcomes, pieces_of

if TYPE_CHECKING:
    from ckptkit.app.execute import How
    from ckptkit.app.jobs import Job, Work


@dataclass(frozen=True)
class Batch:
    """The files of a task, and their bytes."""

    files: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class Run:
    """What every task of a run is told: the job, and what its node must find the same as the coordinator did.

    `token` names a file in the journal of `partial`, which is there as long as the run goes on. `source`: fingerprint of the files that are
    read. `plan`: `digest_of` the plan.
    """

    job: Job
    partial: Path
    token: str
    source: str
    plan: str
    memory: int


def write_on_ray(job: Job, work: Work, partial: Path, journal: Journal, how: How) -> None:
    """Writes every file of the plan that is not finished yet. What is written does not depend on the cluster.

    Raises CkptkitError: Ray is missing or not reached, a node lacks this version, the source or the destination, or what a task raised.
    """
    with connected(how.ray or "auto", how.workers) as ray:
        if job.device == "cuda":
            check_gpus(ray)
        token = journal.begin_run()
        run = Run(job, partial, token, job.asked()["source"], digest_of(work), how.memory)
        batches = batches_of(work, how.workers or cpus(ray))
        files = [batch.files for batch in batches]
        with progress("writing", sum(batch.nbytes for batch in batches)) as advance:
            for index, _ in outcomes(
                ray,
                write_batch,
                run,
                files,
                how.workers,
                int(job.device == "cuda"),
                stop=lambda: journal.stop_run(token),
            ):
                advance(batches[index].nbytes)
    _check_written(work, partial, journal)


def digest_of(work: Work) -> str:
    """SHA-256 of a plan: every file, its size, and names, shapes and dtypes of its tensors, in order."""
    digest = hashlib.sha256()
    for file, output in work.files().items():
        specs = [output.files.specs[name] for name in output.files.names[file]]
        tensors = [[spec.name, list(spec.shape), spec.dtype] for spec in specs]
        digest.update(json.dumps([file, output.files.size(file), tensors]).encode())
    return digest.hexdigest()


def batches_of(work: Work, workers: int) -> list[Batch]:
    """The files of each task, in the order in which the source is read."""
    sizes: dict[str, int] = {}
    for output in work.outputs:
        file_of = {name: file for file, names in output.files.names.items() for name in names}
        order = dict.fromkeys(file_of[name] for names in output.view.groups for name in names)
        sizes |= {file: output.files.size(file) for file in order}
    return [Batch(tuple(files), sum(sizes[file] for file in files)) for files in pieces_of(sizes, workers)]


def write_batch(run: Run, files: Sequence[str]) -> None:
    """Writes and records these files, on the node that this runs on. Raises CkptkitError when it does not see what the coordinator sees."""
    journal = Journal(run.partial, run.token)
    if not journal.may_begin:
        raise CkptkitError(
            f"node {socket.gethostname()} does not see {run.partial} of the coordinator",
            "name a destination on a file system that all nodes share",
        )
    write_files(_planned(run.job, run.source, run.plan), run.partial, journal, files, 1, run.memory)


@lru_cache(maxsize=1)
def _planned(job: Job, source: str, plan: str) -> Work:
    """The plan, made once a process. Raises CkptkitError when it is not the coordinator's."""
    set_up_memory()
    work = planned(job)
    if job.asked()["source"] != source or digest_of(work) != plan:
        raise CkptkitError(
            f"node {socket.gethostname()} sees other files at {job.src} than the coordinator (names, sizes or times differ)",
            "name a source on a file system that all nodes share, or copy it with its times (rsync -a)",
        )
    return work


def _check_written(work: Work, partial: Path, journal: Journal) -> None:
    """Raises CkptkitError unless every file has a record and lies here with its size."""
    for file, output in work.files().items():
        path = partial / file
        size = path.stat().st_size if path.exists() else 0
        if journal.recorded(file) is None or size != output.files.size(file):
            raise CkptkitError(
                f"{path} has {size} bytes instead of {output.files.size(file)}, or no record, after its task ended",
                "name a destination on a file system that all nodes share, and go on with --resume",
            )

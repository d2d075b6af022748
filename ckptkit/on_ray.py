"""Writes the files of a job on a Ray cluster: tasks of whole files, on a file system that all nodes share; docs/ray.md says what that needs."""

from __future__ import annotations

import hashlib
import json
import pickle
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.cluster import connected
from ckptkit.errors import CkptkitError
from ckptkit.execute import write_files
from ckptkit.jobs import planned
from ckptkit.journal import JOURNAL, Journal
from ckptkit.progress import progress
from ckptkit.specs import summarize

if TYPE_CHECKING:
    from ckptkit.execute import How
    from ckptkit.jobs import Job, Work

BATCH = 1_000_000_000  # bytes up to which neighbouring files are one task
_TASKS_EACH = 4  # tasks that every worker should get, so that none waits long for the last one
_RETRIES = 5  # times that Ray starts a task again whose worker or node was lost
_STOP_S = 30.0  # what killing the tasks of a run that failed may take


@dataclass(frozen=True)
class Batch:
    """The files of a task, and their bytes."""

    files: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class Run:
    """What every task of a run is told: the job, and what its node must find the same as the coordinator did.

    `token` names a file in the journal of `partial`. `source`: fingerprint of the files that are read. `plan`: `digest_of` the plan.
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
        _check_resources(ray, job)
        run = Run(job, partial, f"run-{secrets.token_hex(8)}", job.asked()["source"], digest_of(work), how.memory)
        (partial / JOURNAL / run.token).touch()
        batches = batches_of(work, how.workers or _cpus(ray))
        with progress("writing", sum(batch.nbytes for batch in batches)) as advance:
            for batch in _done(ray, run, batches, how.workers):
                advance(batch.nbytes)
    _check_written(work, partial, journal)


def digest_of(work: Work) -> str:
    """SHA-256 of a plan: every file, its size, and names, shapes and dtypes of its tensors, in order."""
    digest = hashlib.sha256()
    for file, output in work.files().items():
        specs = [output.files.specs[name] for name in output.files.names[file]]
        tensors = [[spec.name, list(spec.shape), str(spec.dtype)] for spec in specs]
        digest.update(json.dumps([file, output.files.size(file), tensors]).encode())
    return digest.hexdigest()


def batches_of(work: Work, workers: int) -> list[Batch]:
    """Files in the order in which the source is read; neighbours share a task while it stays small enough, so that every worker gets several."""
    sizes: dict[str, int] = {}
    for output in work.outputs:
        file_of = {name: file for file, names in output.files.names.items() for name in names}
        order = dict.fromkeys(file_of[name] for names in output.view.groups for name in names)
        sizes |= {file: output.files.size(file) for file in order}
    limit = min(BATCH, sum(sizes.values()) // (_TASKS_EACH * workers))
    return [Batch(tuple(files), sum(sizes[file] for file in files)) for files in _neighbours(sizes, limit)]


def _neighbours(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    found: list[list[str]] = []
    room = 0
    for file, size in sizes.items():
        if size > room or not found:
            found.append([])
            room = limit
        found[-1].append(file)
        room -= size
    return found


def _cpus(ray: Any) -> int:
    return int(ray.cluster_resources().get("CPU", 0))


def _check_resources(ray: Any, job: Job) -> None:
    """Raises CkptkitError where tasks would wait for ever."""
    if not _cpus(ray):
        raise CkptkitError("the Ray cluster has no CPUs", "start its nodes with --num-cpus, or wait until they are there")
    if job.device == "cuda" and ray.cluster_resources().get("GPU", 0) < 1:
        raise CkptkitError("the Ray cluster has no GPUs", "leave out --device cuda: the bytes are the same")


def _done(ray: Any, run: Run, batches: Sequence[Batch], workers: int | None) -> Iterator[Batch]:
    """Yields each batch when it is written. On any error, and when the caller stops, no task of it goes on."""
    how = {"num_cpus": 1, "num_gpus": int(run.job.device == "cuda"), "max_retries": _RETRIES, "scheduling_strategy": "SPREAD"}
    task = ray.remote(**how)(_task())
    content = ray.put(pickle.dumps(run))
    waiting, running = deque(batches), dict[Any, Batch]()
    try:
        while waiting or running:
            # Where nobody says how many: as many again as can run, so that no worker waits and a cluster that grows sees why.
            while waiting and len(running) < (workers or 2 * _cpus(ray)):
                batch = waiting.popleft()
                running[task.remote(version("ckptkit"), content, batch.files)] = batch
            for reference in ray.wait(list(running))[0]:
                _raise_from(ray, reference, running[reference])
                yield running.pop(reference)
    finally:
        for reference in running:
            ray.cancel(reference, force=True)
        ray.wait(list(running), num_returns=len(running), timeout=_STOP_S) if running else None


def _raise_from(ray: Any, reference: Any, batch: Batch) -> None:
    """Raises what a task raised as it was raised there, and CkptkitError when Ray lost it too often."""
    try:
        refused = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, (CkptkitError, OSError)):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        words = str(error).strip().partition("\n")[0]
        raise CkptkitError(f"Ray lost the task that writes {summarize(batch.files)} {_RETRIES + 1} times: {words}", "has every node enough memory?") from error
    if refused is not None:
        raise CkptkitError(refused, "install the same version on every node of the cluster")


def _task() -> Callable[[str, bytes, Sequence[str]], str | None]:
    """The remote function. It is sent as it stands, so that it runs, and can say so, where this package is missing or another version."""

    def write_files_of_a_checkpoint(wanted: str, run: bytes, files: Sequence[str]) -> str | None:
        import pickle
        import platform
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version("ckptkit")
        except PackageNotFoundError:
            found = "none"
        if found != wanted:
            return f"node {platform.node()} has ckptkit {found}, and the coordinator {wanted}"
        from ckptkit.on_ray import write_batch

        write_batch(pickle.loads(run), files)
        return None

    return write_files_of_a_checkpoint


def write_batch(run: Run, files: Sequence[str]) -> None:
    """Writes and records these files, on the node that this runs on. Raises CkptkitError when it does not see what the coordinator sees."""
    if not (run.partial / JOURNAL / run.token).exists():
        raise CkptkitError(
            f"node {socket.gethostname()} does not see {run.partial} of the coordinator", "name a destination on a file system that all nodes share"
        )
    write_files(_planned(run.job, run.source, run.plan), run.partial, Journal(run.partial), files, 1, run.memory)


@lru_cache(maxsize=1)
def _planned(job: Job, source: str, plan: str) -> Work:
    """The plan, made once a process. Raises CkptkitError when it is not the coordinator's."""
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

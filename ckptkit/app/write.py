"""Writes files of a plan: in one process, or on a Ray cluster with a shared file system (docs/convert.md)."""

from __future__ import annotations

import functools
import hashlib
import json
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptkit.app.plan import ConversionPlan, make_plan
from ckptkit.app.run_options import RunOptions
from ckptkit.core.allocator import return_freed_memory
from ckptkit.core.errors import CkptkitError
from ckptkit.core.progress import note, progress, size
from ckptkit.formats.files import Digests
from ckptkit.storage.fingerprint import fingerprint
from ckptkit.storage.url import absolute, path_or_url
from ckptkit.transfer.copy import copy
from ckptkit.transfer.files import FilesWriter
from ckptkit.transfer.journal import Journal
from ckptkit.transfer.ray import check_gpus, cpus, outcomes, pieces_of, ray_cluster


def write_files(
    plan: ConversionPlan, partial: Path, journal: Journal, files: Collection[str], workers: int | None, memory: int
) -> None:
    """Writes the unfinished ones of these files, and records each with the errors of its matrices."""
    errors = plan.packing.errors if plan.packing else {}

    def record(file: str, digests: Digests) -> None:
        journal.record(file, digests, {name: errors[name] for name in digests if name in errors})

    left = [[one for one in output.files.names if one in files] for output in plan.outputs]
    if journal.count():
        left = _unfinished(plan, journal, left)
    for output, unfinished in zip(plan.outputs, left, strict=True):
        if unfinished:
            names = {name for file in unfinished for name in output.files.names[file]}
            writer = FilesWriter(partial, output.files, unfinished, record, journal.check_goes_on)
            copy(output.view, writer, "writing", workers, only=names, memory=memory)


def _unfinished(plan: ConversionPlan, journal: Journal, requested: Sequence[Sequence[str]]) -> list[list[str]]:
    """The files of each output that are not finished. Logs the size of the finished ones."""
    kept, nbytes, left = 0, 0, list[list[str]]()
    for output, files in zip(plan.outputs, requested, strict=True):
        intact = {file for file in files if journal.intact(file, output.files)}
        kept, nbytes = kept + len(intact), nbytes + sum(map(output.files.size, intact))
        left.append([file for file in files if file not in intact])
    note(f"kept {kept} of {sum(map(len, requested))} files, {size(nbytes)}, of the interrupted run")
    return left


@dataclass(frozen=True)
class TaskInput:
    """The input of every task of a run.

    `token` names a file in the journal of `partial` that exists as long as the run continues. `source` (a fingerprint)
    and `plan` (its `digest_of`) must be the same on every node.
    """

    options: RunOptions
    partial: Path
    token: str
    source: str
    plan: str


def write_on_ray(options: RunOptions, plan: ConversionPlan, partial: Path, journal: Journal) -> None:
    """Writes every unfinished file of the plan. The output does not depend on the cluster.

    Raises CkptkitError if Ray is missing or not reachable, if a node lacks this version, the source or the destination,
    or if a task raises it.
    """
    gpus = int(options.device == "cuda")
    with ray_cluster(options.ray or "auto", options.workers) as ray:
        if gpus:
            check_gpus(ray)
        token = journal.begin_run()
        # Workers run in another directory.
        absolute_options = replace(options, dst=path_or_url(absolute(options.dst)))
        task = TaskInput(absolute_options, partial.absolute(), token, _source_of(options), digest_of(plan))
        batches = batches_of(plan, options.workers or cpus(ray))
        files, sizes = list(batches), list(batches.values())
        with progress("writing", sum(sizes)) as advance:
            stop = functools.partial(journal.stop_run, token)
            for index, _ in outcomes(ray, write_batch, task, files, options.workers, gpus, stop=stop):
                advance(sizes[index])
    _check_written(plan, partial, journal)


def _source_of(options: RunOptions) -> str:
    return fingerprint(options.local_sources().values())


def digest_of(plan: ConversionPlan) -> str:
    """SHA-256 of a plan: every file, its size, and the names, shapes and dtypes of its tensors, in order."""
    digest = hashlib.sha256()
    for file, output in plan.files().items():
        specs = [output.files.specs[name] for name in output.files.names[file]]
        tensors = [[spec.name, list(spec.shape), spec.dtype] for spec in specs]
        digest.update(json.dumps([file, output.files.size(file), tensors]).encode())
    return digest.hexdigest()


def batches_of(plan: ConversionPlan, workers: int) -> dict[tuple[str, ...], int]:
    """The files of each task with their bytes, in the reading order of the source."""
    sizes: dict[str, int] = {}
    for output in plan.outputs:
        file_of = {name: file for file, names in output.files.names.items() for name in names}
        order = dict.fromkeys(file_of[name] for names in output.view.groups for name in names)
        sizes |= {file: output.files.size(file) for file in order}
    return {tuple(files): sum(sizes[file] for file in files) for files in pieces_of(sizes, workers)}


def write_batch(task: TaskInput, files: Sequence[str]) -> None:
    """Writes and records these files on this node. Raises CkptkitError if it sees other files than the coordinator."""
    journal = Journal(task.partial, task.token)
    if not journal.may_begin:
        message = f"node {socket.gethostname()} does not see {task.partial} of the coordinator"
        raise CkptkitError(message, "choose a destination on a file system that all nodes share")
    plan = _plan_once(task.options, task.source, task.plan)
    write_files(plan, task.partial, journal, files, 1, task.options.memory)


@functools.lru_cache(maxsize=1)
def _plan_once(options: RunOptions, source: str, plan: str) -> ConversionPlan:
    """The plan, made once per process. Raises CkptkitError if it differs from the coordinator's."""
    return_freed_memory()
    own = make_plan(options)
    if _source_of(options) != source or digest_of(own) != plan:
        raise CkptkitError(
            f"node {socket.gethostname()} sees other files at {options.src} than the coordinator "
            "(names, sizes or times differ)",
            "choose a source on a file system that all nodes share, or copy it with its times (rsync -a)",
        )
    return own


def _check_written(plan: ConversionPlan, partial: Path, journal: Journal) -> None:
    """Raises CkptkitError unless every file has a record and the right size here."""
    for file, output in plan.files().items():
        path = partial / file
        size = path.stat().st_size if path.exists() else 0
        if journal.recorded(file) is None or size != output.files.size(file):
            raise CkptkitError(
                f"{path} has {size} bytes instead of {output.files.size(file)}, or no record, after its task ended",
                "choose a destination on a file system that all nodes share, and continue with --resume",
            )

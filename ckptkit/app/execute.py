"""Does a planned job: side files, every file of its outputs, what makes a checkpoint of them, and the manifest."""

from __future__ import annotations

import json
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from ckptkit.app.jobs import Job, Work
from ckptkit.formats.detect import Location
from ckptkit.formats.hf.remote import check_unchanged
from ckptkit.formats.hf.side_files import MANIFEST, copy_side_files, write_config
from ckptkit.storage.digest import TensorDigest
from ckptkit.transfer.copy import IN_FLIGHT, copy
from ckptkit.transfer.destination import new_directory
from ckptkit.transfer.files import FilesWriter
from ckptkit.transfer.journal import Journal
from ckptkit.transfer.manifest import described_files, lineage_of, write_manifest
from ckptkit.transfer.upload import new_upload
from converters.passthrough import FOLDER


@dataclass(frozen=True)
class How:
    """Where to write (a str is a URL) and with what: none of this changes a byte of what is written.

    `workers`: threads (None: `ckptkit.transfer.copy.threads`), or with `ray` tasks at one time (None: as many as the cluster has cores). `memory`: bytes of
    tensors in flight. `ray`: the address of a Ray cluster ("auto": the one at hand, or a new one on this machine).
    """

    path: str | Path
    workers: int | None = None
    memory: int = IN_FLIGHT
    ray: str | None = None
    overwrite: bool = False
    resume: bool = False


def execute(job: Job, work: Work, how: How) -> None:
    """Writes everything. What a run that is cut off has finished is kept for --resume (not at a URL). Raises CkptkitError."""
    with _destination(job, how) as (partial, journal):
        _write_side_files(work, partial)
        if how.ray is None:
            # What fails in it fails in `finish` again.
            with ThreadPoolExecutor(1) as meanwhile:
                for output in work.outputs:
                    meanwhile.submit(output.files.prepare)
                write_files(work, partial, journal, list(work.files()), how.workers, how.memory)
        else:
            # Imported here because few want it, and it needs this module.
            from ckptkit.app.on_ray import write_on_ray

            write_on_ray(job, work, partial, journal, how)
        for output in work.outputs:
            output.files.finish(partial)
        _write_manifest(job, work, partial, journal)
        for root in job.opened.values():
            check_unchanged(root)


def _destination(job: Job, how: How) -> AbstractContextManager[tuple[Path, Journal]]:
    if isinstance(how.path, str):
        return new_upload(how.path, overwrite=how.overwrite, sources=job.sources)
    return new_directory(how.path, job.asked(), overwrite=how.overwrite, resume=how.resume)


def _write_side_files(work: Work, partial: Path) -> None:
    target = partial / work.side_folder
    target.mkdir(exist_ok=True)
    copy_side_files(work.side_files, target)
    write_config(target, work.config, work.view.specs)
    for output in work.outputs[1:]:
        (partial / FOLDER).mkdir(exist_ok=True)
        (partial / FOLDER / "config.json").write_text(json.dumps(dict(output.view.config), indent=2) + "\n")


def write_files(
    work: Work, partial: Path, journal: Journal, wanted: Collection[str], workers: int | None, memory: int
) -> None:
    """Writes those of these files that are not finished yet, and records each."""
    for output in work.outputs:
        files = [file for file in output.files.names if file in wanted and not journal.intact(file, output.files)]
        if files:
            names = {name for file in files for name in output.files.names[file]}
            writer = FilesWriter(partial, output.files, files, journal.record, journal.check_goes_on)
            copy(output.view, writer, "writing", workers, only=names, memory=memory)


def _write_manifest(job: Job, work: Work, partial: Path, journal: Journal) -> None:
    """The manifest of what has been written, digests included, in the order of its names."""
    digests: dict[str, TensorDigest] = {}
    for file in work.outputs[0].files.names:
        digests |= journal.recorded(file) or {}
    more = {"source": work.side_files.name, "lineage": lineage_of(work.source), "hf_layout": dict(work.layout)}
    written = Location(work.kind, partial / "release" if work.kind == "megatron" else partial, partial)
    tensors = {name: digests[name] for name in sorted(digests)}
    write_manifest(partial / MANIFEST, job.command(), tensors, described_files(written, [partial / FOLDER]), more)

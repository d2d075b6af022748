"""Writes files of a plan: all of them in one process, or those of a Ray task."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from ckptkit.app.plan import ConversionPlan
from ckptkit.core.progress import note, size
from ckptkit.formats.files import Digests
from ckptkit.transfer.copy import copy
from ckptkit.transfer.files import FilesWriter
from ckptkit.transfer.journal import Journal


def write_files(
    plan: ConversionPlan, partial: Path, journal: Journal, wanted: Collection[str], workers: int | None, memory: int
) -> None:
    """Writes those of these files that are not finished yet, and records each."""
    left = [[one for one in output.files.names if one in wanted] for output in plan.outputs]
    if journal.count():
        left = _unfinished(plan, journal, left)
    for output, files in zip(plan.outputs, left, strict=True):
        if files:
            names = {name for file in files for name in output.files.names[file]}
            writer = FilesWriter(partial, output.files, files, _recorder(plan, journal), journal.check_goes_on)
            copy(output.view, writer, "writing", workers, only=names, memory=memory)


def _recorder(plan: ConversionPlan, journal: Journal) -> Callable[[str, Digests], None]:
    """Records a file that is whole, with the errors of the matrices in it."""
    errors = plan.packing.errors if plan.packing else {}

    def record(file: str, digests: Digests) -> None:
        journal.record(file, digests, {name: errors[name] for name in digests if name in errors})

    return record


def _unfinished(plan: ConversionPlan, journal: Journal, wanted: Sequence[Sequence[str]]) -> list[list[str]]:
    """The files of each output that are to be written still. Says how much is kept of the run before."""
    kept, nbytes, left = 0, 0, list[list[str]]()
    for output, files in zip(plan.outputs, wanted, strict=True):
        whole = {file for file in files if journal.intact(file, output.files)}
        kept, nbytes = kept + len(whole), nbytes + sum(map(output.files.size, whole))
        left.append([file for file in files if file not in whole])
    note(f"kept {kept} of {sum(map(len, wanted))} files, {size(nbytes)}, of the run that was cut off")
    return left

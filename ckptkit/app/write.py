"""Writes files of a plan: all of them in one process, or those of a Ray task."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ckptkit.app.plan import ConversionPlan
from ckptkit.transfer.copy import copy
from ckptkit.transfer.files import FilesWriter
from ckptkit.transfer.journal import Journal


def write_files(
    plan: ConversionPlan, partial: Path, journal: Journal, wanted: Collection[str], workers: int | None, memory: int
) -> None:
    """Writes those of these files that are not finished yet, and records each."""
    for output in plan.outputs:
        files = [file for file in output.files.names if file in wanted and not journal.intact(file, output.files)]
        if files:
            names = {name for file in files for name in output.files.names[file]}
            writer = FilesWriter(partial, output.files, files, journal.record, journal.check_goes_on)
            copy(output.view, writer, "writing", workers, only=names, memory=memory)

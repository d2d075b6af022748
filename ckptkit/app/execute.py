"""Carries out a plan: side files, every file of its outputs, what makes a checkpoint of them, and the manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ckptkit.app.plan import ConversionPlan
from ckptkit.app.run_options import RunOptions, Sources
from ckptkit.app.write import write_files
from ckptkit.core.printable import printable
from ckptkit.formats.detect import Location
from ckptkit.formats.hf.remote import check_unchanged
from ckptkit.formats.hf.side_files import MANIFEST, copy_files, side_files, write_config
from ckptkit.storage.digest import TensorDigest
from ckptkit.storage.fingerprint import unchanged
from ckptkit.transfer.destination import new_directory
from ckptkit.transfer.journal import Journal
from ckptkit.transfer.manifest import FINGERPRINT, described_files, lineage_of, write_manifest
from ckptkit.transfer.upload import new_upload
from converters.passthrough import FOLDER
from quant.schemes.interface import SquaredError


def execute(options: RunOptions, plan: ConversionPlan, sources: Sources) -> dict[str, SquaredError]:
    """Writes everything that is planned. Returns the error of each matrix that was packed, by its codes' name.

    Raises CkptkitError.

    What a run that is cut off has finished is kept for --resume, except at a URL.
    """
    read = [plan.source.path, *(sources[path].path for path in options.sources[1:])]
    files = side_files(plan.side_files.path, plan.around_side_files)
    identity = options.identity(sources)
    with _destination(options, identity) as (partial, journal), unchanged(read):
        journal.list_files([*plan.files(), *(f"{plan.side_folder}/{file}".lstrip("/") for file in files)])
        lineage = lineage_of(plan.source)  # before the work, which would be lost where it cannot be read
        _write_side_files(plan, files, partial)
        if options.ray is None:
            # An error in `prepare` comes again in `finish`.
            with ThreadPoolExecutor(1) as meanwhile:
                for output in plan.outputs:
                    meanwhile.submit(output.files.prepare)
                write_files(plan, partial, journal, list(plan.files()), options.workers, options.memory)
        else:
            from ckptkit.app.on_ray import write_on_ray  # here because few runs need it

            write_on_ray(options, plan, partial, journal)
        for output in plan.outputs:
            output.files.finish(partial)
        _write_manifest(options, plan, {"lineage": lineage, FINGERPRINT: identity["source"]}, partial, journal)
        for source in sources.values():
            check_unchanged(source)
        return {name: SquaredError(*sums) for file in plan.files() for name, sums in journal.measured(file).items()}


def _destination(options: RunOptions, identity: Mapping[str, Any]) -> AbstractContextManager[tuple[Path, Journal]]:
    if isinstance(options.dst, str):
        return new_upload(options.dst, overwrite=options.overwrite, sources=options.sources)
    return new_directory(options.dst, identity, overwrite=options.overwrite, resume=options.resume)


def _write_side_files(plan: ConversionPlan, files: Sequence[Path], partial: Path) -> None:
    target = partial / plan.side_folder
    target.mkdir(exist_ok=True)
    copy_files(plan.side_files.path, files, target)
    write_config(target, plan.config, plan.view.specs)
    for output in plan.outputs[1:]:
        (partial / FOLDER).mkdir(exist_ok=True)
        (partial / FOLDER / "config.json").write_text(json.dumps(dict(output.view.config), indent=2) + "\n")


def _write_manifest(
    options: RunOptions, plan: ConversionPlan, source: Mapping[str, Any], partial: Path, journal: Journal
) -> None:
    """Writes the manifest of what has been written, digests included, in the order of names."""
    digests: dict[str, TensorDigest] = {}
    for file in plan.outputs[0].files.names:
        digests |= journal.recorded(file) or {}
    more = {"source": printable(plan.side_files.path.name), **source, "hf_layout": dict(plan.layout)}
    written = Location(plan.kind, partial / "release" if plan.is_megatron else partial, partial)
    tensors = {name: digests[name] for name in sorted(digests)}
    files = described_files(written, [partial / FOLDER])
    write_manifest(partial / MANIFEST, options.command(), tensors, files, more)

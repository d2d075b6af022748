"""Runs a conversion or a quantization: opens its sources, rejects invalid requests, plans, and writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckptkit.app.forecast import Forecast, forecast
from ckptkit.app.packing_summary import PackedSummary, summary
from ckptkit.app.plan import ConversionPlan, make_plan
from ckptkit.app.run_options import RunOptions, Sources
from ckptkit.app.write import write_files, write_on_ray
from ckptkit.converters.megatron.run_config import peft_settings
from ckptkit.converters.megatron_adapter import as_peft, only_adapters
from ckptkit.converters.open import open_checkpoint
from ckptkit.converters.passthrough import FOLDER
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError, UsageError
from ckptkit.core.extents import byte_ranges_of
from ckptkit.core.plan import View
from ckptkit.core.printable import printable
from ckptkit.core.progress import phase
from ckptkit.core.specs import fold
from ckptkit.formats.detect import MANIFEST, Location, locate, require_own_files
from ckptkit.formats.hf.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from ckptkit.formats.hf.remote import check_unchanged, open_directory
from ckptkit.formats.hf.side_files import copy_files, side_files, write_config
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.quant.schemes.interface import SquaredError
from ckptkit.quant.schemes.registry import DEFAULT
from ckptkit.storage.digest import TensorDigest
from ckptkit.storage.fingerprint import require_unchanged
from ckptkit.storage.links import dangling_in, format_links
from ckptkit.storage.url import is_url
from ckptkit.transfer.destination import check_destination, finish_published, new_directory
from ckptkit.transfer.journal import Journal
from ckptkit.transfer.manifest import (
    FINGERPRINT,
    file_digest,
    lineage_of,
    loaded_files,
    read_manifest,
    side_file_digests,
    write_manifest,
)
from ckptkit.transfer.upload import check_upload, new_upload


@dataclass(frozen=True)
class ConversionResult:
    """The output of a run, or with `dry_run` its plan. `layout` maps HF shard files to the tensors in them.

    `dequantized`: the quantization of the source; `forecast`: of a dry run; `notes`: remarks on the source; `packed`:
    a summary of the quantization; `was_whole`: the resumed run was already complete, so nothing was written now.
    """

    source: str
    destination: str
    format: str
    tensors: int
    bytes: int
    names: list[str] = field(default_factory=list)
    layout: Mapping[str, list[str]] = field(default_factory=dict)
    dequantized: str | None = None
    forecast: Forecast | None = None
    notes: tuple[str, ...] = ()
    packed: PackedSummary | None = None
    was_whole: bool = False


def run(options: RunOptions) -> ConversionResult:
    """Runs a conversion or a quantization. Raises CkptkitError for invalid input, and then leaves no output."""
    with ExitStack() as stack:
        sources = {source: stack.enter_context(open_directory(source)) for source in dict.fromkeys(options.sources)}
        location = locate(sources[options.src])
        for source in sources.values():
            require_own_files(source.path)
        is_complete = False
        if options.resume and not options.dry_run and isinstance(options.dst, Path):
            is_complete = finish_published(options.dst, options.identity(sources), _fault_of)
        if not is_complete:
            _check_destination(options, sources, location)
        if (adapters := adapters_at(options, location, sources)) is not None:
            if not options.dry_run:
                write_adapters(options, adapters)
            return _written(options.src, options, "adapter", adapters)
        _check_direction(options, location)
        with phase("planning"):
            plan = make_plan(options, sources)
        errors = {} if options.dry_run or is_complete else execute(options, plan, sources)
        # Links to missing files that no loader reads.
        links = dangling_in(plan.side_files.path, plan.around_side_files)
        lost = [f"{plan.side_files.path}: not copied: {format_links(links)}"] if links else []
        return replace(
            _written(str(plan.side_files), options, plan.kind, plan.view),
            layout=plan.layout if plan.kind == "hf" else {},
            dequantized=plan.dequantized,
            forecast=forecast(options, plan) if options.dry_run else None,
            notes=(*plan.notes, *lost),
            # The reason for matrices that could be packed but are not.
            packed=summary(
                plan, errors, f"--preset {options.preset}" if options.preset else "--like" if options.like else "ignore"
            ),
            was_whole=is_complete,
        )


def _fault_of(written: Path) -> str | None:
    """A difference of a directory from its manifest, or None. Digests side files, but reads no weights."""
    try:
        promised = read_manifest(written / MANIFEST)
        for name, digest in promised.files.items():
            if not (written / name).is_file():
                return f"{name} is missing"
            if file_digest(written / name) != digest:
                return f"{name} has other bytes than were written"
        if added := sorted(loaded_files(locate(written)) - promised.files.keys()):
            return f"{added[0]} was added"
        checkpoint = open_checkpoint(written)
        found = {name: (spec.dtype, spec.shape) for name, spec in checkpoint.specs.items()}
    except CkptkitError as error:
        return error.message
    if found != {name: (digest.dtype, digest.shape) for name, digest in promised.tensors.items()}:
        return "its tensors are not those that were written"
    ends: dict[Path, int] = {}
    for one in byte_ranges_of(checkpoint, list(found)):
        ends[one.path] = max(one.end, ends.get(one.path, 0))
    if isinstance(checkpoint, TorchDistCheckpoint):  # its files continue after the last tensor's bytes
        blobs = [chunk.blob for stored in checkpoint.metadata.tensors.values() for chunk in stored.chunks]
        for blob in (*blobs, *checkpoint.metadata.objects.values()):
            ends[blob.path] = max(blob.offset + blob.length, ends.get(blob.path, 0))
    short = (path for path, end in ends.items() if not path.is_file() or path.stat().st_size < end)
    return next((f"{path.relative_to(written)} is missing or cut short" for path in short), None)


def _written(source: str, options: RunOptions, kind: str, view: Checkpoint) -> ConversionResult:
    count = sum(spec.nbytes for spec in view.specs.values())
    return ConversionResult(source, str(options.dst), kind, len(view.specs), count, fold(view.specs))


def _check_destination(options: RunOptions, sources: Sources, location: Location) -> None:
    """Raises CkptkitError if the destination may not be written, for example because it contains a source."""
    if isinstance(options.dst, Path):
        folders = [location.root / "hf", location.root / FOLDER] if location.kind == "megatron" else []
        read = [location.path, *folders, *(sources[path].path for path in options.sources[1:])]
        check_destination(options.dst, read, overwrite=options.overwrite, resume=options.resume)
    else:
        check_upload(options.dst, options.overwrite, options.sources)


def _check_direction(options: RunOptions, location: Location) -> None:
    """Raises UsageError for options of the other direction."""
    if location.kind == "deltas":
        if options.verb == "quantize" or options.scheme or options.dialect or options.cast_to or options.merge:
            message = f"{options.src} has deltas, which convert can only turn into the full HF checkpoint"
            raise UsageError(message, "run `ckptkit convert SRC DST --hf BASE`, and continue from DST")
        return
    if location.kind == "megatron":
        if options.verb == "quantize":
            scheme = options.scheme.name if options.scheme else DEFAULT
            raise UsageError(
                f"{options.src} is a Megatron checkpoint, but `quantize` reads HF checkpoints",
                f"run `ckptkit convert SRC DST --quantize {scheme}`, which exports and quantizes in one pass",
            )
        if options.dialect and options.scheme:
            message = f"--dialect writes a Megatron checkpoint, which cannot have {options.scheme.title} weights"
            raise UsageError(message, "pass --dialect or --quantize, not both")
        if options.dialect and is_url(options.dst):
            raise _no_megatron_at(options.dst)
    elif options.verb == "convert":
        if options.hf:
            message = "--hf is only for conversion from Megatron to HF"
            raise UsageError(message, "remove --hf: the source has a config")
        if options.merge and options.dtype != "auto":
            raise UsageError("--dtype has no effect with --merge, which keeps the dtypes of the base", "remove it")
        if options.scheme and not options.merge:
            hint = f"quantize from HF to HF instead: `ckptkit quantize SRC DST --scheme {options.scheme.name}`"
            raise UsageError(f"{options.scheme.title} is not written into Megatron checkpoints", hint)
        if is_url(options.dst) and not options.merge:
            raise _no_megatron_at(options.dst)


def _no_megatron_at(url: str) -> UsageError:
    message = f"{url}: only HF directories are written to URLs, not Megatron checkpoints"
    return UsageError(message, "write it to a local disk, and upload it")


def adapters_at(options: RunOptions, location: Location, sources: Sources) -> View | None:
    """The adapters under PEFT's names if a Megatron checkpoint has only these, or None. Raises UsageError."""
    if location.kind != "megatron" or location.legacy or (settings := peft_settings(location.path)) is None:
        return None
    source = TorchDistCheckpoint(location.path, hf=sources[options.hf] if options.hf else None)
    if not only_adapters(source.specs):
        return None
    own = RunOptions(options.verb, options.src, options.dst, options.hf)
    if (
        not isinstance(options.dst, Path)
        or replace(own, overwrite=options.overwrite, dry_run=options.dry_run) != options
    ):
        message = f"{options.src} has only LoRA adapters, which convert writes in PEFT's format to a local disk"
        raise UsageError(message, "pass --hf BASE and no other option; merge the adapters later with `--merge DST`")
    return as_peft(source, settings, str(location.path))


def write_adapters(options: RunOptions, view: View) -> None:
    """Writes adapter_config.json and adapter_model.safetensors."""
    from safetensors.torch import save_file

    assert isinstance(options.dst, Path)
    with new_directory(options.dst, {}, overwrite=options.overwrite, resume=False) as (partial, _):
        save_file(view.read(list(view.specs)), partial / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        (partial / ADAPTER_CONFIG).write_text(json.dumps(dict(view.config), indent=2) + "\n")


def execute(options: RunOptions, plan: ConversionPlan, sources: Sources) -> dict[str, SquaredError]:
    """Executes a plan. Returns the error of each packed matrix, by the name of its codes. Raises CkptkitError."""
    read = [plan.source.path, *(sources[path].path for path in options.sources[1:])]
    files = side_files(plan.side_files.path, plan.around_side_files)
    identity = options.identity(sources)
    destination = (
        new_upload(options.dst, overwrite=options.overwrite, sources=options.sources)
        if isinstance(options.dst, str)
        else new_directory(options.dst, identity, overwrite=options.overwrite, resume=options.resume)
    )
    with destination as (partial, journal), require_unchanged(read):
        journal.list_files([*plan.files(), *(f"{plan.side_folder}/{file}".lstrip("/") for file in files)])
        lineage = lineage_of(plan.source)  # first: an unreadable source would waste the work
        target = partial / plan.side_folder
        target.mkdir(exist_ok=True)
        copy_files(plan.side_files.path, files, target)
        write_config(target, plan.config, plan.view.specs)
        for output in plan.outputs[1:]:
            (partial / FOLDER).mkdir(exist_ok=True)
            (partial / FOLDER / "config.json").write_text(json.dumps(dict(output.view.config), indent=2) + "\n")
        if options.ray is None:
            # An error in `prepare` is raised again by `finish`.
            with ThreadPoolExecutor(1) as meanwhile:
                for output in plan.outputs:
                    meanwhile.submit(output.files.prepare)
                write_files(plan, partial, journal, list(plan.files()), options.workers, options.memory)
        else:
            write_on_ray(options, plan, partial, journal)
        for output in plan.outputs:
            output.files.finish(partial)
        _write_manifest(options, plan, {"lineage": lineage, FINGERPRINT: identity["source"]}, partial, journal)
        for source in sources.values():
            check_unchanged(source)
        return {name: SquaredError(*sums) for file in plan.files() for name, sums in journal.measured(file).items()}


def _write_manifest(
    options: RunOptions, plan: ConversionPlan, source: Mapping[str, Any], partial: Path, journal: Journal
) -> None:
    """Writes the manifest of the output, with digests in the order of names."""
    digests: dict[str, TensorDigest] = {}
    for file in plan.outputs[0].files.names:
        digests |= journal.recorded(file) or {}
    more = {"source": printable(plan.side_files.path.name), **source, "hf_layout": dict(plan.layout)}
    written = Location(plan.kind, partial / "release" if plan.kind == "megatron" else partial, partial)
    tensors = {name: digests[name] for name in sorted(digests)}
    files = side_file_digests(written, [partial / FOLDER])
    write_manifest(partial / MANIFEST, options.command(), tensors, files, more)

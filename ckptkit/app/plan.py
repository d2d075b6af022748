"""Plans a conversion or a quantization from headers: the tensors and files to write, and their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.app.run_options import RunOptions, Sources
from ckptkit.converters.adapter import Adapter
from ckptkit.converters.experts import is_fused, only_fused, unfuse
from ckptkit.converters.megatron.arguments import megatron_args
from ckptkit.converters.megatron.hybrid_model import refuse_hybrid_only
from ckptkit.converters.megatron.rank_cuts import rank_cuts
from ckptkit.converters.open import open_megatron
from ckptkit.converters.passthrough import FOLDER, lost_towers, passthrough_of, require_towers
from ckptkit.converters.planner import HYBRID, MCORE, default_dialect, dims_of, to_megatron
from ckptkit.converters.registry import check_unwitnessed
from ckptkit.converters.stored import remarks, require_mtp
from ckptkit.core.allocator import gc_paused
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import DamagedError, UsageError
from ckptkit.core.plan import View
from ckptkit.core.specs import summarize
from ckptkit.formats.deltas import base_of, chain_at, open_deltas
from ckptkit.formats.detect import Kind, Location, locate
from ckptkit.formats.files import FILE_BYTES, Files, part_bytes
from ckptkit.formats.hf.adapter import AdapterFiles
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.formats.hf.side_files import MANIFEST, layout_for, main_dtype, stored_layout
from ckptkit.formats.hf.writer import SafetensorsFiles, cut_shards
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.formats.torch_dist.training_state import calibration_note, training_state
from ckptkit.formats.torch_dist.writer import TorchDistFiles
from ckptkit.storage.directory import Directory
from ckptkit.verify.evidence.plain import as_release, plain, reference_of

if TYPE_CHECKING:
    from ckptkit.quant.schemes.registry import Packing, Scheme

Layout = Mapping[str, list[str]]


@dataclass(frozen=True)
class Output:
    """Tensors, and the files that contain them."""

    view: Checkpoint
    files: Files


@dataclass(frozen=True)
class ConversionPlan:
    """The output of a run: `outputs`, the first with the model, the second with passthrough tensors.

    `side_files`: the HF directory with the config, tokenizer and code for `side_folder` of the destination. `layout`:
    HF files and their tensors, now or after conversion back. `dequantized`: the format of a quantized source. `notes`:
    remarks for the user on the source, and on serving a quantized result. `packing`: the quantization, if any.
    """

    kind: Kind
    source: Location
    outputs: tuple[Output, ...]
    side_files: Directory
    layout: Layout
    config: Mapping[str, Any] = field(default_factory=dict)
    dequantized: str | None = None
    notes: tuple[str, ...] = ()
    packing: Packing | None = None

    @property
    def view(self) -> Checkpoint:
        """The model in the output."""
        return self.outputs[0].view

    @property
    def side_folder(self) -> str:
        """The folder for side files, relative to the destination."""
        return "hf" if self.kind == "megatron" else ""

    @property
    def around_side_files(self) -> Path | None:
        """The checkpoint that contains the side files, or None if they are separate."""
        root = self.source.root
        return root if self.side_files.path.is_relative_to(root) else None

    def files(self) -> dict[str, Output]:
        """Every file to write, in order, with its output."""
        return {file: output for output in self.outputs for file in output.files.names}


@gc_paused()
def make_plan(options: RunOptions, sources: Sources | None = None) -> ConversionPlan:
    """Plans a run from headers. `sources`: directories of sources, or None for their own paths. Raises CkptkitError."""
    local = options.local_sources() if sources is None else sources
    location = locate(local[options.src])
    if location.kind == "deltas":  # the result is the newest version, in files like those of the base
        chain, hf = chain_at(location.path), local[options.hf] if options.hf else None
        view, base = open_deltas(location.path, hf), base_of(chain, hf)
        layout = _cut(view, options) if options.max_shard_size else base.layout
        newest = replace(location, path=chain.versions[chain.target].path)
        return _hf_plan(view, layout, base.directory, newest, options, local)
    if options.verb == "quantize" or (options.merge and location.kind == "hf"):
        return _hf_to_hf(location, options, local)
    if location.kind == "hf":
        source = plain(location.directory)
        _require_tensors(source, location)
        return replace(
            _to_megatron(location, options, source),
            side_files=location.directory,
            layout=_layout(source, options),
            dequantized=_original_format(source),
            notes=_notes(source),
        )
    plan = _to_hf(location, options, local)
    if options.dialect is None:
        return plan
    # Through HF names, which have a mapping to every dialect.
    other = _to_megatron(location, options, plan.view)
    return replace(other, side_files=plan.side_files, layout=plan.layout, notes=plan.notes)


def _require_tensors(source: Checkpoint, location: Location) -> None:
    """Raises DamagedError for a checkpoint without tensors."""
    if not source.specs:
        raise DamagedError(f"{location.directory} has no tensors", "copy or download its weights again")


def _to_megatron(location: Location, options: RunOptions, source: Checkpoint) -> ConversionPlan:
    """The plan for the Megatron files of an HF checkpoint."""
    check_unwitnessed(source.config, options.unwitnessed)
    dialect = options.dialect or default_dialect(source.config)
    if dialect != HYBRID:
        refuse_hybrid_only(dims_of(source.config))
    view = to_megatron(source, str(location.directory), options.cast_to, dialect)
    dtype = main_dtype(view.specs)
    args = megatron_args(dims_of(view.config), dialect) | {
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
    }
    # In writing order, which is also the reading order of a conversion back.
    specs = {name: view.specs[name] for names in view.groups for name in names}
    cuts = rank_cuts(view.config, dialect, specs)
    # slime and miles build Transformer Engine's layers; their exporters fail on the names of other layer specs.
    file_bytes = options.max_shard_size or part_bytes(sum(spec.nbytes for spec in specs.values()))
    files = TorchDistFiles(specs, args, file_bytes, cuts, second_names=dialect == MCORE)
    outputs = [Output(view, files)]
    if (passed := passthrough_of(source, str(location.directory))) is not None:
        outputs.append(Output(passed, SafetensorsFiles(passed.specs, _cut(passed, options), FOLDER)))
    return ConversionPlan("megatron", location, tuple(outputs), location.directory, {}, source.config)


def _to_hf(location: Location, options: RunOptions, local: Sources) -> ConversionPlan:
    source = open_megatron(location, local[options.hf] if options.hf else None)
    _require_tensors(source, location)
    check_unwitnessed(source.config, options.unwitnessed)
    reference = reference_of(source)
    layout = stored_layout(location.root / MANIFEST) if reference is None else _layout(reference, options)
    release = {name for names in (layout or {}).values() for name in names}
    require_mtp(source.config, source.specs, release, str(location.path))
    fused = is_fused(release) or only_fused(source.config)
    packs = options.scheme is not None
    if options.scheme is not None:
        _require_separate_experts(source.config, options.scheme)
    view = as_release(source, location.root, release, fused=fused and not packs, dtype=options.cast_to)
    require_towers(source.config, view.specs, str(location.path))
    before, view = view, _merged(view, options)
    is_untied = view.specs.keys() != before.specs.keys()  # the adapter adds an output layer
    if layout is None or options.max_shard_size or (fused and packs) or is_untied:
        layout = _cut(view, options)
    plan = _hf_plan(view, layout, source.hf, location, options, local)
    state = training_state(source.metadata, {}) if isinstance(source, TorchDistCheckpoint) else {}
    return replace(plan, notes=(*remarks(source.config, source.specs), *calibration_note(state), *plan.notes))


def _merged(view: Checkpoint, options: RunOptions) -> Checkpoint:
    """An HF checkpoint, with the adapter of `--merge` if given."""
    if options.merge is None:
        return view
    return Adapter(AdapterFiles(Path(options.merge)), view, options.merge).merged()


def _hf_to_hf(location: Location, options: RunOptions, local: Sources) -> ConversionPlan:
    source = plain(location.directory)
    _require_tensors(source, location)
    view = _merged(source, options)
    is_untied = view.specs.keys() != source.specs.keys()  # the adapter adds an output layer
    layout = _cut(view, options) if options.max_shard_size or is_untied else _layout(source, options)
    if options.scheme is None and view is source and isinstance(source, HfCheckpoint):
        raise UsageError(f"{options.src} is not quantized: there is nothing to dequantize", "use it unchanged")
    fused = is_fused(view.specs)
    if options.scheme is not None and (fused or only_fused(source.config)):
        _require_separate_experts(source.config, options.scheme)
    if options.scheme is not None and fused:
        view = View(view, unfuse(view.specs, source.config, options.src))
        layout = _cut(view, options)
    stored = source.source if isinstance(source, View) and options.merge is None else None
    plan = _hf_plan(view, layout, location.directory, location, options, local, stored)
    return replace(plan, dequantized=_original_format(source), notes=(*_notes(source), *plan.notes))


def _notes(source: Checkpoint) -> tuple[str, ...]:
    """Remarks for the user on an HF checkpoint."""
    lost = lost_towers(source.config, source.specs)
    message = f"the source lacks {summarize(lost)}, which its class requires: engines use random values there"
    return (*remarks(source.config, source.specs), *([message] if lost else []))


def _require_separate_experts(config: Mapping[str, Any], scheme: Scheme) -> None:
    from ckptkit.quant.planner import require_separate_experts  # few runs need it

    require_separate_experts(config, scheme)


def _hf_plan(
    view: Checkpoint,
    layout: Layout,
    side_files: Directory,
    location: Location,
    options: RunOptions,
    local: Sources,
    stored: Checkpoint | None = None,
) -> ConversionPlan:
    layout = layout_for(view, layout)
    packing: Packing | None = None
    if options.scheme is not None:
        from ckptkit.quant.planner import quantized, quantized_layout
        from ckptkit.quant.schemes.interface import Request

        like = HfCheckpoint(local[options.like]) if options.like else None
        request = Request(str(side_files), like, stored, options.preset, options.readers, options.tp, options.device)
        view, packing = quantized(view, options.scheme, request)
        layout = quantized_layout(layout, view)
    outputs = (Output(view, SafetensorsFiles(view.specs, layout)),)
    notes = packing.notes if packing is not None else ()
    return ConversionPlan("hf", location, outputs, side_files, layout, view.config, notes=notes, packing=packing)


def _original_format(source: Checkpoint) -> str | None:
    """The format of a dequantized release, for people, or None."""
    if not isinstance(source, View):
        return None
    from ckptkit.quant.formats.dequantize import format_of

    return format_of(source.source.config).words


def _layout(source: HfCheckpoint | View, options: RunOptions) -> Layout:
    """The layout of the source, or a new one if it is dequantized and so larger."""
    return source.layout if isinstance(source, HfCheckpoint) else _cut(source, options)


def _cut(view: Checkpoint, options: RunOptions) -> Layout:
    return cut_shards(view.specs, options.max_shard_size or FILE_BYTES)

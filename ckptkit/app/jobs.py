"""A conversion or a quantization as plain data, and the plan of it: what is written, into which files, and from what."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.collector import import_apart, uncollected
from ckptkit.core.errors import CkptkitError
from ckptkit.core.join import Joined
from ckptkit.core.plan import View
from ckptkit.formats.detect import Location, locate
from ckptkit.formats.files import FILE_BYTES, Files
from ckptkit.formats.hf.reader import HfCheckpoint, has_weights
from ckptkit.formats.hf.side_files import MANIFEST, layout_for, main_dtype, stored_layout
from ckptkit.formats.hf.writer import SafetensorsFiles, cut_shards
from ckptkit.formats.torch_dist.writer import TorchDistFiles
from ckptkit.storage.fingerprint import fingerprint
from converters.experts import is_fused, only_fused, unfuse
from converters.megatron.arguments import megatron_args
from converters.megatron.rank_cuts import rank_cuts
from converters.open import open_megatron
from converters.passthrough import FOLDER, passthrough_beside, passthrough_of
from converters.planner import MCORE, dims_of, to_hf, to_megatron
from converters.stored import remarks, require_mtp
from quant.selection.readers import ALL_READERS
from verify.evidence.plain import plain

if TYPE_CHECKING:
    from quant.formats.scheme import QuantScheme

DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
Layout = Mapping[str, list[str]]


@dataclass(frozen=True)
class Job:
    """What to write, as plain data that means the same in every process. Options are those of `ckptkit.convert` and `ckptkit.quantize`.

    `file_bytes`: the size at which a file of the output ends, in bytes of plain weights; None: as in the release, else 5 GB. `opened`: of those sources
    that are URLs, the directories that stand for them while the job is planned and done (`ckptkit.formats.hf.remote.opened`).
    """

    verb: Literal["convert", "quantize"]
    src: str
    hf: str | None = None
    dtype: str = "auto"
    dialect: str | None = None
    scheme: QuantScheme | None = None
    like: str | None = None
    readers: tuple[str, ...] = tuple(ALL_READERS)
    tp: int | None = None
    device: str = "cpu"
    file_bytes: int | None = None
    opened: Mapping[str, Path] = field(default_factory=dict, hash=False)

    @property
    def sources(self) -> list[str]:
        """Paths and URLs of what is read."""
        return [path for path in (self.src, self.hf, self.like) if path]

    def here(self, source: str) -> Path:
        """The directory of this machine where a source is read."""
        return self.opened.get(source, Path(source))

    def command(self) -> list[str]:
        """The job in words, the same whatever runs it and wherever it writes: for the manifest."""
        found = ["ckptkit", self.verb, self.src]
        defaults = {one.name: one.default for one in fields(self)}
        for name in ("hf", "dtype", "dialect", "like", "tp", "file_bytes"):
            if (value := getattr(self, name)) != defaults[name]:
                found += [f"--{name.replace('_', '-')}", str(value)]
        if self.readers != defaults["readers"]:
            found += [word for reader in self.readers for word in ("--reader", reader)]
        return found + (_words_of(self.scheme, self.verb) if self.scheme else [])

    def asked(self) -> dict[str, Any]:
        """What a resumed run must have in common with the one that died: version, command, and names, sizes and times of the files read."""
        read = [self.here(source) for source in self.sources]
        return {"version": version("ckptkit"), "command": shlex.join(self.command()), "source": fingerprint(read)}


def _words_of(scheme: QuantScheme, verb: str) -> list[str]:
    words = ["--quantize", "w4a16"] if verb == "convert" else []
    words += ["--group-size", str(scheme.group_size or "channel"), "--grid", scheme.grid]
    words += [] if scheme.symmetric else ["--asymmetric"]
    words += ["--search", scheme.search] if scheme.search != "none" else []
    words += ["--scale-dtype", str(scheme.scale_dtype).removeprefix("torch.")] if scheme.scale_dtype else []
    return words + [word for pattern in scheme.ignore for word in ("--ignore", pattern)]


@dataclass(frozen=True)
class Output:
    """Tensors, and the files that they go into."""

    view: Checkpoint
    files: Files


@dataclass(frozen=True)
class Work:
    """A planned job: `outputs`, of which the first holds the model, the second what is only carried along.

    `side_files`: the HF directory whose config, tokenizer and code go into `side_folder` of the destination. `layout`: how HF
    weights are, or on the way back will be, cut into files. `dequantized`: how a quantized source was quantized, in words. `notes`: what
    its user should know of the source.
    """

    kind: Literal["hf", "megatron"]
    source: Location
    outputs: tuple[Output, ...]
    side_files: Path
    layout: Layout
    config: Mapping[str, Any] = field(default_factory=dict)
    dequantized: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def view(self) -> Checkpoint:
        """The model as it is written."""
        return self.outputs[0].view

    @property
    def side_folder(self) -> str:
        """Where side files go, below the destination."""
        return "hf" if self.kind == "megatron" else ""

    def files(self) -> dict[str, Output]:
        """Every file to write, in order, and the output that it belongs to."""
        return {file: output for output in self.outputs for file in output.files.names}


@uncollected()
def planned(job: Job) -> Work:
    """The plan. Raises CkptkitError for anything wrong with the job or its source that can be seen without reading weights."""
    location = locate(job.here(job.src))
    if job.verb == "quantize":
        return _quantized(location, job)
    return _hf_to_megatron(location, job) if location.kind == "hf" else _megatron_to_hf(location, job)


def _hf_to_megatron(location: Location, job: Job) -> Work:
    source = plain(location.path)
    dialect = job.dialect or MCORE
    view = to_megatron(source, str(location.path), _cast_to(job), dialect)
    args = megatron_args(dims_of(view.config), dialect) | _dtype_args(view)
    # In the order in which it is written, which is also the order in which the way back will read it.
    specs = {name: view.specs[name] for names in view.groups for name in names}
    cuts = rank_cuts(view.config, dialect, specs)
    outputs = [Output(view, TorchDistFiles(specs, args, job.file_bytes or FILE_BYTES, cuts))]
    if (untouched := passthrough_of(source, str(location.path))) is not None:
        outputs.append(Output(untouched, SafetensorsFiles(untouched.specs, _cut(untouched, job), FOLDER)))
    notes = tuple(remarks(source.config, source.specs))
    work = Work("megatron", location, tuple(outputs), location.path, _layout(source, job), source.config, notes=notes)
    return replace(work, dequantized=_words(source.source.config)) if isinstance(source, View) else work


def _cast_to(job: Job) -> str | None:
    """The dtype to write floating tensors in; None: as they are."""
    return None if job.dtype == "auto" else job.dtype


def _dtype_args(view: Checkpoint) -> dict[str, Any]:
    dtype = main_dtype(view.specs)
    return {
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
    }


def _megatron_to_hf(location: Location, job: Job) -> Work:
    source = open_megatron(location, job.here(job.hf) if job.hf else None)
    layout = (
        _layout(plain(source.hf_path), job) if has_weights(source.hf_path) else stored_layout(location.root / MANIFEST)
    )
    release = {name for names in (layout or {}).values() for name in names}
    require_mtp(source.config, source.specs, release, str(location.path))
    fused = is_fused(release) or only_fused(source.config)
    if job.scheme is not None:
        _refuse_int4(source.config)
    view: Checkpoint = to_hf(
        source, str(location.path), fused=fused and job.scheme is None, dtype=_cast_to(job), release=release
    )
    if untouched := passthrough_beside(source, source.hf_path, location.root, plain):
        view = Joined(view, untouched)
    usable = _cut(view, job) if job.file_bytes or layout is None or (fused and job.scheme) else layout
    return replace(_hf(view, usable, source.hf_path, location, job), notes=tuple(remarks(source.config, source.specs)))


def _quantized(location: Location, job: Job) -> Work:
    source = plain(location.path)
    view: Checkpoint = source
    layout: Layout = _cut(source, job) if job.file_bytes else _layout(source, job)
    if is_fused(source.specs):
        _refuse_int4(source.config)
        view = View(source, unfuse(source.specs, source.config, job.src))
        layout = _cut(view, job)
    before = source.source if isinstance(source, View) else None
    work = replace(
        _hf(view, layout, location.path, location, job, reference=_int4(before)),
        notes=tuple(remarks(source.config, source.specs)),
    )
    return replace(work, dequantized=_words(before.config)) if before is not None else work


def _int4(source: Checkpoint | None) -> Checkpoint | None:
    """The source, when it is in INT4."""
    if source is None:
        return None
    from quant.requantize import recorded

    return source if recorded(source.config) else None


def _refuse_int4(config: Mapping[str, Any]) -> None:
    if only_fused(config):
        raise CkptkitError(
            f"INT4 {config['model_type']} is not supported: its experts are one tensor a layer, and no reader knows them one by one",
            "serve it as it is, or in the format of its release",
        )


def _hf(
    view: Checkpoint,
    layout: Layout,
    side_files: Path,
    location: Location,
    job: Job,
    reference: Checkpoint | None = None,
) -> Work:
    layout = layout_for(view, layout)
    if job.scheme is not None:
        import_apart("quant.planner")
        from quant.planner import packed_less, quantized, quantized_layout

        before = view
        like = HfCheckpoint(job.here(job.like)) if job.like else None
        names = like.specs if like else packed_less(reference.specs, job.scheme.ignore) if reference else None
        view = quantized(
            view,
            str(side_files),
            job.scheme,
            reference=like or reference,
            like=names,
            tp=job.tp,
            readers=job.readers,
            device=job.device,
        )
        layout = quantized_layout(layout, before.specs, view.specs)
    return Work("hf", location, (Output(view, SafetensorsFiles(view.specs, layout)),), side_files, layout, view.config)


def _words(config: Mapping[str, Any]) -> str:
    """How a quantized release is quantized."""
    from quant.formats.dequantize import format_of

    return format_of(config).words


def _layout(source: HfCheckpoint | View, job: Job) -> Layout:
    """How its weights are cut into files: as they are, or anew where they are dequantized and so larger."""
    return source.layout if isinstance(source, HfCheckpoint) else _cut(source, job)


def _cut(view: Checkpoint, job: Job) -> Layout:
    return cut_shards(view.specs, job.file_bytes or FILE_BYTES)

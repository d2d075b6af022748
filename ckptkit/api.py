"""The verbs as Python functions: what the command line calls, and what a training script can call itself."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ckptkit.checkpoint import Checkpoint
from ckptkit.copy import check_destination, copy, new_directory
from ckptkit.errors import CkptkitError
from ckptkit.formats import Location, locate
from ckptkit.join import Joined
from ckptkit.manifest import Digested, described_files, digests_of, lineage_of, write_manifest
from ckptkit.plan import View
from ckptkit.safetensors_io import HfCheckpoint, SafetensorsWriter, cut_shards, has_weights, read_json
from ckptkit.sidefiles import MANIFEST, copy_side_files, is_quantized, layout_for, main_dtype, stored_layout, write_config
from ckptkit.specs import fold
from ckptkit.torch_dist_reader import TorchDistCheckpoint
from converters.arguments import megatron_args
from converters.carried import FOLDER, carried, carried_beside
from converters.experts import is_fused, only_fused, unfuse
from converters.legacy import LegacyCheckpoint
from converters.open import open_checkpoint, open_megatron
from converters.planner import DIALECTS, MCORE, dims_of, to_hf, to_megatron
from quant.readers import ALL_READERS
from verify.plain import plain

if TYPE_CHECKING:
    from quant.scheme import Grid, QuantScheme, Search

DTYPES: dict[str, torch.dtype | None] = {"auto": None, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Written:
    """What a conversion wrote, or with `dry_run` would write. `layout` maps HF shard files to the tensors in them.

    `dequantized` says how a quantized source was quantized, in words.
    """

    source: str
    destination: str
    format: str
    tensors: int
    bytes: int
    names: list[str] = field(default_factory=list)
    layout: Mapping[str, list[str]] = field(default_factory=dict)
    dequantized: str | None = None


@dataclass(frozen=True)
class _Wanted:
    """What the INT4 weights must fit: an INT4 checkpoint to pack the same as, readers that must agree, a tensor parallel size; and what computes them."""

    like: Path | None
    readers: Sequence[str]
    tp: int | None
    device: str


@dataclass(frozen=True)
class _Output:
    """Where to write, with how many threads (None: one a core), and whether to replace what is there or to write nothing at all."""

    path: Path
    workers: int | None
    overwrite: bool
    dry_run: bool


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    hf: str | Path | None = None,
    dtype: str = "auto",
    dialect: str | None = None,
    quantize: QuantScheme | None = None,
    like: str | Path | None = None,
    readers: Sequence[str] = ALL_READERS,
    tp: int | None = None,
    device: str = "cpu",
    workers: int | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
) -> Written:
    """HF directory -> Megatron torch_dist, or a Megatron root, `release/` or `iter_*/` (torch_dist or legacy) -> HF directory.

    `hf` names the HF directory that gives config, tokenizer and shard layout on the way back; without it, what was stored
    on the way there is used. `dialect` names Megatron's tensors: "mcore" (the default) as megatron-core does, "slime" as
    slime's own modules do; on the way back it is told from the names. `quantize` (only on the way back) writes INT4 in the same pass;
    `like`, `readers`, `tp` and `device` are as in `quantize`.
    `workers` threads read, compute and write (None: one a core). Raises CkptkitError for anything wrong with the input; then nothing is
    left at `dst`.
    """
    location = locate(src)
    output = _Output(Path(dst), workers, overwrite, dry_run)
    check_destination(output.path, overwrite, [location.path, location.root / "hf", Path(hf) if hf else None])
    if dtype not in DTYPES:
        raise CkptkitError(f"unknown dtype {dtype!r}", f"choose one of {', '.join(DTYPES)}")
    if location.kind == "hf":
        if hf:
            raise CkptkitError("--hf is for the way back, from Megatron to HF", "leave it out: the source brings its own config")
        if quantize:
            raise CkptkitError("Megatron holds no INT4 weights", "`ckptkit quantize` makes an INT4 HF checkpoint from an HF one")
        if (dialect or MCORE) not in DIALECTS:
            raise CkptkitError(f"unknown dialect {dialect!r}", f"choose one of {', '.join(DIALECTS)}")
        return _hf_to_megatron(location, output, DTYPES[dtype], dialect or MCORE)
    if dialect:
        raise CkptkitError("--dialect is for the way to Megatron", "leave it out: on the way back the names tell it")
    return _megatron_to_hf(location, output, hf, DTYPES[dtype], quantize, _Wanted(Path(like) if like else None, readers, tp, device))


def quantize(
    src: str | Path,
    dst: str | Path,
    scheme: QuantScheme,
    *,
    like: str | Path | None = None,
    readers: Sequence[str] = ALL_READERS,
    tp: int | None = None,
    device: str = "cpu",
    workers: int | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
) -> Written:
    """HF directory -> INT4 W4A16 HF directory (compressed-tensors pack-quantized), one tensor an expert. Errors as `convert`.

    A quantized source is dequantized first; what one in INT4 has packed is packed again, less what the scheme ignores, and keeps its
    scales where they still give its weights and the scheme has the same groups. `like`, an INT4 HF directory of the same model, says
    what is packed, and gives scales in the same way. `readers` (of `quant.readers.READERS`) must agree on what is packed. `tp`: a
    tensor parallel size that SGLang's kernels must be able to load. `device`, "cpu" or "cuda", computes; the bytes are the same.
    """
    location = locate(src)
    output = _Output(Path(dst), workers, overwrite, dry_run)
    check_destination(output.path, overwrite, [location.path])
    if location.kind != "hf":
        raise CkptkitError(f"{src} is a Megatron checkpoint", "`ckptkit convert SRC DST --quantize w4a16` exports and quantizes in one pass")
    source = plain(location.path)
    view: Checkpoint = source
    layout: Mapping[str, list[str]] = _layout(source)
    if is_fused(source.specs):
        _refuse_int4(source.config)
        view = _viewed(source, str(src))
        layout = cut_shards(view.specs)
    before = source.source if isinstance(source, View) else None
    wanted = _Wanted(Path(like) if like else None, readers, tp, device)
    written = _write_hf(view, layout, location.path, output, scheme, wanted, location, reference=_int4(before))
    return replace(written, dequantized=_words(before.config)) if before is not None else written


def _int4(source: Checkpoint | None) -> Checkpoint | None:
    """The source, when it is in INT4."""
    if source is None:
        return None
    from quant.requantize import recorded

    return source if recorded(source.config) else None


def int4_scheme(
    reference: str | Path | None = None,
    *,
    group_size: int | Literal["channel"] | None = None,
    grid: Grid | None = None,
    symmetric: bool | None = None,
    ignore: tuple[str, ...] = (),
    search: Search = "none",
    scale_dtype: torch.dtype | None = None,
) -> QuantScheme:
    """A scheme in which what is None is as in the INT4 HF checkpoint at `reference`, if it is one; else groups of 128, symmetric, qmax7.

    What is asymmetric or searched is on the minmax grid, the only one that can be. Raises CkptkitError as `QuantScheme` does.
    """
    from quant.requantize import Recorded, recorded
    from quant.scheme import QuantScheme

    config = Path(reference) / "config.json" if reference else None
    known = (recorded(read_json(config)) if config and config.exists() else None) or Recorded(128, True)
    even = known.symmetric if symmetric is None else symmetric
    chosen = grid or (known.grid if even and search == "none" else "minmax") or "qmax7"
    size = known.group_size if group_size is None else None if group_size == "channel" else group_size
    return QuantScheme(size, chosen, ignore, even, search, scale_dtype or known.scale_dtype)


def _refuse_int4(config: Mapping[str, Any]) -> None:
    if only_fused(config):
        raise CkptkitError(
            f"INT4 {config['model_type']} is not supported: its experts are one tensor a layer, and no reader knows them one by one",
            "serve it as it is, or in the format of its release",
        )


def _viewed(source: Checkpoint, where: str) -> Checkpoint:
    return View(source, unfuse(source.specs, source.config, where))


def _hf_to_megatron(location: Location, output: _Output, dtype: torch.dtype | None, dialect: str) -> Written:
    # Imported here because it brings torch.distributed with it, which takes a second.
    from ckptkit.torch_dist_writer import TorchDistWriter

    source = plain(location.path)
    layout = _layout(source)
    view = to_megatron(source, str(location.path), dtype, dialect)
    args = megatron_args(dims_of(source.config), dialect) | _dtype_args(view)
    if not output.dry_run:
        with new_directory(output.path, output.overwrite) as partial:
            (partial / "hf").mkdir()
            copy_side_files(location.path, partial / "hf")
            write_config(partial / "hf", source.config, view.specs)
            if untouched := carried(source, str(location.path)):
                _write_carried(untouched, partial / FOLDER)
            # In the order in which it is written, which is also the order in which the way back will read it.
            specs = {name: view.specs[name] for names in view.groups for name in names}
            writer = Digested(TorchDistWriter(partial, specs, args))
            copy(view, writer, "HF -> Megatron", output.workers)
            _write_manifest(Location("megatron", partial / "release", partial), location, location.path, layout, writer)
    written = _written(location.path, output.path, "megatron", view, layout)
    return replace(written, dequantized=_words(source.source.config)) if isinstance(source, View) else written


def _words(config: Mapping[str, Any]) -> str:
    """How a quantized release is quantized."""
    from quant.dequantize import format_of

    return format_of(config).words


def _layout(source: HfCheckpoint | View) -> dict[str, list[str]]:
    """How its weights are cut into files: as they are, or anew where they are dequantized and so larger."""
    return source.layout if isinstance(source, HfCheckpoint) else cut_shards(source.specs)


def _write_carried(view: Checkpoint, target: Path) -> None:
    """An HF directory with the tensors that Megatron does not hold."""
    target.mkdir()
    (target / "config.json").write_text(json.dumps(dict(view.config), indent=2) + "\n")
    copy(view, SafetensorsWriter(target, view.specs, cut_shards(view.specs)), "carrying along")


def _dtype_args(view: Checkpoint) -> dict[str, Any]:
    dtype = main_dtype(view.specs)
    return {"bf16": dtype == "bfloat16", "fp16": dtype == "float16", "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}


def _megatron_to_hf(
    location: Location,
    output: _Output,
    hf: str | Path | None,
    dtype: torch.dtype | None,
    scheme: QuantScheme | None,
    wanted: _Wanted,
) -> Written:
    source = open_megatron(location, hf)
    layout = _layout(plain(source.hf_path)) if has_weights(source.hf_path) else stored_layout(location.root / MANIFEST)
    release = {name for names in (layout or {}).values() for name in names}
    fused = is_fused(release) or only_fused(source.config)
    if scheme is not None:
        _refuse_int4(source.config)
    view: Checkpoint = to_hf(source, str(location.path), fused=fused and scheme is None, dtype=dtype, release=release)
    if untouched := carried_beside(source, location.root, plain):
        view = Joined(view, untouched)
    usable = layout if layout is not None and not (fused and scheme) else cut_shards(view.specs)
    return _write_hf(view, usable, source.hf_path, output, scheme, wanted, location)


def _write_hf(
    view: Checkpoint,
    layout: Mapping[str, list[str]],
    side_files: Path,
    output: _Output,
    scheme: QuantScheme | None,
    wanted: _Wanted,
    source: Location,
    reference: Checkpoint | None = None,
) -> Written:
    layout = layout_for(view, layout)
    if scheme is not None:
        from quant.planner import packed_less, quantized, quantized_layout

        before = view
        like = HfCheckpoint(wanted.like) if wanted.like else None
        names = like.specs if like else packed_less(reference.specs, scheme.ignore) if reference else None
        view = quantized(view, str(side_files), scheme, reference=like or reference, like=names, tp=wanted.tp, readers=wanted.readers, device=wanted.device)
        layout = quantized_layout(layout, before.specs, view.specs)
    if not output.dry_run:
        with new_directory(output.path, output.overwrite) as partial:
            copy_side_files(side_files, partial)
            write_config(partial, view.config, view.specs)
            writer = Digested(SafetensorsWriter(partial, view.specs, layout))
            copy(view, writer, "writing HF", output.workers)
            _write_manifest(Location("hf", partial, partial), source, side_files, layout, writer)
    return _written(side_files, output.path, "hf", view, layout)


def _write_manifest(written: Location, source: Location, side_files: Path, layout: Mapping[str, list[str]], writer: Digested) -> None:
    """The manifest of what has just been written, digests included, in the order of its names."""
    more = {"source": side_files.name, "lineage": lineage_of(source), "hf_layout": dict(layout)}
    tensors = {name: writer.tensors[name] for name in sorted(writer.tensors)}
    write_manifest(written.root / MANIFEST, sys.argv, tensors, described_files(written, [written.root / FOLDER]), more)


def make_manifest(path: str | Path, output: str | Path | None = None, *, hf: str | Path | None = None, workers: int | None = None) -> Path:
    """Reads the checkpoint at `path`, HF or Megatron, and writes a manifest of it: to `output`, or `ckptkit.json` at its root. Returns where.

    A manifest that has digests already is never replaced: `verify` compares with it. One without them, from an earlier version, is
    completed. Raises CkptkitError where the checkpoint cannot be opened or read.
    """
    location = locate(path)
    target = Path(output) if output else location.root / MANIFEST
    before = read_json(target) if target.exists() else {}
    if "tensors" in before or (output and target.exists()):
        raise CkptkitError(f"{target} exists already", f"compare with it: `ckptkit verify {path} --manifest {target}`; or choose another --output")
    known: dict[str, Any] = {key: before[key] for key in ("source", "lineage", "hf_layout") if key in before}
    tensors = digests_of(open_checkpoint(path, hf=hf), workers)
    write_manifest(target, before.get("command", sys.argv), tensors, described_files(location, [location.root / FOLDER]), known)
    return target


def _written(source: Path, destination: Path, kind: str, view: Checkpoint, layout: Mapping[str, list[str]]) -> Written:
    nbytes = sum(spec.nbytes for spec in view.specs.values())
    return Written(str(source), str(destination), kind, len(view.specs), nbytes, fold(view.specs), layout if kind == "hf" else {})


def inspect(path: str | Path, hf: str | Path | None = None) -> dict[str, Any]:
    """What lies at `path`: format, sizes, dtypes, the model's dimensions, Megatron's stored arguments, and folded tensor names."""
    location = locate(path)
    checkpoint = open_checkpoint(path, hf=hf)
    specs = checkpoint.specs
    facts: dict[str, Any] = {"path": str(location.path), "format": _format(location)}
    facts["tensors"] = len(specs)
    facts["bytes"] = sum(spec.nbytes for spec in specs.values())
    facts["dtypes"] = dict(Counter(str(spec.dtype).removeprefix("torch.") for spec in specs.values()))
    if isinstance(checkpoint, HfCheckpoint):
        facts["files"] = {file: len(shard.specs) for file, shard in checkpoint.shards.items()}
        facts["config"] = _selected(checkpoint.config, lambda value: not isinstance(value, dict))
        facts["quantization"] = _quantization(checkpoint)
    elif isinstance(checkpoint, (TorchDistCheckpoint, LegacyCheckpoint)):
        facts["iteration"] = location.path.name
        if isinstance(checkpoint, LegacyCheckpoint):
            facts["ranks"] = f"{len(checkpoint.files.ranks)} files of {checkpoint.files.sizes}"
        facts["args"] = _selected(checkpoint.args, lambda value: isinstance(value, (int, float, str, list)))
    facts["names"] = [f"{name} {_shape_of(name, checkpoint)}" for name in fold(specs)]
    return facts


def _quantization(checkpoint: HfCheckpoint) -> str | None:
    if not is_quantized(checkpoint.config):
        return None
    from quant.dequantize import described

    return described(checkpoint.config, checkpoint.specs)


def model_arguments(path: str | Path, hf: str | Path | None = None) -> dict[str, Any]:
    """Megatron-LM arguments (argparse names) of the model at `path`, from its HF config; a lone config.json is enough.

    Raises CkptkitError for a model that is not supported, or that Megatron has no arguments for.
    """
    if (Path(path) / "config.json").exists():
        return megatron_args(dims_of(read_json(Path(path) / "config.json")))
    return megatron_args(dims_of(open_checkpoint(path, hf=hf).config))


def _format(location: Location) -> str:
    if location.kind == "hf":
        return "HF safetensors"
    return "Megatron legacy torch (mp_rank_*)" if location.legacy else "Megatron torch_dist"


def _selected(values: Mapping[str, Any], wanted: Callable[[Any], bool]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if wanted(value)}


def _shape_of(folded: str, checkpoint: Checkpoint) -> str:
    spec = checkpoint.specs.get(folded)
    return f"{list(spec.shape)} {str(spec.dtype).removeprefix('torch.')}" if spec else ""

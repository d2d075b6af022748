"""The verbs as Python functions: what the command line calls, and what a training script can call itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ckptkit.app.execute import How, execute
from ckptkit.app.forecast import Forecast, forecast
from ckptkit.app.jobs import DTYPES, Job, planned
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import fold
from ckptkit.core.unused import refuse_hf, refuse_int4_options
from ckptkit.formats.detect import Location, locate, refuse_url
from ckptkit.formats.hf.reader import HfCheckpoint, stored_names
from ckptkit.formats.hf.remote import config_at, opened
from ckptkit.formats.hf.side_files import MANIFEST, is_quantized
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.storage.remote_file import spoken
from ckptkit.storage.url import absolute, is_url, place
from ckptkit.transfer.copy import IN_FLIGHT
from ckptkit.transfer.destination import check_destination
from ckptkit.transfer.manifest import described_files, digests_of, replaceable_manifest, write_manifest
from ckptkit.transfer.upload import check_upload
from converters.megatron.arguments import megatron_args
from converters.megatron.legacy import LegacyCheckpoint
from converters.megatron.unsaid import UNSAID, unsaid
from converters.open import open_checkpoint
from converters.passthrough import FOLDER
from converters.planner import DIALECTS, MCORE, dims_of
from converters.stored import as_stored
from quant.selection.readers import ALL_READERS

if TYPE_CHECKING:
    from quant.formats.scheme import Grid, QuantScheme, Search


@dataclass(frozen=True)
class Written:
    """What a conversion wrote, or with `dry_run` would write. `layout` maps HF shard files to the tensors in them.

    `dequantized` says how a quantized source was quantized, in words; `forecast`, only with `dry_run`, what the job will take. `notes`:
    what its user should know of the source.
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
    file_bytes: int | None = None,
    workers: int | None = None,
    memory: int = IN_FLIGHT,
    ray: str | None = None,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
) -> Written:
    """HF directory -> Megatron torch_dist, or a Megatron root, `release/` or `iter_*/` (torch_dist or legacy) -> HF directory.

    `hf` names the HF directory that gives config, tokenizer and shard layout on the way back; without it, what was stored
    on the way there is used. `dialect` names Megatron's tensors: "mcore" (the default) as megatron-core does, "slime" as
    slime's own modules do; on the way back it is told from the names. `quantize` (only on the way back) writes INT4 in the same pass;
    `like`, `readers`, `tp` and `device` are as in `quantize`. `file_bytes`: where a file of the output ends (None: after 5 GB, or as in
    the release). `workers`, `memory` and `ray` (`ckptkit.app.execute.How`) change no byte of what is written. `resume` goes on with what a run
    of the same arguments has finished before it was cut off. Raises CkptkitError for anything wrong with the input; then nothing is left.
    """
    asked = Job(
        "convert",
        absolute(src),
        _absolute(hf),
        dtype,
        dialect,
        quantize,
        _absolute(like),
        tuple(readers),
        tp,
        device,
        file_bytes,
    )
    how = How(place(dst), workers, memory, ray, overwrite, resume)
    with _opened(asked, how) as job:
        location = locate(job.here(job.src))
        _check_destination(job, how, location)
        if dtype not in DTYPES:
            raise CkptkitError(f"unknown dtype {dtype!r}", f"choose one of {', '.join(DTYPES)}")
        if job.scheme is None:
            refuse_int4_options(_int4_options(job))
        if location.kind == "hf":
            _check_to_megatron(job, how)
        elif dialect:
            raise CkptkitError(
                "--dialect is for the way to Megatron", "leave it out: on the way back the names tell it"
            )
        return _done(job, how, dry_run)


def _int4_options(job: Job) -> list[str]:
    """What a job says of INT4 beside its scheme."""
    plain = Job(job.verb, job.src)
    said = {
        "--like": job.like != plain.like,
        "--tp": job.tp != plain.tp,
        "--reader": job.readers != plain.readers,
        "--device": job.device != plain.device,
    }
    return [option for option, given in said.items() if given]


def _check_to_megatron(job: Job, how: How) -> None:
    if job.hf:
        raise CkptkitError(
            "--hf is for the way back, from Megatron to HF", "leave it out: the source brings its own config"
        )
    if job.scheme:
        raise CkptkitError(
            "Megatron holds no INT4 weights", "`ckptkit quantize` makes an INT4 HF checkpoint from an HF one"
        )
    if (job.dialect or MCORE) not in DIALECTS:
        raise CkptkitError(f"unknown dialect {job.dialect!r}", f"choose one of {', '.join(DIALECTS)}")
    if is_url(how.path):
        raise CkptkitError(
            f"{how.path}: only HF directories are written to URLs, and no Megatron checkpoints",
            "write it to a disk, and copy it there",
        )


def quantize(
    src: str | Path,
    dst: str | Path,
    scheme: QuantScheme,
    *,
    like: str | Path | None = None,
    readers: Sequence[str] = ALL_READERS,
    tp: int | None = None,
    device: str = "cpu",
    file_bytes: int | None = None,
    workers: int | None = None,
    memory: int = IN_FLIGHT,
    ray: str | None = None,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
) -> Written:
    """HF directory -> INT4 W4A16 HF directory (compressed-tensors pack-quantized), one tensor an expert. The rest and errors as `convert`.

    A quantized source is dequantized first; what one in INT4 has packed is packed again, less what the scheme ignores, and keeps its
    scales where they still give its weights and the scheme has the same groups. `like`, an INT4 HF directory of the same model, says
    what is packed, and gives scales in the same way. `readers` (of `quant.selection.readers.READERS`) must agree on what is packed. `tp`: a
    tensor parallel size that SGLang's kernels must be able to load. `device`, "cpu" or "cuda", computes; the bytes are the same.
    """
    asked = Job(
        "quantize", absolute(src), None, "auto", None, scheme, _absolute(like), tuple(readers), tp, device, file_bytes
    )
    how = How(place(dst), workers, memory, ray, overwrite, resume)
    with _opened(asked, how) as job:
        location = locate(job.here(job.src))
        _check_destination(job, how, location)
        if location.kind != "hf":
            raise CkptkitError(
                f"{src} is a Megatron checkpoint",
                "`ckptkit convert SRC DST --quantize w4a16` exports and quantizes in one pass",
            )
        return _done(job, how, dry_run)


def _absolute(path: str | Path | None) -> str | None:
    return absolute(path) if path else None


@contextmanager
def _opened(job: Job, how: How) -> Iterator[Job]:
    """The job with what stands for those of its sources that are URLs. Raises CkptkitError for what cannot be asked for together."""
    urls = [source for source in dict.fromkeys(job.sources) if is_url(source)]
    if how.overwrite and how.resume:
        raise CkptkitError("--resume goes on with what is there, --overwrite replaces it", "give one of them")
    if how.resume and is_url(how.path):
        raise CkptkitError(
            f"{how.path}: what was cut off at a URL cannot be gone on with", "begin again with --overwrite"
        )
    if how.ray is not None and (there := [*urls, how.path] if is_url(how.path) else urls):
        raise CkptkitError(
            f"--ray works on a file system that all nodes share, and {there[0]} is a URL",
            "copy to such a file system, or leave out --ray",
        )
    with ExitStack() as stack:
        yield replace(job, opened={url: stack.enter_context(opened(url)) for url in urls})


def _check_destination(job: Job, how: How, location: Location) -> None:
    """Raises CkptkitError where nothing may be written, since what is read there would be lost among other reasons."""
    if isinstance(how.path, Path):
        beside = [location.root / "hf", location.root / FOLDER] if location.kind == "megatron" else []
        sources = [location.path, *beside, *(job.here(path) for path in (job.hf, job.like) if path)]
        check_destination(how.path, sources, overwrite=how.overwrite, resume=how.resume)
    else:
        check_upload(how.path, how.overwrite, job.sources)


def _done(job: Job, how: How, dry_run: bool) -> Written:
    work = planned(job)
    if not dry_run:
        execute(job, work, how)
    specs = work.view.specs
    nbytes = sum(spec.nbytes for spec in specs.values())
    layout = work.layout if work.kind == "hf" else {}
    names, expected = fold(specs), forecast(job, work, how) if dry_run else None
    return Written(
        spoken(work.side_files),
        str(how.path),
        work.kind,
        len(specs),
        nbytes,
        names,
        layout,
        work.dequantized,
        expected,
        work.notes,
    )


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
    from quant.formats.scheme import QuantScheme
    from quant.requantize import Recorded, recorded

    config = config_at(reference) if reference else None
    known = (recorded(config) if config is not None else None) or Recorded(128, True)
    even = known.symmetric if symmetric is None else symmetric
    chosen = grid or (known.grid if even and search == "none" else "minmax") or "qmax7"
    size = known.group_size if group_size is None else None if group_size == "channel" else group_size
    return QuantScheme(size, chosen, ignore, even, search, scale_dtype or known.scale_dtype)


def make_manifest(
    path: str | Path, output: str | Path | None = None, *, hf: str | Path | None = None, workers: int | None = None
) -> Path:
    """Reads the checkpoint at `path`, HF or Megatron, and writes a manifest of it: to `output`, or `ckptkit.json` at its root. Returns where.

    A manifest that has digests already is never replaced: `verify` compares with it. One without them, from an earlier version, is
    completed. Raises CkptkitError where the checkpoint cannot be opened or read.
    """
    if hf:
        refuse_url(hf)
    location = locate(path)
    if location.kind == "hf":
        refuse_hf(hf, path)
    target = Path(output) if output else location.root / MANIFEST
    before = replaceable_manifest(target, output is not None, path)
    known: dict[str, Any] = {key: before[key] for key in ("source", "lineage", "hf_layout") if key in before}
    tensors = digests_of(open_checkpoint(path, hf=hf), workers)
    write_manifest(
        target,
        before.get("command", ["ckptkit", "manifest", str(path)]),
        tensors,
        described_files(location, [location.root / FOLDER]),
        known,
    )
    return target


def inspect(path: str | Path, hf: str | Path | None = None) -> dict[str, Any]:
    """What lies at `path`: format, sizes, dtypes, the model's dimensions, Megatron's stored arguments, and folded tensor names."""
    with _read(path, hf) as (here, its_hf):
        location = locate(here)
        if location.kind == "hf":
            refuse_hf(hf, path)
        return _facts(location, open_checkpoint(here, hf=its_hf))


@contextmanager
def _read(path: str | Path, hf: str | Path | None) -> Iterator[tuple[Path, Path | None]]:
    """A checkpoint and the HF directory named with it, where they are read: each may be at a URL."""
    with ExitStack() as stack:
        yield stack.enter_context(opened(place(path))), stack.enter_context(opened(place(hf))) if hf else None


def _facts(location: Location, checkpoint: Checkpoint) -> dict[str, Any]:
    specs = checkpoint.specs
    facts: dict[str, Any] = {"path": spoken(location.path), "format": _format(location)}
    facts["tensors"] = len(specs)
    facts["bytes"] = sum(spec.nbytes for spec in specs.values())
    facts["dtypes"] = dict(Counter(spec.dtype for spec in specs.values()))
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
    from quant.formats.dequantize import described

    return described(checkpoint.config, checkpoint.specs)


def model_arguments(path: str | Path, hf: str | Path | None = None) -> dict[str, Any]:
    """Megatron-LM arguments (argparse names) of the model at `path`, from its HF config; a lone config.json is enough.

    MTP layers that the config promises are left out where weights lie there and no tensor is of one. Where the arguments alone would
    build another model, `no_argument_for` lists what they do not say. Raises CkptkitError for a model
    that is not supported, or that Megatron has no arguments for.
    """
    if (config := config_at(place(path))) is not None:
        refuse_hf(hf, path)
        names = () if is_url(path) else stored_names(Path(path))
        return _arguments(as_stored(config, names) if names else config)
    with _read(path, hf) as (here, its_hf):
        checkpoint = open_checkpoint(here, hf=its_hf)
        return _arguments(as_stored(checkpoint.config, checkpoint.specs))


def _arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    dims = dims_of(config)
    lines = unsaid(dims)
    return megatron_args(dims) | ({UNSAID: lines} if lines else {})


def _format(location: Location) -> str:
    if location.kind == "hf":
        return "HF safetensors"
    return "Megatron legacy torch (mp_rank_*)" if location.legacy else "Megatron torch_dist"


def _selected(values: Mapping[str, Any], wanted: Callable[[Any], bool]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if wanted(value)}


def _shape_of(folded: str, checkpoint: Checkpoint) -> str:
    spec = checkpoint.specs.get(folded)
    return f"{list(spec.shape)} {spec.dtype}" if spec else ""

"""The options of one conversion or quantization, as data that every process can use."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from ckptkit.app.option import EXCLUDES, Needs, option, together
from ckptkit.converters.config.bounds import MAX_RANKS
from ckptkit.core.allocator import IN_FLIGHT
from ckptkit.core.dtypes import COMPUTED
from ckptkit.core.errors import UsageError
from ckptkit.core.installation import program_version
from ckptkit.core.printable import printable, without_credentials
from ckptkit.quant.ignore.readers import ALL_READERS
from ckptkit.quant.schemes.registry import DEFAULT, NAMES, UNQUANTIZED
from ckptkit.storage.directory import Directory
from ckptkit.storage.fingerprint import fingerprint
from ckptkit.storage.url import absolute, is_url, path_or_url

if TYPE_CHECKING:
    from ckptkit.quant.schemes.registry import Scheme

DTYPES = ("auto", *COMPUTED)
DIALECTS = ("mcore", "slime", "hybrid")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
Sources = Mapping[str, Directory]  # the directory of each source, by its path or URL


class PathOrUrl(click.Path):
    """A Path, or a URL as str, because a Path would merge its two slashes."""

    def convert(
        self, value: str | os.PathLike[str], parameter: click.Parameter | None, context: click.Context | None
    ) -> Any:
        path = path_or_url(os.fspath(value))
        return path if isinstance(path, str) else super().convert(path, parameter, context)


def parse_size(text: str) -> int:
    """Bytes of `5GB`, `512MiB` or a plain number. Raises CkptkitError."""
    match = re.fullmatch(r"(\d+) ?([KMG]I?B|)", text.upper())
    if not match or not int(match[1]):
        raise UsageError(f"{text!r} is not a size", "write 512MB, 2GB or a number of bytes")
    return int(match[1]) * _UNITS[match[2]]


def _size(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """Bytes of `512MB` or `2GiB`. Raises click.BadParameter."""
    try:
        return None if text is None else parse_size(text)
    except UsageError as error:
        raise click.BadParameter(f"{error.message}: {error.hint}") from error


PATH, PATH_OR_URL = click.Path(path_type=Path), PathOrUrl(path_type=Path)
PARALLEL = click.IntRange(1, MAX_RANKS)  # a parallel size
_NOT_QUANTIZED = "remove it, or pass --quantize w4a16 for Megatron to HF; `ckptkit quantize` quantizes an HF checkpoint"
QUANTIZED = Needs(("quantization",), _NOT_QUANTIZED)


def _option(group: str, *words: str, is_recorded: bool = True, otherwise: Any = None, **row: Any) -> Any:
    """A field of RunOptions and its command line option, with the parameters of `click.option`.

    `group`: its group for `rows`. `is_recorded`: the output depends on it, so manifests contain it, and a resumed run
    must have the same value. `otherwise`: the field's default if it differs from the option's.
    """
    default = otherwise if otherwise is not None else row.get("default", False if row.get("is_flag") else None)
    metadata = {"group": group, "words": words, "option": option(*words, **row), "recorded": is_recorded, "row": row}
    metadata |= {"help": row.get("help", ""), "annotation": _annotation(row)}
    return field(default=default, metadata=metadata)


def _annotation(row: Mapping[str, Any]) -> str:
    """What Python passes for an option, if the field has another type: a path, a size as text, any list; else ""."""
    if row.get("type") in (PATH, PATH_OR_URL):
        return "str | Path | None"
    return "int | str | None" if row.get("callback") is _size else "Sequence[str]" if row.get("multiple") else ""


_converting, _writing = partial(_option, "converting"), partial(_option, "writing")
_quantizing, _resource = partial(_option, "quantizing", needs=QUANTIZED), partial(_writing, is_recorded=False)


@dataclass(frozen=True)
class RunOptions:
    """Sources, destination and resources of a run. `run_options` makes one from user input.

    Each field is also a command line option; in addition to its help:

    src, hf, like: absolute paths or URLs. hf: None for the config stored with the Megatron checkpoint.
    dialect: None means "mcore". A Megatron source is converted to this dialect if given, else to HF.
    scheme: the quantization, or None for dequantized weights.
    readers: keys of `ckptkit.quant.ignore.readers.ALL_READERS`.
    max_shard_size, memory: bytes. workers: with `ray` concurrent tasks (None: one per core), else threads.

    Raises UsageError for options that contradict each other.
    """

    verb: Literal["convert", "quantize"]
    src: str
    dst: str | Path
    hf: str | None = _converting(
        "--hf", type=PATH_OR_URL, help="HF directory with config, tokenizer and shard layout for Megatron to HF."
    )
    merge: str | None = _converting(
        "--merge", type=PATH, help="A PEFT adapter (LoRA) to merge into the weights; HF then stays HF."
    )
    dtype: str = _converting("--dtype", default="auto", show_default=True, type=click.Choice(DTYPES))
    dialect: str | None = _converting(
        "--dialect",
        type=click.Choice(DIALECTS),
        help="Names of Megatron's tensors: GPTModel's (mcore, the default), slime's, or HybridModel's.",
    )
    unwitnessed: bool = _converting(
        "--unwitnessed",
        is_flag=True,
        help="Convert a model that no released Megatron has loaded, with tensor names from another stack's source.",
    )
    scheme: Scheme | None = None
    like: str | None = _quantizing(
        "--like", type=PATH_OR_URL, help="A checkpoint of the same model in the same scheme: pack the same weights."
    )
    preset: Literal["rl"] | None = _quantizing(
        "--preset",
        type=click.Choice(["rl"]),
        help="rl: for updates of an engine during training. w4a16: only routed experts, symmetric and on the qmax7 "
        "grid, as slime's training rounds them; SGLang cannot update other INT4 layers, vLLM can. fp8-block, mxfp8: "
        "the rounding of trainers' updates.",
    )
    tp: int | None = _quantizing(
        "--tp",
        type=PARALLEL,
        needs=Needs(("quantization",), "remove --tp: the output of a conversion loads at any parallel size"),
        help="Tensor parallel size that SGLang's INT4 kernels must be able to load.",
    )
    readers: tuple[str, ...] = _quantizing(
        *("--reader", "readers"),
        otherwise=ALL_READERS,
        multiple=True,
        type=click.Choice(ALL_READERS),
        help="A reader that must agree on the packed weights. Repeatable. [default: all]",
    )
    device: str = _quantizing(
        "--device",
        is_recorded=False,
        default="cpu",
        show_default=True,
        type=click.Choice(["cpu", "cuda"]),
        help="The device for computation; the output is the same.",
    )
    workers: int | None = _resource(
        "--workers",
        type=click.IntRange(1),
        help="Threads that read, compute and write. [default: cores + 3, at most one per 48 MiB of --memory]",
    )
    memory: int = _resource(
        "--memory",
        otherwise=IN_FLIGHT,
        callback=_size,
        default="512MB",
        show_default=True,
        help="Maximum bytes of tensors in memory at a time: 512MB, 2GB.",
    )
    max_shard_size: int | None = _writing(
        "--max-shard-size",
        callback=_size,
        help="Size of the files of DST: 5GB, 512MiB or bytes. [default: as in the release; for Megatron an eighth of "
        "the weights, 500MB to 5GB]",
    )
    ray: str | None = _resource(
        "--ray",
        is_flag=False,
        flag_value="auto",
        metavar="[ADDRESS]",
        help="Run on a Ray cluster: the one at ADDRESS, a running one, or a new one on this machine.",
    )
    resume: bool = _resource("--resume", is_flag=True, help="Continue an interrupted run.")
    overwrite: bool = _resource(
        "--overwrite",
        is_flag=True,
        help="Replace DST once the new checkpoint is complete; at a URL, once its first file is.",
    )
    dry_run: bool = _resource(
        "--dry-run",
        is_flag=True,
        help="Check everything; print the plan, its time and its memory. "
        "Writes only a temporary file, to measure the disk.",
    )

    def __post_init__(self) -> None:
        if self.resume and is_url(self.dst):
            raise UsageError(f"{self.dst}: --resume is not supported for URLs", "pass --overwrite to start again")
        urls = [path for path in (*self.sources, self.dst) if is_url(path)]
        if self.ray is not None and urls:
            message = f"--ray requires a file system that all nodes share, but {urls[0]} is a URL"
            raise UsageError(message, "copy the checkpoint to such a file system, or remove --ray")
        if self.merge is not None and (is_url(self.merge) or self.dialect is not None):
            message = "--merge requires an adapter on a local disk, and writes an HF checkpoint"
            raise UsageError(message, "copy the adapter here; convert the merged checkpoint to Megatron after that")
        quantizing = [_word(name) for name in _FIELDS if _row(name).get("needs") and self._is_given(name)]
        if quantizing and self.scheme is None:
            hint = "; a Megatron checkpoint loads at any parallel size"
            message = f"{', '.join(quantizing)} applies only to quantized weights, so it has no effect here"
            raise UsageError(message, _NOT_QUANTIZED + hint * ("--tp" in quantizing))
        for names, hint in EXCLUDES:
            if len(words := [_word(name) for name in names if name in _FIELDS and self._is_given(name)]) > 1:
                raise UsageError(f"{' and '.join(words)} exclude each other", hint)
        if self.scheme is not None and self.preset:
            self.scheme.check_preset()

    def _is_given(self, name: str) -> bool:
        return bool(getattr(self, name) != _FIELDS[name].default)

    @property
    def sources(self) -> list[str]:
        """Paths and URLs of all sources."""
        return [path for path in (self.src, self.hf, self.like, self.merge) if path]

    @property
    def cast_to(self) -> str | None:
        """The dtype for floating tensors of the output, or None to keep theirs."""
        return None if self.dtype == "auto" else self.dtype

    def local_sources(self) -> Sources:
        """Each source at its own path, for a run without URLs."""
        return {source: Directory(Path(source)) for source in self.sources}

    def command(self) -> list[str]:
        """The command line of the options that affect the output, without credentials: for manifest and --resume."""
        words = ["ckptkit", self.verb, self.src]
        recorded = [name for name, one in _FIELDS.items() if one.metadata.get("recorded") and self._is_given(name)]
        values = {_word(name): getattr(self, name) for name in recorded}
        words += [part for word, one in values.items() if type(one) in (str, int) for part in (word, str(one))]
        words += [word for word, one in values.items() if one is True]
        words += [part for word, one in values.items() if type(one) is tuple for each in one for part in (word, each)]
        if self.scheme is not None:
            spelled = "--quantize" if self.verb == "convert" else "--scheme"
            words += [spelled, self.scheme.name] if self.verb == "convert" or self.scheme.name != DEFAULT else []
            words += self.scheme.command_line()
        elif self.verb == "quantize":
            words += ["--scheme", UNQUANTIZED]
        # A path may not be UTF-8, as JSON requires.
        return [printable(without_credentials(word)) for word in words]

    def identity(self, sources: Sources) -> dict[str, Any]:
        """Values that must be the same in a resumed run: version, command, and fingerprint of the sources."""
        source = fingerprint([sources[path] for path in self.sources], is_strict=True)
        return {"version": program_version(), "command": shlex.join(self.command()), "source": source}


_FIELDS = {one.name: one for one in fields(RunOptions)}


def _word(name: str) -> str:
    return str(_FIELDS[name].metadata["words"][0])


def _row(name: str) -> Mapping[str, Any]:
    """The parameters for `click.option` of a field, or empty for other names."""
    return _FIELDS[name].metadata.get("row", {}) if name in _FIELDS else {}


def rows(*names: str, group: str = "") -> Callable[[Any], Any]:
    """A decorator that adds the options of these fields, or of a group, to a verb."""
    chosen = [one.metadata for one in fields(RunOptions) if one.name in names or one.metadata.get("group") == group]
    return together(*(one["option"] for one in chosen))


def run_options(
    verb: Literal["convert", "quantize"],
    src: str | Path,
    dst: str | Path,
    scheme: Scheme | str | None = None,
    **options: Any,
) -> RunOptions:
    """Makes RunOptions from user input: any paths, sizes also as "5GB", readers as a list. Raises UsageError.

    A scheme by name has its default options; those of INT4 are the reference's, as on the command line.
    """
    values = {name: _value(name, value) for name, value in options.items()}
    if isinstance(scheme, str):
        scheme = _scheme(scheme, values.get("like") or (src if verb == "quantize" else None))
    return RunOptions(verb, absolute(src), path_or_url(dst), scheme=scheme, **values)


def _scheme(name: str, reference: str | Path | None) -> Scheme | None:
    """The scheme called `name`, or None for "none". Raises UsageError."""
    if name not in (*NAMES, UNQUANTIZED):
        raise UsageError(f"unknown scheme {name!r}", f"choose one of {', '.join((*NAMES, UNQUANTIZED))}")
    if name == DEFAULT:
        from ckptkit.quant.schemes.w4a16 import int4_scheme

        return int4_scheme(reference)
    from ckptkit.quant.schemes.floats import FloatScheme

    return None if name == UNQUANTIZED else FloatScheme(name)


def _value(name: str, value: Any) -> Any:
    row = _row(name)
    kind = row.get("type")
    if row.get("multiple"):
        value = tuple(value or getattr(RunOptions, name))
    if isinstance(kind, click.Choice | click.IntRange) and value is not None:
        try:
            for one in value if row.get("multiple") else (value,):
                kind.convert(one, None, None)
        except click.BadParameter as error:
            raise UsageError(
                f"{name}: {error.message.rstrip('.')}", "`ckptkit convert --help` has the values"
            ) from error
    if row.get("callback") is _size and isinstance(value, str):
        return parse_size(value)
    return absolute(value) if value and kind in (PATH, PATH_OR_URL) else value

"""The options of one conversion or quantization, as data that means the same in every process."""

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
from ckptkit.quant.schemes.registry import DEFAULT, UNQUANTIZED
from ckptkit.storage.directory import Directory
from ckptkit.storage.fingerprint import fingerprint
from ckptkit.storage.url import absolute, is_url, path_or_url

if TYPE_CHECKING:
    from ckptkit.quant.schemes.registry import Scheme

DTYPES = ("auto", *COMPUTED)
DIALECTS = ("mcore", "slime", "hybrid")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
Sources = Mapping[str, Directory]  # where each source is read, by its path or URL


class PathOrUrl(click.Path):
    """A Path, or a URL as str: a Path would make one slash of its two."""

    def convert(
        self, value: str | os.PathLike[str], parameter: click.Parameter | None, context: click.Context | None
    ) -> Any:
        found = path_or_url(os.fspath(value))
        return found if isinstance(found, str) else super().convert(found, parameter, context)


def parse_size(text: str) -> int:
    """Bytes of `5GB`, `512MiB` or a plain number. Raises CkptkitError."""
    found = re.fullmatch(r"(\d+) ?([KMG]I?B|)", text.upper())
    if not found or not int(found[1]):
        raise UsageError(f"{text!r} is not a size", "write 512MB, 2GB or a number of bytes")
    return int(found[1]) * _UNITS[found[2]]


def _size(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """Bytes of `512MB` or `2GiB`. Raises click.BadParameter."""
    try:
        return None if text is None else parse_size(text)
    except UsageError as error:
        raise click.BadParameter(f"{error.message}: {error.hint}") from error


PATH, PATH_OR_URL = click.Path(path_type=Path), PathOrUrl(path_type=Path)
PARALLEL = click.IntRange(1, MAX_RANKS)  # a parallel size
_NOT_QUANTIZED = (
    "leave it out, or add --quantize w4a16 on the way from Megatron to HF; "
    "`ckptkit quantize` quantizes an HF checkpoint"
)
QUANTIZED = Needs(("quantization",), _NOT_QUANTIZED)


def _option(group: str, *words: str, is_recorded: bool = True, otherwise: Any = None, **row: Any) -> Any:
    """A field of RunOptions, and its option of the command line, as for `click.option`.

    `group`: the options of verbs that it is one of, for `rows`.
    `is_recorded`: what is written depends on it, so manifests have it, and a run that is resumed must have the same.
    `otherwise`: the field's default, where it is another than the option's.
    """
    default = otherwise if otherwise is not None else row.get("default", False if row.get("is_flag") else None)
    metadata = {"group": group, "words": words, "option": option(*words, **row), "recorded": is_recorded, "row": row}
    return field(default=default, metadata=metadata)


_converting, _writing = partial(_option, "converting"), partial(_option, "writing")
_quantizing, _resource = partial(_option, "quantizing", needs=QUANTIZED), partial(_writing, is_recorded=False)


@dataclass(frozen=True)
class RunOptions:
    """What to write, from what, where, and with which resources. `run_options` makes one of what a user gave.

    Each option is one row, of which the command line is made too. What the help does not say:

    src, hf, like: absolute paths or URLs. hf: None: what was stored on the way there.
    dialect: None means "mcore". That of a source follows from its names. A Megatron source is converted to another
        dialect where this is given, else to HF.
    scheme: how weights are quantized; None: they are not, and a quantized source is dequantized.
    readers: those of `ckptkit.quant.ignore.readers.READERS`.
    max_shard_size, memory: bytes. workers: with `ray` concurrent tasks (None: one a core), else threads.

    Raises UsageError for options that contradict each other.
    """

    verb: Literal["convert", "quantize"]
    src: str
    dst: str | Path
    hf: str | None = _converting(
        "--hf", type=PATH_OR_URL, help="HF directory that gives config, tokenizer and shard layout on the way back."
    )
    merge: str | None = _converting(
        "--merge", type=PATH, help="A PEFT adapter (LoRA) to merge into the weights; HF then stays HF."
    )
    dtype: str = _converting("--dtype", default="auto", show_default=True, type=click.Choice(DTYPES))
    dialect: str | None = _converting(
        "--dialect",
        type=click.Choice(DIALECTS),
        help="Names of Megatron's tensors: GPTModel's (mcore, the default), with slime's modules, or HybridModel's.",
    )
    unwitnessed: bool = _converting(
        "--unwitnessed",
        is_flag=True,
        help="Convert a kind of model that no released Megatron has loaded, by names read in another stack's source.",
    )
    scheme: Scheme | None = None
    like: str | None = _quantizing(
        "--like", type=PATH_OR_URL, help="A checkpoint of the same model in the same scheme: pack the same weights."
    )
    preset: Literal["rl"] | None = _quantizing(
        "--preset",
        type=click.Choice(["rl"]),
        help="rl: what updates of an engine bring. w4a16: routed experts alone, symmetric and on the qmax7 grid, as "
        "slime's training rounds them; SGLang takes no other INT4 layers again, vLLM takes all. fp8-block, mxfp8: the "
        "rounding of trainers' updates.",
    )
    tp: int | None = _quantizing(
        "--tp",
        type=PARALLEL,
        needs=Needs(("quantization",), "leave it out: converting needs no parallel sizes, and the output loads at any"),
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
        help="What computes; the bytes are the same.",
    )
    workers: int | None = _resource(
        "--workers",
        type=click.IntRange(1),
        help="Threads that read, compute and write. "
        "[default: three more than there are cores, one for each 48 MiB of --memory at most]",
    )
    memory: int = _resource(
        "--memory",
        otherwise=IN_FLIGHT,
        callback=_size,
        default="512MB",
        show_default=True,
        help="Most bytes of tensors in flight: 512MB, 2GB.",
    )
    max_shard_size: int | None = _writing(
        "--max-shard-size",
        callback=_size,
        help="Where a file of DST ends: 5GB, 512MiB or bytes. [default: as in the release; of Megatron's files "
        "an eighth of the weights, 500MB to 5GB]",
    )
    ray: str | None = _resource(
        "--ray",
        is_flag=False,
        flag_value="auto",
        metavar="[ADDRESS]",
        help="Work on a Ray cluster: the one at ADDRESS or at hand, or a new one on this machine.",
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
        "Writes only a file to measure the disk with, which is removed at once.",
    )

    def __post_init__(self) -> None:
        if self.resume and is_url(self.dst):
            message = f"{self.dst}: --resume is not supported for URL destinations"
            raise UsageError(message, "begin again with --overwrite")
        urls = [path for path in (*self.sources, self.dst) if is_url(path)]
        if self.ray is not None and urls:
            raise UsageError(
                f"--ray works on a file system that all nodes share, and {urls[0]} is a URL",
                "copy to such a file system, or leave out --ray",
            )
        for name, value, values in (("dtype", self.dtype, DTYPES), ("dialect", self.dialect, (None, *DIALECTS))):
            if value not in values:
                raise UsageError(f"unknown {name} {value!r}", f"choose one of {', '.join(filter(None, values))}")
        if self.merge is not None and (is_url(self.merge) or self.dialect is not None):
            message = "--merge makes an HF checkpoint of an adapter on a local disk"
            raise UsageError(message, "copy the adapter here; convert the merged checkpoint to Megatron after that")
        quantizing = [_word(name) for name in _FIELDS if _row(name).get("needs") and self._is_given(name)]
        if quantizing and self.scheme is None:
            hint = "; a Megatron checkpoint is not cut, and loads at any parallel size"
            message = f"{', '.join(quantizing)} is about quantized weights, and has no effect where none are written"
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
        """Paths and URLs of what is read."""
        return [path for path in (self.src, self.hf, self.like, self.merge) if path]

    @property
    def cast_to(self) -> str | None:
        """The dtype to write floating tensors in; None: as they are."""
        return None if self.dtype == "auto" else self.dtype

    def local_sources(self) -> Sources:
        """Each source at its own path, for a run without URLs."""
        return {source: Directory(Path(source)) for source in self.sources}

    def command(self) -> list[str]:
        """The command line of these options, less credentials and what changes no byte: for manifest and --resume."""
        words = ["ckptkit", self.verb, self.src]
        recorded = [name for name, one in _FIELDS.items() if one.metadata.get("recorded") and self._is_given(name)]
        given = {_word(name): getattr(self, name) for name in recorded}
        words += [part for word, one in given.items() if type(one) in (str, int) for part in (word, str(one))]
        words += [word for word, one in given.items() if one is True]
        words += [part for word, one in given.items() if type(one) is tuple for each in one for part in (word, each)]
        if self.scheme is not None:
            spelled = "--quantize" if self.verb == "convert" else "--scheme"
            words += [spelled, self.scheme.name] if self.verb == "convert" or self.scheme.name != DEFAULT else []
            words += self.scheme.command_line()
        elif self.verb == "quantize":
            words += ["--scheme", UNQUANTIZED]
        # A path may not be in UTF-8, and JSON is.
        return [printable(without_credentials(word)) for word in words]

    def identity(self, sources: Sources) -> dict[str, Any]:
        """What a resumed run must share with the one that died: version, command, and the files that are read."""
        read = fingerprint([sources[source] for source in self.sources], is_strict=True)
        return {"version": program_version(), "command": shlex.join(self.command()), "source": read}


_FIELDS = {one.name: one for one in fields(RunOptions)}


def _word(name: str) -> str:
    return str(_FIELDS[name].metadata["words"][0])


def _row(name: str) -> Mapping[str, Any]:
    """The option of a field, as it is given to `click.option`; empty of others."""
    return _FIELDS[name].metadata.get("row", {}) if name in _FIELDS else {}


def rows(*names: str, group: str = "") -> Callable[[Any], Any]:
    """The options of these fields, or of a group, as a decorator of a verb."""
    chosen = [one.metadata for one in fields(RunOptions) if one.name in names or one.metadata.get("group") == group]
    return together(*(one["option"] for one in chosen))


def run_options(
    verb: Literal["convert", "quantize"],
    src: str | Path,
    dst: str | Path,
    scheme: Scheme | None = None,
    **options: Any,
) -> RunOptions:
    """Makes RunOptions of fields as a user writes them: paths in any form, sizes also as "5GB", readers in a list.

    Raises as RunOptions does, and TypeError for an unknown option.
    """
    values = {name: _value(name, value) for name, value in options.items()}
    return RunOptions(verb, absolute(src), path_or_url(dst), scheme=scheme, **values)


def _value(name: str, value: Any) -> Any:
    row = _row(name)
    if row.get("multiple"):
        return tuple(value or getattr(RunOptions, name))
    if row.get("callback") is _size and isinstance(value, str):
        return parse_size(value)
    return absolute(value) if value and row.get("type") in (PATH, PATH_OR_URL) else value

"""The options of one conversion or quantization, as data that means the same in every process."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from ckptkit.core.dtypes import COMPUTED
from ckptkit.core.errors import UsageError
from ckptkit.core.installation import program_version
from ckptkit.core.printable import printable, without_credentials
from ckptkit.storage.directory import Directory
from ckptkit.storage.fingerprint import fingerprint
from ckptkit.storage.url import absolute, is_url, place
from ckptkit.transfer.copy import IN_FLIGHT
from converters.planner import DIALECTS
from quant.schemes.registry import DEFAULT, UNQUANTIZED
from quant.selection.readers import ALL_READERS

if TYPE_CHECKING:
    from quant.schemes.registry import Scheme

DTYPES = ("auto", *COMPUTED)
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
Sources = Mapping[str, Directory]  # where each source is read, by its path or URL


@dataclass(frozen=True)
class RunOptions:
    """What to write, from what, where, and with which resources. `run_options` makes one of what a user gave.

    Fields mean what the options of their names do, as `ckptkit convert --help` and `ckptkit quantize --help` say; those
    after `max_shard_size` never change a byte. What the help does not say:

    src, hf, like: absolute paths or URLs. hf: None: what was stored on the way there.
    dialect: None means "mcore". That of a source follows from its names. A Megatron source is converted to another
        dialect where this is given, else to HF.
    scheme: how weights are quantized; None: they are not, and a quantized source is dequantized.
    readers: those of `quant.selection.readers.READERS`.
    max_shard_size, memory: bytes. workers: with `ray` concurrent tasks (None: one a core), else threads.

    Raises UsageError for options that contradict each other.
    """

    verb: Literal["convert", "quantize"]
    src: str
    dst: str | Path
    hf: str | None = None
    merge: str | None = None
    dtype: str = "auto"
    dialect: str | None = None
    unwitnessed: bool = False
    scheme: Scheme | None = None
    like: str | None = None
    preset: Literal["rl"] | None = None
    readers: tuple[str, ...] = ALL_READERS
    tp: int | None = None
    device: str = "cpu"
    max_shard_size: int | None = None
    workers: int | None = None
    memory: int = IN_FLIGHT
    ray: str | None = None
    overwrite: bool = False
    resume: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.overwrite and self.resume:
            raise UsageError("--resume goes on with what is there, --overwrite replaces it", "give one of them")
        if self.resume and is_url(self.dst):
            message = f"{self.dst}: --resume is not supported for URL destinations"
            raise UsageError(message, "begin again with --overwrite")
        urls = [path for path in (*self.sources, self.dst) if is_url(path)]
        if self.ray is not None and urls:
            raise UsageError(
                f"--ray works on a file system that all nodes share, and {urls[0]} is a URL",
                "copy to such a file system, or leave out --ray",
            )
        if self.dtype not in DTYPES:
            raise UsageError(f"unknown dtype {self.dtype!r}", f"choose one of {', '.join(DTYPES)}")
        if self.merge is not None and (is_url(self.merge) or self.dialect is not None):
            message = "--merge makes an HF checkpoint of an adapter on a local disk"
            raise UsageError(message, "copy the adapter here; convert the merged checkpoint to Megatron after that")
        if self.dialect is not None and self.dialect not in DIALECTS:
            raise UsageError(f"unknown dialect {self.dialect!r}", f"choose one of {', '.join(DIALECTS)}")
        if self.scheme is None:
            names = ("like", "preset", "tp", "readers", "device")
            _refuse_quantizing([f"--{name.removesuffix('s')}" for name in names if self._is_given(name)])
        elif self.preset:
            if self.like:
                raise UsageError("--like and --preset both say what is packed", "give one of them")
            self.scheme.check_preset()

    def _is_given(self, name: str) -> bool:
        (default,) = (one.default for one in fields(self) if one.name == name)
        return bool(getattr(self, name) != default)

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
        for name in ("hf", "merge", "dtype", "dialect", "like", "preset", "tp", "max_shard_size"):
            if self._is_given(name):
                words += [f"--{name.replace('_', '-')}", str(getattr(self, name))]
        words += ["--unwitnessed"] if self.unwitnessed else []
        if self._is_given("readers"):
            words += [word for reader in self.readers for word in ("--reader", reader)]
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


def _refuse_quantizing(given: Sequence[str]) -> None:
    """Raises UsageError where a run that does not quantize was `given` options for it."""
    if given:
        hint = (
            "leave it out, or add --quantize w4a16 on the way from Megatron to HF; "
            "`ckptkit quantize` quantizes an HF checkpoint"
        )
        if "--tp" in given:
            hint += "; what is converted to Megatron is not cut, and loads at any parallel size"
        message = f"{', '.join(given)} is about quantized weights, and has no effect where none are written"
        raise UsageError(message, hint)


class GivenOptions(TypedDict, total=False):
    """What `ckptkit.convert` and `ckptkit.quantize` accept: the fields of RunOptions, as users write them.

    Paths come in any form, sizes also as "5GB".
    """

    hf: str | Path | None
    merge: str | Path | None
    dtype: str
    dialect: str | None
    unwitnessed: bool
    like: str | Path | None
    preset: Literal["rl"] | None
    readers: Sequence[str] | None
    tp: int | None
    device: str
    max_shard_size: int | str | None
    workers: int | None
    memory: int
    ray: str | None
    overwrite: bool
    resume: bool
    dry_run: bool


def run_options(
    verb: Literal["convert", "quantize"],
    src: str | Path,
    dst: str | Path,
    scheme: Scheme | None = None,
    **given: Unpack[GivenOptions],
) -> RunOptions:
    """Makes RunOptions of what a user gave. Raises as RunOptions does, and TypeError for an unknown option."""
    options: dict[str, Any] = dict(given)
    size = options.get("max_shard_size")
    options["max_shard_size"] = parse_size(size) if isinstance(size, str) else size
    options["readers"] = tuple(options.get("readers") or ALL_READERS)
    options |= {name: absolute(options[name]) for name in ("hf", "like", "merge") if options.get(name)}
    return RunOptions(verb, absolute(src), place(dst), scheme=scheme, **options)


def parse_size(text: str) -> int:
    """Bytes of `5GB`, `512MiB` or a plain number. Raises CkptkitError."""
    found = re.fullmatch(r"(\d+) ?([KMG]I?B|)", text.upper())
    if not found or not int(found[1]):
        raise UsageError(f"{text!r} is not a size", "write 512MB, 2GB or a number of bytes")
    return int(found[1]) * _UNITS[found[2]]

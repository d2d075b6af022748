"""The subject of a verification: the checkpoint, its source, and the options."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from ckptkit.converters.adapter import Adapter
from ckptkit.converters.open import open_checkpoint
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.detect import TRACKER, Kind, Location, locate
from ckptkit.formats.hf.adapter import AdapterFiles
from ckptkit.formats.hf.side_files import is_quantized
from ckptkit.verify.evidence.files import HfFiles, MegatronFiles
from ckptkit.verify.evidence.folding import group_by_pattern
from ckptkit.verify.evidence.plain import comparable, open_plain, plain
from ckptkit.verify.options import VerifyOptions
from ckptkit.verify.witnesses.registry import ENGINES, live_engine

if TYPE_CHECKING:
    from ckptkit.verify.launch.arguments import LaunchArguments
    from ckptkit.verify.launch.job import Job
    from ckptkit.verify.launch.words import Word

T = TypeVar("T")
P = ParamSpec("P")
_DEFAULT = VerifyOptions()


@dataclass(frozen=True)
class Subject:
    """A checkpoint and the options to verify it with. Files are opened lazily, so that checks can report broken ones.

    Only preflight sets the fields from `job` on.
    """

    path: Path
    source_path: Path | None = None
    hf_path: Path | None = None  # the HF directory with Megatron's config if it stores none, or with the base of deltas
    options: VerifyOptions = _DEFAULT
    job: Job | None = None  # the training job that would load this checkpoint
    arguments: LaunchArguments | None = None  # the sizes of the launch
    sizes_at: Mapping[str, Word] = field(default_factory=dict, compare=False)  # the words of `tp`, `pp`, `ep` and `etp`
    updated: bool | None = False  # whether the job quantizes by the `ignore` list, or None if by packed tensors
    loaded: Mapping[Path, Subject] = field(default_factory=dict, repr=False, compare=False)  # by the job's directories
    _results: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Makes paths absolute and free of `..`, since the directory above an iteration is recognized by its name."""
        for name in ("path", "source_path", "hf_path"):
            if given := getattr(self, name):
                object.__setattr__(self, name, Path(os.path.abspath(given)))

    @property
    def tp(self) -> int:
        """The tensor parallel size."""
        return self.options.tp

    @property
    def ep(self) -> int:
        """The expert parallel size."""
        return self.options.ep

    @property
    def against(self) -> frozenset[str]:
        """The requested witnesses."""
        return self.options.against

    @property
    def readers(self) -> tuple[str, ...] | None:
        """The readers that count for an INT4 checkpoint, or None for those of RL stacks."""
        return self.options.readers

    def peek(self, find: Callable[[Subject], T]) -> T | None:
        """The stored result of a function with `@once`, or None if it was not called."""
        return self._results.get((find,))

    @property
    def engine(self) -> str:
        """The engine that the rules are for: the launch's, that of --reader, or the requested one, in this order."""
        if self.arguments is not None and self.arguments.server:
            return self.arguments.server
        if self.readers is not None and not {"sglang", "vllm"}.isdisjoint(self.readers):
            return "sglang" if "sglang" in self.readers else "vllm"
        return live_engine(self.against).name

    @property
    def not_for_sglang(self) -> str | None:
        """The reason to skip SGLang's rules: another engine serves or is requested, or --reader does not name it."""
        if self.arguments is not None and self.engine != "sglang":
            label = next((one.label for one in ENGINES if one.name == self.engine), self.engine)
            return f"the rollout engine of the launch is {label}"
        if self.readers is None and self.engine != "sglang":
            return "--against-vllm was given, and --against-sglang was not"
        is_excluded = self.readers is not None and "sglang" not in self.readers
        return "--reader does not include SGLang" if is_excluded else None

    @cached_property
    def kind(self) -> Kind:
        """The format at `path`, judged by any file in it. Raises CkptkitError if there is no checkpoint."""
        if any((self.path / mark).exists() for mark in (TRACKER, ".metadata")) or any(self.path.glob("*.distcp")):
            return "megatron"
        if (self.path / "config.json").exists():
            return "hf"
        # An HF directory may hold files of these names too.
        if any((self.path / mark).exists() for mark in ("metadata.json", "common.pt")):
            return "megatron"
        return locate(self.path).kind

    @property
    def config_root(self) -> Path:
        """The directory of config.json; for Megatron, the HF directory that belongs to it."""
        return self.path if self.kind == "hf" else self.megatron_files.opened.hf_path

    @property
    def unread_names(self) -> Collection[str]:
        """Tensor names that the index lists in unreadable files."""
        return self.hf_files.unknown if self.kind == "hf" else ()

    @cached_property
    def hf_files(self) -> HfFiles:
        """The files of an HF directory, sound or not."""
        return HfFiles(self.path)

    @cached_property
    def megatron_files(self) -> MegatronFiles:
        """The files of a Megatron directory, sound or not."""
        return MegatronFiles(self.path, self.hf_path)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor in headers or `.metadata`. Raises CkptkitError if `.metadata` cannot be read."""
        return self.hf_files.specs if self.kind == "hf" else self.megatron_files.opened.specs

    @cached_property
    def kinds(self) -> Sequence[Sequence[str]]:
        """The names of `specs`, grouped if they differ only in layer and expert numbers. Raises as `specs`."""
        return list(group_by_pattern(self.specs))

    @cached_property
    def location(self) -> Location:
        """The location of the checkpoint at `path`."""
        return locate(self.path)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The opened checkpoint. Raises CkptkitError if it cannot be opened, which CK1xx checks report first."""
        if self.location.kind == "hf":
            return self.hf_files.checkpoint
        return open_checkpoint(self.path, hf=self.hf_path)

    @cached_property
    def adapter(self) -> Adapter | None:
        """The adapter of `--adapter` over `--source`. Raises CkptkitError if it is unsupported or does not fit."""
        if self.options.adapter is None or self.source_path is None:
            return None
        return Adapter(AdapterFiles(self.options.adapter), plain(self.source_path), str(self.options.adapter))

    @cached_property
    def source(self) -> Checkpoint | None:
        """The opened checkpoint of `--source`, dequantized; weights stored alike in both stay quantized (`comparable`).

        Raises CkptkitError if it cannot be opened or its quantization is not supported.
        """
        if self.source_path is None:
            return None
        if self.adapter is not None:
            return self.adapter.merged()
        if self.kind == "hf" and is_quantized(self.checkpoint.config):
            return comparable(open_checkpoint(self.source_path, hf=self.hf_path), self.checkpoint)
        return open_plain(locate(self.source_path), self.hf_path)

    @cached_property
    def source_is_hf(self) -> bool:
        """Whether the source is an HF directory; true without a source."""
        return self.source_path is None or locate(self.source_path).kind == "hf"


def once(find: Callable[Concatenate[Subject, P], T]) -> Callable[Concatenate[Subject, P], T]:
    """Caches the result of a function for each subject and further arguments. Exceptions are not cached."""

    @wraps(find)
    def found(subject: Subject, /, *args: P.args, **kwargs: P.kwargs) -> T:
        key = (found, *args)
        if key not in subject._results:
            subject._results[key] = find(subject, *args, **kwargs)
        return subject._results[key]  # type: ignore[no-any-return]

    return found

"""What is being verified: the checkpoint, its source, and how it is going to be used."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.formats.detect import TRACKER, Location, locate
from ckptkit.formats.hf.side_files import is_quantized
from converters.open import open_checkpoint
from verify.evidence.folding import alike
from verify.evidence.hf_files import HfFiles
from verify.evidence.megatron_files import MegatronFiles
from verify.evidence.plain import plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verify.evidence.expected import Expected
    from verify.evidence.scales import Scale
    from verify.evidence.values import Values
    from verify.launch.arguments import LaunchArguments
    from verify.launch.launch import Launch
    from verify.witnesses.megatron.run import MegatronRun
    from verify.witnesses.sglang.run import SglangRun


@dataclass
class Subject:
    """A checkpoint and the question asked of it. Opening is lazy, so that file checks can look at broken ones.

    `tp`, `pp`, `ep`, `etp` (inside experts; None: as launch scripts choose) and `vpp` are the parallel sizes to load Megatron
    with; `against` holds "megatron" and "sglang" as asked for.
    `launch` says how a training job would find this checkpoint, `arguments` what its launch script says of parallel sizes;
    only preflight gives them. `manifest` is a file with digests to compare with. `rounding` is what CK305 found of each packed
    weight: how many quantization steps it is off its source, and how many it may be; `promised` what `expected_of` found.
    `readers` (as `--reader` has them) are those that are to load an INT4 checkpoint; None: `quant.selection.readers.RL_READERS`. `updated`: a
    launch quantizes weights by its `ignore` list. `ray`: the address of the Ray cluster
    (`ckptkit.transfer.ray.cluster.connected`) that reads all the bytes; None: threads of this process.
    """

    path: Path
    source_path: Path | None = None
    hf_path: Path | None = None
    tp: int = 1
    pp: int = 1
    ep: int = 1
    against: frozenset[str] = frozenset()
    launch: Launch | None = None
    etp: int | None = None
    vpp: int = 1
    arguments: LaunchArguments | None = None
    rounding: dict[str, tuple[float, float]] = field(default_factory=dict)
    manifest: Path | None = None
    promised: Expected | None = field(default=None, repr=False)
    readers: tuple[str, ...] | None = None
    updated: bool = False
    ray: str | None = None

    def __post_init__(self) -> None:
        """Makes paths absolute and free of `..`: the directory above an iteration is looked at by its name."""
        self.path = Path(os.path.abspath(self.path))
        self.source_path = self.source_path and Path(os.path.abspath(self.source_path))
        self.hf_path = self.hf_path and Path(os.path.abspath(self.hf_path))

    @cached_property
    def kind(self) -> Literal["hf", "megatron"]:
        """What lies at `path`, told by any file that is still there. Raises CkptkitError when it holds no checkpoint at all."""
        if any((self.path / mark).exists() for mark in (TRACKER, ".metadata")) or any(self.path.glob("*.distcp")):
            return "megatron"
        if (self.path / "config.json").exists():
            return "hf"
        # An HF directory may hold files of these names too.
        if any((self.path / mark).exists() for mark in ("metadata.json", "common.pt")):
            return "megatron"
        return locate(self.path).kind

    @cached_property
    def hf_files(self) -> HfFiles:
        """The files of an HF directory, sound or not."""
        return HfFiles(self.path)

    @cached_property
    def megatron_files(self) -> MegatronFiles:
        """The files of a Megatron directory, sound or not."""
        return MegatronFiles(self.path, self.hf_path)

    @cached_property
    def kinds(self) -> Sequence[Sequence[str]]:
        """The names of all tensors, those together that differ in layer and expert numbers only. Raises CkptkitError where `.metadata` cannot be read."""
        return list(alike(self.hf_files.specs if self.kind == "hf" else self.megatron_files.opened.specs))

    @cached_property
    def location(self) -> Location:
        """What lies at `path`."""
        return locate(self.path)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint itself. Raises CkptkitError when it cannot be opened; CK1xx checks have said why by then."""
        return open_checkpoint(self.path, hf=self.hf_path)

    @cached_property
    def source(self) -> Checkpoint | None:
        """What `--source` names, opened; a quantized release as the weights that it dequantizes to, unless this checkpoint is quantized too.

        Raises CkptkitError where it cannot be opened, or is quantized in a format that is not supported.
        """
        if self.source_path is None:
            return None
        alike = self.kind == "hf" and is_quantized(self.checkpoint.config)
        return (
            open_checkpoint(self.source_path, hf=self.hf_path)
            if alike or self.source_kind == "megatron"
            else plain(locate(self.source_path).path)
        )

    @cached_property
    def source_kind(self) -> Literal["hf", "megatron"]:
        """What lies at `source_path`; "hf" when there is no source."""
        return locate(self.source_path).kind if self.source_path else "hf"

    @cached_property
    def values(self) -> Values:
        """What one pass over all the bytes, of the checkpoint and of its source, found."""
        from verify.evidence.values import read_values

        return read_values(self)

    @cached_property
    def scales(self) -> Sequence[Scale]:
        """What the scales of packed weights hold. Raises CkptkitError where the checkpoint cannot be opened or read."""
        from verify.evidence.scales import read_scales

        return list(read_scales(self))

    @cached_property
    def megatron_run(self) -> MegatronRun:
        """What real Megatron asked for and held, rank by rank. Errors and skips as `verify.witnesses.megatron.run.run_megatron`."""
        from verify.witnesses.megatron.run import run_megatron

        return run_megatron(self)

    @cached_property
    def sglang_run(self) -> SglangRun:
        """What real SGLang made of it, loaded once for all the checks."""
        from verify.witnesses.sglang.run import run_sglang

        return run_sglang(self)

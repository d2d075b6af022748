"""What verify tells the SGLang witness to do, and what the witness tells back: both as JSON files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class SglangJob:
    """`checkpoint` is loaded; `hf` gives the config of a Megatron one that carries none.

    `source`, an unquantized HF directory, is what a Megatron checkpoint's values are compared with; without it, its own.
    `scratch` is an empty directory for the meeting point of SGLang's process group and for a Megatron checkpoint's config.
    """

    checkpoint: str
    hf: str | None
    source: str | None
    scratch: str
    report: str

    def save(self, path: Path) -> None:
        """Writes the job as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> SglangJob:
        """The job written by `save`."""
        return SglangJob(**json.loads(path.read_text()))


@dataclass(frozen=True)
class Observation:
    """What is wrong with one HF tensor, or with an SGLang parameter that has none; `param` is SGLang's name for its place."""

    tensor: str
    param: str
    what: str


@dataclass(frozen=True)
class SglangReport:
    """What the witness saw.

    `fused_shared`: GLM's shared expert was kept as one more routed expert. `fed`: how many names `load_weights` was given.
    `unwritten`: places that still hold the poison. `dropped`: names that were given and landed nowhere, or elsewhere.
    `differing`: places whose bits are not the file's. `rounded`: places of a smaller dtype than the file's, that lose bits.
    `routers`: dead ones. `draft`: names left to a draft model. `log`: what SGLang said of unknown names. `repacked`: what is
    wrong after the quantization methods ran, None where they were not run. `unchecked`: what they turned into a layout that is not known here.
    """

    version: str
    model: str
    device: str
    dtype: str
    fused_shared: bool
    parameters: int
    fed: int
    tensors: int
    bytes: int
    routers_seen: int
    unwritten: tuple[Observation, ...]
    dropped: tuple[Observation, ...]
    differing: tuple[Observation, ...]
    rounded: tuple[Observation, ...]
    routers: tuple[Observation, ...]
    draft: tuple[str, ...]
    log: tuple[str, ...]
    repacked: tuple[Observation, ...] | None
    repacked_seen: int
    unchecked: tuple[str, ...] = ()

    def save(self, path: Path) -> None:
        """Writes the report as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> SglangReport:
        """The report written by `save`."""
        values: dict[str, Any] = json.loads(path.read_text())
        for key in ("unwritten", "dropped", "differing", "rounded", "routers", "repacked"):
            if values[key] is not None:
                values[key] = tuple(Observation(**trouble) for trouble in values[key])
        return SglangReport(**{**values, **{key: tuple(values[key]) for key in ("draft", "log", "unchecked")}})

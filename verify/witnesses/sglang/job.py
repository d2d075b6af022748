"""The SGLang witness's task and its report, both JSON files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class SglangJob:
    """`checkpoint` is loaded; `hf` gives the config of a Megatron one that carries none.

    A Megatron checkpoint's values are compared with `source`, an unquantized HF directory, or without one with its own.
    `scratch` is an empty directory for SGLang's process group and for a Megatron checkpoint's config.
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
    """What is wrong with an HF tensor, or an SGLang parameter that belongs to none; `param` is SGLang's name."""

    tensor: str
    param: str
    what: str


@dataclass(frozen=True)
class SglangReport:
    """What the witness saw.

    `fused_shared`: GLM's shared expert was kept as one more routed expert. `fed`: how many names `load_weights` was
    given. `unwritten`: what still holds the poison. `dropped`: names that were given and written nowhere, or in part.
    `differing`: places whose bits are not the file's. `rounded`: those of a smaller dtype, which lost bits. `computed`:
    parameters that were computed instead of copied, and so not compared. `routers`: dead ones. `draft`: names left to a
    draft model. `log`: what SGLang said of unknown names. `repacked`: what is wrong after the quantization methods ran,
    None where they did not run. `unchecked`: what they turned into a layout that is not known here.
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
    computed: tuple[str, ...]
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
        return SglangReport(
            **{**values, **{key: tuple(values[key]) for key in ("computed", "draft", "log", "unchecked")}}
        )

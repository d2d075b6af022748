"""The SGLang witness's task and its report, both JSON files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class EngineSizes:
    """How an engine is cut, in SGLang's terms.

    It has `tp` ranks. `ep` divides `tp`: each rank keeps 1/ep of the experts, and tp/ep ranks cut those among them.
    `dp_attention`: every rank keeps the attention whole, as with `--enable-dp-attention` and `--dp-size` of `tp`.
    """

    tp: int = 1
    ep: int = 1
    dp_attention: bool = False

    def __str__(self) -> str:
        parts = [f"tp {self.tp}", f"ep {self.ep}"] + ["dp attention"] * self.dp_attention
        return ", ".join(parts)


ONE_RANK = EngineSizes()
TAKEN = "SGLang's draft model takes"  # how an `Observation` begins of a copy whose original is taken instead


@dataclass(frozen=True)
class SglangJob:
    """`checkpoint` is loaded; `hf` gives the config of a Megatron one that carries none.

    A Megatron checkpoint's values are compared with `source`, an unquantized HF directory, or without one with its own.
    `scratch` is a directory that all ranks share, empty at first, for SGLang's process groups and for the configs of a
    Megatron checkpoint.
    """

    checkpoint: str
    hf: str | None
    source: str | None
    scratch: str
    report: str
    sizes: EngineSizes = ONE_RANK
    rank: int = 0

    def save(self, path: Path) -> None:
        """Writes the job as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> SglangJob:
        """The job written by `save`."""
        values: dict[str, Any] = json.loads(path.read_text())
        return SglangJob(**values | {"sizes": EngineSizes(**values["sizes"])})


@dataclass(frozen=True)
class Observation:
    """What is wrong with an HF tensor, or an SGLang parameter that belongs to none; `param` is SGLang's name.

    `rank`: where, of several ranks; None: on all.
    """

    tensor: str
    param: str
    what: str
    rank: str | None = None


@dataclass(frozen=True)
class Held:
    """Of a tensor of `elements`, the parts that stand in parameters: offset, sizes and strides, in elements."""

    elements: int
    parts: Sequence[tuple[int, Sequence[int], Sequence[int]]]


@dataclass(frozen=True)
class SglangReport:
    """What the witness saw, on one rank or, after `merge.merged`, on all.

    `fused_shared`: GLM's shared expert was kept as one more routed expert. `parameters`: of the first rank. `fed`: how
    many names `load_weights` was given. `equal`: tensors whose bits are where they should be, and their bytes. `held`:
    what there is of tensors that are not here as a whole. `unwritten`: what still holds the poison. `dropped`: names
    that were given and written nowhere, or in part. `differing`: places whose bits are not the file's. `rounded`: those
    of a smaller dtype, which lost bits. `computed`: parameters that were computed instead of copied, and so not
    compared. `routers`: dead ones. `draft`: names of multi-token prediction layers, which are loaded into a draft model
    with a report of its own. `log`: what SGLang said of unknown names. `repacked`: what is wrong after the quantization
    methods ran, None where they did not run. `unchecked`: what they turned into a layout that is not known here.
    """

    version: str
    model: str
    device: str
    dtype: str
    sizes: EngineSizes
    fused_shared: bool
    parameters: int
    fed: int
    equal: Mapping[str, int]
    held: Mapping[str, Held]
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

    @property
    def tensors(self) -> int:
        """How many tensors were compared."""
        return len(self.equal.keys() | {seen.tensor for seen in self.differing})

    @property
    def bytes(self) -> int:
        """How many bytes are where they should be."""
        return sum(self.equal.values())

    @staticmethod
    def draft_path(report: Path) -> Path:
        """Where a witness writes its report on the draft model, beside that on the model itself."""
        return report.with_name(f"{report.name}.draft")

    def save(self, path: Path) -> None:
        """Writes the report as JSON, at once."""
        part = path.with_name(f"{path.name}.part")
        part.write_text(json.dumps(asdict(self)))
        part.rename(path)

    @staticmethod
    def load(path: Path) -> SglangReport:
        """The report written by `save`."""
        values: dict[str, Any] = json.loads(path.read_text())
        for key in ("unwritten", "dropped", "differing", "rounded", "routers", "repacked"):
            if values[key] is not None:
                values[key] = tuple(Observation(**trouble) for trouble in values[key])
        values["held"] = {name: Held(**held) for name, held in values["held"].items()}
        values |= {key: tuple(values[key]) for key in ("computed", "draft", "log", "unchecked")}
        return SglangReport(**values | {"sizes": EngineSizes(**values["sizes"])})

"""What an engine is asked to load, and what was seen of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class EngineSizes:
    """How an engine is cut."""

    tp: int = 1  # ranks that share a layer
    ep: int = 1  # divides `tp`: each rank keeps 1/ep of the experts, and tp/ep ranks cut those among them
    dp_attention: bool = False  # every rank keeps the attention whole (`--enable-dp-attention`, `--dp-size` of `tp`)
    pp: int = 1  # pipeline stages

    @property
    def ranks(self) -> int:
        """How many processes that are."""
        return self.tp * self.pp

    def __str__(self) -> str:
        stages = [f"pp {self.pp}"] if self.pp > 1 else []
        return ", ".join([f"tp {self.tp}", *stages, f"ep {self.ep}", *["dp attention"] * self.dp_attention])


ONE_RANK = EngineSizes()


@dataclass(frozen=True)
class LoadJob:
    """One rank's task: load a checkpoint into an engine, and compare."""

    adapter: str  # the module that is its `Engine`
    checkpoint: str
    hf: str | None = None  # gives the config of a Megatron checkpoint that carries none
    source: str | None = None  # an unquantized HF directory: what a Megatron checkpoint's values are compared with
    scratch: str = ""  # shared by all ranks, empty at first
    report: str = ""
    sizes: EngineSizes = ONE_RANK
    rank: int = 0


@dataclass(frozen=True)
class Observation:
    """What is wrong with an HF tensor, or with a parameter of the engine that belongs to none."""

    tensor: str
    param: str  # the engine's name
    what: str
    rank: str | None = None  # where, of several ranks; None: on all
    original: str | None = None  # the tensor that a draft model takes from its target instead of this copy


@dataclass(frozen=True)
class PartialTensor:
    """A tensor of which only some parts stand in parameters of a rank."""

    elements: int  # of the whole
    parts: Sequence[tuple[int, Sequence[int], Sequence[int]]]  # offset, sizes and strides, in elements


@dataclass(frozen=True)
class LoadReport:
    """What was seen on one rank or, after `merge.merged_reports`, on all of them."""

    version: str
    model: str  # the engine's class
    device: str
    dtype: str
    sizes: EngineSizes = ONE_RANK
    parameters: int = 0  # of the first rank
    loaded_names: int = 0  # how many names `load_weights` was given
    equal: Mapping[str, int] = field(default_factory=dict)  # tensors whose bits are where they should be, their bytes
    partial: Mapping[str, PartialTensor] = field(default_factory=dict)  # tensors that are not here as a whole
    routers_seen: int = 0
    unwritten: tuple[Observation, ...] = ()  # what still holds the poison
    dropped: tuple[Observation, ...] = ()  # names that were given and written nowhere, or in part
    differing: tuple[Observation, ...] = ()  # places whose bits are not the file's
    rounded: tuple[Observation, ...] = ()  # places of a smaller dtype, which lost bits
    computed: tuple[str, ...] = ()  # parameters that were computed instead of copied, and so not compared
    routers: tuple[Observation, ...] = ()  # dead ones
    draft: tuple[str, ...] = ()  # names of multi-token prediction layers; the draft model has a report of its own
    log: tuple[str, ...] = ()  # what the engine said of unknown names
    repacked: tuple[Observation, ...] | None = None  # wrong after the quantization methods; None: they did not run
    repacked_seen: int = 0
    unchecked: tuple[str, ...] = ()  # what they turned into a layout that is not known here
    # Parameters that they rounded to other scales, and their largest change, as a part of a block's largest value.
    requantized: Mapping[str, float] = field(default_factory=dict)

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

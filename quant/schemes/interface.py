"""The protocol of a quantization scheme. Reading its weights back is a `Format` of `quant.formats`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.specs import TensorSpec
from quant.selection.readers import ALL_READERS

if TYPE_CHECKING:
    from torch import Tensor

    from quant.formats.squared_error import SquaredError


class Scheme(Protocol):
    """What a user asks for, as data; its constructor refuses contradictions."""

    @property
    def name(self) -> str:
        """The scheme as `--quantize` takes it."""

    @property
    def title(self) -> str:
        """The scheme in messages."""

    @property
    def ignore(self) -> tuple[str, ...]:
        """Entries for modules that are not quantized, beside the model's own."""

    @property
    def is_slow(self) -> bool:
        """Whether one core does not keep up with a disk."""

    def command_line(self) -> list[str]:
        """The options of `ckptkit quantize` that give this scheme."""

    def check_preset(self) -> None:
        """Raises CkptkitError where training does not round weights so (`--preset rl`)."""


@dataclass(frozen=True)
class Request:
    """What is asked for one checkpoint beside the scheme."""

    # The source as messages name it.
    where: str
    # A quantized checkpoint of the same model: what it has packed is packed, with its scales where they still fit.
    like: Checkpoint | None = None
    # The source as it is stored, where it is quantized itself; used as `like` is, less what `ignore` names.
    stored: Checkpoint | None = None
    # "rl" packs routed experts alone, which both SGLang and vLLM can be updated with.
    preset: Literal["rl"] | None = None
    # Those of `quant.selection.readers.READERS` who must agree on what is packed.
    readers: Sequence[str] = ALL_READERS
    # A tensor parallel size that the kernels of SGLang must be able to load.
    tp: int | None = None
    # What quantizes, "cpu" or "cuda"; the bytes are the same.
    device: str = "cpu"


class Packing(Protocol):
    """Which weights of one checkpoint become quantized, and into what."""

    @property
    def names(self) -> Collection[str]:
        """The weights that are quantized."""

    @property
    def label(self) -> str:
        """What happens to a weight, for the dry run."""

    @property
    def together(self) -> Sequence[tuple[str, ...]]:
        """Weights that are quantized in one step, since they share a scale; every other one has a step of its own."""

    def shapes(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """The tensors that a weight becomes."""

    def pack(self, specs: Sequence[TensorSpec], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Quantizes weights, those of one step, to what `shapes` announces, one after the other."""

    def config(self) -> Mapping[str, Any]:
        """The `quantization_config` of the result."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know before the result is served."""

    @property
    def advice(self) -> str | None:
        """Which options would lose less, where they may be used."""

    @property
    def errors(self) -> Mapping[str, SquaredError]:
        """How far each weight that `pack` has packed is from its source, by the name of the tensor with its codes."""


class SchemeModule(Protocol):
    """What a module of `quant.schemes` has."""

    def from_options(self, name: str, given: dict[str, Any], reference: str | Path | None) -> Scheme:
        """Makes the scheme called `name` of command line options, which it takes out of `given`.

        Options not given default to those of the checkpoint at `reference`. Raises CkptkitError.
        """

    def select(self, source: Checkpoint, scheme: Scheme, request: Request) -> Packing:
        """Decides from headers what is quantized. Raises CkptkitError where readers would disagree about it."""

    def quantize_sample(self, weight: Tensor, scheme: Scheme) -> None:
        """Quantizes a matrix, so that a forecast can measure how long it takes."""

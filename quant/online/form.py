"""What the online quantizer needs to know of a quantization: INT4's is in `int4.py`, FP8's in `fp8.py`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from ckptkit.core.errors import CkptkitError

if TYPE_CHECKING:
    from quant.kernels.triton_launch import Launcher

Pair = tuple[str, Tensor]


class Part(NamedTuple):
    """A tensor [rows, width] that a kernel makes of a matrix."""

    dtype: torch.dtype
    rows: int
    width: int


class Form(Protocol):
    """How an engine's weights are quantized."""

    @property
    def sends_shape(self) -> bool:
        """Whether the engine is sent the shape of each matrix too, int64 [2], after its parts."""

    def quantize(self, named: Sequence[Pair], packed: Collection[str]) -> list[Pair]:
        """Quantizes those in `packed` at once; `named` has the checkpoint's names.

        Raises CkptkitError, naming a tensor that cannot be quantized.
        """

    def check(self, weight: Tensor, name: str) -> None:
        """Raises CkptkitError, naming the tensor, for what cannot be quantized, whatever its values."""

    def not_finite(self, weight: Tensor, name: str) -> CkptkitError:
        """The error for a matrix that a kernel marked as bad."""

    def has_kernel(self, weight: Tensor) -> bool:
        """Whether `launcher` takes this matrix on a GPU."""

    def launcher(self, weight: Tensor) -> Launcher:
        """Launches the kernel for matrices like this one; matrices with equal launchers share a launch."""

    def parts(self, weight: Tensor) -> tuple[Part, ...]:
        """What the kernel makes of a matrix, in the order of its outputs."""

    def names(self, name: str) -> tuple[str, ...]:
        """The names of these parts in the checkpoint, and of the shape if it is sent."""

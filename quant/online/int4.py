"""A trainer's tensors in INT4, as an engine serves them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ckptkit.core.errors import CkptkitError
from quant.formats.grids import check, not_finite
from quant.formats.part_names import PACKED, SCALE, SHAPE
from quant.formats.scheme import CODES_PER_WORD, QuantScheme
from quant.kernels.dispatch import quantize_pack
from quant.online.form import Pair, Part

if TYPE_CHECKING:
    from quant.kernels.triton_launch import Launcher


@dataclass(frozen=True)
class Int4Form:
    """A `Form`: `N.weight` [rows, columns] becomes `N.weight_packed`, `N.weight_scale` and `N.weight_shape`."""

    scheme: QuantScheme
    sends_shape: bool = True

    def quantize(self, named: Sequence[Pair], packed: Collection[str]) -> list[Pair]:
        """As `Form.quantize`, in one call of `quantize_pack`."""
        chosen = [(name, tensor.detach().contiguous()) for name, tensor in named if name in packed]
        names, weights = [name for name, _ in chosen], [tensor for _, tensor in chosen]
        made = dict(zip(names, quantize_pack(weights, self.scheme, names), strict=True)) if chosen else {}
        # One copy to the device for all shapes.
        shapes = (
            torch.tensor([weight.shape for weight in weights], dtype=torch.int64).to(weights[0].device).unbind()
            if chosen
            else ()
        )
        shape_of = dict(zip(names, shapes, strict=True))
        bucket: list[Pair] = []
        for name, tensor in named:
            if name in made:
                parts = made[name].words, made[name].scale, shape_of[name]
                bucket += zip(self.names(name), parts, strict=True)
            else:
                bucket.append((name, tensor.detach()))
        return bucket

    def check(self, weight: Tensor, name: str) -> None:
        """As `Form.check`."""
        check(weight, self.scheme, name)

    def not_finite(self, weight: Tensor, name: str) -> CkptkitError:
        """As `Form.not_finite`."""
        return not_finite(weight, self.scheme.scale_dtype or weight.dtype, name)

    def has_kernel(self, weight: Tensor) -> bool:
        """As `Form.has_kernel`."""
        return self.scheme.search == "none" and self.scheme.symmetric

    def launcher(self, weight: Tensor) -> Launcher:
        """As `Form.launcher`. Groups follow one another, so that a matrix and one with its axes swapped share one."""
        # Imported here because it needs Triton, which comes with CUDA builds of torch.
        from quant.kernels.triton_launch import launcher

        rows, columns = weight.shape
        return launcher(self.scheme, rows, columns, weight.dtype)

    def parts(self, weight: Tensor) -> tuple[Part, ...]:
        """As `Form.parts`: words and scales."""
        rows, columns = weight.shape
        return (
            Part(torch.int32, rows, columns // CODES_PER_WORD),
            Part(self.scheme.scale_dtype or weight.dtype, rows, self.scheme.groups(columns)),
        )

    def names(self, name: str) -> tuple[str, ...]:
        """As `Form.names`."""
        module = name.removesuffix(".weight")
        return module + PACKED, module + SCALE, module + SHAPE

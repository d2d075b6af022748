"""What the scales and weight_shape tensors of an INT4 checkpoint hold, read once for all the checks that look at them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant.formats.part_names import SCALE, SHAPE
from verify.evidence.packed import packed_names

if TYPE_CHECKING:
    from verify.evidence.subject import Subject


@dataclass(frozen=True)
class Scale:
    """The scale of one module: how many values, how many are not finite, how many zero or negative, and the median of the others.

    `shape` is what its weight_shape says; None where there is none. `nbytes` is what was read.
    """

    module: str
    values: int
    not_finite: int
    not_positive: int
    median: float | None
    shape: tuple[int, ...] | None
    nbytes: int


def read_scales(subject: Subject) -> Iterator[Scale]:
    """Every scale of the checkpoint, and the weight_shape beside it, in the order of `packed_names`."""
    specs = subject.checkpoint.specs
    for module in packed_names(specs):
        parts = [module + SCALE, module + SHAPE]
        found = subject.checkpoint.read([part for part in parts if part in specs])
        scale, shape = found.get(parts[0]), found.get(parts[1])
        nbytes = sum(tensor.nbytes for tensor in found.values())
        said = None if shape is None else tuple(int(size) for size in shape.flatten().tolist())
        if scale is None:
            yield Scale(module, 0, 0, 0, None, said, nbytes)
            continue
        good = scale[scale.isfinite() & (scale > 0)]
        wrong, low = int((~scale.isfinite()).sum()), int((scale <= 0).sum())
        yield Scale(
            module, scale.numel(), wrong, low, float(good.float().median()) if good.numel() else None, said, nbytes
        )

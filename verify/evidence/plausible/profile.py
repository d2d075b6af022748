"""Measures how large the rows and the columns of a matrix are: all that remains of a weight after the pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from verify.evidence.folding import LAYER

if TYPE_CHECKING:
    from torch import Tensor

Array = np.ndarray[Any, np.dtype[np.float32]]

_SAMPLED = 256  # rows and columns kept of an expert: a thousand million experts' bytes become a few kilobytes each
_WHOLE = 1 << 16  # and of attention, whose heads must be whole
_LOOKED_AT = 1024  # rows by which the columns are measured
_FEW_ROWS = 512  # of a router, each of which is held against every other
_TINY = 1e-30


@dataclass(frozen=True)
class Profile:
    """Logarithms of the mean squares of a matrix's rows and columns, evenly spaced ones where there are many."""

    shape: tuple[int, ...]  # of the matrix
    rows: Array
    columns: Array
    width: int = 0  # numbers that each of `rows` is the mean of
    height: int = 0  # and each of `columns`
    vector: Array | None = None  # the weight of a norm, whole
    likeness: float | None = None  # of a router: the mean square of the cosines between its rows

    @property
    def square(self) -> bool:
        """Whether its transpose has the same shape."""
        return len(self.shape) == 2 and self.shape[0] == self.shape[1]


def profile_of(name: str, tensor: Tensor) -> Profile | None:
    """The profile of a weight of a decoder layer; None of any other tensor, and of numbers that are not finite."""
    import torch

    if not LAYER.match(name) or tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return None
    none = np.zeros(0, np.float32)
    if tensor.dim() == 1 and "norm" in name:
        vector = tensor.float().numpy()
        return Profile(tuple(tensor.shape), none, none, vector=vector) if np.isfinite(vector).all() else None
    if tensor.dim() != 2 or min(tensor.shape) == 0:
        return None
    most = _WHOLE if "attn" in name else _SAMPLED
    rows = _every(tensor, 0, most)
    columns = _every(_every(tensor, 0, _LOOKED_AT), 1, most)
    sizes = _log_size(rows, 1), _log_size(columns, 0)
    if not all(np.isfinite(one).all() for one in sizes):
        return None
    likeness = _likeness(tensor) if name.endswith("gate.weight") and 1 < len(tensor) <= _FEW_ROWS else None
    return Profile(tuple(tensor.shape), *sizes, rows.shape[1], columns.shape[0], likeness=likeness)


def _likeness(tensor: Tensor) -> float:
    import torch

    rows = torch.nn.functional.normalize(tensor.float(), dim=1)
    count = len(rows)
    return float((rows @ rows.T).square().sum() - count) / (count * (count - 1))


def _every(tensor: Tensor, axis: int, most: int) -> Tensor:
    """At most `most` slices along an axis; of axes of the same length always the same ones."""
    count = tensor.shape[axis]
    step = max(1, count // most)
    index = (slice(None),) * axis + (slice(0, step * min(count, most), step),)
    return tensor[index]


def _log_size(tensor: Tensor, axis: int) -> Array:
    import torch

    squares = torch.linalg.vector_norm(tensor, dim=axis, dtype=torch.float32).square() / tensor.shape[axis]
    return np.asarray(squares.clamp_min(_TINY).log().numpy())

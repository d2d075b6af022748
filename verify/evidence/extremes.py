"""Measures one tensor in one pass over its bytes: digest, extremes, root mean square, rows of zeros."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from blake3 import blake3

from ckptkit.storage.buffers import bytes_of

if TYPE_CHECKING:
    from torch import Tensor

_PIECE_BYTES = 1 << 20  # bytes that stay in a core's cache over several computations
_SMALL = 1 << 16  # elements up to which bits are inspected one by one: router biases, not matrices
_SMALLEST_NORMAL = 2.0**-126  # of float32 and bfloat16


@dataclass(frozen=True)
class Extremes:
    """Measurements of one tensor."""

    digest: bytes  # BLAKE3 of its bytes
    nbytes: int
    finite: bool  # whether every element is finite
    low: float
    high: float
    rms: float  # root mean square; 0 for integers
    zero_rows: int  # rows of zeros only
    rows: int
    coarse: bool = False  # whether it is a small float32 tensor with only values that are exact in bfloat16

    @property
    def constant(self) -> bool:
        """Whether every element is the same number."""
        return self.finite and self.low == self.high

    @property
    def denormal(self) -> bool:
        """Whether all numbers are below 2**-126, where float32 loses precision, and some are not zero."""
        return 0 < max(abs(self.low), abs(self.high)) < _SMALLEST_NORMAL


@dataclass(frozen=True)
class _Piece:
    low: float
    high: float
    squares: float  # the sum of squares
    zero_rows: int


def digest_of(tensor: Tensor) -> bytes:
    """BLAKE3 of the bytes of a contiguous tensor."""
    return blake3(bytes_of(tensor)).digest()


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors agree in dtype, shape and every bit (NaN equals NaN, 0.0 differs from -0.0)."""
    if a.dtype != b.dtype or a.shape != b.shape or not a.numel():
        return a.dtype == b.dtype and a.shape == b.shape
    # memcmp reads at the speed of memory and lets other threads run; torch.equal does neither for every dtype.
    pointers = ctypes.c_void_p(a.data_ptr()), ctypes.c_void_p(b.data_ptr())
    return bool(ctypes.CDLL(None).memcmp(*pointers, ctypes.c_size_t(a.nbytes)) == 0)


def as_integers(tensor: Tensor) -> Tensor:
    """The same memory as integers of the same width, which are equal if all bits are."""
    import torch

    return tensor.detach().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def extremes(tensor: Tensor) -> Extremes:
    """Measures a contiguous tensor. Rows are those of the first axis; a vector is one row."""
    import torch

    if not tensor.numel():
        return Extremes(digest_of(tensor), 0, True, 0.0, 0.0, 0.0, 0, 0)
    measurement = Measurement()
    measurement.add(tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor.reshape(1, -1))
    few = tensor.dtype == torch.float32 and 1 < tensor.numel() <= _SMALL
    coarse = few and not bool((tensor.contiguous().view(torch.int32) & 0xFFFF).any())  # the lower half of the bits
    return replace(measurement.result(), coarse=coarse)


def rows_at_once(nbytes: int) -> int:
    """The number of rows of `nbytes` bytes that are summed together, on which rounding depends."""
    return max(1, _PIECE_BYTES // nbytes)


class Measurement:
    """Measures a tensor in pieces [rows, width]: multiples of `rows_at_once`, except for the last."""

    def __init__(self) -> None:
        self._digest, self._pieces = blake3(), list[_Piece]()
        self._nbytes, self._rows, self._numel = 0, 0, 0

    def add(self, rows: Tensor) -> None:
        """Measures the next rows."""
        import torch

        for piece in torch.split(rows, rows_at_once(rows.shape[1] * rows.element_size())):
            self._digest.update(bytes_of(piece))
            self._pieces.append(_measured(piece))
        self._nbytes += rows.nbytes
        self._rows += len(rows)
        self._numel += rows.numel()

    def result(self) -> Extremes:
        """The extremes of all rows."""
        low, high = min(piece.low for piece in self._pieces), max(piece.high for piece in self._pieces)
        finite = all(math.isfinite(one) for piece in self._pieces for one in (piece.low, piece.high))
        rms = math.sqrt(sum(piece.squares for piece in self._pieces) / self._numel) if finite else math.nan
        zeros = sum(piece.zero_rows for piece in self._pieces)
        return Extremes(self._digest.digest(), self._nbytes, finite, low, high, rms, zeros, self._rows)


def _measured(rows: Tensor) -> _Piece:
    import torch

    if rows.is_complex():
        rows = torch.view_as_real(rows).flatten(1)
    # torch has no minimum of unsigned integers. Viewed as signed, values differ, but constant and zero stay so.
    if rows.dtype in (torch.uint16, torch.uint32, torch.uint64):
        rows = as_integers(rows)
    if not rows.is_floating_point():
        least, most = torch.aminmax(rows)
        return _Piece(float(least), float(most), 0.0, int((~rows.bool().any(dim=1)).sum()))
    rows = rows.float() if rows.dtype.itemsize == 1 else rows
    low, high = (float(value) for value in torch.aminmax(rows))
    norms = torch.linalg.vector_norm(rows, dim=1)
    squares = float(norms.double().square().sum())
    # Squares leave the range of float32 at both ends before the numbers do.
    if not 1e-30 < squares < math.inf and math.isfinite(low) and math.isfinite(high):
        squares = float(rows.double().square().sum())
    silent = norms == 0
    return _Piece(low, high, squares, int((rows[silent] == 0).all(dim=1).sum()) if silent.any() else 0)

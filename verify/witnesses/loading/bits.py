"""The bits of tensors: a poison that reveals unwritten elements, and exact comparison."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from ckptkit.verify.evidence.extremes import as_integers

# By bytes of an element. For floats a NaN that no computation returns, for integers an unlikely number. Files may
# contain it, so poisoned elements are compared with the file before they are called unwritten.
_POISON = {1: 0x7F, 2: 0x7FFD, 4: 0x7FFDBEEF, 8: 0x7FFDBEEF7FFDBEEF}


def poison(tensors: Iterable[Tensor]) -> None:
    """Fills every element with the poison of its width, in place."""
    for tensor in tensors:
        as_integers(tensor).fill_(_POISON[tensor.element_size()])


def poisoned(tensor: Tensor) -> Tensor:
    """A mask of the elements that hold the poison: bool, of the tensor's shape."""
    return as_integers(tensor) == _POISON[tensor.element_size()]


def unequal(one: Tensor, other: Tensor) -> Tensor:
    """A mask of the elements of two tensors of one shape and dtype that differ in a bit, as 0.0 and -0.0 do."""
    return as_integers(one) != as_integers(other)


def difference(actual: Tensor, expected: Tensor) -> str | None:
    """Describes the difference of two tensors of one dtype, or None if they are equal bit for bit."""
    if actual.shape != expected.shape:
        return f"shape {list(actual.shape)} instead of {list(expected.shape)}"
    return first_wrong(unequal(actual, expected), actual, expected, "elements differ")


def first_wrong(wrong: Tensor, actual: Tensor, expected: Tensor, words: str) -> str | None:
    """Describes the number of wrong elements and the first of them, or None without any."""
    if not (count := int(wrong.sum())):
        return None
    at = wrong.nonzero()[0].tolist()
    found, wanted = actual[tuple(at)].item(), expected[tuple(at)].item()
    return f"{count} of {wrong.numel()} {words}, first at {at}: {found} instead of {wanted}"

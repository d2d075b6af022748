"""The bits of tensors: a poison that shows what a loader never wrote, and exact comparison."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from ckptkit.verify.evidence.extremes import as_integers

# By bytes an element. Floats: a NaN that no computation makes. Integers: an unlikely number. A file may hold it all the
# same, so what still has the poison is compared with the file before it is called unwritten.
_POISON = {1: 0x7F, 2: 0x7FFD, 4: 0x7FFDBEEF, 8: 0x7FFDBEEF7FFDBEEF}


def poison(tensors: Iterable[Tensor]) -> None:
    """Fills every element with the poison of its width, in place."""
    for tensor in tensors:
        as_integers(tensor).fill_(_POISON[tensor.element_size()])


def poisoned(tensor: Tensor) -> Tensor:
    """Which elements hold the poison: bool, of the tensor's shape."""
    return as_integers(tensor) == _POISON[tensor.element_size()]


def unequal(one: Tensor, other: Tensor) -> Tensor:
    """Which elements of two tensors of one shape and dtype differ in a bit: NaN equals NaN, 0.0 differs from -0.0."""
    return as_integers(one) != as_integers(other)


def difference(actual: Tensor, expected: Tensor) -> str | None:
    """How two tensors of one dtype differ, for people; None when they are equal bit for bit."""
    if actual.shape != expected.shape:
        return f"shape {list(actual.shape)} instead of {list(expected.shape)}"
    return first_wrong(unequal(actual, expected), actual, expected, "elements differ")


def first_wrong(wrong: Tensor, actual: Tensor, expected: Tensor, words: str) -> str | None:
    """Says how many elements are wrong, and which is the first; None where none is."""
    if not (count := int(wrong.sum())):
        return None
    at = wrong.nonzero()[0].tolist()
    found, wanted = actual[tuple(at)].item(), expected[tuple(at)].item()
    return f"{count} of {wrong.numel()} {words}, first at {at}: {found} instead of {wanted}"

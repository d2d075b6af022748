"""One difference between the files next to the weights of two checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckptkit.core.printable import shortened
from verify.report import Severity


@dataclass(frozen=True)
class Difference:
    """What differs between a checkpoint and the one that it is compared with."""

    file: str  # of the checkpoint, relative to its directory: holds what differs, or should
    what: str  # in the other one, that this one should have: "pre_tokenizer"
    words: str  # "pre_tokenizer is Whitespace but Split in the source; 'a b' is [1, 2] but [3]"
    severity: Severity = "error"
    count: int = 1
    is_presentation: bool = False  # of how a text is put together or shown: no text has other ids


def show(value: Any) -> str:
    """A JSON value in the words of a difference."""
    return "missing" if value is None else shortened(value)

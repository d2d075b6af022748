"""One difference between the files next to the weights of two checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    source: str | None = None  # the file of the other one that has it, where that is another file
    is_presentation: bool = False  # of how a text is put together or shown: no text has other ids


def show(value: Any) -> str:
    """A JSON value in the words of a difference."""
    return "missing" if value is None else shortened(value)


def of_keys(
    file: str, pairs: Mapping[str, tuple[Any, Any]], place: str, severity: Severity, before: str = ""
) -> Iterator[Difference]:
    """The difference of settings, each with its values here and there; none without any. `before`: the first words."""
    if pairs:
        first = list(pairs)[:5]
        listed = [f"{key} is {show(pairs[key][0])} but {show(pairs[key][1])} {place}" for key in first]
        more = f" and {len(pairs) - 5} more" if len(pairs) > 5 else ""
        yield Difference(file, ", ".join(first), before + "; ".join(listed) + more, severity, count=len(pairs))

"""Holds an `ignore` list against the tensor names of its model, as each reader takes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from quant.formats.groups import Refusal, Target, groups_of, refusals
from quant.lists.reading import names_by_part
from quant.selection.matrices import Matrix, parts_of
from quant.selection.portable import Divergence, divergences, packed_by, shown
from quant.selection.published import severities
from quant.selection.readers import RULES
from quant.selection.reading import Reading, covering, read_all
from quant.selection.tree import ClassTree

Severity = Literal["error", "warning", "note"]
_NO_TARGET = "add a pattern of its name to `targets` of its config group; engines also ask for fused names (qkv_proj)"


@dataclass(frozen=True)
class IgnoreList:
    """An `ignore` list, the tensor names of its model, and how each reader takes the list."""

    config: Mapping[str, Any]
    ignore: tuple[str, ...]
    targets: tuple[Target, ...]
    tree: ClassTree
    matrices: Sequence[Matrix]
    stored: frozenset[str] | None  # modules that the files hold packed; None: they hold none
    readers: tuple[str, ...]  # the readers that are checked
    asked: tuple[str, ...] | None = None  # names given with `--reader`; None: none were
    indexed: bool = False  # names come from files, not only from the model's classes
    scaled: frozenset[str] = frozenset()  # modules stored with a scale and not packed, so in another format (FP8)
    path: Path = Path()  # the directory
    leaves: frozenset[str] = frozenset()  # stored tensors that are not matrices, with and without their last part

    @cached_property
    def readings(self) -> dict[str, Reading]:
        """How each reader takes the list."""
        return self.read(self.ignore)

    def read(self, ignore: Sequence[str]) -> dict[str, Reading]:
        """Returns how each reader takes another list."""
        return read_all(self.every_reader, self.matrices, ignore, self.config, self.targets)

    @cached_property
    def packed(self) -> tuple[bool, ...]:
        """Whether each matrix is packed: by stored names if any is, else by classes and compressed-tensors."""
        if self.stored is not None:
            return tuple(matrix.module in self.stored for matrix in self.matrices)
        return tuple(packed_by(self.matrices, self.readings["compressed-tensors"]))

    @cached_property
    def others(self) -> frozenset[str]:
        """Modules in another format than INT4: by stored names, else by what compressed-tensors makes of the groups."""
        if self.stored is not None:
            return self.scaled
        answers = self.readings["compressed-tensors"].answers
        pairs = zip(self.matrices, answers, strict=True)
        return frozenset(matrix.module for matrix, answer in pairs if answer == "other")

    @cached_property
    def severities(self) -> dict[str, Severity]:
        """The severity of each reader's disagreement with what is packed, as in `verify`."""
        return dict(severities(self.config, self.ignore, self.tree, self.asked))

    def refusals(self) -> Iterator[Refusal]:
        """What readers refuse of the config as a whole."""
        return refusals(self.config)

    def next_move(self, readers: Sequence[str], patterns: Sequence[str], entry: str | None) -> str:
        """What to do about readers that take a tensor otherwise than it is. `entry`: one that leaves it out for all."""
        if entry:
            return f"use '{entry}'"
        if patterns:
            return f"replace {shown(patterns)} by entries that spare it"
        return _NO_TARGET if self.by_name else "quantize again"

    @property
    def key(self) -> str:
        """The key of the config that has the list."""
        return "ignore"

    def names_any(self, pattern: str) -> bool:
        """Whether an entry names something that is stored and no reader looks up, or a layer as an engine names it."""
        having = [self._named.get(part.lower(), ()) for part in pattern.split(".")]
        return any(f".{pattern}." in f".{name}." for name in min(having, key=len))

    @cached_property
    def _named(self) -> Mapping[str, Sequence[str]]:
        layers = {name for matrix in self.matrices for name in (matrix.sglang, matrix.vllm) if name}
        parts = (part for layer in layers for part in (layer, *parts_of(layer)))
        return names_by_part(dict.fromkeys(chain(self.leaves, parts)))

    @cached_property
    def every_reader(self) -> tuple[str, ...]:
        """All readers whose reading of the list is looked at."""
        return tuple(reader for reader in RULES if self.is_int4 or reader != "slime")

    @property
    def base(self) -> str:
        """The reading that others are held against."""
        return "compressed-tensors"

    @cached_property
    def is_int4(self) -> bool:
        """Whether INT4 is among the formats."""
        return any(group.kind == "packs" for group in groups_of(self.config))

    @property
    def by_name(self) -> bool:
        """Whether targets name modules, and not only the class Linear."""
        return [target.pattern for target in self.targets] != ["Linear"]

    @property
    def whole(self) -> bool:
        """Whether all module names are known, so that an entry that covers none is useless."""
        return self.indexed or (self.tree.whole and not self.tree.drafts)

    def spelled(self, pattern: str) -> list[str]:
        """Returns the Linear layers that an entry covers, by transformers' names."""
        return sorted(self._spelled(pattern))

    @cached_property
    def _spelled(self) -> Callable[[str], frozenset[str]]:
        return covering("transformers", self.ignore, sorted(self.tree.spelled))

    def divergences(self, readings: Mapping[str, Reading]) -> list[Divergence]:
        """Returns where the checked readers disagree with what is packed."""
        return divergences(self.matrices, self.packed, readings, self.readers, self.others)

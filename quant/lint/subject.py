"""An `ignore` list and the tensor names of its model, as each reader takes it; and what a lint rule reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from ckptkit.core.specs import fold
from ckptkit.formats.hf.side_files import quantization_of
from quant.formats.groups import Refusal, Target, groups_of, refusals
from quant.formats.modelopt import differing_configs
from quant.lists.table import COMPRESSED, KEYS, NAMED, NAMES, ListReader, Method, readers_of_method
from quant.selection.matrices import Matrix, fused_layer, parts_of
from quant.selection.portable import Divergence, divergences, packed_by, severities, shown
from quant.selection.readers import BY_CLASS, LIST_READERS, TRAINERS
from quant.selection.reading import Answer, Known, Names, Reading, covering, read_all, read_list, unreadable
from quant.selection.tree import ClassTree

ORDER: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class LintFinding:
    """One thing that is wrong with an `ignore` list."""

    kind: str
    severity: Severity
    message: str
    hint: str
    pattern: str | None = None  # the entry; None: no entry covers the tensors
    tensors: tuple[str, ...] = ()  # folded names
    count: int = 0  # of tensors
    readers: tuple[str, ...] = ()  # those concerned


def finding(
    kind: str,
    severity: Severity,
    message: str,
    hint: str,
    tensors: Sequence[str],
    readers: Iterable[str] = (),
    pattern: str | None = None,
) -> LintFinding:
    return LintFinding(kind, severity, message, hint, pattern, tuple(fold(tensors)), len(tensors), tuple(readers))


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
    method: Method = COMPRESSED

    @cached_property
    def readings(self) -> dict[str, Reading]:
        """How each reader takes the list."""
        return self.read(self.ignore)

    def read(self, ignore: Sequence[str]) -> dict[str, Reading]:
        """Returns how each reader takes another list."""
        return read_all(self.every_reader, self.matrices, ignore, self.config, self.targets)

    @property
    def base(self) -> str:
        """The reading that tells what the list is meant to pack."""
        return BY_CLASS[0] if self.method == COMPRESSED else NAMES

    @cached_property
    def packed(self) -> tuple[bool, ...]:
        """Whether each matrix is quantized: by stored names if any is, else by classes and what the list names."""
        if self.stored is not None:
            return tuple(matrix.module in self.stored for matrix in self.matrices)
        return tuple(packed_by(self.matrices, self.readings[self.base]))

    @cached_property
    def others(self) -> frozenset[str]:
        """Modules in another format than INT4: by stored names, else by what compressed-tensors makes of the groups."""
        if self.stored is not None:
            return self.scaled
        pairs = zip(self.matrices, self.readings[self.base].answers, strict=True)
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
        """The key of the config that has the list, or that it belongs under."""
        content = quantization_of(self.config)
        return next((key for key in KEYS[self.method] if content.get(key)), WRITTEN.get(self.method, ("ignore",))[0])

    def names_any(self, pattern: str) -> bool:
        """Whether an entry names something that is stored and no reader looks up, or a layer as an engine names it."""
        having = [self._named.get(part.lower(), ()) for part in pattern.split(".")]
        return any(f".{pattern}." in f".{name}." for name in min(having, key=len))

    @cached_property
    def _named(self) -> Mapping[str, Sequence[str]]:
        layers = {name for matrix in self.matrices for name in (matrix.sglang, matrix.vllm) if name}
        parts = (part for layer in layers for part in (layer, *parts_of(layer)))
        return Names(frozenset(chain(self.leaves, parts))).by_part

    @cached_property
    def rows(self) -> Mapping[str, ListReader]:
        """The readers that know this format, and how they take its list."""
        return readers_of_method(self.method)

    @cached_property
    def every_reader(self) -> tuple[str, ...]:
        """All readers whose reading of the list is looked at. slime reads those of INT4, and no other groups."""
        return tuple(one for one in self.rows if one != "slime" or self.is_int4 or self.method != COMPRESSED)

    @cached_property
    def is_int4(self) -> bool:
        """Whether INT4 is among the formats."""
        return self.method == COMPRESSED and any(group.kind == "packs" for group in groups_of(self.config))

    @property
    def by_name(self) -> bool:
        """Whether targets name modules, and not only the class Linear."""
        return [target.pattern for target in self.targets] != ["Linear"]

    @property
    def whole(self) -> bool:
        """Whether all module names are known, so that an entry that covers none is useless."""
        return self.indexed or (self.tree.whole and not self.tree.drafts)

    @cached_property
    def spelled(self) -> Callable[[str], frozenset[str]]:
        """Says of an entry which Linear layers it covers, by transformers' names."""
        return covering(self.ignore, self.tree.spelled)

    def divergences(self, readings: Mapping[str, Reading], readers: Sequence[str] | None = None) -> list[Divergence]:
        """Returns where readers, those that are checked, disagree with what is packed."""
        checked = self.readers if readers is None else readers
        return divergences(self.matrices, self.packed, readings, checked, self.others)


# The keys that every reader of a method finds between them, other methods' is `ignore`.
WRITTEN: Mapping[str, tuple[str, ...]] = {
    "fp8": ("modules_to_not_convert",),
    "mxfp8": ("modules_to_not_convert", "ignored_layers"),
    "mxfp4": ("modules_to_not_convert",),
    "quark": ("exclude",),
}


@dataclass(frozen=True)
class LowPrecisionList(IgnoreList):
    """A list of unquantized modules in a format other than compressed-tensors'."""

    per_layer: frozenset[str] | None = None  # modules that `quantized_layers` names; None: there is no such key

    @cached_property
    def readings(self) -> dict[str, Reading]:
        """How each reader takes the list that it reads."""
        content = quantization_of(self.config)
        own = {reader: row.entries(content) for reader, row in self.rows.items()}
        return self._readings({NAMES: self.ignore, **own})

    def read(self, ignore: Sequence[str]) -> dict[str, Reading]:
        """Returns how each reader takes another list, written under every key that is read."""
        return self._readings({NAMES: ignore, **{reader: ignore for reader, row in self.rows.items() if row.keys}})

    def _readings(self, lists: Mapping[str, Sequence[str]]) -> dict[str, Reading]:
        rows = {NAMES: NAMED[self.method.partition(" ")[0]], **self.rows}
        every, known = dict.fromkeys(lists[NAMES]), Known()
        found = {
            reader: read_list(reader, row, self.matrices, lists.get(reader, ()), self.config, known)
            for reader, row in rows.items()
        }
        # A reader that reads no list takes every entry for nothing.
        return {
            reader: replace(
                reading,
                covers={**dict.fromkeys(every, frozenset[str]()), **reading.covers},
                answers=tuple(map(self._per_layer, self.matrices, reading.answers)),
            )
            for reader, reading in found.items()
        }

    def _per_layer(self, matrix: Matrix, answer: Answer) -> Answer:
        """The answer where `quantized_layers` has to name a module, or one that holds it, for it to be quantized."""
        if self.per_layer is None or answer != "packs":
            return answer
        parts = matrix.module.split(".")
        held = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        return "packs" if any(name in self.per_layer for name in held) else "keeps"

    @cached_property
    def severities(self) -> dict[str, Severity]:
        """As for INT4: an error for SGLang and for readers that are asked for, a note for trainers otherwise."""
        asked = {reader for name in self.asked or () for reader in LIST_READERS[name]}
        usual: dict[str, Severity] = {
            reader: "note" if reader in TRAINERS else "error" if reader.startswith("SGLang") else "warning"
            for reader in self.rows
        }
        if self.asked is None:
            return usual
        return {reader: "error" if reader in asked else "warning" for reader in usual}

    def divergences(self, readings: Mapping[str, Reading], readers: Sequence[str] | None = None) -> list[Divergence]:
        """Returns where readers, those that are checked, disagree with what is quantized."""
        content = quantization_of(self.config)
        own = {reader: set(row.entries(content)) for reader, row in self.rows.items()}
        checked = self.readers if readers is None else readers
        found = divergences(self.matrices, self.packed, readings, checked, (), NAMES)
        return [
            replace(
                one,
                patterns=tuple(filter(own[one.reader].__contains__, one.patterns)),
                cause=one.cause if one.covering else self._cause(one),
            )
            for one in found
        ]

    def _cause(self, one: Divergence) -> str:
        """Why a reader leaves a tensor out that is quantized, or the reverse, where no entry covers it."""
        row, content = self.rows[one.reader], quantization_of(self.config)
        if row.packs is not None:
            return "because of its name"
        unread = [key for key in KEYS[self.method] if content.get(key) and key not in row.keys]
        if one.answer == "packs" and unread and not row.entries(content):
            return f"because it does not read `{unread[0]}`"
        named = self.per_layer is None or one.answer != "keeps"
        return one.cause if named else "because `quantized_layers` does not name it"

    def next_move(self, readers: Sequence[str], patterns: Sequence[str], entry: str | None) -> str:
        """What to do about readers that take a tensor otherwise than it is."""
        key = self.key
        if set(readers) <= set(TRAINERS):
            return f"quantize the release as {' and '.join(readers)} would, or roll out unquantized"
        if patterns:
            return f"replace {shown(patterns)} by whole module names: `ckptkit lint --fix` writes such a list"
        if entry is None:
            return "quantize again, or take the entry out that names it"
        return f"name the whole module under `{key}`: `ckptkit lint --fix` writes such a list"

    @cached_property
    def _engines(self) -> tuple[str, ...]:
        """The readers whose agreement makes a list portable: engines and transformers, of those that are checked."""
        engines = tuple(reader for reader in self.rows if reader not in TRAINERS)
        return tuple(reader for reader in engines if reader in self.readers) or engines

    @cached_property
    def is_agreed(self) -> bool:
        """Whether engines and transformers agree on the list as it is."""
        is_one_list = "ignore" not in differing_configs(self.path)
        return is_one_list and not self.divergences(self.readings, self._engines) and not list(self.refusals())

    def portable(self) -> tuple[str, ...] | None:
        """Returns a list of whole module names on which engines and transformers agree; None when there is none.

        The list as it is where they agree already. Entries that no reader looks up stay.
        """
        if self.is_agreed:
            return self.ignore
        idle = [entry for entry in self.ignore if not any(one.covers[entry] for one in self.readings.values())]
        looking = [self.readings[reader] for reader in self._engines]
        asked = [any(one.asked[index] for one in looking) for index in range(len(self.matrices))]
        names = (
            fused_layer(matrix.module, None) if matrix.expert else matrix.module
            for matrix, packs, looked_up in zip(self.matrices, self.packed, asked, strict=True)
            if looked_up and not packs
        )
        found = tuple(dict.fromkeys([*sorted(names, key=_by_number), *idle]))
        agreed = not any(unreadable(row, entry) for row in self.rows.values() for entry in found)
        return found if agreed and not self.divergences(self.read(found), self._engines) else None

    def refusals(self) -> Iterator[Refusal]:
        """Entries for which a reader raises."""
        for reader, row in self.rows.items():
            if bad := [entry for entry in row.entries(quantization_of(self.config)) if unreadable(row, entry)]:
                what = f"{len(bad)} entries are not regular expressions, which {reader} takes them for: '{bad[0]}'"
                yield Refusal((reader,), what, "name whole modules, without `*`")


def _by_number(name: str) -> list[tuple[int, str]]:
    return [(int(part) if part.isdecimal() else -1, part) for part in name.split(".")]

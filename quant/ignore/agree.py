"""Finds the tensors that readers of an `ignore` list treat differently, and replaces entries by portable ones."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ckptkit.converters.registry import FAMILIES
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import fold, summarize
from ckptkit.quant.formats.groups import LINEAR, Target, groups_of
from ckptkit.quant.ignore.names import Matrix, candidates
from ckptkit.quant.ignore.readers import BY_CLASS, INT4_READERS, refuses_own_format, severity_of
from ckptkit.quant.ignore.reading import Answer, Reading, read_all
from ckptkit.quant.ignore.tree import DRAFT_LAYER, ClassTree

OTHER_FORMAT = (
    "`ignore` cannot exclude layers of another format: do not quantize updates of this model with slime or miles"
)
NOTHING_PACKED = "remove quantization_config, or quantize again with `ckptkit quantize`"
_SHOWN = 4  # entries in a sentence
_MAX_ADVICE = 3  # entries to find a replacement for: each attempt examines every tensor again
_TOGETHER = "SGLang packs all routed experts of a layer or none, and likewise q, k, v or gate, up"
_NO_TARGET = "because no entry of `targets` matches it"
_VERBS: Mapping[Answer, str] = {
    "packs": "pack",
    "other": "expect another format of",
    "keeps": "leave unpacked",
    "refuses": "refuse to load",
}


def packed_by(matrices: Iterable[Matrix], base: Reading) -> list[bool]:
    """Whether the model's classes and compressed-tensors' reading `base` allow packing each matrix."""
    return [one.reason is None and answer == "packs" for one, answer in zip(matrices, base.answers, strict=True)]


@dataclass(frozen=True)
class Divergence:
    """A tensor that one reader treats differently from its packing, and the entries that it reads differently."""

    tensor: str
    reader: str
    answer: Answer
    patterns: tuple[str, ...]
    cause: str = ""  # any other cause, with `{}` for the covering entries
    covering: tuple[str, ...] = ()  # the entries that cover it for this reader


def divergences(
    matrices: Sequence[Matrix],
    packed: Sequence[bool],
    readings: Mapping[str, Reading],
    readers: Iterable[str],
    others: Collection[str] = (),
    base_reader: str = "compressed-tensors",
) -> list[Divergence]:
    """Returns a divergence for each matrix and each of `readers` that contradicts `packed`.

    `readings`: the result of `read_all`; entries are compared with the reading of `base_reader`. `others`: modules
    quantized in another format.
    """
    found, base = [], readings[base_reader]
    for reader, reading in ((reader, readings[reader]) for reader in readers):
        for index, (matrix, packs, answer) in enumerate(zip(matrices, packed, reading.answers, strict=True)):
            if answer not in ("packs" if packs else "other" if matrix.module in others else "keeps", "either"):
                covering = tuple(reading.entries_at(index))
                entries = dict.fromkeys([*base.entries_at(index), *covering])
                differ = tuple(pattern for pattern in entries if _differs(reading, base, pattern, index))
                cause = _cause(reading, reading is base, matrix, index)
                found.append(Divergence(matrix.tensor, reader, answer, differ, cause, covering))
    return found


def _cause(reading: Reading, is_base: bool, matrix: Matrix, index: int) -> str:
    answer, covered = reading.answers[index], bool(reading.entries_at(index))
    if not reading.lookups[index] or (is_base and matrix.torch_class is None):
        return "because its model class has no quantized layer there"
    if answer == "packs":
        return "because no entry covers it"
    if answer == "refuses":
        return "because {} covers only a part of it" if covered else "because `targets` match only a part of it"
    if answer == "other":
        return "because another config group matches it"
    return "because {} covers it" if covered else _NO_TARGET


def reason_of(several: Sequence[Divergence]) -> str:
    """The reason why a reader treats these tensors differently; they have one cause."""
    entries = fold(dict.fromkeys(pattern for one in several for pattern in one.patterns))
    if entries and not (several[0].answer == "refuses" and several[0].covering):
        return f"reading {quote_some(entries)} differently"
    covering = fold(dict.fromkeys(entry for one in several for entry in one.covering))
    return several[0].cause.replace("{}", quote_some(covering))


def kind_of(one: Divergence) -> tuple[str, ...]:
    """The key of divergences with one cause; entries that differ only in numbers are equal."""
    return (*map(without_numbers, one.patterns or one.covering), "" if one.patterns else one.cause)


def _differs(reading: Reading, base: Reading, pattern: str, index: int) -> bool:
    if reading is base or pattern not in reading.covers:
        return False
    is_covered = base.covered(pattern, index)
    return any((name in reading.covers[pattern]) != is_covered for name in reading.lookups[index])


@dataclass(frozen=True)
class Question:
    """The packing of a model that readers must agree on."""

    matrices: Sequence[Matrix]
    packed: Sequence[bool]  # for each matrix
    config: Mapping[str, Any]
    readers: Sequence[str]
    targets: Sequence[Target] = LINEAR
    others: Collection[str] = ()  # modules quantized in another format

    def divergences(self, ignore: Sequence[str]) -> list[Divergence]:
        readings = read_all(self.readers, self.matrices, ignore, self.config, self.targets)
        return divergences(self.matrices, self.packed, readings, self.readers, self.others)


def check_portable(question: Question, ignore: Sequence[str]) -> None:
    """Raises CkptkitError naming tensors, readers and entries if readers interpret `ignore` differently."""
    if found := question.divergences(ignore):
        hint, details = advice(found, question, ignore), list(describe_divergences(found))
        raise CkptkitError("readers interpret the ignore list differently", hint, details)


def describe_divergences(found: Iterable[Divergence]) -> Iterator[str]:
    """Describes divergences, one line for each kind; entries that differ only in numbers are one kind."""
    kinds: dict[tuple[str, Answer, tuple[str, ...]], list[Divergence]] = defaultdict(list)
    for one in found:
        kinds[one.reader, one.answer, kind_of(one)].append(one)
    readers: dict[str, list[str]] = defaultdict(list)
    for (reader, answer, _), several in kinds.items():
        clause = f"would {_VERBS[answer]} {summarize([one.tensor for one in several])} {reason_of(several)}"
        readers[clause].append(reader)
    yield from (f"{' and '.join(names)} {clause}" for clause, names in readers.items())


def without_numbers(entry: str) -> str:
    """The entry with `#` for every number, so that entries of all layers and experts are equal."""
    return re.sub(r"\d+", "#", entry)


def quoted(patterns: Iterable[str]) -> str:
    return ", ".join(f"'{pattern}'" for pattern in patterns)


def quote_some(patterns: Sequence[str]) -> str:
    """Like `quoted`, but shortens a long list."""
    more = len(patterns) - _SHOWN
    return quoted(patterns[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def advice(found: Sequence[Divergence], question: Question, ignore: Sequence[str]) -> str:
    """Suggests replacements for entries that readers interpret differently, and entries to add, one a draft layer."""
    moves = []
    drafts = {matrix.tensor for matrix in question.matrices if matrix.reason == DRAFT_LAYER}
    suspects = list(dict.fromkeys(pattern for one in found if one.tensor not in drafts for pattern in one.patterns))
    for pattern in suspects[:_MAX_ADVICE]:
        better = _respell(pattern, question, ignore)
        removal = f"remove '{pattern}' and name complete layers: {_TOGETHER}"
        moves.append(f"replace '{pattern}' by '{better}'" if better else removal)
    if more := len(suspects[_MAX_ADVICE:]):
        moves.append(f"do the same for {more} more entries")
    unnamed = {one.tensor for one in found if not one.patterns or one.tensor in drafts}
    matrices = [matrix for matrix in question.matrices if matrix.tensor in unnamed]
    if missing := dict.fromkeys(one.entry for one in matrices if one.module not in question.others):
        moves.append("add " + quoted(missing))
    moves += [OTHER_FORMAT] if any(one.module in question.others for one in matrices) else []
    return "; ".join(moves)


def _respell(pattern: str, question: Question, ignore: Sequence[str]) -> str | None:
    """The first spelling of an entry that covers a matrix and that readers agree on, or None."""
    basis = [matrix.entry for matrix in question.matrices if matrix.reason]
    others = {
        (one.tensor, one.reader) for one in question.divergences(_unique(ignore, basis)) if pattern not in one.patterns
    }
    for candidate in dict.fromkeys(candidates(pattern)):
        replaced = _unique([candidate if entry == pattern else entry for entry in ignore], basis)
        base = read_all((), question.matrices, replaced, question.config, question.targets)["compressed-tensors"]
        answered = replace(question, packed=packed_by(question.matrices, base)).divergences(replaced)
        if base.covers[candidate] and {(one.tensor, one.reader) for one in answered} <= others:
            return candidate
    return None


def _unique(*entries: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(entry for several in entries for entry in several))


def is_published(model_type: str, ignore: Sequence[str], tree: ClassTree) -> bool:
    """Whether a release has this list, or llm-compressor may have written it: full names, with head and routers."""
    family = FAMILIES.get(model_type)
    if family and family.release and frozenset(ignore) in family.release.published_ignore:
        return True
    routers = tree.gates | {name for name in tree.others if ".layers." in f".{name}"}
    return not any(entry.startswith("re:") for entry in ignore) and {tree.head, *routers} <= set(ignore)


def severities(
    config: Mapping[str, Any],
    ignore: Sequence[str],
    tree: ClassTree,
    asked: Sequence[str] | None,
    engine: str = "sglang",
    *,
    updated: bool | None = False,
) -> dict[str, Literal["error", "warning"]]:
    """The severity, for each reader, of a list that contradicts the packed weights: see `severity_of`.

    A config of several groups counts as published too: it is for engines, since trainers read only the first group.
    `updated` None: the trainer packs the stored packed weights, so that slime's reading of the list does not matter.
    """
    published = len(groups_of(config)) > 1 or is_published(str(config.get("model_type")), ignore, tree)
    readers = (reader for reader in INT4_READERS if updated is not None or reader != "slime")
    return {
        reader: severity_of(reader, asked, engine, published=published, updated=bool(updated)) for reader in readers
    }


def is_untargeted(one: Divergence, asked: Sequence[str] | None) -> bool:
    """Whether compressed-tensors finds no target for a packed weight, which is then random in transformers."""
    return one.cause == _NO_TARGET and one.reader in BY_CLASS and refuses_own_format(BY_CLASS, asked)

"""Finds where readers of an `ignore` list disagree about what is packed, and a spelling on which they agree."""

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
    "no entry of `ignore` tells layers of another format: do not quantize updates of this model with slime or miles"
)
NOTHING_PACKED = "remove quantization_config, or quantize again with `ckptkit quantize`"
_SHOWN = 4  # entries in a sentence
_MAX_ADVICE = 3  # each try looks at every tensor again
_TOGETHER = "SGLang packs the routed experts of a layer together or not at all, and so q, k, v and gate, up"
_NO_TARGET = "because no entry of `targets` names it"
_VERBS: Mapping[Answer, str] = {
    "packs": "pack",
    "other": "look in another format for",
    "keeps": "leave unpacked",
    "refuses": "refuse to load",
}


def packed_by(matrices: Iterable[Matrix], base: Reading) -> list[bool]:
    """Whether each matrix is to be packed: what the model's classes and compressed-tensors' reading `base` allow."""
    pairs = zip(matrices, base.answers, strict=True)
    return [matrix.reason is None and answer == "packs" for matrix, answer in pairs]


@dataclass(frozen=True)
class Divergence:
    """A tensor that one reader treats differently, and the entries of `ignore` that this reader reads differently."""

    tensor: str
    reader: str
    answer: Answer
    patterns: tuple[str, ...]
    cause: str = ""  # why else, in words with `{}` for the entries that cover it
    covering: tuple[str, ...] = ()  # the entries that cover it for this reader


def divergences(
    matrices: Sequence[Matrix],
    packed: Sequence[bool],
    readings: Mapping[str, Reading],
    readers: Iterable[str],
    others: Collection[str] = (),
    base_reader: str = "compressed-tensors",
) -> list[Divergence]:
    """Every matrix where one of `readers` contradicts `packed`.

    `readings`: as `read_all` returns them; entries are compared with the reading of `base_reader`. `others`: modules
    quantized in another format.
    """
    found, base = [], readings[base_reader]
    wanted: list[Answer] = [
        "packs" if packs else "other" if matrix.module in others else "keeps"
        for matrix, packs in zip(matrices, packed, strict=True)
    ]
    for reader in readers:
        reading = readings[reader]
        for index, (matrix, answer, should) in enumerate(zip(matrices, reading.answers, wanted, strict=True)):
            if answer not in (should, "either"):
                near = dict.fromkeys([*base.entries_at(index), *reading.entries_at(index)])
                differ = tuple(pattern for pattern in near if _differs(reading, base, pattern, index))
                covering, cause = tuple(reading.entries_at(index)), _cause(reading, reading is base, matrix, index)
                found.append(Divergence(matrix.tensor, reader, answer, differ, cause, covering))
    return found


def _cause(reading: Reading, by_class: bool, matrix: Matrix, index: int) -> str:
    """As `Divergence.cause`. `by_class`: the reader asks about modules by their class, as compressed-tensors does."""
    answer, covered = reading.answers[index], bool(reading.entries_at(index))
    if not reading.asked[index] or (by_class and matrix.torch_class is None):
        return "because it has no quantized layer for it, whatever the list contains"
    if answer == "packs":
        return "because no entry covers it"
    if answer == "refuses":
        return "because {} covers only a part of it" if covered else "because `targets` do not name all of it"
    if answer == "other":
        return "because another config group names it"
    return "because {} covers it" if covered else _NO_TARGET


def reason_of(several: Sequence[Divergence]) -> str:
    """Why a reader answers so about tensors that it treats differently for one and the same cause."""
    entries = fold(dict.fromkeys(pattern for one in several for pattern in one.patterns))
    if entries and not (several[0].answer == "refuses" and several[0].covering):
        return f"because of how it reads {shown(entries)}"
    covering = fold(dict.fromkeys(entry for one in several for entry in one.covering))
    return several[0].cause.replace("{}", shown(covering))


def kind_of(one: Divergence) -> tuple[str, ...]:
    """What divergences of one cause have in common: entries that differ only in numbers count as one."""
    return (*map(without_numbers, one.patterns or one.covering), "" if one.patterns else one.cause)


def _differs(reading: Reading, base: Reading, pattern: str, index: int) -> bool:
    if reading is base or pattern not in reading.covers:
        return False
    wanted = base.covered(pattern, index)
    return any((name in reading.covers[pattern]) != wanted for name in reading.asked[index])


@dataclass(frozen=True)
class Question:
    """What readers must agree on."""

    matrices: Sequence[Matrix]
    packed: Sequence[bool]  # for each matrix
    config: Mapping[str, Any]
    readers: Sequence[str]
    targets: Sequence[Target] = LINEAR
    others: Collection[str] = ()  # modules quantized in another format

    def divergences(self, ignore: Sequence[str]) -> list[Divergence]:
        """Every disagreement over `ignore`."""
        readings = read_all(self.readers, self.matrices, ignore, self.config, self.targets)
        return divergences(self.matrices, self.packed, readings, self.readers, self.others)


def check_portable(question: Question, ignore: Sequence[str]) -> None:
    """Raises CkptkitError naming tensors, readers and entries when a reader takes `ignore` differently."""
    found = question.divergences(ignore)
    if found:
        raise CkptkitError(
            "readers do not agree on the ignore list", advice(found, question, ignore), list(described(found))
        )


def described(found: Iterable[Divergence]) -> Iterator[str]:
    """Describes divergences, with one line for those of one kind, over entries that differ in numbers alone."""
    kinds: dict[tuple[str, Answer, tuple[str, ...]], list[Divergence]] = defaultdict(list)
    for one in found:
        kinds[one.reader, one.answer, kind_of(one)].append(one)
    readers: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for (reader, answer, _), several in kinds.items():
        readers[_VERBS[answer], summarize([one.tensor for one in several]), reason_of(several)].append(reader)
    for (verb, names_folded, why), who in readers.items():
        yield f"{' and '.join(who)} would {verb} {names_folded} {why}"


def without_numbers(entry: str) -> str:
    """The entry with `#` for every number: equal for those of all layers and experts."""
    return re.sub(r"\d+", "#", entry)


def quoted(patterns: Iterable[str]) -> str:
    """Entries for a message."""
    return ", ".join(f"'{pattern}'" for pattern in patterns)


def shown(patterns: Sequence[str]) -> str:
    """As `quoted`, with the first few of many."""
    rest = len(patterns) - _SHOWN
    return quoted(patterns[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def advice(found: Sequence[Divergence], question: Question, ignore: Sequence[str]) -> str:
    """The next move: what to write instead of the entries that readers take differently, and what to add.

    Draft layers are left out by one entry for the whole layer, since engines give its modules other names.
    """
    moves = []
    drafts = {matrix.tensor for matrix in question.matrices if matrix.reason == DRAFT_LAYER}
    suspects = list(dict.fromkeys(pattern for one in found if one.tensor not in drafts for pattern in one.patterns))
    for pattern in suspects[:_MAX_ADVICE]:
        better = _respell(pattern, question, ignore)
        moves.append(
            f"instead of '{pattern}' pass '{better}'"
            if better
            else f"remove '{pattern}' and name whole layers: {_TOGETHER}"
        )
    if rest := suspects[_MAX_ADVICE:]:
        moves.append(f"do the same for {len(rest)} more entries")
    bare = {one.tensor for one in found if not one.patterns or one.tensor in drafts}
    alone = [matrix for matrix in question.matrices if matrix.tensor in bare]
    if missing := dict.fromkeys(one.entry for one in alone if one.module not in question.others):
        moves.append("add " + quoted(missing))
    if any(one.module in question.others for one in alone):
        moves.append(OTHER_FORMAT)
    return "; ".join(moves)


def _respell(pattern: str, question: Question, ignore: Sequence[str]) -> str | None:
    """The first spelling of an entry that covers something and on which readers agree; None: there is none."""
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
    """Whether the list is one of a known release, or is written out as llm-compressor saves it.

    Written out: whole module names and no pattern, the head and every router among them.
    """
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

    A config of several groups is made for engines too: trainers read the first alone. `updated` None: the trainer packs
    what is stored packed, so that slime's reading of the list does not matter.
    """
    published = len(groups_of(config)) > 1 or is_published(str(config.get("model_type")), ignore, tree)
    readers = (reader for reader in INT4_READERS if updated is not None or reader != "slime")
    return {
        reader: severity_of(reader, asked, engine, published=published, updated=bool(updated)) for reader in readers
    }


def is_untargeted(one: Divergence, asked: Sequence[str] | None) -> bool:
    """Whether compressed-tensors finds no target for what is packed, an error as in `refuses_own_format`.

    It then leaves random numbers in transformers, as for the target "linear", which engines take for a class.
    """
    return one.cause == _NO_TARGET and one.reader in BY_CLASS and refuses_own_format(BY_CLASS, asked)

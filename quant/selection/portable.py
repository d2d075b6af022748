"""What each reader makes of an `ignore` list, and whether all of them agree on what is packed."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import summarize
from converters.registry import FAMILIES
from quant.patterns.entries import check_lookups, matcher
from quant.selection.matrices import Matrix, names_in_sglang, names_in_vllm
from quant.selection.readers import RULES
from quant.selection.spelling import candidates
from quant.selection.tree import DRAFT_LAYER

Answer = Literal["packs", "keeps", "refuses"]
_MAX_ADVICE = 3  # each try looks at every tensor again
_TOGETHER = "SGLang packs the routed experts of a layer together or not at all, and so q, k, v and gate, up"
_VERBS: Mapping[Answer, str] = {"packs": "pack", "keeps": "leave unpacked", "refuses": "refuse to load"}
_BY_CLASS = ("compressed-tensors", "transformers")
_LAST = "\U0010ffff"


@dataclass(frozen=True)
class Reading:
    """One reader and one `ignore` list.

    The names that it looks up for every matrix, and what each entry covers of them.

    `answers[i]`: whether it `packs` or `keeps` matrix i (or takes it for packed or not), or `refuses` a fused layer
    that is covered in part.
    """

    reader: str
    asked: tuple[tuple[str, ...], ...]
    covers: Mapping[str, frozenset[str]]
    answers: tuple[Answer, ...]

    @cached_property
    def _asking(self) -> Mapping[str, list[int]]:
        found: dict[str, list[int]] = defaultdict(list)
        for index, names in enumerate(self.asked):
            for name in names:
                found[name].append(index)
        return found

    def covering(self, pattern: str) -> list[int]:
        """The matrices, by index, for which this reader looks up a name that an entry covers."""
        return sorted({index for name in self.covers[pattern] for index in self._asking[name]})

    def covered(self, pattern: str, index: int) -> bool:
        """Whether an entry covers a name that this reader looks up for the matrix at `index`."""
        return any(name in self.covers[pattern] for name in self.asked[index])


def read(
    reader: str,
    matrices: Sequence[Matrix],
    ignore: Sequence[str],
    config: Mapping[str, Any],
    targets: Sequence[str] = ("Linear",),
) -> Reading:
    """What `reader` makes of `ignore`. `targets` are those of config.json: modules of these classes or names."""
    entry = FAMILIES[str(config.get("model_type"))].sglang.entry if reader.startswith("SGLang") else str
    asked = tuple(_asked(reader, matrices, {entry(pattern) for pattern in ignore}, config))
    names = sorted({name for several in asked for name in several})
    check_lookups(ignore, len(names))
    covers = {pattern: covered(reader, entry(pattern), names) for pattern in dict.fromkeys(ignore)}
    ignored = frozenset[str]().union(*covers.values())
    targeted = _targeted(reader, names, targets)
    answers: dict[tuple[str, ...], Answer] = {
        several: _answer(reader, several, ignored, targeted) for several in set(asked)
    }
    by_class = reader in _BY_CLASS
    found: Iterator[Answer] = (
        "keeps" if by_class and not matrix.linear else answers[several]
        for matrix, several in zip(matrices, asked, strict=True)
    )
    return Reading(reader, asked, covers, tuple(found))


def read_all(
    readers: Iterable[str],
    matrices: Sequence[Matrix],
    ignore: Sequence[str],
    config: Mapping[str, Any],
    targets: Sequence[str] = ("Linear",),
) -> dict[str, Reading]:
    """What each of `readers` makes of `ignore`; compressed-tensors in any case, since transformers reads as it does."""
    base = read("compressed-tensors", matrices, ignore, config, targets)
    found = {
        reader: replace(base, reader=reader) if reader in _BY_CLASS else read(reader, matrices, ignore, config, targets)
        for reader in readers
    }
    return {"compressed-tensors": base, **found}


def _asked(
    reader: str, matrices: Iterable[Matrix], ignore: set[str], config: Mapping[str, Any]
) -> Iterator[tuple[str, ...]]:
    if reader == "slime":
        # It packs what ends so, and fused experts do not.
        yield from ((matrix.tensor,) if matrix.tensor.endswith(".weight") else () for matrix in matrices)
        return
    if reader in _BY_CLASS:
        yield from ((matrix.module,) for matrix in matrices)
        return
    packed_modules = FAMILIES[str(config.get("model_type"))].sglang.packed_modules
    known: dict[str | None, tuple[str, ...]] = {None: ()}  # an engine asks once about all experts of a layer
    for matrix in matrices:
        layer = matrix.sglang if reader.startswith("SGLang") else matrix.vllm
        if layer not in known:
            known[layer] = (
                names_in_sglang(matrix, ignore, packed_modules)
                if reader.startswith("SGLang")
                else names_in_vllm(matrix, ignore)
            )
        yield known[layer]


def covered(reader: str, pattern: str, names: Sequence[str]) -> frozenset[str]:
    """Those of `names` (sorted) that an entry covers: `RULES[reader]` for all of them at once."""
    if pattern.startswith("re:"):
        match = matcher(pattern, max(map(len, names), default=0))
        return frozenset(name for name in names if match(name))
    if reader == "slime":
        return frozenset(names[bisect_left(names, pattern) : bisect_left(names, pattern + _LAST)])
    rule = RULES[reader]
    return frozenset(name for name in names if rule(name, pattern))


def _targeted(reader: str, names: Sequence[str], targets: Sequence[str]) -> frozenset[str]:
    """The names that are to be packed where `ignore` does not cover them. slime reads no targets."""
    if reader == "slime" or "Linear" in targets:
        return frozenset(names)
    return frozenset[str]().union(*(covered("vLLM", target, names) for target in targets))


def _answer(reader: str, asked: Sequence[str], ignored: frozenset[str], targeted: frozenset[str]) -> Answer:
    if not asked:
        return "keeps"
    answers: set[Answer] = set()
    for name in asked:
        # SGLang demands a target for every layer that is not ignored.
        answers.add(
            "keeps"
            if name in ignored
            else "packs"
            if name in targeted
            else "refuses"
            if reader.startswith("SGLang")
            else "keeps"
        )
    return answers.pop() if len(answers) == 1 else "refuses"


def packed_by(matrices: Iterable[Matrix], base: Reading) -> list[bool]:
    """Whether each matrix is to be packed: what the model's classes and compressed-tensors' reading `base` allow."""
    pairs = zip(matrices, base.answers, strict=True)
    return [matrix.kept is None and answer == "packs" for matrix, answer in pairs]


@dataclass(frozen=True)
class Divergence:
    """A tensor that one reader treats differently, and the entries of `ignore` that this reader reads differently."""

    tensor: str
    reader: str
    answer: Answer
    patterns: tuple[str, ...]


def divergences(
    matrices: Sequence[Matrix], packed: Sequence[bool], readings: Mapping[str, Reading], readers: Iterable[str]
) -> list[Divergence]:
    """Every matrix that one of `readers` takes otherwise than `packed`.

    `readings`: as `read_all` returns them; entries are held against compressed-tensors' reading.
    """
    found, base = [], readings["compressed-tensors"]
    wanted: list[Answer] = ["packs" if packs else "keeps" for packs in packed]
    for reading in map(readings.__getitem__, readers):
        for index, (matrix, answer, should) in enumerate(zip(matrices, reading.answers, wanted, strict=True)):
            if answer != should:
                differ = (pattern for pattern in base.covers if _differs(reading, base, pattern, index))
                found.append(Divergence(matrix.tensor, reading.reader, answer, tuple(differ)))
    return found


def _differs(reading: Reading, base: Reading, pattern: str, index: int) -> bool:
    wanted = base.covered(pattern, index)
    return any((name in reading.covers[pattern]) != wanted for name in reading.asked[index])


@dataclass(frozen=True)
class Question:
    """What must be agreed on: which matrices are packed (`packed`), among which readers, for the model of `config`."""

    matrices: Sequence[Matrix]
    packed: Sequence[bool]
    config: Mapping[str, Any]
    readers: Sequence[str]

    def divergences(self, ignore: Sequence[str]) -> list[Divergence]:
        """Every disagreement over `ignore`."""
        readings = read_all(self.readers, self.matrices, ignore, self.config)
        return divergences(self.matrices, self.packed, readings, self.readers)


def check_portable(question: Question, ignore: Sequence[str]) -> None:
    """Raises CkptkitError naming tensors, readers and entries when a reader takes `ignore` differently.

    The hint spells it portably.
    """
    found = question.divergences(ignore)
    if found:
        raise CkptkitError(
            "the ignore list is not read alike by every reader", advice(found, question, ignore), list(said(found))
        )


def said(found: Iterable[Divergence]) -> Iterator[str]:
    """Divergences in words, those of one kind in one line."""
    tensors: dict[tuple[str, Answer, tuple[str, ...]], list[str]] = defaultdict(list)
    for one in found:
        tensors[one.reader, one.answer, one.patterns].append(one.tensor)
    readers: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for (reader, answer, patterns), names in tensors.items():
        why = "because of how it reads " + quoted(patterns) if patterns else "because no entry covers it"
        readers[_VERBS[answer], summarize(names), why].append(reader)
    for (verb, names_folded, why), who in readers.items():
        yield f"{' and '.join(who)} would {verb} {names_folded} {why}"


def quoted(patterns: Iterable[str]) -> str:
    """Entries for a message."""
    return ", ".join(f"'{pattern}'" for pattern in patterns)


def advice(found: Sequence[Divergence], question: Question, ignore: Sequence[str]) -> str:
    """The next move: what to write instead of the entries that readers take differently, and what to add.

    Draft layers are left out by one entry for the whole layer, since engines give its modules other names.
    """
    moves = []
    drafts = {matrix.tensor for matrix in question.matrices if matrix.kept == DRAFT_LAYER}
    suspects = list(dict.fromkeys(pattern for one in found if one.tensor not in drafts for pattern in one.patterns))
    for pattern in suspects[:_MAX_ADVICE]:
        better = _respell(pattern, question, ignore)
        moves.append(
            f"instead of '{pattern}' pass '{better}'"
            if better
            else f"remove '{pattern}' and name whole layers: {_TOGETHER}"
        )
    if rest := suspects[_MAX_ADVICE:]:
        moves.append(f"treat {len(rest)} more entries alike")
    bare = {one.tensor for one in found if not one.patterns or one.tensor in drafts}
    if missing := dict.fromkeys(matrix.entry for matrix in question.matrices if matrix.tensor in bare):
        moves.append("add " + quoted(missing))
    return "; ".join(moves)


def _respell(pattern: str, question: Question, ignore: Sequence[str]) -> str | None:
    """The first rewriting of one entry that removes every disagreement over it, makes no other and covers something.

    Else None.
    """
    basis = [matrix.entry for matrix in question.matrices if matrix.kept]
    others = {
        (one.tensor, one.reader) for one in question.divergences(_unique(ignore, basis)) if pattern not in one.patterns
    }
    for candidate in dict.fromkeys(candidates(pattern)):
        replaced = _unique([candidate if entry == pattern else entry for entry in ignore], basis)
        base = read("compressed-tensors", question.matrices, replaced, question.config)
        answered = replace(question, packed=packed_by(question.matrices, base)).divergences(replaced)
        if base.covers[candidate] and {(one.tensor, one.reader) for one in answered} <= others:
            return candidate
    return None


def _unique(*entries: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(entry for several in entries for entry in several))

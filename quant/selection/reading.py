"""Predicts which modules each reader takes for packed, from an `ignore` list and targets."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from converters.registry import FAMILIES
from quant.formats.groups import LINEAR, Kind, Target
from quant.patterns import check_lookups, matcher
from quant.selection.matrices import Matrix, names_in_sglang, names_in_vllm
from quant.selection.readers import LINEAR_CLASSES, RULES, VLLM, sglang, sglang_suffix
from quant.selection.tree import DRAFT_LAYER

# "either": the reader loads the module packed or not.
Answer = Literal["packs", "other", "keeps", "refuses", "either"]
BY_CLASS = ("compressed-tensors", "transformers")
_LAST = "\U0010ffff"
# Classes of vLLM, by the last part of a layer's name.
_EXPERTS = "RoutedExperts"
_CLASSES = {
    "qkv_proj": "QKVParallelLinear",
    "gate_up_proj": "MergedColumnParallelLinear",
    "fused_qkv_a_proj": "DeepSeekV2FusedQkvAProjLinear",
    "o_proj": "RowParallelLinear",
    "down_proj": "RowParallelLinear",
    "lm_head": "ParallelLMHead",
}
_OTHER = "ColumnParallelLinear"  # every other class has Linear in its name too


@dataclass(frozen=True)
class Reading:
    """What one reader makes of one `ignore` list."""

    reader: str
    asked: tuple[tuple[str, ...], ...]  # the names that it looks up for each matrix
    covers: Mapping[str, frozenset[str]]  # what each entry covers of them
    # For each matrix: packed or not, quantized in the `other` format of another config group, or a fused layer that is
    # covered in part, which it `refuses`.
    answers: tuple[Answer, ...]

    @cached_property
    def _entries(self) -> Mapping[str, list[str]]:
        """The entries that cover each name, in their order."""
        found: dict[str, list[str]] = defaultdict(list)
        for pattern, names in self.covers.items():
            for name in names:
                found[name].append(pattern)
        return found

    def entries_at(self, index: int) -> list[str]:
        """The entries that cover a name that this reader looks up for the matrix at `index`."""
        names = self.asked[index]
        return list(dict.fromkeys(entry for name in names for entry in self._entries.get(name, ())))

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
    targets: Sequence[Target] = LINEAR,
) -> Reading:
    """Predicts what `reader` takes for packed. `targets`: classes and names of modules, as config.json has them."""
    if not matrices:  # of a model that is not known
        return Reading(reader, (), dict.fromkeys(ignore, frozenset()), ())
    entry = FAMILIES[str(config.get("model_type"))].engine("sglang").entry if reader.startswith("SGLang") else str
    asked = tuple(_asked(reader, matrices, {entry(pattern) for pattern in ignore}, config))
    names = sorted({name for several in asked for name in several})
    found_by = covering(reader, ignore, names)
    covers = {pattern: found_by(entry(pattern)) for pattern in dict.fromkeys(ignore)}
    ignored = frozenset[str]().union(*covers.values())
    layers = [_layer(reader, matrix) for matrix in matrices]
    targeted = _targeted(reader, sorted({*names, *filter(None, layers)}), targets)
    answers: dict[tuple[str, tuple[str, ...]], Answer] = {
        (layer, several): _answer(reader, layer, several, ignored, targeted)
        for layer, several in set(zip(layers, asked, strict=True))
    }
    by_class = reader in BY_CLASS
    found: Iterator[Answer] = (
        # These readers do not load draft layers.
        ("keeps" if matrix.reason not in (None, DRAFT_LAYER) else "either")
        if by_class and not matrix.linear
        else answers[layer, several]
        for matrix, layer, several in zip(matrices, layers, asked, strict=True)
    )
    return Reading(reader, asked, covers, tuple(found))


def read_all(
    readers: Iterable[str],
    matrices: Sequence[Matrix],
    ignore: Sequence[str],
    config: Mapping[str, Any],
    targets: Sequence[Target] = LINEAR,
) -> dict[str, Reading]:
    """As `read` for each of `readers`, and for compressed-tensors, since transformers reads as it does."""
    base = read("compressed-tensors", matrices, ignore, config, targets)
    found = {
        reader: replace(base, reader=reader) if reader in BY_CLASS else read(reader, matrices, ignore, config, targets)
        for reader in readers
    }
    return {"compressed-tensors": base, **found}


def _asked(
    reader: str, matrices: Sequence[Matrix], ignore: set[str], config: Mapping[str, Any]
) -> Iterator[tuple[str, ...]]:
    if reader == "slime":
        # It packs what ends so, and fused experts do not.
        yield from ((matrix.tensor,) if matrix.tensor.endswith(".weight") else () for matrix in matrices)
        return
    if reader in BY_CLASS:
        yield from ((matrix.module,) for matrix in matrices)
        return
    packed_modules = FAMILIES[str(config.get("model_type"))].engine("sglang").packed_modules
    if reader == "vLLM 0.33":  # an entry that matches a fused layer's own name decides for its shards
        layers = sorted({matrix.vllm for matrix in matrices if matrix.vllm is not None})
        ignore = set[str]().union(*map(covering(reader, list(ignore), layers), ignore))
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


def covering(reader: str, entries: Sequence[str], names: Sequence[str]) -> Callable[[str], frozenset[str]]:
    """Says of an entry which of `names` (sorted) it covers: `RULES[reader]`, without a look at each name.

    Raises CkptkitError where `entries`, those that it will be asked about, are too many for so many names.
    """
    searched = [entry for entry in entries if entry.startswith("re:") or RULES[reader] is sglang]
    check_lookups(searched, len(names))
    longest, plain = max(map(len, names), default=0), _plain(reader, names)

    def covered(entry: str) -> frozenset[str]:
        if entry.startswith("re:"):
            return frozenset(filter(matcher(entry, longest), names))
        return frozenset(plain(entry))

    return covered


def ignored(modules: Iterable[str], ignore: Sequence[str]) -> frozenset[str]:
    """Those of these Linear modules that entries cover for compressed-tensors. Raises CkptkitError as `covering`."""
    covers = covering("compressed-tensors", ignore, sorted(set(modules)))
    return frozenset[str]().union(*map(covers, dict.fromkeys(ignore)))


def _plain(reader: str, names: Sequence[str]) -> Callable[[str], Iterable[str]]:
    """As `covering` for entries without `re:`."""
    if reader == "slime":
        return lambda entry: names[bisect_left(names, entry) : bisect_left(names, entry + _LAST)]
    if RULES[reader] is sglang:
        return _parts(names)
    if RULES[reader] is sglang_suffix:
        endings: dict[str, list[str]] = defaultdict(list)
        for name in names:
            parts = name.split(".")
            for ending in {".".join(parts[begin:]) for begin in range(len(parts))}:
                endings[ending].append(name)
        return lambda entry: endings.get(entry, ())
    every = frozenset(names)
    classes = LINEAR_CLASSES if reader in BY_CLASS else ()
    return lambda entry: every if entry in classes else every & {entry}


def _parts(names: Sequence[str]) -> Callable[[str], Iterable[str]]:
    """Says of a text which of `names` contain it in any case: one search through all of them."""
    lowered = [name.lower() for name in names]
    begins, text = [0, *accumulate(len(name) + 1 for name in lowered)], "\0".join(lowered)

    def holding(entry: str) -> Iterator[str]:
        part = entry.lower()
        if "\0" in part:  # it could match across two names
            yield from (name for name, lower in zip(names, lowered, strict=True) if part in lower)
            return
        at = text.find(part)
        while at >= 0:
            place = bisect_right(begins, at) - 1
            yield names[place]
            at = text.find(part, begins[place + 1])

    return holding


def _layer(reader: str, matrix: Matrix) -> str:
    """The fused layer's own name, which a reader compares with targets before the names that it looks up in `ignore`.

    Empty for routed experts, whose name is one of those.
    """
    layer = matrix.sglang if reader.startswith("SGLang") else matrix.vllm if reader in VLLM else None
    return "" if layer is None or layer.endswith(".experts") else layer


@dataclass(frozen=True)
class _Targeted:
    """What targets make of modules: by name, and by the class of a layer; None: no target is for them."""

    reader: str
    by_name: Mapping[str, Answer]
    by_class: Callable[[str], Answer | None]

    def of(self, layer: str, names: Sequence[str]) -> set[Answer | None]:
        """The answers for a layer: by its own name, then its class, then the names of its parts; vLLM 0.33 parts first.

        Parts by name count only where there is a target for all of them; that of the first then stands in vLLM.
        """
        if layer in self.by_name:
            return {self.by_name[layer]}
        by_class = self.by_class(layer or names[0])
        if not layer:
            return {self.by_name.get(name, by_class) for name in names}
        parts = [self.by_name.get(name) for name in names]
        if None in parts or (by_class is not None and self.reader != "vLLM 0.33"):
            return {by_class}
        return set(parts[:1] if self.reader in VLLM else parts)


def _targeted(reader: str, names: Sequence[str], targets: Sequence[Target]) -> _Targeted:
    """What is to be quantized where `ignore` does not cover it. slime reads no targets."""
    if reader == "slime":
        return _Targeted(reader, {}, lambda _: "packs")
    by_name: dict[str, Answer] = {}
    by_target = covering("vLLM 0.26", [target.pattern for target in targets], names)
    for target in targets:
        if target.pattern != "Linear":
            by_name = dict.fromkeys(by_target(target.pattern), target.kind) | by_name
    if reader in VLLM:
        return _Targeted(reader, by_name, lambda layer: _named_by_class(_class_in_vllm(layer), targets))
    linear = next((target.kind for target in targets if target.pattern == "Linear"), None)
    return _Targeted(reader, by_name, lambda _: linear)


def _answer(reader: str, layer: str, asked: Sequence[str], ignored: frozenset[str], targeted: _Targeted) -> Answer:
    if not asked:
        return "keeps"
    covers = {name in ignored for name in asked}
    if covers == {True}:
        return "keeps"
    # SGLang demands a target for every layer that is not ignored.
    answers = {
        answer or ("refuses" if reader.startswith("SGLang") else "keeps") for answer in targeted.of(layer, asked)
    }
    return answers.pop() if len(answers) == 1 and covers == {False} else "refuses"


def _class_in_vllm(layer: str) -> str:
    """The class that vLLM builds a layer with, which it searches for `targets`; of experts by the name of one of them.

    Source: vLLM `compressed_tensors/utils.py`, `find_matched_target`, and `compressed_tensors.py`, where routed experts
    take the target Linear over.
    """
    return _EXPERTS if ".experts." in layer else _CLASSES.get(layer.rpartition(".")[2], _OTHER)


def _named_by_class(name: str, targets: Sequence[Target]) -> Kind | None:
    """What the first target makes of a class: a pattern from the start, else any part of its name in any case."""
    found = next((target.kind for target in targets if _matches_class(name, target.pattern)), None)
    if found is None and name == _EXPERTS:
        return next((target.kind for target in targets if target.pattern == "Linear"), None)
    return found


def _matches_class(name: str, pattern: str) -> bool:
    return bool(matcher(pattern)(name)) if pattern.startswith("re:") else pattern.lower() in name.lower()

"""Predicts which modules each reader takes for packed, from an `ignore` list and targets."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from converters.registry import FAMILIES
from quant.formats.groups import LINEAR, Target
from quant.patterns.entries import check_lookups, matcher
from quant.selection.matrices import Matrix, names_in_sglang, names_in_vllm
from quant.selection.readers import RULES, VLLM
from quant.selection.vllm_classes import class_in_vllm, named_by_class

# "either": the reader loads the module packed or not.
Answer = Literal["packs", "other", "keeps", "refuses", "either"]
_BY_CLASS = ("compressed-tensors", "transformers")
_LAST = "\U0010ffff"


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
    check_lookups(ignore, len(names))
    covers = {pattern: covered(reader, entry(pattern), names) for pattern in dict.fromkeys(ignore)}
    ignored = frozenset[str]().union(*covers.values())
    layers = [_layer(reader, matrix) for matrix in matrices]
    targeted = _targeted(reader, sorted({*names, *filter(None, layers)}), targets)
    answers: dict[tuple[str, tuple[str, ...]], Answer] = {
        (layer, several): _answer(reader, layer, several, ignored, targeted)
        for layer, several in set(zip(layers, asked, strict=True))
    }
    by_class = reader in _BY_CLASS
    found: Iterator[Answer] = (
        # A layer that may be packed and is of no class here is a draft layer, which these readers do not load.
        ("keeps" if matrix.reason else "either") if by_class and not matrix.linear else answers[layer, several]
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
        reader: replace(base, reader=reader) if reader in _BY_CLASS else read(reader, matrices, ignore, config, targets)
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
    if reader in _BY_CLASS:
        yield from ((matrix.module,) for matrix in matrices)
        return
    packed_modules = FAMILIES[str(config.get("model_type"))].engine("sglang").packed_modules
    if reader == "vLLM 0.33":  # an entry that matches a fused layer's own name decides for its shards
        layers = sorted({matrix.vllm for matrix in matrices if matrix.vllm is not None})
        check_lookups(list(ignore), len(layers))
        ignore = set[str]().union(*(covered(reader, pattern, layers) for pattern in ignore))
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
    for target in targets:
        if target.pattern != "Linear":
            by_name = dict.fromkeys(covered("vLLM 0.26", target.pattern, names), target.kind) | by_name
    if reader in VLLM:
        return _Targeted(reader, by_name, lambda layer: named_by_class(class_in_vllm(layer), targets))
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

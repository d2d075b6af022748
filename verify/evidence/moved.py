"""Explains tensors that hold each other's values: layers, pipeline stages, experts and projections.

The one answer for checks with a source, witnesses and `diff`. Without a source it explains layers and experts that hold
the same bytes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckptkit.converters.megatron.pipeline import Pipeline
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import ranges, summarize
from ckptkit.verify.core.subject import Subject, once
from ckptkit.verify.evidence.folding import LAYER, by_key, count_differing_parts, layer_of, layers_of, pattern_of

# The next move, by what most often puts values into each other's place.
AGAIN = "convert again from the source"
_WHOLE_LAYERS = {
    "exchanged": "their names were exchanged where they were written: save or convert again from the source",
    "reordered": "the layers were numbered from another start, or written in another order, for example sorted as text "
    "(0, 1, 10, 11, 2): save or convert again in order of number, from 0",
    "copied": "save or convert again from the source",
}
_STAGE = "the layers of a pipeline stage were numbered from another one: save or convert again with global layer IDs"
_INSIDE = "the layers were numbered wrongly inside a pipeline stage: save or convert again with global layer IDs"
_LOCAL = "each expert parallel rank may have numbered its experts from 0: save or convert again with global expert IDs"
_WHICH = "compare with the release: which {} belongs there?"
_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Moved:
    """One mistake that put values under other names."""

    text: str  # what happened, for people
    hint: str  # the next move
    names: Sequence[str]  # tensors with wrong values
    is_layers: bool = False  # whether whole layers moved
    others: Sequence[str] = ()  # in `diff`: for each the name in B that has its bits


@dataclass(frozen=True)
class Stages:
    """The pipeline stages of a model, for findings that a stage may explain."""

    count: int  # decoder layers
    # The layers of each stage's chunks. Empty: the pipeline is unknown, and the stages of every even one are possible.
    chunks: Mapping[int, Sequence[Sequence[int]]] = field(default_factory=dict)

    @staticmethod
    def of_names(names: Collection[str]) -> Stages:
        """An unknown pipeline over the decoder layers that these tensors belong to."""
        return Stages(1 + max(layers_of(names), default=-1))

    def pair(self, layers: Sequence[int], others: Sequence[int]) -> str | None:
        """What two sets of as many layers are called if each is a stage, or a chunk of one: `stages 1 and 0 of ...`."""
        one, other = self._label(layers), self._label(others)
        pipeline = "the pipeline" if self.chunks else f"a pipeline of {self.count // len(layers)}"
        return None if one is None or other is None else f"stages {one} and {other} of {pipeline}"

    def _label(self, layers: Sequence[int]) -> str | None:
        size = len(layers)
        if not self.chunks:
            is_run = list(layers) == list(range(layers[0], layers[0] + size))
            is_even = 1 < size < self.count and self.count % size == 0 == layers[0] % size
            return str(layers[0] // size) if is_run and is_even else None
        labels = {tuple(chunk): f"{at} (chunk {n})" for at, some in self.chunks.items() for n, chunk in enumerate(some)}
        labels |= {tuple(_all(chunks)): str(stage) for stage, chunks in self.chunks.items()}
        return labels.get(tuple(layers))

    def holding(self, layers: Collection[int]) -> str | None:
        """The stage of the known pipeline that holds all of these, with its layers."""
        for stage, chunks in self.chunks.items():
            if set(layers) <= set(_all(chunks)):
                return f"stage {stage} of the pipeline (layers {ranges(_all(chunks))})"
        return None


def _all(chunks: Sequence[Sequence[int]]) -> list[int]:
    return sorted(layer for chunk in chunks for layer in chunk)


@once
def stages_of(subject: Subject) -> Stages:
    """The pipeline that saved the checkpoint, by its training arguments; unknown where they have none.

    Raises CkptkitError where `.metadata` or the training arguments cannot be read.
    """
    args = subject.megatron_files.args if subject.is_megatron else {}
    if (args.get("pipeline_model_parallel_size") or 1) == 1:
        return Stages.of_names(subject.specs)
    try:
        pipeline = Pipeline.from_args(args)
        return Stages(pipeline.layers, dict(enumerate(pipeline.stages)))
    except CkptkitError:  # Megatron would refuse these numbers, so no stage of theirs saved anything
        return Stages.of_names(subject.specs)


def explain_moves(origins: Mapping[str, str | None], stages: Stages, where: str = "") -> Iterator[Moved]:
    """Yields the tensors that hold others' values, those that one mistake explains together.

    Whole layers come first, then experts and projections, then what remains. `origins` maps each tensor with wrong
    values to the one whose values it holds; None where that is unknown. `where` follows the name of a tensor whose
    values are elsewhere.
    """
    left = {name: other for name, other in origins.items() if other is not None}
    for layers in moved_layers(origins, stages):
        yield layers
        for name in layers.names:
            del left[name]
    within = {
        name: other
        for name, other in left.items()
        if count_differing_parts(name, other) == 1 and name.count(".") == other.count(".")
    }
    yield from _moved_parts(within)
    others = {name: other for name, other in left.items() if name not in within}
    for names in group_pairs(others):
        yield Moved(f"the values of {summarize(others[name] for name in names)}{where}", AGAIN, names)


def group_pairs(pairs: Mapping[str, str]) -> Iterable[list[str]]:
    """Groups names that differ in numbers only, on both sides of the pair."""
    return by_key(((pattern_of(name), pattern_of(other)), name) for name, other in pairs.items()).values()


def moved_layers(origins: Mapping[str, str | None], stages: Stages) -> Iterator[Moved]:
    """Yields the layers that hold another layer's values, those that one mistake explains together.

    A layer has moved when it has several wrong tensors, and all of them hold the tensors of the same name in one other
    layer.
    """
    wrong: dict[int, list[str]] = defaultdict(list)
    sources: dict[int, set[int | None]] = defaultdict(set)
    for name, other in origins.items():
        if (layer := layer_of(name)) is not None:
            wrong[layer].append(name)
            sources[layer].add(_same_tensor_in(name, other))
    origin = {
        layer: source
        for layer, found in sources.items()
        if len(found) == 1 < len(wrong[layer]) and (source := next(iter(found))) is not None
    }
    exchanged = {layer for layer, other in origin.items() if origin.get(other) == layer}
    around = origin.keys() - exchanged  # on a cycle of layers that each hold the values of the next
    while ends := around - ({layer for layer in around if origin[layer] in around} & {origin[one] for one in around}):
        around -= ends
    kinds = {"exchanged": exchanged, "reordered": around, "copied": origin.keys() - exchanged - around}
    for kind, layers in ((kind, layers) for kind, layers in kinds.items() if layers):
        mapping, hint = {layer: origin[layer] for layer in sorted(layers)}, _WHOLE_LAYERS[kind]
        text = _relation("layers", {str(layer): str(other) for layer, other in mapping.items()})
        firsts = [layer for layer, other in mapping.items() if kind == "copied" or layer < other]
        blamed = stages.pair(firsts, sorted(mapping[layer] for layer in firsts)) if kind != "reordered" else None
        if blamed:
            text, hint = f"{text}, which are {blamed}", _STAGE
        elif kind != "exchanged" and len(layers) > 1 and (inside := stages.holding({*layers, *mapping.values()})):
            text, hint = f"{text}, all of {inside}", _INSIDE
        yield Moved(text, hint, [name for layer in mapping for name in wrong[layer]], is_layers=True)


def _same_tensor_in(name: str, other: str | None) -> int | None:
    """The layer of `other` when it is the tensor `name` of another layer."""
    here, there = LAYER.match(name), LAYER.match(other or "")
    if not here or not there or other is None or name[here.end() :] != other[there.end() :]:
        return None
    return int(there[1])


def _moved_parts(origins: Mapping[str, str]) -> Iterator[Moved]:
    """Moves between names that differ in one part: an expert, a projection."""
    moves: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)  # by what precedes and follows the part
    for name, other in origins.items():
        one, two = name.split("."), other.split(".")
        at = next(index for index, part in enumerate(one) if part != two[index])
        moves[".".join(one[:at]), ".".join(one[at + 1 :])][one[at]] = two[at]
    same: dict[tuple[str, frozenset[tuple[str, str]]], list[str]] = defaultdict(list)
    for (before, behind), mapping in moves.items():
        kind = before.rpartition(".")[2]
        key = kind if kind in ("experts", "layers") else "", frozenset(mapping.items())
        same[key] += [".".join(filter(None, (before, part, behind))) for part in mapping]
    for (kind, relation), names in same.items():
        numbers = sorted((int(there), int(here)) for here, there in relation if here.isdecimal() and there.isdecimal())
        is_local = kind == "experts" and _numbered_by_rank([list(one) for one in zip(*numbers, strict=True)] or [[]])
        yield Moved(_relation(kind, dict(relation)), _LOCAL if is_local else AGAIN, names)


def _relation(kind: str, mapping: Mapping[str, str]) -> str:
    """Words for parts of names that hold each other's values: `experts 3 and 5 are exchanged`."""
    prefix = f"{kind} " if kind else ""
    names = sorted(mapping, key=_order)
    if all(mapping.get(other) == name for name, other in mapping.items()):
        first = [name for name in names if _order(name) < _order(mapping[name])]
        return f"{prefix}{_listed(first)} and {_listed([mapping[name] for name in first])} are exchanged"
    if set(mapping) == set(mapping.values()):
        held = ", ".join(f"{name} those of {mapping[name]}" for name in names[1:3]) + " and so on" * len(names[3:4])
        start = f"{names[0]} holds the values of {mapping[names[0]]}"
        return f"{prefix}{_listed(names)} stand in another order: {start}, {held}"
    if len(names) == 1:
        one = f"{kind[:-1]} " if kind else ""
        return f"{one}{names[0]} holds the values of {one}{mapping[names[0]]}"
    return f"{prefix}{_listed(names)} hold the values of {prefix}{_listed([mapping[name] for name in names])}"


def _order(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdecimal() else (-1, part)


def _listed(parts: Sequence[str]) -> str:
    return ranges(map(int, parts)) if all(part.isdecimal() for part in parts) else ", ".join(parts)


def explain_repeats(equal: Iterable[Sequence[str]], stages: Stages) -> list[Moved]:
    """Explains groups of tensors of one pattern with the same bytes: layers first, then experts of a layer.

    Groups of layers, or experts, that are as far apart are one; groups that differ in more than the expert are alone.
    """
    alike: dict[tuple[str, tuple[int, ...]], tuple[set[int], list[str]]] = {}  # by kind and gaps: first numbers, names
    alone: list[Moved] = []
    for names in equal:
        kind, numbers = "layer", layers_of(names)
        if len(numbers) < len(names):
            matches = [match for name in names if (match := _EXPERT.fullmatch(name))]
            if len(matches) < len(names) or len({(match[1], match[3]) for match in matches}) > 1:
                alone.append(Moved("the same bytes", _WHICH.format("expert"), list(names)))
                continue
            kind, numbers = "expert", sorted(int(match[2]) for match in matches)
        starts, together = alike.setdefault((kind, tuple(one - numbers[0] for one in numbers)), (set(), []))
        starts.add(numbers[0])
        together += names
    found: dict[str, list[Moved]] = {"layer": [], "expert": alone}
    for (kind, gaps), (starts, names) in alike.items():
        sets = [sorted(start + gap for start in starts) for gap in gaps]
        text, hint = f"{kind}s {' and '.join(map(ranges, sets))} hold the same bytes", _WHICH.format(kind)
        if kind == "expert":
            hint = _LOCAL if _numbered_by_rank(sets) else hint
        elif len(sets) == 2 and (blamed := stages.pair(*sets)):
            text, hint = f"{text}; they are {blamed}", _STAGE
        found[kind].append(Moved(text, hint, names))
    return [*found["layer"], *found["expert"]]


def _numbered_by_rank(sets: Sequence[Sequence[int]]) -> bool:
    """Whether these are the first experts of several ranks with as many each: runs of one length, the first from 0."""
    size = len(sets[0])
    runs = (list(some) == list(range(some[0], some[0] + size)) and some[0] % size == 0 for some in sets)
    return size > 1 and sets[0][0] == 0 and all(runs)

"""Explains tensors with each other's values, or with equal bytes: layers, pipeline stages, experts, projections."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from ckptkit.converters.megatron.pipeline import Pipeline
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import ranges, summarize
from ckptkit.verify.core.subject import Subject, once
from ckptkit.verify.evidence.folding import LAYER, by_key, count_differing_parts, layer_of, layers_of, pattern_of

AGAIN = "convert again from the source"
_WHOLE_LAYERS = {
    "exchanged": "save or convert again from the source: the names of these layers were exchanged",
    "reordered": "save or convert again with layers numbered from 0 in their order: they had another start or another "
    "order, for example that of text (0, 1, 10, 11, 2)",
    "copied": "save or convert again from the source",
}
_STAGE = "save or convert again with global layer numbers: a pipeline stage used the numbers of another stage"
_INSIDE = "save or convert again with global layer numbers: the numbers inside a pipeline stage are wrong"
_LOCAL = "save or convert again with global expert numbers: ranks may have numbered their experts from 0"
_WHICH = "compare with the release to find the right {}"
_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Moved:
    """One mistake that put values under other names."""

    text: str  # the mistake, for people
    hint: str  # the fix
    names: Sequence[str]  # tensors with wrong values
    is_layers: bool = False  # whether complete layers moved
    others: Sequence[str] = ()  # in `diff`: for each name, the name in B with its bits


@dataclass(frozen=True)
class Stages:
    """The pipeline stages of a model, for findings that a stage may explain."""

    count: int  # decoder layers
    # The layers of each stage's chunks; empty if the pipeline is unknown: any even one is possible.
    chunks: Mapping[int, Sequence[Sequence[int]]] = field(default_factory=dict)

    @staticmethod
    def of_names(names: Collection[str]) -> Stages:
        """An unknown pipeline over the decoder layers of these tensors."""
        return Stages(1 + max(layers_of(names), default=-1))

    def pair(self, layers: Sequence[int], others: Sequence[int]) -> str | None:
        """`stages 1 and 0 of ...` if both sets of layers are stages, or chunks of stages, else None."""
        first, second = self._label(layers), self._label(others)
        pipeline = "the pipeline" if self.chunks else f"a pipeline of {self.count // len(layers)}"
        return None if first is None or second is None else f"stages {first} and {second} of {pipeline}"

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
        """The stage of the known pipeline with all of these layers, or None."""
        for stage, chunks in self.chunks.items():
            if set(layers) <= set(_all(chunks)):
                return f"stage {stage} of the pipeline (layers {ranges(_all(chunks))})"
        return None


def _all(chunks: Sequence[Sequence[int]]) -> list[int]:
    return sorted(chain.from_iterable(chunks))


@once
def stages_of(subject: Subject) -> Stages:
    """The pipeline that saved the checkpoint, by its training arguments. Raises CkptkitError if they are unreadable."""
    args = subject.megatron_files.args if subject.kind == "megatron" else {}
    if (args.get("pipeline_model_parallel_size") or 1) == 1:
        return Stages.of_names(subject.specs)
    try:
        pipeline = Pipeline.from_args(args)
        return Stages(pipeline.layers, dict(enumerate(pipeline.stages)))
    except CkptkitError:  # Megatron refuses these numbers, so no such stage saved anything
        return Stages.of_names(subject.specs)


def explain_moves(origins: Mapping[str, str | None], stages: Stages, where: str = "") -> Iterator[Moved]:
    """Yields one `Moved` for each mistake: complete layers, then experts and projections, then single tensors.

    `origins`: the tensor with the values of each wrong one, or None if unknown. `where` follows names of origins.
    """
    known = {name: origin for name, origin in origins.items() if origin is not None}
    for layers in moved_layers(origins, stages):
        yield layers
        for name in layers.names:
            del known[name]
    same_depth = ((name, origin) for name, origin in known.items() if name.count(".") == origin.count("."))
    parts = {name: origin for name, origin in same_depth if count_differing_parts(name, origin) == 1}
    yield from _moved_parts(parts)
    single = {name: origin for name, origin in known.items() if name not in parts}
    for names in group_pairs(single):
        yield Moved(f"the values of {summarize(single[name] for name in names)}{where}", AGAIN, names)


def group_pairs(pairs: Mapping[str, str]) -> Iterable[list[str]]:
    """Groups names that differ in numbers only, on both sides of the pair."""
    return by_key(((pattern_of(name), pattern_of(other)), name) for name, other in pairs.items()).values()


def moved_layers(origins: Mapping[str, str | None], stages: Stages) -> Iterator[Moved]:
    """Yields one `Moved` for each mistake that moved layers: several wrong tensors, all with values of one layer."""
    wrong: dict[int, list[str]] = defaultdict(list)
    sources: dict[int, set[int | None]] = defaultdict(set)
    for name, other in origins.items():
        if (layer := layer_of(name)) is not None:
            wrong[layer].append(name)
            sources[layer].add(_same_tensor_in(name, other))
    single = {layer: next(iter(found)) for layer, found in sources.items() if len(found) == 1 < len(wrong[layer])}
    origin = {layer: source for layer, source in single.items() if source is not None}
    exchanged = {layer for layer, other in origin.items() if origin.get(other) == layer}
    around = origin.keys() - exchanged  # on a cycle of layers that each hold the values of the next
    while ends := around - ({layer for layer in around if origin[layer] in around} & {origin[one] for one in around}):
        around -= ends
    kinds = {"exchanged": exchanged, "reordered": around, "copied": origin.keys() - exchanged - around}
    for kind, layers in kinds.items():
        if not layers:
            continue
        mapping, hint = {layer: origin[layer] for layer in sorted(layers)}, _WHOLE_LAYERS[kind]
        text = _relation("layers", {str(layer): str(other) for layer, other in mapping.items()})
        firsts = [layer for layer, other in mapping.items() if kind == "copied" or layer < other]
        pair = stages.pair(firsts, sorted(mapping[layer] for layer in firsts)) if kind != "reordered" else None
        if pair:
            text, hint = f"{text}, which are {pair}", _STAGE
        elif kind != "exchanged" and len(layers) > 1 and (inside := stages.holding({*layers, *mapping.values()})):
            text, hint = f"{text}, all of {inside}", _INSIDE
        yield Moved(text, hint, [name for layer in mapping for name in wrong[layer]], is_layers=True)


def _same_tensor_in(name: str, other: str | None) -> int | None:
    """The layer of `other` if it is the tensor `name` of another layer, else None."""
    ours, theirs = LAYER.match(name), LAYER.match(other or "")
    return int(theirs[1]) if ours and theirs and name[ours.end() :] == theirs.string[theirs.end() :] else None


def _moved_parts(origins: Mapping[str, str]) -> Iterator[Moved]:
    """Moves between names that differ in one part: an expert, a projection."""
    moves: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)  # by the text before and after the part
    for name, origin in origins.items():
        ours, theirs = name.split("."), origin.split(".")
        at = next(index for index, part in enumerate(ours) if part != theirs[index])
        moves[".".join(ours[:at]), ".".join(ours[at + 1 :])][ours[at]] = theirs[at]
    same: dict[tuple[str, frozenset[tuple[str, str]]], list[str]] = defaultdict(list)
    for (before, behind), mapping in moves.items():
        kind = before.rpartition(".")[2]
        key = kind if kind in ("experts", "layers") else "", frozenset(mapping.items())
        same[key] += [".".join(filter(None, (before, part, behind))) for part in mapping]
    for (kind, relation), names in same.items():
        numbers = sorted((int(b), int(a)) for a, b in relation if a.isdecimal() and b.isdecimal())
        is_local = kind == "experts" and _numbered_by_rank([list(row) for row in zip(*numbers, strict=True)] or [[]])
        yield Moved(_relation(kind, dict(relation)), _LOCAL if is_local else AGAIN, names)


def _relation(kind: str, mapping: Mapping[str, str]) -> str:
    """Describes parts of names with each other's values: `experts 3 and 5 are exchanged`."""
    prefix = f"{kind} " if kind else ""
    names = sorted(mapping, key=_order)
    if all(mapping.get(other) == name for name, other in mapping.items()):
        lower = [name for name in names if _order(name) < _order(mapping[name])]
        return f"{prefix}{_listed(lower)} and {_listed([mapping[name] for name in lower])} are exchanged"
    if set(mapping) == set(mapping.values()):
        more = ", ".join(f"{name} those of {mapping[name]}" for name in names[1:3]) + " and so on" * len(names[3:4])
        start = f"{names[0]} holds the values of {mapping[names[0]]}"
        return f"{prefix}{_listed(names)} are in another order: {start}, {more}"
    if len(names) == 1:
        singular = f"{kind[:-1]} " if kind else ""
        return f"{singular}{names[0]} holds the values of {singular}{mapping[names[0]]}"
    return f"{prefix}{_listed(names)} hold the values of {prefix}{_listed([mapping[name] for name in names])}"


def _order(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdecimal() else (-1, part)


def _listed(parts: Sequence[str]) -> str:
    return ranges(map(int, parts)) if all(part.isdecimal() for part in parts) else ", ".join(parts)


def explain_repeats(equal: Iterable[Sequence[str]], stages: Stages) -> list[Moved]:
    """Explains groups of tensors with the same bytes, merged if distances of layers or experts agree; layers first."""
    merged: dict[tuple[str, tuple[int, ...]], tuple[set[int], list[str]]] = {}  # by kind and gaps: first numbers, names
    single: list[Moved] = []
    for names in equal:
        kind, numbers = "layer", layers_of(names)
        if len(numbers) < len(names):
            matches = [match for name in names if (match := _EXPERT.fullmatch(name))]
            if len(matches) < len(names) or len({(match[1], match[3]) for match in matches}) > 1:
                single.append(Moved("the same bytes", _WHICH.format("expert"), list(names)))
                continue
            kind, numbers = "expert", sorted(int(match[2]) for match in matches)
        starts, together = merged.setdefault((kind, tuple(one - numbers[0] for one in numbers)), (set(), []))
        starts.add(numbers[0])
        together += names
    found: dict[str, list[Moved]] = {"layer": [], "expert": single}
    for (kind, gaps), (starts, names) in merged.items():
        sets = [sorted(start + gap for start in starts) for gap in gaps]
        text, hint = f"{kind}s {' and '.join(map(ranges, sets))} hold the same bytes", _WHICH.format(kind)
        if kind == "expert":
            hint = _LOCAL if _numbered_by_rank(sets) else hint
        elif len(sets) == 2 and (pair := stages.pair(*sets)):
            text, hint = f"{text}; they are {pair}", _STAGE
        found[kind].append(Moved(text, hint, names))
    return [*found["layer"], *found["expert"]]


def _numbered_by_rank(sets: Sequence[Sequence[int]]) -> bool:
    """Whether these are the experts of several ranks of one size: runs of one length, the first from 0."""
    size = len(sets[0])
    runs = (list(some) == list(range(some[0], some[0] + size)) and some[0] % size == 0 for some in sets)
    return size > 1 and sets[0][0] == 0 and all(runs)

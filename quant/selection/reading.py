"""Predicts what each reader takes for quantized, from its list of unquantized modules and from targets."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.side_files import quantization_of
from converters.hf_names import FUSED
from converters.registry import family_of
from quant.formats.groups import LINEAR, Kind, Target
from quant.lists.table import INDEXED, NAMES, PLAIN, ListReader, Rule, Run, exact, never
from quant.patterns import check_lookups, matcher
from quant.selection.matrices import Matrix, fused_layer, names_in_sglang, names_in_vllm
from quant.selection.readers import LINEAR_CLASSES, RULES, SGLANG, VLLM, sglang, sglang_suffix, slime
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
    entry = family_of(config).engine("sglang").entry if reader.startswith("SGLang") else str
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
    packed_modules = family_of(config).engine("sglang").packed_modules
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
    """Says of an entry which of `names` (sorted) it covers, by `RULES[reader]`.

    Exact names and prefixes are not compared with each name. Raises CkptkitError where `entries`, those that it will be
    asked about, are too many for so many names.
    """
    rule = RULES[reader]
    indexed = rule not in (sglang, sglang_suffix)
    check_lookups([entry for entry in entries if entry.startswith("re:") or not indexed], len(names))
    longest, every = max(map(len, names), default=0), frozenset(names)

    def covered(entry: str) -> frozenset[str]:
        if entry.startswith("re:"):
            return frozenset(filter(matcher(entry, longest), names))
        if rule is slime:
            return frozenset(names[bisect_left(names, entry) : bisect_left(names, entry + _LAST)])
        if indexed:
            return every if reader in BY_CLASS and entry in LINEAR_CLASSES else every & {entry}
        return frozenset(name for name in names if rule(name, entry))

    return covered


def ignored(modules: Iterable[str], ignore: Sequence[str]) -> frozenset[str]:
    """Those of these Linear modules that entries cover for compressed-tensors. Raises CkptkitError as `covering`."""
    covers = covering("compressed-tensors", ignore, sorted(set(modules)))
    return frozenset[str]().union(*map(covers, dict.fromkeys(ignore)))


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


# Of these names, those that each entry covers by a rule.
Known = dict[tuple[Rule, frozenset[str]], dict[str, frozenset[str]]]
_SLOW = 5  # a rule that is asked about each name takes as long as so many lookups
# Fused layers that SGLang takes apart whatever the model's class declares.
_ALWAYS_FUSED = ("qkv_proj", "gate_up_proj")
# Engines build the indexer's key weight with quantization or without, by chip and release, and load either. vLLM joins
# the head weights to it; transformers keeps them in float32.
_EITHER = (".indexer.wk", ".indexer.weights_proj")


@dataclass(frozen=True)
class _Layer:
    """What a reader looks up for one matrix: nothing, a container of experts, or a layer and the parts of it."""

    name: str = ""
    parts: tuple[str, ...] = ()  # empty: the layer is not looked up
    experts: bool = False
    answer: Answer | None = None  # known without a lookup


def read_list(
    reader: str,
    row: ListReader,
    matrices: Sequence[Matrix],
    entries: Sequence[str],
    config: Mapping[str, Any],
    known: Known | None = None,
) -> Reading:
    """Predicts what `reader` takes for quantized where its list has these `entries`.

    `known`: what was found for other readers with the same rules and names, which is added to.
    """
    known = {} if known is None else known
    sglang = family_of(config).engine("sglang") if matrices else None
    engine = sglang.entry if sglang and reader.startswith("SGLang") else str
    layers = list(_all_looked_up(reader, row, matrices, config))
    kinds = {
        "experts": frozenset(layer.name for layer in layers if layer.experts),
        "part": frozenset(part for layer in layers if not layer.experts for part in layer.parts),
        "own": frozenset(layer.name for layer in layers if layer.parts and not layer.experts),
    }
    by_part = {names: names_by_part(names) for names in kinds.values()} if entries else {}
    by_rule = (
        ("experts", row.experts, kinds["experts"]),
        ("part", row.part, kinds["part"]),
        ("fused", row.fused, kinds["own"]),
        ("last", row.last, kinds["own"]),
    )
    for _, rule, names in by_rule:
        if rule is not None and rule not in INDEXED:
            check_lookups(entries, len(names) * _SLOW)
    covers: dict[str, frozenset[str]] = {}
    covered: dict[str, set[str]] = {kind: set() for kind, *_ in by_rule}
    tables = [
        (kind, rule, names, known.setdefault((rule, names), {}))
        for kind, rule, names in by_rule
        if rule is not None and rule is not never and names
    ]
    for entry in dict.fromkeys(entries):
        spelled, found = engine(entry), frozenset[str]()
        for kind, rule, names, table in tables:
            if spelled not in table:
                table[spelled] = frozenset(_covered(rule, spelled, names, by_part[names]))
            if hit := table[spelled]:
                covered[kind] |= hit
                found |= hit
        covers[entry] = found
    made = {layer: (_names_of(layer), _answer_of(layer, covered)) for layer in dict.fromkeys(layers)}
    asked, answers = [made[layer][0] for layer in layers], [made[layer][1] for layer in layers]
    return Reading(reader, tuple(asked), covers, tuple(answers))


def unreadable(row: ListReader, entry: str) -> bool:
    """Whether a reader raises for an entry: transformers, for what is not a regular expression."""
    if PLAIN.fullmatch(entry):
        return False
    try:
        row.part(entry)("")
        row.experts(entry)("")
    except CkptkitError:
        return True
    return False


def names_by_part(names: Iterable[str]) -> dict[str, list[str]]:
    """The names that have each dotted part, which stands here in lower case."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        for part in set(name.lower().split(".")):
            found[part].append(name)
    return found


def _covered(rule: Rule, entry: str, names: frozenset[str], by_part: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """A run of parts is looked for where its rarest part is: long lists of large models would take minutes."""
    try:
        if rule is exact:
            yield from names & {entry}
            return
        covers = rule(entry)
        where: Collection[str] = names
        if isinstance(covers, Run):
            having: list[Collection[str]] = [by_part.get(part.lower(), ()) for part in covers.parts.split(".")]
            where = min(having, key=len)
        yield from (name for name in where if covers(name))
    except CkptkitError:
        return  # `unreadable` has it


def _all_looked_up(
    reader: str, row: ListReader, matrices: Sequence[Matrix], config: Mapping[str, Any]
) -> Iterator[_Layer]:
    """Looks up each matrix, but of a layer's routed experts the first alone where the reader holds them as one."""
    known: dict[str, _Layer] = {}
    for matrix in matrices:
        if not matrix.expert or row.packs is not None or reader == NAMES:
            yield _looked_up(reader, row, matrix, config)
            continue
        container = matrix.module.partition(".experts.")[0]
        if container not in known:
            known[container] = _looked_up(reader, row, matrix, config)
        yield known[container]


def _looked_up(reader: str, row: ListReader, matrix: Matrix, config: Mapping[str, Any]) -> _Layer:
    if reader == NAMES:
        is_head = _is_head(matrix)
        own = fused_layer(matrix.module, None)
        return _Layer(answer="keeps") if is_head and not row.head else _Layer(own, (matrix.module,))
    if row.packs is not None:
        if not matrix.tensor.endswith(".weight"):
            return _Layer(answer="either")
        packs = row.packs(matrix.tensor, config)
        return _Layer(matrix.tensor, (matrix.tensor,)) if packs else _Layer(answer="keeps")
    if matrix.module.endswith(_EITHER):
        return _Layer(answer="either")
    if reader.startswith("transformers"):
        return _in_transformers(row, matrix, config)
    is_head = _is_head(matrix)
    if is_head and not row.head:
        return _Layer(answer="keeps")
    if is_head and config.get("tie_word_embeddings"):
        return _Layer(answer="either")
    layer = matrix.sglang if reader in SGLANG else matrix.vllm
    layer = matrix.module if is_head and layer is None else layer
    if layer is None:
        return _Layer(answer="keeps")
    if layer.endswith(".experts"):
        return _Layer(layer, (layer,), experts=True)
    return _Layer(layer, _parts_of_layer(reader, row, layer, matrix, config)) if row.linears else _Layer(answer="keeps")


def _is_head(matrix: Matrix) -> bool:
    """Whether it is the output embedding, which DeepSeek-V4's releases call otherwise."""
    return matrix.tensor == "head.weight" or matrix.tensor.endswith("lm_head.weight")


def _parts_of_layer(
    reader: str, row: ListReader, layer: str, matrix: Matrix, config: Mapping[str, Any]
) -> tuple[str, ...]:
    """The names of a fused layer's parts, or the layer's own."""
    if reader not in SGLANG:
        return names_in_vllm(matrix, ()) if matrix.vllm is not None else (layer,)
    declared = family_of(config).engine("sglang").fused if matrix.unfused else ()
    name = layer.rpartition(".")[2]
    if name in declared or (name in _ALWAYS_FUSED and not row.declared):
        return tuple(layer.replace(name, part) for part in FUSED[name])
    return (layer,)


def _in_transformers(row: ListReader, matrix: Matrix, config: Mapping[str, Any]) -> _Layer:
    if matrix.expert:
        container = matrix.module.partition(".experts")[0] + ".experts"
        return _Layer(container, (container,), experts=True)
    if not matrix.linear or not row.linears:  # draft layers too, which it has no classes for
        return _Layer(answer="keeps" if matrix.reason else "either")
    if _is_head(matrix) and not row.entries(quantization_of(config)):
        return _Layer(answer="keeps")  # left out by itself where there is no list
    return _Layer(matrix.module, (matrix.module,))


def _names_of(layer: _Layer) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*layer.parts, layer.name])) if layer.parts else ()


def _answer_of(layer: _Layer, covered: Mapping[str, set[str]]) -> Answer:
    if layer.answer is not None:
        return layer.answer
    if layer.experts:
        return "keeps" if layer.name in covered["experts"] else "packs"
    if layer.name in covered["fused"]:
        return "keeps"
    hit = {part in covered["part"] for part in layer.parts}
    if len(hit) == 2:
        return "refuses"
    return "keeps" if hit == {True} or layer.name in covered["last"] else "packs"

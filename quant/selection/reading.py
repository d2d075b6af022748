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
from quant.engines.registry import engine_class
from quant.formats.groups import LINEAR, Target, by_priority
from quant.lists.table import (
    COMPRESSED,
    INDEXED,
    INDEXED_PLAIN,
    NAMES,
    PLAIN,
    ListReader,
    Rule,
    Run,
    any_part,
    class_name,
    exact,
    never,
    prefix,
    readers_of_method,
    regex_or_exact,
)
from quant.patterns import REGEX, check_lookups, matcher
from quant.selection.matrices import Matrix, fused_layer, names_in_vllm, names_of_layer
from quant.selection.readers import BY_CLASS, SGLANG
from quant.selection.tree import DRAFT_LAYER

# "either": the reader loads the module packed or not.
Answer = Literal["packs", "other", "keeps", "refuses", "either"]
_LAST = "\U0010ffff"
# Classes of vLLM and SGLang, by the last part of a layer's name.
_CLASSES = {
    "qkv_proj": "QKVParallelLinear",
    "gate_up_proj": "MergedColumnParallelLinear",
    "fused_qkv_a_proj": "DeepSeekV2FusedQkvAProjLinear",
    "o_proj": "RowParallelLinear",
    "down_proj": "RowParallelLinear",
    "lm_head": "ParallelLMHead",
}
_OTHER = "ColumnParallelLinear"  # every other class has Linear in its name too
# Of these names, those that each entry covers by a rule.
Known = dict[tuple[Rule, frozenset[str]], dict[str, frozenset[str]]]
_SLOW = 5  # a rule that is asked about each name takes as long as so many lookups
# Fused layers that SGLang takes apart whatever the model's class declares.
_ALWAYS_FUSED = ("qkv_proj", "gate_up_proj")
# Engines build the indexer's key weight with quantization or without, by chip and release, and load either. vLLM joins
# the head weights to it; transformers keeps them in float32.
_EITHER = (".indexer.wk", ".indexer.weights_proj")


@dataclass(frozen=True)
class Reading:
    """What one reader makes of one `ignore` list."""

    reader: str
    asked: tuple[tuple[str, ...], ...]  # the names that it looks up for each matrix
    covers: Mapping[str, frozenset[str]]  # what each entry covers of them
    # For each matrix: packed or not, quantized in the `other` format of another config group, or a fused layer that is
    # covered in part, which it `refuses`.
    answers: tuple[Answer, ...]
    targets: tuple[Target | None, ...] = ()  # those by which it packs each matrix; empty: this format has none

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


def read_all(
    readers: Iterable[str],
    matrices: Sequence[Matrix],
    ignore: Sequence[str],
    config: Mapping[str, Any],
    targets: Sequence[Target] = LINEAR,
) -> dict[str, Reading]:
    """How each of `readers`, and compressed-tensors, takes a list of compressed-tensors'. `targets`: of all groups."""
    known, rows = Known(), readers_of_method(COMPRESSED)
    base = read_list(BY_CLASS[0], rows[BY_CLASS[0]], matrices, ignore, config, known, targets)
    found = {
        reader: replace(base, reader=reader)  # transformers calls compressed-tensors
        if reader in BY_CLASS
        else read_list(reader, rows[reader], matrices, ignore, config, known, targets)
        for reader in readers
    }
    return {BY_CLASS[0]: base, **found}


def ignored(modules: Iterable[str], ignore: Sequence[str]) -> frozenset[str]:
    """Those of these Linear modules that entries cover for compressed-tensors. Raises CkptkitError as `covering`."""
    covers = covering(ignore, modules)
    return frozenset[str]().union(*map(covers, dict.fromkeys(ignore)))


def covering(entries: Sequence[str], modules: Iterable[str]) -> Callable[[str], frozenset[str]]:
    """Says of an entry which of these Linear modules it covers for compressed-tensors.

    Raises CkptkitError where `entries`, those that it will be asked about, are too many for so many modules.
    """
    names = Names(frozenset(modules))
    _check_lookups(entries, regex_or_exact, names)

    def covered(entry: str) -> frozenset[str]:
        return names.names if class_name(entry)("Linear") else frozenset(_covered(regex_or_exact, entry, names))

    return covered


@dataclass(frozen=True)
class _Layer:
    """What a reader looks up for one matrix: nothing, a container of experts, or a layer and the parts of it.

    compressed-tensors looks up a module, and by its class.
    """

    name: str = ""  # its own, or its class; empty for experts that are looked up one by one
    parts: tuple[str, ...] = ()  # empty: the layer is not looked up
    experts: bool = False
    alike: bool = False  # the parts are names of one module, in releases of transformers
    answer: Answer | None = None  # known without a lookup


def read_list(
    reader: str,
    row: ListReader,
    matrices: Sequence[Matrix],
    entries: Sequence[str],
    config: Mapping[str, Any],
    known: Known | None = None,
    targets: Sequence[Target] = (),
) -> Reading:
    """Predicts what `reader` takes for quantized where its list has these `entries`.

    `known`: what was found for other readers with the same rules and names, which is added to. `targets`: of
    compressed-tensors' groups; slime does not read them. Raises CkptkitError where entries are too many for so many
    names.
    """
    known = {} if known is None else known
    sglang = engine_class("sglang", config) if matrices else None
    engine = sglang.entry if sglang and reader.startswith("SGLang") else str
    layers = list(_all_looked_up(reader, row, matrices, config))
    kinds = {
        "experts": frozenset(layer.name for layer in layers if layer.experts),
        "part": frozenset(part for layer in layers if not layer.experts for part in layer.parts),
        "own": frozenset(layer.name for layer in layers if layer.parts and not layer.experts),
    }
    by_rule = (
        ("experts", row.experts, kinds["experts"]),
        ("part", row.part, kinds["part"]),
        ("fused", row.fused, kinds["own"]),
        ("last", row.last, kinds["own"]),
    )
    indexes = {names: Names(names) for names in kinds.values()}
    tables = [
        (kind, rule, indexes[names], known.setdefault((rule, names), {}))
        for kind, rule, names in by_rule
        if rule is not None and rule is not never and names
    ]
    covers: dict[str, frozenset[str]] = {}
    covered: dict[str, set[str]] = {kind: set() for kind, *_ in by_rule}
    for _, rule, index, _ in tables:
        _check_lookups([engine(entry) for entry in entries], rule, index)
    for entry in dict.fromkeys(entries):
        spelled, found = engine(entry), frozenset[str]()
        for kind, rule, index, table in tables:
            if spelled not in table:
                try:
                    table[spelled] = frozenset(_covered(rule, spelled, index))
                except CkptkitError:
                    if COMPRESSED in row.methods:
                        raise
                    table[spelled] = frozenset()  # `unreadable` has it
            if hit := table[spelled]:
                covered[kind] |= hit
                found |= hit
        covers[entry] = found
    targeted = _targeted(reader, layers, targets) if targets and row.packs is None else None
    made = {layer: _answer_of(layer, covered, targeted) for layer in dict.fromkeys(layers)}
    answers = [made[layer] for layer in layers]
    return Reading(
        reader,
        tuple(_names_of(row, layer, covered) for layer in layers),
        covers,
        tuple(answer for answer, _ in answers),
        tuple(target for _, target in answers) if targeted else (),
    )


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


@dataclass(frozen=True)
class Names:
    """Names that entries are looked up in, indexed: long lists of large models would take minutes."""

    names: frozenset[str]

    @cached_property
    def by_part(self) -> Mapping[str, Sequence[str]]:
        """Those that have each dotted part, which is in lower case here."""
        found: dict[str, list[str]] = defaultdict(list)
        for name in self.names:
            for part in set(name.lower().split(".")):
                found[part].append(name)
        return found

    @cached_property
    def ordered(self) -> Sequence[str]:
        return sorted(self.names)

    @cached_property
    def longest(self) -> int:
        return max(map(len, self.names), default=0)


def _check_lookups(entries: Sequence[str], rule: Rule, names: Names) -> None:
    """Raises CkptkitError where `entries` that a rule asks about each name are too many."""
    if rule in INDEXED_PLAIN:
        check_lookups([entry for entry in entries if entry.startswith(REGEX)], len(names.names))
    elif rule not in INDEXED:
        check_lookups(entries, len(names.names) * _SLOW)


def _covered(rule: Rule, entry: str, names: Names) -> Iterable[str]:
    """The names that an entry covers. A run of parts is looked for where its rarest part is."""
    if rule in INDEXED_PLAIN and entry.startswith(REGEX):
        return filter(matcher(entry, names.longest), names.names)
    if rule in (exact, regex_or_exact):
        return names.names & {entry}
    if rule is prefix:
        return names.ordered[bisect_left(names.ordered, entry) : bisect_left(names.ordered, entry + _LAST)]
    covers = rule(entry)
    where: Collection[str] = names.names
    if isinstance(covers, Run):
        having: list[Collection[str]] = [names.by_part.get(part.lower(), ()) for part in covers.parts.split(".")]
        where = min(having, key=len)
    return [name for name in where if covers(name)]


def _all_looked_up(
    reader: str, row: ListReader, matrices: Sequence[Matrix], config: Mapping[str, Any]
) -> Iterator[_Layer]:
    """Looks up each matrix, but of a layer's routed experts the first alone where the reader holds them as one."""
    known: dict[str, _Layer] = {}
    for matrix in matrices:
        if not matrix.expert or row.packs is not None or reader in (NAMES, *BY_CLASS):
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
            return _Layer(answer="keeps" if COMPRESSED in row.methods else "either")
        packs = row.packs(matrix.tensor, config)
        return _Layer(matrix.tensor, (matrix.tensor,)) if packs else _Layer(answer="keeps")
    if COMPRESSED in row.methods:
        return _in_compressed_tensors(reader, row, matrix, config)
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


def _in_compressed_tensors(reader: str, row: ListReader, matrix: Matrix, config: Mapping[str, Any]) -> _Layer:
    """The same of a list of compressed-tensors'. Engines ask for the first expert's three projections."""
    if reader in BY_CLASS:
        if matrix.torch_class is not None:
            names = dict.fromkeys(filter(None, (matrix.module, matrix.transformers)))
            return _Layer(matrix.torch_class, tuple(names), alike=True)
        answer: Answer = "keeps" if matrix.reason not in (None, DRAFT_LAYER) else "either"  # it loads no drafts
        return _Layer("", (matrix.module,), answer=answer)
    layer = matrix.sglang if reader in SGLANG else matrix.vllm
    if layer is None:
        return _Layer(answer="keeps")
    own = "" if layer.endswith(".experts") else layer
    return _Layer(own, _parts_of_layer(reader, row, layer, matrix, config))


def _is_head(matrix: Matrix) -> bool:
    """Whether it is the output embedding, which DeepSeek-V4's releases call otherwise."""
    return matrix.tensor == "head.weight" or matrix.tensor.endswith("lm_head.weight")


def _parts_of_layer(
    reader: str, row: ListReader, layer: str, matrix: Matrix, config: Mapping[str, Any]
) -> tuple[str, ...]:
    """The names of a fused layer's parts, or the layer's own."""
    if reader not in SGLANG:
        return names_in_vllm(matrix) or (layer,)
    declared = engine_class("sglang", config).fused if matrix.unfused else ()
    apart = (*declared, *(() if row.declared else _ALWAYS_FUSED))
    return names_of_layer(layer, {name: FUSED[name] for name in apart})


def _in_transformers(row: ListReader, matrix: Matrix, config: Mapping[str, Any]) -> _Layer:
    if matrix.expert:
        container = matrix.module.partition(".experts")[0] + ".experts"
        return _Layer(container, (container,), experts=True)
    if not matrix.linear or not row.linears:  # draft layers too, which it has no classes for
        return _Layer(answer="keeps" if matrix.reason else "either")
    if _is_head(matrix) and not row.entries(quantization_of(config)):
        return _Layer(answer="keeps")  # left out by itself where there is no list
    return _Layer(matrix.module, (matrix.module,))


def _names_of(row: ListReader, layer: _Layer, covered: Mapping[str, set[str]]) -> tuple[str, ...]:
    """The names that decide: in a list of compressed-tensors the own one where an entry covers it, else the parts."""
    if COMPRESSED in row.methods and row.fused is not None:
        return (layer.name,) if layer.name in covered["fused"] else layer.parts
    return tuple(dict.fromkeys(filter(None, [*layer.parts, layer.name]))) if layer.parts else ()


def _answer_of(
    layer: _Layer, covered: Mapping[str, set[str]], targeted: _Targeted | None
) -> tuple[Answer, Target | None]:
    """The answer, and the target by which the layer is packed."""
    if layer.answer is not None:
        return layer.answer, None
    if layer.experts:
        return "keeps" if layer.name in covered["experts"] else "packs", None
    if layer.name in covered["fused"]:
        return "keeps", None
    hit = {part in covered["part"] for part in layer.parts}
    if len(hit) == 2 and not layer.alike:
        return "refuses", None
    if True in hit or layer.name in covered["last"]:
        return "keeps", None
    return targeted.answer(layer) if targeted else ("packs", None)


@dataclass(frozen=True)
class _Targeted:
    """What a reader makes of `targets`.

    Source: compressed-tensors `utils/match.py`, `match_targets`; `compressed_tensors/utils.py` of vLLM and SGLang,
    `find_matched_target`.
    """

    reader: str
    targets: Sequence[Target]  # in the order in which it tries them
    by_name: Mapping[str, Target]

    def answer(self, layer: _Layer) -> tuple[Answer, Target | None]:
        """The answer for a layer that no entry covers; SGLang demands a target for each. And the one target."""
        found = self._of(layer)
        nothing: Answer = "refuses" if self.reader in SGLANG else "keeps"
        answers: set[Answer] = {target.kind if target else nothing for target in found}
        return answers.pop() if len(answers) == 1 else "refuses", found[0] if len(set(found)) == 1 else None

    def _of(self, layer: _Layer) -> list[Target | None]:
        """The targets for a layer: by its own name, then its class, then the names of its parts; vLLM 0.33 parts first.

        Parts by name count only where there is a target for all of them; that of the first then stands in engines.
        """
        if layer.name in self.by_name:
            return [self.by_name[layer.name]]
        by_class = self._by_class(layer)
        parts = [self.by_name.get(name) for name in layer.parts]
        if layer.alike:
            return [next(filter(None, parts), by_class)]
        if not layer.name:
            return [part or by_class for part in parts]
        if None in parts or (by_class is not None and self.reader != "vLLM 0.33"):
            return [by_class]
        return parts[:1]

    def _by_class(self, layer: _Layer) -> Target | None:
        """What the first target makes of a class: a pattern from the start, else any part of its name in any case.

        Routed experts take the target Linear over. Source: `compressed_tensors.py` of vLLM and SGLang.
        """
        if self.reader in BY_CLASS:
            return next((target for target in self.targets if class_name(target.pattern)(layer.name)), None)
        experts = "FusedMoE" if self.reader in SGLANG else "RoutedExperts"
        name = _CLASSES.get(layer.name.rpartition(".")[2], _OTHER) if layer.name else experts
        found = next((target for target in self.targets if any_part(target.pattern)(name)), None)
        if found is None and name == experts:
            return next((target for target in self.targets if target.pattern == "Linear"), None)
        return found


def _targeted(reader: str, layers: Iterable[_Layer], targets: Sequence[Target]) -> _Targeted:
    own = reader not in BY_CLASS
    names = Names(frozenset(name for layer in layers for name in (*layer.parts, *((layer.name,) if own else ()))))
    targets = targets if own else by_priority(targets)
    _check_lookups([target.pattern for target in targets], regex_or_exact, names)
    found: dict[str, Target] = {}
    for target in targets:
        found = dict.fromkeys(_covered(regex_or_exact, target.pattern, names), target) | found
    return _Targeted(reader, targets, found)

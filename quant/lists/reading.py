"""Predicts what a reader takes for quantized, from its list of unquantized modules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.side_files import quantization_of
from converters.hf_names import FUSED
from converters.registry import FAMILIES
from quant.lists.rules import INDEXED, PLAIN, Rule, Run, exact, never
from quant.lists.table import NAMES, ListReader
from quant.patterns import check_lookups
from quant.selection.matrices import Matrix, fused_layer, names_in_vllm
from quant.selection.readers import SGLANG
from quant.selection.reading import Answer, Reading

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
    sglang = FAMILIES[str(config.get("model_type"))].engine("sglang") if matrices else None
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
    made = {layer: (_asked(layer), _answer(layer, covered)) for layer in dict.fromkeys(layers)}
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
    return _Layer(layer, _parts(reader, row, layer, matrix, config)) if row.linears else _Layer(answer="keeps")


def _is_head(matrix: Matrix) -> bool:
    """Whether it is the output embedding, which DeepSeek-V4's releases call otherwise."""
    return matrix.tensor == "head.weight" or matrix.tensor.endswith("lm_head.weight")


def _parts(reader: str, row: ListReader, layer: str, matrix: Matrix, config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of a fused layer's parts, or the layer's own."""
    if reader not in SGLANG:
        return names_in_vllm(matrix, ()) if matrix.vllm is not None else (layer,)
    declared = FAMILIES[str(config.get("model_type"))].engine("sglang").fused if matrix.unfused else ()
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


def _asked(layer: _Layer) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*layer.parts, layer.name])) if layer.parts else ()


def _answer(layer: _Layer, covered: Mapping[str, set[str]]) -> Answer:
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

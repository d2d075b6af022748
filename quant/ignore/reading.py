"""Predicts which modules each reader treats as quantized, by its list of unquantized modules and by targets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from ckptkit.converters.hf_names import FUSED
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.side_files import quantization_of
from ckptkit.quant.engines.registry import engine_class
from ckptkit.quant.formats.groups import LINEAR, Target, by_priority
from ckptkit.quant.ignore.matching import Names, any_part, class_name, never, regex_or_exact
from ckptkit.quant.ignore.names import Matrix, container_of, fused_layer, names_in_vllm, names_of_layer
from ckptkit.quant.ignore.readers import BY_CLASS, COMPRESSED, NAMED, NAMES, ListReader, Method, readers_of_method
from ckptkit.quant.ignore.tree import DRAFT_LAYER

# "either": the reader loads the module packed or not.
Answer = Literal["packs", "other", "keeps", "refuses", "either"]
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
Known = dict[frozenset[str], Names]  # lookups of other readers
_ALWAYS_FUSED = ("qkv_proj", "gate_up_proj")  # SGLang splits them even if the model's class does not declare them
# Engines build the indexer's key weight with quantization or without, by chip and release, and load either. vLLM joins
# the head weights to it; transformers keeps them in float32.
_EITHER = (".indexer.wk", ".indexer.weights_proj")


@dataclass(frozen=True)
class Reading:
    """The interpretation of one `ignore` list by one reader."""

    lookups: tuple[tuple[str, ...], ...]  # the names that it looks up for each matrix
    covers: Mapping[str, frozenset[str]]  # the lookups that each entry of the reader's list covers
    # For each matrix: packed or not, quantized in the `other` format of another config group, or a fused layer that is
    # covered in part, which it `refuses`.
    answers: tuple[Answer, ...]
    targets: tuple[Target | None, ...] = ()  # the targets by which it packs each matrix; empty if the format has none

    @cached_property
    def _entries(self) -> Mapping[str, list[str]]:
        """The entries that cover each name, in order."""
        entries: dict[str, list[str]] = defaultdict(list)
        for pattern, names in self.covers.items():
            for name in names:
                entries[name].append(pattern)
        return entries

    def entries_at(self, index: int) -> list[str]:
        """The entries that cover a lookup for the matrix at `index`."""
        names = self.lookups[index]
        return list(dict.fromkeys(entry for name in names for entry in self._entries.get(name, ())))

    @cached_property
    def _indices(self) -> Mapping[str, list[int]]:
        indices: dict[str, list[int]] = defaultdict(list)
        for index, names in enumerate(self.lookups):
            for name in names:
                indices[name].append(index)
        return indices

    def covering(self, pattern: str) -> list[int]:
        """The indices of the matrices with a lookup that an entry covers."""
        return sorted({index for name in self.covers.get(pattern, ()) for index in self._indices[name]})

    def covered(self, pattern: str, index: int) -> bool:
        """Whether an entry covers a lookup for the matrix at `index`."""
        return any(name in self.covers.get(pattern, ()) for name in self.lookups[index])


def base_of(method: Method) -> tuple[str, ListReader]:
    """The reading that defines the intended meaning of a list: compressed-tensors', or of entries as names."""
    if method == COMPRESSED:
        return BY_CLASS[0], readers_of_method(method)[BY_CLASS[0]]
    return NAMES, NAMED[method.partition(" ")[0]]


def read_all(
    readers: Iterable[str],
    matrices: Sequence[Matrix],
    ignore: Sequence[str],
    config: Mapping[str, Any],
    targets: Sequence[Target] = LINEAR,
    method: Method = COMPRESSED,
    content: Mapping[str, Any] | None = None,
) -> dict[str, Reading]:
    """Reads a list as each of `readers`, and as the base of the method.

    `targets`: of all groups of compressed-tensors. `content`: a quantization_config with a list for each reader under
    its own key, or None if all of them read `ignore`. Raises CkptkitError as `read_list`.
    """
    base, row = base_of(method)
    rows, known = {**readers_of_method(method), base: row}, Known()
    cache: dict[tuple[ListReader, tuple[str, ...]], Reading] = {}
    readings = {}
    for reader in (base, *readers):
        row = rows[reader]
        entries = tuple(ignore) if row.keys or reader == base else ()
        if content is not None and reader != base:
            entries = row.entries(content)
        if (row, entries) not in cache:
            cache[row, entries] = read_list(row, matrices, entries, config, known, targets)
        readings[reader] = cache[row, entries]
    return readings


@dataclass(frozen=True)
class _Layer:
    """A reader's lookup for one matrix: nothing, a container of experts, a layer and its parts, or module and class."""

    name: str = ""  # or its class; empty for experts that are looked up one by one
    parts: tuple[str, ...] = ()  # empty: the layer is not looked up
    experts: bool = False
    alike: bool = False  # the parts are names of one module, in releases of transformers
    answer: Answer | None = None  # known without a lookup


def read_list(
    row: ListReader,
    matrices: Sequence[Matrix],
    entries: Sequence[str],
    config: Mapping[str, Any],
    known: Known | None = None,
    targets: Sequence[Target] = (),
) -> Reading:
    """Predicts which matrices a reader treats as quantized if its list has these `entries`.

    `known` caches lookups of other readers. `targets`: of compressed-tensors' groups; trainers do not read them.
    Raises CkptkitError if there are too many entries for this number of names.
    """
    known = {} if known is None else known
    rewrite = engine_class("sglang", config).entry if matrices and row.namespace == "sglang" else str
    layers = list(_layers(row, matrices, config))
    own = frozenset(layer.name for layer in layers if layer.parts and not layer.experts)
    by_rule = (
        ("experts", row.experts, frozenset(layer.name for layer in layers if layer.experts)),
        ("part", row.part, frozenset(part for layer in layers if not layer.experts for part in layer.parts)),
        ("fused", row.fused, own),
        ("last", row.last, own),
    )
    tables = [
        (kind, rule, known.setdefault(names, Names(names)))
        for kind, rule, names in by_rule
        if rule is not None and rule is not never and names
    ]
    covers: dict[str, frozenset[str]] = {}
    covered: dict[str, set[str]] = {kind: set() for kind, *_ in by_rule}
    rewritten = {entry: rewrite(entry) for entry in entries}
    for _, rule, names in tables:
        names.check(list(rewritten.values()), rule)
    for entry, pattern in rewritten.items():
        covers[entry] = frozenset()
        for kind, rule, names in tables:
            try:
                hits = names.covered(rule, pattern)
            except CkptkitError:
                if COMPRESSED in row.methods:
                    raise
                continue  # `ListReader.refuses` reports it
            covered[kind] |= hits
            covers[entry] |= hits
    targeted = _targeted(row, layers, targets) if targets and row.namespace != "parameter" else None
    by_layer = {layer: _answer_of(layer, covered, targeted) for layer in dict.fromkeys(layers)}
    return Reading(
        tuple(_names_of(row, layer, covered) for layer in layers),
        covers,
        tuple(by_layer[layer][0] for layer in layers),
        tuple(by_layer[layer][1] for layer in layers) if targeted else (),
    )


def _layers(row: ListReader, matrices: Sequence[Matrix], config: Mapping[str, Any]) -> Iterator[_Layer]:
    """Yields the lookup for each matrix; a reader that holds a layer's routed experts as one looks up the first."""
    known: dict[str, _Layer] = {}
    for matrix in matrices:
        if not matrix.expert or row.namespace in ("entry", "class", "parameter"):
            yield _layer(row, matrix, config)
            continue
        container = container_of(matrix.module)
        if container not in known:
            known[container] = _layer(row, matrix, config)
        yield known[container]


def _layer(row: ListReader, matrix: Matrix, config: Mapping[str, Any]) -> _Layer:
    if row.namespace == "entry":
        is_excluded = _is_head(matrix) and not row.head
        return _Layer(answer="keeps") if is_excluded else _Layer(fused_layer(matrix.module, None), (matrix.module,))
    if row.namespace == "parameter":
        if not matrix.tensor.endswith(".weight"):
            return _Layer(answer="keeps" if COMPRESSED in row.methods else "either")
        packs = row.packs is None or row.packs(matrix.tensor, config)
        return _Layer(matrix.tensor, (matrix.tensor,)) if packs else _Layer(answer="keeps")
    if row.namespace == "class":
        if matrix.torch_class is not None:
            names = dict.fromkeys(filter(None, (matrix.module, matrix.transformers)))
            return _Layer(matrix.torch_class, tuple(names), alike=True)
        answer: Answer = "keeps" if matrix.reason not in (None, DRAFT_LAYER) else "either"  # it loads no drafts
        return _Layer("", (matrix.module,), answer=answer)
    if COMPRESSED not in row.methods and matrix.module.endswith(_EITHER):
        return _Layer(answer="either")
    return _in_transformers(row, matrix, config) if row.namespace == "transformers" else _in_engine(row, matrix, config)


def _in_engine(row: ListReader, matrix: Matrix, config: Mapping[str, Any]) -> _Layer:
    """With a list of compressed-tensors engines look up the first expert's three projections, else the container."""
    is_int4 = COMPRESSED in row.methods
    layer = matrix.sglang if row.namespace == "sglang" else matrix.vllm
    if not is_int4 and _is_head(matrix):
        if not row.head or config.get("tie_word_embeddings"):
            return _Layer(answer="either" if row.head else "keeps")
        layer = layer or matrix.module
    if layer is None:
        return _Layer(answer="keeps")
    is_experts = layer.endswith(".experts")
    if is_experts and not is_int4:
        return _Layer(layer, (layer,), experts=True)
    if not row.linears:
        return _Layer(answer="keeps")
    return _Layer("" if is_experts else layer, _parts_of_layer(row, layer, matrix, config))


def _is_head(matrix: Matrix) -> bool:
    """Whether it is the output embedding, which has another name in DeepSeek-V4's releases."""
    return matrix.tensor == "head.weight" or matrix.tensor.endswith("lm_head.weight")


def _parts_of_layer(row: ListReader, layer: str, matrix: Matrix, config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of a fused layer's parts, or the layer's own."""
    if row.namespace != "sglang":
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
        return _Layer(answer="keeps")  # excluded by default if there is no list
    return _Layer(matrix.module, (matrix.module,))


def _names_of(row: ListReader, layer: _Layer, covered: Mapping[str, set[str]]) -> tuple[str, ...]:
    """The names that decide: with a list of compressed-tensors the layer's if an entry covers it, else the parts."""
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
    """A reader's `targets`. Source: compressed-tensors `match_targets`; vLLM's and SGLang's `find_matched_target`."""

    row: ListReader
    targets: Sequence[Target]  # in the order in which it tries them
    by_name: Mapping[str, Target]

    def answer(self, layer: _Layer) -> tuple[Answer, Target | None]:
        """The answer for a layer that no entry covers, and its only target; SGLang requires a target for each layer."""
        found = self._find(layer)
        default: Answer = "refuses" if self.row.namespace == "sglang" else "keeps"
        answers: set[Answer] = {target.kind if target else default for target in found}
        return answers.pop() if len(answers) == 1 else "refuses", found[0] if len(set(found)) == 1 else None

    def _find(self, layer: _Layer) -> list[Target | None]:
        """The targets for a layer: by its name, its class, or its parts, if each has one; the first counts."""
        if layer.name in self.by_name:
            return [self.by_name[layer.name]]
        by_class = self._by_class(layer)
        parts = [self.by_name.get(name) for name in layer.parts]
        if layer.alike:
            return [next(filter(None, parts), by_class)]
        if not layer.name:
            return [part or by_class for part in parts]
        if None in parts or (by_class is not None and not self.row.parts_first):
            return [by_class]
        return parts[:1]

    def _by_class(self, layer: _Layer) -> Target | None:
        """The first target for a class; experts also have Linear. Source: vLLM's, SGLang's `compressed_tensors.py`."""
        if self.row.namespace == "class":
            return next((target for target in self.targets if class_name(target.pattern)(layer.name)), None)
        experts = "FusedMoE" if self.row.namespace == "sglang" else "RoutedExperts"
        name = _CLASSES.get(layer.name.rpartition(".")[2], _OTHER) if layer.name else experts
        found = next((target for target in self.targets if any_part(target.pattern)(name)), None)
        if found is None and name == experts:
            return next((target for target in self.targets if target.pattern == "Linear"), None)
        return found


def _targeted(row: ListReader, layers: Iterable[_Layer], targets: Sequence[Target]) -> _Targeted:
    is_engine = row.namespace != "class"
    names = Names(frozenset(name for layer in layers for name in (*layer.parts, *((layer.name,) if is_engine else ()))))
    targets = targets if is_engine else by_priority(targets)
    names.check([target.pattern for target in targets], regex_or_exact)
    by_name: dict[str, Target] = {}
    for target in reversed(targets):
        by_name |= dict.fromkeys(names.covered(regex_or_exact, target.pattern), target)
    return _Targeted(row, targets, by_name)

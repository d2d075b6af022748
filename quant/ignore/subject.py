"""A list of unquantized modules with its model's tensor names, as each reader takes it. Reads no weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

from ckptkit.converters.foreign import refuse_stated
from ckptkit.converters.registry import find_family
from ckptkit.converters.stored import as_spelled, with_unused
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.detect import require_own_files
from ckptkit.formats.hf.reader import SINGLE, read_json, shard_names
from ckptkit.formats.hf.shard import read_shard
from ckptkit.formats.hf.side_files import describe_quantization, quantization_of
from ckptkit.quant.formats.floats.layout import quantized_in
from ckptkit.quant.formats.groups import Group, Kind, Refusal, Target, groups_of, refusals, targets_of
from ckptkit.quant.formats.modelopt import differing_configs, flattened
from ckptkit.quant.formats.part_names import SCALE, packed_in
from ckptkit.quant.formats.scheme import listed
from ckptkit.quant.ignore.agree import Divergence, divergences, packed_by, severities, shown
from ckptkit.quant.ignore.matching import Names, covering
from ckptkit.quant.ignore.names import Matrix, fused_experts, matrices_named, parts_of
from ckptkit.quant.ignore.readers import (
    COMPRESSED,
    KEYS,
    LISTS,
    TRAINERS,
    ListReader,
    Method,
    readers_of,
    readers_of_method,
)
from ckptkit.quant.ignore.reading import Reading, base_of, read_all
from ckptkit.quant.ignore.tree import ClassTree, class_tree
from ckptkit.quant.patterns import check_entries

LintSeverity = Literal["error", "warning", "note"]
# The keys that every reader of a method finds between them, other methods' is `ignore`.
WRITTEN: Mapping[str, tuple[str, ...]] = {
    "fp8": ("modules_to_not_convert",),
    "mxfp8": ("modules_to_not_convert", "ignored_layers"),
    "mxfp4": ("modules_to_not_convert",),
    "quark": ("exclude",),
}
_NO_TARGET = "add a pattern of its name to `targets` of its config group; engines also ask for fused names (qkv_proj)"
# Linear layers that every engine holds unquantized, whatever the list.
_NEVER = (".indexer.weights_proj",)
_NOTHING_KNOWN = ClassTree(frozenset(), "lm_head", frozenset(), frozenset(), {}, whole=False)


@dataclass(frozen=True)
class IgnoreList:
    """A list of unquantized modules, the tensor names of its model, and how each reader takes the list."""

    config: Mapping[str, Any]
    method: Method
    ignore: tuple[str, ...]
    targets: tuple[Target, ...]  # of compressed-tensors' groups
    tree: ClassTree
    matrices: Sequence[Matrix]
    stored: frozenset[str] | None  # modules that the files hold packed; None: they hold none
    every_reader: tuple[str, ...]  # all whose reading of the list is looked at
    readers: tuple[str, ...]  # the readers that are checked
    asked: tuple[str, ...] | None  # names given with `--reader`; None: none were
    indexed: bool  # names come from files, not only from the model's classes
    scaled: frozenset[str]  # modules stored with a scale and not packed, so in another format (FP8)
    path: Path  # the directory
    leaves: frozenset[str]  # stored tensors that are not matrices, with and without their last part
    per_layer: frozenset[str] | None  # modules that `quantized_layers` names; None: there is no such key

    @cached_property
    def content(self) -> Mapping[str, Any]:
        """The quantization_config."""
        content: Mapping[str, Any] = quantization_of(self.config)
        return content

    @cached_property
    def readings(self) -> dict[str, Reading]:
        """How each reader takes the list, or the one of several that it reads."""
        return self._read(self.ignore, self.content)

    def read(self, ignore: Sequence[str]) -> dict[str, Reading]:
        """Returns how each reader takes another list, written under every key that is read."""
        return self._read(ignore, None)

    def _read(self, ignore: Sequence[str], content: Mapping[str, Any] | None) -> dict[str, Reading]:
        found = read_all(self.every_reader, self.matrices, ignore, self.config, self.targets, self.method, content)
        if self.per_layer is None:
            return found
        return {
            reader: replace(
                one,
                answers=tuple(
                    "keeps" if answer == "packs" and not self._is_in_a_layer(matrix.module) else answer
                    for matrix, answer in zip(self.matrices, one.answers, strict=True)
                ),
            )
            for reader, one in found.items()
        }

    def _is_in_a_layer(self, module: str) -> bool:
        """Whether `quantized_layers` names a module, or one that holds it, which it must to be quantized."""
        parts = module.split(".")
        return any(".".join(parts[:count]) in (self.per_layer or ()) for count in range(len(parts), 0, -1))

    @property
    def base(self) -> str:
        """The reading that tells what the list is meant to pack."""
        return base_of(self.method)[0]

    @cached_property
    def packed(self) -> tuple[bool, ...]:
        """Whether each matrix is quantized: by stored names if any is, else by classes and what the list names."""
        if self.stored is not None:
            return tuple(matrix.module in self.stored for matrix in self.matrices)
        return tuple(packed_by(self.matrices, self.readings[self.base]))

    @cached_property
    def pairs(self) -> list[tuple[Matrix, bool]]:
        """Each matrix, and whether it is quantized."""
        return list(zip(self.matrices, self.packed, strict=True))

    @cached_property
    def others(self) -> frozenset[str]:
        """Modules in another format than INT4: by stored names, else by what compressed-tensors makes of the groups."""
        if self.stored is not None:
            return self.scaled
        pairs = zip(self.matrices, self.readings[self.base].answers, strict=True)
        return frozenset(matrix.module for matrix, answer in pairs if answer == "other")

    @cached_property
    def severities(self) -> Mapping[str, LintSeverity]:
        """The severity of each reader's disagreement with what is packed, as in `verify`."""
        if self.is_compressed:
            return dict(severities(self.config, self.ignore, self.tree, self.asked))
        if self.asked is not None:
            return {reader: "error" if reader in self.readers else "warning" for reader in self.rows}
        return {
            reader: "note" if reader in TRAINERS else "error" if reader.startswith("SGLang") else "warning"
            for reader in self.rows
        }

    def refusals(self) -> Iterator[Refusal]:
        """What readers refuse of the config as a whole, and entries for which one raises."""
        if self.is_compressed:
            yield from refusals(self.config)
            return
        for reader, row in self.rows.items():
            if bad := list(filter(row.refuses, row.entries(self.content))):
                what = f"{len(bad)} entries are not regular expressions, which {reader} takes them for: '{bad[0]}'"
                yield Refusal((reader,), what, "name whole modules, without `*`")

    def next_move(self, readers: Sequence[str], patterns: Sequence[str], entry: str | None) -> str:
        """What to do about readers that take a tensor otherwise than it is. `entry`: one that leaves it out for all."""
        if self.is_compressed:
            if entry or patterns:
                return f"use '{entry}'" if entry else f"replace {shown(patterns)} by entries that spare it"
            return _NO_TARGET if self.by_name else "quantize again"
        if set(readers) <= set(TRAINERS):
            return f"quantize the release as {' and '.join(readers)} would, or roll out unquantized"
        if patterns:
            return f"replace {shown(patterns)} by whole module names: `ckptkit lint --fix` writes such a list"
        if entry is None:
            return "quantize again, or take the entry out that names it"
        return f"name the whole module under `{self.key}`: `ckptkit lint --fix` writes such a list"

    @property
    def key(self) -> str:
        """The key of the config that has the list, or that it belongs under."""
        return next(filter(self.content.get, KEYS[self.method]), WRITTEN.get(self.method, ("ignore",))[0])

    def names_any(self, pattern: str) -> bool:
        """Whether an entry names something that is stored and no reader looks up, or a layer as an engine names it."""
        having = [self._named.get(part.lower(), ()) for part in pattern.split(".")]
        return any(f".{pattern}." in f".{name}." for name in min(having, key=len))

    @cached_property
    def _named(self) -> Mapping[str, Sequence[str]]:
        layers = {name for matrix in self.matrices for name in (matrix.sglang, matrix.vllm) if name}
        parts = (part for layer in layers for part in (layer, *parts_of(layer)))
        return Names(frozenset(chain(self.leaves, parts))).by_part

    @cached_property
    def rows(self) -> Mapping[str, ListReader]:
        """The readers that know this format, and how they take its list."""
        return readers_of_method(self.method)

    @property
    def is_compressed(self) -> bool:
        """Whether the format is compressed-tensors'."""
        return self.method == COMPRESSED

    @cached_property
    def is_int4(self) -> bool:
        """Whether INT4 is among the formats."""
        return self.is_compressed and any(group.kind == "packs" for group in groups_of(self.config))

    @property
    def by_name(self) -> bool:
        """Whether targets name modules, and not only the class Linear."""
        return [target.pattern for target in self.targets] != ["Linear"]

    @property
    def whole(self) -> bool:
        """Whether all module names are known, so that an entry that covers none is useless."""
        return self.indexed or (self.tree.whole and not self.tree.drafts)

    @cached_property
    def spelled(self) -> Callable[[str], frozenset[str]]:
        """Says of an entry which Linear layers it covers, by transformers' names."""
        return covering(self.ignore, self.tree.spelled)

    @cached_property
    def idle(self) -> list[str]:
        """Entries that cover nothing for any reader."""
        return [entry for entry in self.ignore if not any(one.covers.get(entry) for one in self.readings.values())]

    def divergences(self, readings: Mapping[str, Reading], readers: Sequence[str] | None = None) -> list[Divergence]:
        """Returns where readers, those that are checked, disagree with what is packed."""
        checked = self.readers if readers is None else readers
        found = divergences(self.matrices, self.packed, readings, checked, self.others, self.base)
        return [one if one.covering else replace(one, cause=self._cause(one)) for one in found]

    def _cause(self, one: Divergence) -> str:
        """Why a reader leaves a tensor out that is quantized, or the reverse, where no entry covers it."""
        row = self.rows[one.reader]
        if row.packs is not None:
            return "because of its name"
        unread = [key for key in KEYS[self.method] if self.content.get(key) and key not in row.keys]
        if one.answer == "packs" and unread and not row.entries(self.content):
            return f"because it does not read `{unread[0]}`"
        named = self.per_layer is None or one.answer != "keeps"
        return one.cause if named else "because `quantized_layers` does not name it"

    @property
    def engines(self) -> tuple[str, ...]:
        """The readers whose agreement makes a list portable: engines and transformers, of those that are checked."""
        engines = tuple(reader for reader in self.rows if reader not in TRAINERS)
        return tuple(reader for reader in engines if reader in self.readers) or engines

    @cached_property
    def is_agreed(self) -> bool:
        """Whether engines and transformers agree on the list as it is, in a format other than compressed-tensors'."""
        is_one_list = "ignore" not in differing_configs(self.path)
        return is_one_list and not self.divergences(self.readings, self.engines) and not list(self.refusals())


def open_subject(path: Path, readers: Sequence[str] | None = None) -> tuple[IgnoreList, str]:
    """Loads the list at `path`, a directory with config.json, and says where its tensor names come from.

    Without a quantization_config the one of hf_quant_config.json counts. `readers` (as `--reader`): those that must
    agree; None: all. Raises CkptkitError when there is none, for a format that is not read (as `refuse_stated`), and
    for INT4 of a model that is not known.
    """
    file = path / "config.json"
    require_own_files(path)
    config: Mapping[str, Any] = flattened(read_json(file), path)
    refuse_stated(config, path)
    content, method = quantization_of(config), _method_of(config, path)
    groups = groups_of(config) if method == COMPRESSED else ()
    int4 = any(group.kind == "packs" for group in groups)
    if method == COMPRESSED:
        if not int4 and not any(_bits(group) for group in groups):
            raise CkptkitError(
                f"{file}: no config group has INT4, FP8 or FP4 weights (format {content.get('format')!r})",
                "lint looks at these formats and their ignore lists",
            )
        ignore = listed(content, "ignore")
    else:
        lists = (several for key in KEYS[method] if isinstance(several := content.get(key), list))
        ignore = list(dict.fromkeys(str(entry) for several in lists for entry in several))
    targets = targets_of(groups) if int4 else _float_targets(groups)
    check_entries(ignore, f"{file}: {KEYS[method][0]}")
    check_entries([target.pattern for target in targets], f"{file}: targets")
    stored, source = _stored_names(path)
    config, tree, names, matrices = _model(config, stored, any_format=not int4)
    packed = frozenset(packed_in(names) if int4 or _has_fp4(groups) else quantized_in(names))
    scaled = frozenset(name.removesuffix(SCALE) for name in names if name.endswith(SCALE)) if groups else frozenset()
    # slime reads compressed-tensors' lists for INT4, and no other groups.
    every = tuple(one for one in readers_of_method(method) if int4 or method != COMPRESSED or one != "slime")
    layers = content.get("quantized_layers") if method != COMPRESSED else None
    return IgnoreList(
        config,
        method,
        tuple(dict.fromkeys(ignore)),
        targets,
        tree,
        matrices,
        packed or None,
        every,
        every if readers is None else readers_of(readers, method),
        None if readers is None else tuple(readers),
        bool(stored),
        scaled - packed,
        path,
        _leaves(stored, matrices),
        frozenset(layers) if isinstance(layers, Mapping) else None,
    ), source


def _model(
    config: Mapping[str, Any], stored: Sequence[str], *, any_format: bool
) -> tuple[Mapping[str, Any], ClassTree, Sequence[str], list[Matrix]]:
    """The config as its tensors are stored, the model's modules, the names to judge, and its matrices.

    `any_format`: not INT4, so that a model that is not known has no matrices, and without weights draft layers are not
    judged: nothing tells whether they are quantized.
    """
    family = find_family(config)
    if any_format and (family is None or family.release is None):
        return config, _NOTHING_KNOWN, stored, []
    config = with_unused(as_spelled(config, stored), set(stored))
    tree = class_tree(config)
    drafts = () if any_format else _draft_modules(tree)
    names = stored or [f"{module}.weight" for module in [*tree.others, *sorted(tree.linears), *drafts]]
    matrices = [*matrices_named(names, tree, config), *fused_experts(names, tree, config)]
    return config, tree, names, _allowed(matrices, tree) if any_format else matrices


def _bits(group: Group) -> object:
    """The bits of a group of floats; None for any other."""
    return group.weights.get("num_bits") if group.weights.get("type") == "float" else None


def _has_fp4(groups: Iterable[Group]) -> bool:
    return any(_bits(group) == 4 for group in groups)


def _float_targets(groups: Sequence[Group]) -> tuple[Target, ...]:
    """The targets of groups of floats: FP4 counts as packed where there is any, and FP8 beside it as another format."""
    main = 4 if _has_fp4(groups) else 8
    kinds: tuple[Kind, ...] = tuple("packs" if _bits(group) == main else "other" for group in groups)
    return tuple(replace(one, kind=kinds[one.group]) for one in targets_of(groups) if groups[one.group].weights)


def _stored_names(path: Path) -> tuple[list[str], str]:
    """Returns the names of stored tensors (none without weights) and where they come from."""
    if (weight_map := shard_names(path)) is not None:
        return list(weight_map), "the index"
    if (path / SINGLE).exists():
        return list(read_shard(path / SINGLE).specs), f"the header of {SINGLE}"
    return [], "the model's classes, since there are no weights"


def _draft_modules(tree: ClassTree) -> Iterator[str]:
    """Yields the modules of draft layers: the one that joins their inputs, and those of the layer that each is like."""
    for draft in tree.drafts:
        yield from [draft.joint] if draft.joint else []
        yield from (draft.layer + tail.replace("#", "0") for tail in sorted(tree.tails_of(draft)))


def _method_of(config: Mapping[str, Any], where: object) -> Method:
    """The method of a quantization_config whose list is read here.

    Raises CkptkitError for any other.
    """
    found = quantization_of(config)
    content = found if isinstance(found, Mapping) else {}
    algo = str(content.get("quant_algo") or "").upper()
    method = str(content.get("quant_method", "modelopt" if algo else None))
    if method.startswith("modelopt") and algo:
        method = f"modelopt {'fp4' if 'NVFP4' in algo else 'mxfp8' if 'MXFP8' in algo else 'fp8'}"
    if method not in get_args(Method):
        known = sorted({one.partition(" ")[0] for row in LISTS for one in row.methods})
        raise CkptkitError(
            f"{where}: {describe_quantization(config)}",
            f"lint looks at the lists of {', '.join(known[:-1])} and {known[-1]}",
        )
    known_method: Method = method  # type: ignore[assignment]
    return known_method


def _leaves(names: Iterable[str], matrices: Iterable[Matrix]) -> frozenset[str]:
    """Stored tensors other than the matrices, by name and by module: norms, biases, and what hangs on a matrix."""
    judged = {matrix.tensor for matrix in matrices}
    rest = [name for name in names if name not in judged]
    return frozenset([*rest, *(name.rpartition(".")[0] for name in rest)])


def _allowed(matrices: Iterable[Matrix], tree: ClassTree) -> list[Matrix]:
    """The matrices with the reasons that hold for any format: draft layers and towers may be quantized in these.

    A draft layer that SGLang calls as a layer of the model is left out with that one, or quantized. Experts that are
    one tensor a layer may be, too. Linear layers that no INT4 release quantizes are not judged: releases differ.
    """
    return [
        replace(matrix, reason=_reason(matrix, tree), sglang=matrix.sglang or matrix.sglang_own)
        for matrix in matrices
        if not tree.is_kept(matrix.module)
    ]


def _reason(matrix: Matrix, tree: ClassTree) -> str | None:
    if matrix.module.endswith(_NEVER):
        return "engines hold it unquantized"
    if matrix.module in tree.gates or (matrix.module in tree.others and not matrix.expert):
        return matrix.reason
    return None

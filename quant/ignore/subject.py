"""A list of unquantized modules, the tensor names of its model, and each reader's interpretation. Reads no weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, cast, get_args

from ckptkit.converters.foreign import refuse_declared_format
from ckptkit.converters.registry import find_family
from ckptkit.converters.stored import nest_text_config, with_unused
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.detect import require_own_files
from ckptkit.formats.hf.reader import SINGLE, read_json, shard_names
from ckptkit.formats.hf.shard import read_shard
from ckptkit.formats.hf.side_files import describe_quantization, quantization_of
from ckptkit.quant.formats.floats.layout import quantized_in
from ckptkit.quant.formats.groups import Group, Kind, Refusal, Target, find_refusals, groups_of, targets_of
from ckptkit.quant.formats.modelopt import differing_configs, unify_configs
from ckptkit.quant.formats.part_names import SCALE, packed_in
from ckptkit.quant.formats.scheme import get_list
from ckptkit.quant.ignore.agree import Divergence, divergences, packed_by, quote_some, severities
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
from ckptkit.quant.ignore.reading import Answer, Reading, base_of, read_all
from ckptkit.quant.ignore.tree import ClassTree, class_tree
from ckptkit.quant.patterns import check_entries

LintSeverity = Literal["error", "warning", "note"]
# The keys that together reach every reader of a method; other methods have `ignore`.
WRITTEN: Mapping[str, tuple[str, ...]] = {
    "fp8": ("modules_to_not_convert",),
    "mxfp8": ("modules_to_not_convert", "ignored_layers"),
    "mxfp4": ("modules_to_not_convert",),
    "quark": ("exclude",),
}
_NO_TARGET = "add a pattern for the layer to `targets` of its config group; engines also look up fused names (qkv_proj)"
# Linear layers that every engine holds unquantized, regardless of the list.
_NEVER = (".indexer.weights_proj",)
_NOTHING_KNOWN = ClassTree(frozenset(), "lm_head", frozenset(), frozenset(), {}, whole=False)


@dataclass(frozen=True)
class IgnoreList:
    """A list of unquantized modules, the tensor names of its model, and each reader's interpretation of the list."""

    config: Mapping[str, Any]
    method: Method
    ignore: tuple[str, ...]
    targets: tuple[Target, ...]  # of compressed-tensors' groups
    tree: ClassTree
    matrices: Sequence[Matrix]
    stored: frozenset[str] | None  # modules that are stored packed, or None without any
    every_reader: tuple[str, ...]  # all readers with a reading of the list
    readers: tuple[str, ...]  # the readers that are checked
    asked: tuple[str, ...] | None  # the names given with `--reader`, if any
    indexed: bool  # names come from files, not only from the model's classes
    scaled: frozenset[str]  # modules stored with a scale and not packed, so in another format (FP8)
    path: Path  # the directory
    leaves: frozenset[str]  # stored tensors that are not matrices, with and without their last part
    per_layer: frozenset[str] | None  # modules that `quantized_layers` names, or None without this key

    @cached_property
    def content(self) -> Mapping[str, Any]:
        content: Mapping[str, Any] = quantization_of(self.config)
        return content

    @cached_property
    def readings(self) -> dict[str, Reading]:
        """Each reader's interpretation of the list, or of the one among several that it reads."""
        return self._read(self.ignore, self.content)

    def read(self, ignore: Sequence[str]) -> dict[str, Reading]:
        """Returns each reader's interpretation of another list, written under every key that is read."""
        return self._read(ignore, None)

    def _read(self, ignore: Sequence[str], content: Mapping[str, Any] | None) -> dict[str, Reading]:
        readings = read_all(self.every_reader, self.matrices, ignore, self.config, self.targets, self.method, content)
        if self.per_layer is None:
            return readings
        listed_layers = [self._is_in_a_layer(matrix.module) for matrix in self.matrices]

        def answers(reading: Reading) -> tuple[Answer, ...]:
            pairs = zip(reading.answers, listed_layers, strict=True)
            return tuple("keeps" if answer == "packs" and not is_listed else answer for answer, is_listed in pairs)

        return {reader: replace(reading, answers=answers(reading)) for reader, reading in readings.items()}

    def _is_in_a_layer(self, module: str) -> bool:
        """Whether `quantized_layers` names a module or one that contains it, so that it is quantized."""
        parts = module.split(".")
        return any(".".join(parts[:count]) in (self.per_layer or ()) for count in range(len(parts), 0, -1))

    @property
    def base(self) -> str:
        """The reader that defines the intended packing."""
        return base_of(self.method)[0]

    @cached_property
    def packed(self) -> tuple[bool, ...]:
        """Whether each matrix is quantized: by stored names if any is, else by the model's classes and the list."""
        if self.stored is None:
            return tuple(packed_by(self.matrices, self.readings[self.base]))
        return tuple(matrix.module in self.stored for matrix in self.matrices)

    @cached_property
    def pairs(self) -> list[tuple[Matrix, bool]]:
        return list(zip(self.matrices, self.packed, strict=True))

    @cached_property
    def others(self) -> frozenset[str]:
        """Modules in another format than INT4: by stored names, else by compressed-tensors' reading of the groups."""
        if self.stored is not None:
            return self.scaled
        pairs = zip(self.matrices, self.readings[self.base].answers, strict=True)
        return frozenset(matrix.module for matrix, answer in pairs if answer == "other")

    @cached_property
    def severities(self) -> Mapping[str, LintSeverity]:
        """The severity of each reader's disagreement with the packed weights, like in `verify`."""
        if self.is_compressed:
            return dict(severities(self.config, self.ignore, self.tree, self.asked))
        if self.asked is not None:
            return {reader: "error" if reader in self.readers else "warning" for reader in self.rows}
        return {
            reader: "note" if reader in TRAINERS else "error" if reader.startswith("SGLang") else "warning"
            for reader in self.rows
        }

    def find_refusals(self) -> Iterator[Refusal]:
        """Yields the parts of the config that readers refuse, and entries for which one raises."""
        if self.is_compressed:
            yield from find_refusals(self.config)
            return
        for reader, row in self.rows.items():
            if bad := list(filter(row.refuses, row.entries(self.content))):
                what = f"{len(bad)} entries are not the regular expressions that {reader} expects: '{bad[0]}'"
                yield Refusal((reader,), what, "use full module names, without `*`")

    def next_move(self, readers: Sequence[str], patterns: Sequence[str], entry: str | None) -> str:
        """Suggests how to fix a tensor that readers misjudge. `entry`: an entry that excludes it for all readers."""
        if self.is_compressed:
            if entry or patterns:
                return f"use the entry '{entry}'" if entry else f"replace {quote_some(patterns)} by narrower entries"
            return _NO_TARGET if self.by_name else "quantize again"
        if set(readers) <= set(TRAINERS):
            return f"quantize the release as {' and '.join(readers)} would, or roll out unquantized"
        if patterns:
            return f"replace {quote_some(patterns)} by full module names: `ckptkit lint --fix` writes such a list"
        if entry is None:
            return "quantize again, or remove the entry that names the tensor"
        return f"add the full module name to `{self.key}`: `ckptkit lint --fix` writes such a list"

    @property
    def key(self) -> str:
        """The key of the list in the config, or the key for a new one."""
        return next(filter(self.content.get, KEYS[self.method]), WRITTEN.get(self.method, ("ignore",))[0])

    def names_any(self, pattern: str) -> bool:
        """Whether an entry names a stored tensor that no reader looks up, or a layer by an engine's name."""
        candidates = [self._named.get(part.lower(), ()) for part in pattern.split(".")]
        return any(f".{pattern}." in f".{name}." for name in min(candidates, key=len))

    @cached_property
    def _named(self) -> Mapping[str, Sequence[str]]:
        layers = {name for matrix in self.matrices for name in (matrix.sglang, matrix.vllm) if name}
        parts = (part for layer in layers for part in (layer, *parts_of(layer)))
        return Names(frozenset(chain(self.leaves, parts))).by_part

    @cached_property
    def rows(self) -> Mapping[str, ListReader]:
        """The readers of this format."""
        return readers_of_method(self.method)

    @property
    def is_compressed(self) -> bool:
        return self.method == COMPRESSED

    @cached_property
    def is_int4(self) -> bool:
        return self.is_compressed and any(group.kind == "packs" for group in groups_of(self.config))

    @property
    def by_name(self) -> bool:
        """Whether targets are more than the class Linear."""
        return [target.pattern for target in self.targets] != ["Linear"]

    @property
    def whole(self) -> bool:
        """Whether all module names are known, so that an entry that covers none is useless."""
        return self.indexed or (self.tree.whole and not self.tree.drafts)

    @cached_property
    def covered_linears(self) -> Callable[[str], frozenset[str]]:
        """Maps an entry to the Linear layers that it covers, by transformers' names."""
        return covering(self.ignore, self.tree.linear_names)

    @cached_property
    def idle(self) -> list[str]:
        """Entries that cover nothing for any reader."""
        return [entry for entry in self.ignore if not any(one.covers.get(entry) for one in self.readings.values())]

    def divergences(self, readings: Mapping[str, Reading], readers: Sequence[str] | None = None) -> list[Divergence]:
        """Returns the disagreements of `readers`, or of all checked readers, with the packed weights."""
        checked = self.readers if readers is None else readers
        several = divergences(self.matrices, self.packed, readings, checked, self.others, self.base)
        return [one if one.covering else replace(one, cause=self._cause(one)) for one in several]

    def _cause(self, one: Divergence) -> str:
        """The cause of a divergence over a tensor that no entry covers."""
        row = self.rows[one.reader]
        if row.packs is not None:
            return "because of the tensor's name"
        unread = [key for key in KEYS[self.method] if self.content.get(key) and key not in row.keys]
        if one.answer == "packs" and unread and not row.entries(self.content):
            return f"because it does not read `{unread[0]}`"
        is_per_layer = self.per_layer is not None and one.answer == "keeps"
        return "because `quantized_layers` does not name it" if is_per_layer else one.cause

    @property
    def engines(self) -> tuple[str, ...]:
        """The readers that must agree on a portable list: engines and transformers, among the checked ones."""
        engines = tuple(reader for reader in self.rows if reader not in TRAINERS)
        return tuple(reader for reader in engines if reader in self.readers) or engines

    @cached_property
    def is_agreed(self) -> bool:
        """Whether engines and transformers agree on the current list; not for compressed-tensors."""
        is_one_list = "ignore" not in differing_configs(self.path)
        return is_one_list and not self.divergences(self.readings, self.engines) and not list(self.find_refusals())


def open_subject(path: Path, readers: Sequence[str] | None = None) -> tuple[IgnoreList, str]:
    """Loads the list at `path`, a directory with config.json; also returns the source of its tensor names.

    Without a quantization_config, reads that of hf_quant_config.json. `readers` (like `--reader`): those that must
    agree, or None for all. Raises CkptkitError for a missing list, an unsupported format (like
    `refuse_declared_format`), and INT4 of an unknown model.
    """
    file = path / "config.json"
    require_own_files(path)
    config: Mapping[str, Any] = unify_configs(read_json(file), path)
    refuse_declared_format(config, path)
    content, method = quantization_of(config), _method_of(config, path)
    groups = groups_of(config) if method == COMPRESSED else ()
    int4 = any(group.kind == "packs" for group in groups)
    if method == COMPRESSED:
        if not int4 and not any(_bits(group) for group in groups):
            message = f"{file}: no config group has INT4, FP8 or FP4 weights (format {content.get('format')!r})"
            raise CkptkitError(message, "pass a checkpoint with INT4, FP8 or FP4 weights to lint")
        ignore = get_list(content, "ignore")
    else:
        lists = (entries for key in KEYS[method] if isinstance(entries := content.get(key), list))
        ignore = list(dict.fromkeys(str(entry) for entries in lists for entry in entries))
    has_fp4 = any(_bits(group) == 4 for group in groups)
    targets = targets_of(groups) if int4 else _float_targets(groups, 4 if has_fp4 else 8)
    check_entries(ignore, f"{file}: {KEYS[method][0]}")
    check_entries([target.pattern for target in targets], f"{file}: targets")
    stored, source = _stored_names(path)
    config, tree, names, matrices = _model(config, stored, any_format=not int4)
    packed = frozenset(packed_in(names) if int4 or has_fp4 else quantized_in(names))
    scaled = frozenset(name.removesuffix(SCALE) for name in names if name.endswith(SCALE)) if groups else frozenset()
    # slime reads compressed-tensors' lists only for INT4.
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
    """Returns the config of the stored tensors, the model's modules, their tensor names, and the known matrices."""
    family = find_family(config)
    if any_format and (family is None or family.release is None):
        return config, _NOTHING_KNOWN, stored, []
    config = with_unused(nest_text_config(config, stored), set(stored))
    tree = class_tree(config)
    drafts = () if any_format else _draft_modules(tree)
    names = stored or [f"{module}.weight" for module in [*tree.others, *sorted(tree.linears), *drafts]]
    matrices = [*matrices_named(names, tree, config), *fused_experts(names, tree, config)]
    return config, tree, names, _allowed(matrices, tree) if any_format else matrices


def _bits(group: Group) -> object:
    """The bits of a group of floats, or None for any other group."""
    return group.weights.get("num_bits") if group.weights.get("type") == "float" else None


def _float_targets(groups: Sequence[Group], bits: int) -> tuple[Target, ...]:
    """The targets of groups of floats: those with these bits count as packed, the others as another format."""
    kinds: tuple[Kind, ...] = tuple("packs" if _bits(group) == bits else "other" for group in groups)
    return tuple(replace(one, kind=kinds[one.group]) for one in targets_of(groups) if groups[one.group].weights)


def _stored_names(path: Path) -> tuple[list[str], str]:
    """Returns the names of stored tensors (none without weights) and their source."""
    if (weight_map := shard_names(path)) is not None:
        return list(weight_map), "the index"
    if (path / SINGLE).exists():
        return list(read_shard(path / SINGLE).specs), f"the header of {SINGLE}"
    return [], "the model's class, since no weights are stored"


def _draft_modules(tree: ClassTree) -> Iterator[str]:
    """Yields the modules of draft layers: their joint projection, and those of the decoder layer that they copy."""
    for draft in tree.drafts:
        yield from [draft.joint] if draft.joint else []
        yield from (draft.layer + tail.replace("#", "0") for tail in sorted(tree.tails_of(draft)))


def _method_of(config: Mapping[str, Any], where: object) -> Method:
    """The method of the quantization_config. Raises CkptkitError if lint does not support it."""
    stated = quantization_of(config)
    content = stated if isinstance(stated, Mapping) else {}
    algo = str(content.get("quant_algo") or "").upper()
    method = str(content.get("quant_method", "modelopt" if algo else None))
    if method.startswith("modelopt") and algo:
        method = f"modelopt {'fp4' if 'NVFP4' in algo else 'mxfp8' if 'MXFP8' in algo else 'fp8'}"
    if method not in get_args(Method):
        known = sorted({one.partition(" ")[0] for row in LISTS for one in row.methods})
        message = f"{where}: {describe_quantization(config)}"
        raise CkptkitError(message, f"lint only checks the lists of {', '.join(known[:-1])} and {known[-1]}")
    return cast("Method", method)


def _leaves(names: Iterable[str], matrices: Iterable[Matrix]) -> frozenset[str]:
    """Stored tensors other than the matrices, by name and by module: norms, biases, scales."""
    tensors = {matrix.tensor for matrix in matrices}
    leaves = [name for name in names if name not in tensors]
    return frozenset([*leaves, *(name.rpartition(".")[0] for name in leaves)])


def _allowed(matrices: Iterable[Matrix], tree: ClassTree) -> list[Matrix]:
    """The matrices with reasons for all formats, without Linear layers that only some releases quantize."""
    return [
        replace(matrix, reason=_reason(matrix, tree), sglang=matrix.sglang or matrix.sglang_own)
        for matrix in matrices
        if not tree.is_kept(matrix.module)
    ]


def _reason(matrix: Matrix, tree: ClassTree) -> str | None:
    if matrix.module.endswith(_NEVER):
        return "engines hold this layer unquantized"
    if matrix.module in tree.gates or (matrix.module in tree.others and not matrix.expert):
        return matrix.reason
    return None

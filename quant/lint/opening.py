"""Loads the list of unquantized modules and the tensor names of a checkpoint. Reads no weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.reader import SINGLE, read_json, shard_names
from ckptkit.formats.hf.shard import read_shard
from ckptkit.formats.hf.side_files import quantization_of
from converters.foreign import refuse_stated
from converters.registry import FAMILIES
from converters.stored import as_spelled
from quant.formats.floats.table import quantized_in
from quant.formats.groups import Group, Kind, Target, groups_of, targets_of
from quant.formats.modelopt import flattened
from quant.formats.part_names import SCALE, packed_in
from quant.formats.scheme import listed
from quant.lint.low_precision import allowed, leaves, method_of, open_list
from quant.lint.subject import IgnoreList
from quant.patterns.entries import check_entries
from quant.selection.class_tree import class_tree
from quant.selection.matrices import Matrix, fused_experts, matrices_named
from quant.selection.readers import ALL_READERS, readers_of
from quant.selection.tree import ClassTree

_NOTHING_KNOWN = ClassTree(frozenset(), "lm_head", frozenset(), frozenset(), {}, whole=False)


def open_subject(path: Path, readers: Sequence[str] | None = None) -> tuple[IgnoreList, str]:
    """Loads the subject at `path`, a directory with config.json, and says where its names come from.

    Without a quantization_config the one of hf_quant_config.json counts. Raises CkptkitError when there is none, for a
    format that is not read (as `refuse_stated`), and for INT4 of a model that is not known.
    """
    file = path / "config.json"
    config: Mapping[str, Any] = flattened(read_json(file), path)
    refuse_stated(config, path)
    content = quantization_of(config)
    if isinstance(content, Mapping) and content.get("quant_method") == "compressed-tensors":
        return _compressed_tensors(path, config, content, readers)
    method_of(content if isinstance(content, Mapping) else {}, file)
    stored, source = _stored_names(path)
    config, tree, _, matrices = _model(config, stored, any_format=True)
    return open_list(config, matrices, tree, stored, readers, path), source


def _compressed_tensors(
    path: Path, config: Mapping[str, Any], content: Mapping[str, Any], readers: Sequence[str] | None
) -> tuple[IgnoreList, str]:
    file = path / "config.json"
    ignore, groups = listed(content, "ignore"), groups_of(config)
    int4 = any(group.kind == "packs" for group in groups)
    if not int4 and not any(_bits(group) for group in groups):
        raise CkptkitError(
            f"{file}: no config group has INT4, FP8 or FP4 weights (format {content.get('format')!r})",
            "lint looks at these formats and their ignore lists",
        )
    targets = targets_of(groups) if int4 else _float_targets(groups)
    check_entries(ignore, f"{file}: ignore")
    check_entries([target.pattern for target in targets], f"{file}: targets")
    stored, source = _stored_names(path)
    config, tree, names, matrices = _model(config, stored, any_format=not int4)
    packed = frozenset(packed_in(names) if int4 or _has_fp4(groups) else quantized_in(names))
    known = [name for name in ALL_READERS if int4 or name not in ("slime", "miles")]
    return IgnoreList(
        config,
        tuple(dict.fromkeys(ignore)),
        targets,
        tree,
        matrices,
        packed or None,
        readers_of(known if readers is None else readers),
        None if readers is None else tuple(readers),
        bool(stored),
        frozenset(name.removesuffix(SCALE) for name in names if name.endswith(SCALE)) - packed,
        frozenset() if int4 else leaves(stored, matrices),
    ), source


def _model(
    config: Mapping[str, Any], stored: Sequence[str], *, any_format: bool
) -> tuple[Mapping[str, Any], ClassTree, Sequence[str], list[Matrix]]:
    """The config as its tensors are spelled, the model's modules, the names to judge, and its matrices.

    `any_format`: not INT4, so that a model that is not known has no matrices, and without weights draft layers are not
    judged: nothing tells whether they are quantized.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if any_format and (family is None or family.release is None):
        return config, _NOTHING_KNOWN, stored, []
    config = as_spelled(config, stored)
    tree = class_tree(config)
    drafts = () if any_format else _draft_modules(tree)
    names = stored or [f"{module}.weight" for module in [*tree.others, *sorted(tree.linears), *drafts]]
    matrices = [*matrices_named(names, tree, config), *fused_experts(names, tree, config)]
    return config, tree, names, allowed(matrices, tree) if any_format else matrices


def _bits(group: Group) -> object:
    """The bits of a group of floats; None for any other."""
    return group.weights.get("num_bits") if group.weights.get("type") == "float" else None


def _has_fp4(groups: Iterable[Group]) -> bool:
    return any(_bits(group) == 4 for group in groups)


def _float_targets(groups: Sequence[Group]) -> tuple[Target, ...]:
    """The targets of groups of floats: FP4 counts as packed where there is any, and FP8 beside it as another format."""
    main = 4 if _has_fp4(groups) else 8
    kinds: dict[str, Kind] = {
        target: "packs" if _bits(group) == main else "other"
        for group in groups
        if group.weights
        for target in group.targets
    }
    return tuple(Target(pattern, kind) for pattern, kind in kinds.items())


def _stored_names(path: Path) -> tuple[list[str], str]:
    """Returns the names of stored tensors (none without weights) and where they come from."""
    if (weight_map := shard_names(path)) is not None:
        return list(weight_map), "the index"
    if (path / SINGLE).exists():
        return list(read_shard(path / SINGLE).specs), f"the header of {SINGLE}"
    return [], "the model's classes, since there are no weights"


def _draft_modules(tree: ClassTree) -> Iterator[str]:
    """Yields the modules of draft layers: the one that joins their inputs, and the same as in the last layer."""
    for draft in tree.drafts:
        yield draft.joint
        yield from (draft.layer + tail.replace("#", "0") for tail in sorted(tree.last_tails))

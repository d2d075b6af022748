"""Loads the list of unquantized modules and the tensor names of a checkpoint. Reads no weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.detect import require_own_files
from ckptkit.formats.hf.reader import SINGLE, read_json, shard_names
from ckptkit.formats.hf.shard import read_shard
from ckptkit.formats.hf.side_files import describe_quantization, quantization_of
from converters.foreign import refuse_stated
from converters.registry import find_family
from converters.stored import as_spelled, with_unused
from quant.formats.floats.layout import quantized_in
from quant.formats.groups import Group, Kind, Target, groups_of, targets_of
from quant.formats.modelopt import flattened
from quant.formats.part_names import SCALE, packed_in
from quant.formats.scheme import listed
from quant.lint.subject import IgnoreList, LowPrecisionList
from quant.lists.table import KEYS, LISTS, Method, readers_of_method
from quant.patterns import check_entries
from quant.selection.matrices import Matrix, fused_experts, matrices_named
from quant.selection.readers import ALL_READERS, LIST_READERS, readers_of
from quant.selection.tree import ClassTree, class_tree

# Linear layers that every engine holds unquantized, whatever the list.
_NEVER = (".indexer.weights_proj",)

_NOTHING_KNOWN = ClassTree(frozenset(), "lm_head", frozenset(), frozenset(), {}, whole=False)


def open_subject(path: Path, readers: Sequence[str] | None = None) -> tuple[IgnoreList, str]:
    """Loads the subject at `path`, a directory with config.json, and says where its names come from.

    Without a quantization_config the one of hf_quant_config.json counts. Raises CkptkitError when there is none, for a
    format that is not read (as `refuse_stated`), and for INT4 of a model that is not known.
    """
    file = path / "config.json"
    require_own_files(path)
    config: Mapping[str, Any] = flattened(read_json(file), path)
    refuse_stated(config, path)
    content = quantization_of(config)
    if isinstance(content, Mapping) and content.get("quant_method") == "compressed-tensors":
        return _compressed_tensors(path, config, content, readers)
    method, layers = _method_of(config, path), content.get("quantized_layers")
    names, source = _stored_names(path)
    config, tree, _, matrices = _model(config, names, any_format=True)
    lists = [content[key] for key in KEYS[method] if isinstance(content.get(key), list)]
    ignore = tuple(dict.fromkeys(str(entry) for several in lists for entry in several))
    check_entries(ignore, f"{file}: {KEYS[method][0]}")
    return LowPrecisionList(
        config,
        ignore,
        (),
        tree,
        matrices,
        frozenset(quantized_in(names)) or None,
        _wanted_readers(method, readers),
        None if readers is None else tuple(readers),
        bool(names),
        leaves=_leaves(names, matrices),
        path=path,
        method=method,
        per_layer=frozenset(layers) if isinstance(layers, Mapping) else None,
    ), source


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
        path,
        _leaves(stored, matrices),
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

    Raises CkptkitError for any other, compressed-tensors' included.
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


def _wanted_readers(method: str, readers: Sequence[str] | None) -> tuple[str, ...]:
    """The readers to check: those asked for, or all. Raises CkptkitError as `readers_of`, or where none is left."""
    known = readers_of_method(method)
    if readers is None:
        return tuple(known)
    wanted = {one for name in readers for one in LIST_READERS.get(name, ())} & known.keys()
    if not wanted:
        if unknown := [name for name in readers if name not in LIST_READERS]:
            readers_of(unknown)
        raise CkptkitError(
            f"--reader {' '.join(readers)} reads no list of {method} checkpoints",
            f"choose from {', '.join(name for name, several in LIST_READERS.items() if known.keys() & set(several))}",
        )
    return tuple(reader for reader in known if reader in wanted)

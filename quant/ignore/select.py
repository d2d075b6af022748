"""Selects the tensors to quantize, by a reference or the model's classes, without those that `ignore` covers.

In FP8, MXFP4 and NVFP4, but not in INT4, engines also hold latent and linear attention and multi-token prediction
layers. A selection is refused if readers would disagree on it, or if it has only a part of a fused layer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.converters.hf_names import FUSED, LATENT_DOWN, name_in_layer
from ckptkit.core.dtypes import COMPUTED
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec, summarize
from ckptkit.quant.formats.part_names import FP8_SCALE, FP8_SCALE_INV, PACKED
from ckptkit.quant.formats.scheme import GROUP_SIZES, QuantScheme, read_scheme
from ckptkit.quant.ignore.agree import Question, check_portable, packed_by
from ckptkit.quant.ignore.matching import ignored
from ckptkit.quant.ignore.names import (
    Matrix,
    container_of,
    entries_for,
    fused_layer,
    ignore_options,
    leave_out,
    matrices_named,
    matrices_of,
    parts_of,
)
from ckptkit.quant.ignore.readers import ALL_READERS, readers_of
from ckptkit.quant.ignore.reading import read_all
from ckptkit.quant.ignore.tiles import describe, unloadable
from ckptkit.quant.ignore.tree import ClassTree, class_tree


def select_int4_weights(
    specs: Mapping[str, TensorSpec],
    config: Mapping[str, Any],
    scheme: QuantScheme,
    *,
    like: Collection[str] | None = None,
    tp: int | None = None,
    readers: Sequence[str] = ALL_READERS,
) -> frozenset[str]:
    """Returns the tensors to quantize to INT4; `scheme.ignore` is the complete list, without `default_ignore`.

    `like`: the names of an INT4 checkpoint of the same model, or None if the model's classes and `ignore` decide.
    `tp`: a tensor parallel size that SGLang's kernels must be able to load. `readers`: like `--reader`.

    Raises CkptkitError, naming tensors and a fix, if a reader interprets an entry differently, if a tensor to quantize
    is not a float matrix or does not divide into groups or tiles, and if `like` packs a weight that cannot be INT4, or
    is of another model.
    """
    tree = class_tree(config)
    matrices = matrices_of(specs, tree, config)
    if like is None:
        packed = packed_by(matrices, read_all((), matrices, scheme.ignore, config)["compressed-tensors"])
    else:
        packed = _packed_like(matrices, like)
    check_portable(Question(matrices, packed, config, readers_of(readers)), scheme.ignore)
    chosen = [specs[matrix.tensor] for matrix, packs in zip(matrices, packed, strict=True) if packs]
    _check_quantizable(chosen, scheme)
    if tp is not None and (found := unloadable(chosen, tree, config, scheme.group_size, tp, ep=1)):
        message = f"SGLang's INT4 kernels cannot load at tensor parallel size {tp}"
        raise CkptkitError(message, found[0], describe(found[1]))
    return frozenset(spec.name for spec in chosen)


def _packed_like(matrices: Sequence[Matrix], like: Collection[str]) -> list[bool]:
    packed = [matrix.module + PACKED in like for matrix in matrices]
    pairs = list(zip(matrices, packed, strict=True))
    if wrong := [matrix for matrix, packs in pairs if packs and matrix.reason]:
        names = summarize(matrix.module + PACKED for matrix in wrong)
        message = f"--like has {names}, which cannot be INT4: {wrong[0].reason}"
        raise CkptkitError(message, "pass --like with the INT4 release that your engine serves")
    expected = [matrix.tensor for matrix, packs in pairs if not packs and matrix.reason is None]
    if missing := [tensor for tensor in expected if tensor not in like]:
        message = f"--like has neither {summarize(missing)} nor its packed form"
        raise CkptkitError(message, "pass a checkpoint of the same model with one tensor per expert")
    return packed


def default_ignore(config: Mapping[str, Any], like: Collection[str] | None = None) -> tuple[str, ...]:
    """Entries for embeddings, routers, the output embedding and draft layers, which must not be packed.

    `like`: the names of an INT4 checkpoint; its unpacked matrices also get entries. Only slime needs those for
    embeddings and routers: it packs every weight that no entry covers.
    """
    tree = class_tree(config)
    excluded = [*tree.others, *sorted(name for name in tree.linears - tree.packable if name != tree.head), tree.head]
    names = (f"{name}.weight" for name in (*excluded, *(f"{prefix}x" for prefix in tree.outside)))
    entries = [matrix.entry for matrix in matrices_named(names, tree, config)]
    entries += [draft.entry for draft in tree.drafts]
    if like is not None:
        matrices = matrices_named(like, tree, config)
        packed = {matrix.module for matrix in matrices if matrix.module + PACKED in like}
        unpacked = {matrix.module: matrix.entry for matrix in matrices if matrix.module not in packed}
        entries += entries_for(unpacked, packed)
    return tuple(dict.fromkeys(entries))


def _check_quantizable(chosen: list[TensorSpec], scheme: QuantScheme) -> None:
    _check_dtypes(chosen)
    if ragged := {spec.name: spec.shape[1] for spec in chosen if spec.shape[1] % scheme.divisor}:
        sizes = sorted(set(ragged.values()))
        fitting = [size for size in GROUP_SIZES if not any(columns % size for columns in sizes)]
        features = f"the {', '.join(map(str, sizes))} input features of {summarize(ragged)}"
        other_size = f"pass --group-size {fitting[-1]}, or " if fitting else ""
        hint = other_size + leave_out(ragged, (spec.name for spec in chosen))
        raise CkptkitError(f"groups of {scheme.divisor} do not divide {features}", hint)


def packed_modules(specs: Collection[str], config: Mapping[str, Any]) -> set[str]:
    """Returns the modules that an INT4 checkpoint must hold packed: every Linear that its `ignore` does not cover.

    `specs`: the checkpoint's names. A tied output embedding, which is not stored, is not expected.
    Raises CkptkitError like `read_scheme` and `class_tree`.
    """
    ignore, tree = read_scheme(config).ignore, class_tree(config)
    stored = tree.linears if any(name.startswith(f"{tree.head}.") for name in specs) else tree.linears - {tree.head}
    return set(stored - ignored(stored, ignore))


# Linear layers that engines always build in BF16: the head weights of the DSA indexer, and the decay and step of the
# gated delta net. slime and miles do not quantize them either.
_BF16_IN_ENGINES = (".indexer.weights_proj", ".linear_attn.in_proj_a", ".linear_attn.in_proj_b", ".in_proj_ba")
# Projection -> the layer that engines fuse it into.
_JOINED: Mapping[str, str] = {part: layer for layer, parts in (*FUSED.items(), ("w13", ("w1", "w3"))) for part in parts}


@dataclass(frozen=True)
class EightBit:
    """The weights to quantize, and the modules to list in the config."""

    names: frozenset[str]
    ignore: tuple[str, ...]  # modules that are not quantized
    quantized: tuple[str, ...]  # the other modules, by every name that engines look up; experts by their container
    notes: tuple[str, ...] = ()  # for the user


def select_float_weights(
    specs: Mapping[str, TensorSpec],
    config: Mapping[str, Any],
    ignore: Sequence[str],
    block: tuple[int, int],
    like: Collection[str] | None = None,
    kept: tuple[str, ...] = (),
) -> EightBit:
    """Selects the tensors to quantize to FP8 or FP4, by headers; `specs` has one tensor an expert.

    `ignore`: entries in compressed-tensors' language. `block`: rows and columns that share a scale; layers that do not
    fit the blocks as engines require stay unquantized, with a note. `like`: the names of an FP8 checkpoint of the same
    model; only its weights with scales are quantized. `kept`: endings of modules that engines hold in BF16 in this
    format. Raises CkptkitError if `ignore` or `like` splits a fused layer, and if nothing is left to quantize.
    """
    tree = class_tree(config)
    matrices = matrices_of(specs, tree, config)
    excluded = ignored((matrix.module for matrix in matrices), ignore)
    selected = {
        matrix.tensor
        for matrix in matrices
        if _may_be_fp8(matrix, tree)
        and not matrix.module.endswith(kept)
        and (like is None or _has_scale(matrix.module, like))
        and matrix.module not in excluded
    }
    unfit: dict[str, str] = {}
    for layer in _by_layer(matrices, tree):
        chosen = [specs[matrix.tensor] for matrix in layer if matrix.tensor in selected]
        if chosen and len(chosen) < len(layer):
            parts = [matrix.tensor for matrix in layer]
            plain, packed = (summarize(one for one in parts if (one in selected) == is_in) for is_in in (False, True))
            message = f"{plain} would stay unquantized but {packed} would be quantized, but engines fuse both"
            raise CkptkitError(f"{message} into one layer", f"exclude all of them: {ignore_options(parts)}")
        if fault := _fault(chosen, layer[0], block):
            unfit.update(dict.fromkeys((spec.name for spec in chosen), fault))
    names = frozenset(selected - unfit.keys())
    notes = tuple(
        f"left unquantized because {fault}: {summarize(name for name in unfit if unfit[name] == fault)}"
        for fault in dict.fromkeys(unfit.values())
    )
    if like is not None and not any(_has_scale(matrix.module, like) for matrix in matrices):
        raise CkptkitError("--like has no scales of weights", "pass a checkpoint of the same model in this scheme")
    if not names:
        raise nothing_left(ignore, notes)
    _check_dtypes([specs[name] for name in names])
    return EightBit(names, _unquantized_modules(matrices, names, tree), _quantized_modules(matrices, names), notes)


def nothing_left(ignore: Sequence[str], notes: Sequence[str] = ()) -> CkptkitError:
    """The error if no weight is left to quantize; `notes`: on weights that do not fit the scheme."""
    hint = "choose another --scheme, or serve the source checkpoint"
    hint = "remove the --ignore that excludes all of them" if ignore and not notes else hint
    return CkptkitError("; ".join(("no weight is left to quantize", *notes)), hint)


def _may_be_fp8(matrix: Matrix, tree: ClassTree) -> bool:
    module = matrix.module
    if module.endswith(_BF16_IN_ENGINES) or tree.is_kept(module) or not matrix.tensor.endswith(".weight"):
        return False
    draft = tree.draft_of(module)
    return tree.reason_in_any_format(module) is None or (
        draft is not None and (module in draft.own or name_in_layer(module.removeprefix(draft.prefix)) in tree.tails)
    )


def _has_scale(module: str, names: Collection[str]) -> bool:
    return any(f"{module}.weight{ending}" in names for ending in (FP8_SCALE_INV, FP8_SCALE))


def _by_layer(matrices: Sequence[Matrix], tree: ClassTree) -> list[list[Matrix]]:
    """The matrices that may be FP8, in groups that engines fuse into one layer."""
    layers: dict[str, list[Matrix]] = {}
    for matrix in matrices:
        if _may_be_fp8(matrix, tree):
            layer = matrix.vllm or fused_layer(matrix.module, None if tree.draft_of(matrix.module) else tree)
            layers.setdefault(layer, []).append(matrix)
    return list(layers.values())


def _fault(specs: Sequence[TensorSpec], first: Matrix, block: tuple[int, int]) -> str | None:
    """The reason why blocks do not fit a layer, or None. Source: SGLang `validate_block_quant_shapes`."""
    height, width = block
    if any(spec.shape[1] % width for spec in specs if len(spec.shape) == 2):
        return f"blocks of {width} columns do not divide these matrices"
    # Scales of fused layers are concatenated: blocks must divide each part; of latent attention all but the last.
    latent = first.module.endswith(LATENT_DOWN)
    parts = [spec for spec in specs if not (latent and spec.name.endswith(f"{LATENT_DOWN[-1]}.weight"))]
    if (len(specs) > 1 or first.expert) and any(spec.shape[0] % height for spec in parts):
        return f"blocks of {height} rows do not divide the parts of a fused layer"
    return None


def _check_dtypes(chosen: Sequence[TensorSpec]) -> None:
    if wrong := [spec for spec in chosen if len(spec.shape) != 2 or spec.dtype not in COMPUTED]:
        raise CkptkitError(
            f"{wrong[0]} cannot be quantized" + (f", nor can {len(wrong) - 1} more" if wrong[1:] else ""),
            "start from the unquantized release: only bfloat16, float16 or float32 matrices can be quantized",
        )


def _unquantized_modules(matrices: Sequence[Matrix], names: Collection[str], tree: ClassTree) -> tuple[str, ...]:
    """Full names of unquantized modules, sorted, as in the release and in engines; experts by their container."""
    modules, quantized = {tree.head}, {name_in_layer(name.removesuffix(".weight")) for name in names}
    for matrix in matrices:
        if matrix.tensor in names:
            continue
        is_renamed = tree.reason_in_any_format(matrix.module) is not None or tree.partly_fused or _is_respelled(matrix)
        for name in filter(None, (matrix.module, *((matrix.sglang, matrix.vllm) if is_renamed else ()))):
            parts = parts_of(name) if name != matrix.module else ()
            if quantized.isdisjoint((name, *parts)):  # SGLang calls MiMo's draft layer `self_attn.q_proj`
                modules |= {container_of(name)} if ".experts." in name else {name, *parts}
    return tuple(sorted(modules))


def _is_respelled(matrix: Matrix) -> bool:
    """Whether an engine looks up the module under another parent, or as part of a layer that only the engine has."""
    name, layer = matrix.module.rpartition(".")[2], (matrix.sglang or "").rpartition(".")[2]
    moved = matrix.vllm is not None and matrix.vllm.rpartition(".")[0] not in matrix.module
    stacked = layer == "experts" and ".experts." not in matrix.module  # all experts of a layer in one tensor
    return moved or stacked or layer not in ("", name, "experts", *FUSED)


def _quantized_modules(matrices: Sequence[Matrix], names: Collection[str]) -> tuple[str, ...]:
    chosen = (one for one in matrices if one.tensor in names)
    several = ((one.module, one.sglang, one.sglang_own, one.vllm) for one in chosen)
    return tuple(sorted({container_of(name) for modules in several for name in modules if name}))


def sharing_a_scale(names: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Groups of two or more weights that kernels multiply by one scale: q, k and v; gate and up of an expert."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        parent, _, projection = name.removesuffix(".weight").rpartition(".")
        if projection in _JOINED:
            groups.setdefault((parent, _JOINED[projection]), []).append(name)
    return tuple(tuple(several) for several in groups.values() if len(several) > 1)

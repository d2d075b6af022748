"""Decides which tensors are quantized, by a reference or the model's classes, less what `ignore` names.

Unlike INT4, engines hold latent and linear attention and multi-token prediction layers in FP8, MXFP4 and NVFP4 too.
Refused where readers would disagree, and where a layer that engines fuse into one would be quantized in part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.converters.hf_names import FUSED, LATENT_DOWN, tail
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
    matrices_named,
    matrices_of,
    parts_of,
)
from ckptkit.quant.ignore.readers import ALL_READERS, readers_of
from ckptkit.quant.ignore.reading import read_all
from ckptkit.quant.ignore.tiles import check_tiles
from ckptkit.quant.ignore.tree import ClassTree, class_tree


def resolve(
    specs: Mapping[str, TensorSpec],
    config: Mapping[str, Any],
    scheme: QuantScheme,
    *,
    like: Collection[str] | None = None,
    tp: int | None = None,
    readers: Sequence[str] = ALL_READERS,
) -> frozenset[str]:
    """The tensors to quantize, with `scheme.ignore` taken as the whole list (`default_ignore` is not added here).

    `like` are the names of an INT4 checkpoint of the same model: what it has packed is packed. Otherwise what the
    model's classes allow and no entry covers. `tp`: a tensor parallel size that SGLang's kernels must be able to load.
    `readers`, as `--reader` takes them, are those that must agree.

    Raises CkptkitError, naming tensors and the next move, when one of the readers takes an entry otherwise, when a
    tensor to quantize is not a float matrix or does not divide into groups or tiles, and when `like` packs what cannot
    be packed, or is of another model.
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
    if tp is not None:
        check_tiles(chosen, tree, config, scheme.group_size, tp)
    return frozenset(spec.name for spec in chosen)


def _packed_like(matrices: Sequence[Matrix], like: Collection[str]) -> list[bool]:
    packed = [matrix.module + PACKED in like for matrix in matrices]
    if wrong := [matrix for matrix, packs in zip(matrices, packed, strict=True) if packs and matrix.reason]:
        raise CkptkitError(
            f"--like has {summarize(matrix.module + PACKED for matrix in wrong)}, "
            f"which cannot be INT4: {wrong[0].reason}",
            "give the INT4 release that your engine serves",
        )
    if missing := [
        matrix.tensor
        for matrix, packs in zip(matrices, packed, strict=True)
        if not packs and matrix.reason is None and matrix.tensor not in like
    ]:
        raise CkptkitError(
            f"--like has neither {summarize(missing)} nor its packed form",
            "it must be a checkpoint of the same model, with one tensor an expert",
        )
    return packed


def default_ignore(config: Mapping[str, Any], like: Collection[str] | None = None) -> tuple[str, ...]:
    """Entries for embeddings, routers, the output embedding and draft layers, which must not be packed.

    With `like`, the names of an INT4 checkpoint, also for all that it leaves unpacked. Readers that know classes would
    spare embeddings and routers anyway; slime packs whatever is not named.
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
    if ragged := [spec for spec in chosen if spec.shape[1] % scheme.divisor]:
        sizes = sorted({spec.shape[1] for spec in ragged})
        fitting = [size for size in GROUP_SIZES if not any(columns % size for columns in sizes)]
        raise CkptkitError(
            f"groups of {scheme.divisor} do not divide the {', '.join(map(str, sizes))} input features of "
            f"{summarize(spec.name for spec in ragged)}",
            (f"use --group-size {fitting[-1]}, or " if fitting else "")
            + f"leave them out: {ignore_options(spec.name for spec in ragged)}",
        )


def packed_modules(specs: Collection[str], config: Mapping[str, Any]) -> set[str]:
    """Returns the modules that an INT4 checkpoint must hold packed: every Linear that its `ignore` does not cover.

    `specs`: the checkpoint's names. A tied output embedding, which is not stored, is not expected.
    Raises CkptkitError as `read_scheme` and `class_tree` do.
    """
    ignore = read_scheme(config).ignore
    tree = class_tree(config)
    stored = tree.linears if any(name.startswith(f"{tree.head}.") for name in specs) else tree.linears - {tree.head}
    return set(stored - ignored(stored, ignore))


# Linear layers that engines always build in BF16: the head weights of the DSA indexer, the decay and step of the gated
# delta net. slime's and miles' quantizers leave them out as well.
_BF16_IN_ENGINES = (".indexer.weights_proj", ".linear_attn.in_proj_a", ".linear_attn.in_proj_b", ".in_proj_ba")
# The layer that an engine makes of a projection and others.
_JOINED: Mapping[str, str] = {part: layer for layer, parts in (*FUSED.items(), ("w13", ("w1", "w3"))) for part in parts}


@dataclass(frozen=True)
class EightBit:
    """Weights that are quantized; modules that readers must be told of; what a user should know."""

    names: frozenset[str]
    ignore: tuple[str, ...]  # to leave out
    quantized: tuple[str, ...]  # the others, by every name that an engine asks by; of experts their container
    notes: tuple[str, ...] = ()


def select_eight_bit(
    specs: Mapping[str, TensorSpec],
    config: Mapping[str, Any],
    ignore: Sequence[str],
    block: tuple[int, int],
    like: Collection[str] | None = None,
    kept: tuple[str, ...] = (),
) -> EightBit:
    """Decides from headers. `specs` has one tensor an expert. `block`: rows and columns that share a scale.

    `kept`: endings of modules that engines hold in BF16 beside this format.
    `ignore`: entries, in compressed-tensors' language, for more modules to leave out. `like`: the names of an FP8
    checkpoint of the same model; what it has a scale for is quantized. A layer that blocks do not fit, in the way that
    engines need, stays as it is, with a note. Raises CkptkitError where `ignore` or `like` tears a fused layer apart,
    and where nothing is left to quantize.
    """
    tree = class_tree(config)
    matrices = matrices_of(specs, tree, config)
    spared = ignored((matrix.module for matrix in matrices), ignore)
    wanted = {
        matrix.tensor
        for matrix in matrices
        if _may_be_fp8(matrix, tree)
        and not matrix.module.endswith(kept)
        and (like is None or _has_scale(matrix.module, like))
        and matrix.module not in spared
    }
    ragged: dict[str, str] = {}
    for layer in _by_layer(matrices, tree):
        chosen = [specs[matrix.tensor] for matrix in layer if matrix.tensor in wanted]
        if chosen and len(chosen) < len(layer):
            joined = [matrix.tensor for matrix in layer]
            left, taken = (summarize(name for name in joined if (name in wanted) == is_in) for is_in in (False, True))
            raise CkptkitError(
                f"{left} would stay as it is beside {taken}, and engines hold them as one layer",
                f"leave out all of them: {ignore_options(joined)}",
            )
        fault = _fault(chosen, layer[0], block)
        if fault:
            ragged.update(dict.fromkeys((spec.name for spec in chosen), fault))
    names = frozenset(wanted - ragged.keys())
    notes = tuple(
        f"stay as they are, since {fault}: {summarize(name for name in ragged if ragged[name] == fault)}"
        for fault in dict.fromkeys(ragged.values())
    )
    if like is not None and not any(_has_scale(matrix.module, like) for matrix in matrices):
        raise CkptkitError("--like has no scale of any weight", "give a checkpoint of the same model in this scheme")
    if not names:
        raise nothing_left(ignore, notes)
    _check_dtypes([specs[name] for name in names])
    return EightBit(names, _left_out(matrices, names, tree), _asked_by(matrices, names), notes)


def nothing_left(ignore: Sequence[str], notes: Sequence[str] = ()) -> CkptkitError:
    """The error where no weight is left to quantize; `notes`: on weights that do not fit the scheme."""
    own = "leave out the --ignore that covers all of them"
    hint = own if ignore and not notes else "choose another --scheme, or serve the checkpoint as it is"
    return CkptkitError("; ".join(("no weight is left to quantize", *notes)), hint)


def _may_be_fp8(matrix: Matrix, tree: ClassTree) -> bool:
    module = matrix.module
    if module.endswith(_BF16_IN_ENGINES) or tree.is_kept(module) or not matrix.tensor.endswith(".weight"):
        return False
    draft = tree.draft_of(module)
    return tree.reason_in_any_format(module) is None or (
        draft is not None and (module in draft.own or tail(module.removeprefix(draft.prefix)) in tree.tails)
    )


def _has_scale(module: str, names: Collection[str]) -> bool:
    return any(f"{module}.weight{ending}" in names for ending in (FP8_SCALE_INV, FP8_SCALE))


def _by_layer(matrices: Sequence[Matrix], tree: ClassTree) -> list[list[Matrix]]:
    """What may be FP8, by the layer that engines hold it in."""
    layers: dict[str, list[Matrix]] = {}
    for matrix in matrices:
        if _may_be_fp8(matrix, tree):
            known = None if tree.draft_of(matrix.module) else tree
            layers.setdefault(matrix.vllm or fused_layer(matrix.module, known), []).append(matrix)
    return list(layers.values())


def _fault(specs: Sequence[TensorSpec], first: Matrix, block: tuple[int, int]) -> str | None:
    """Why blocks do not fit a layer; None: they do.

    Kernels quantize activations in groups as wide as a block, so that columns must divide. Scales of fused layers are
    joined, so that the rows of each part must: SGLang wants all of several parts to, latent attention's all but the
    last. Source: SGLang `Fp8LinearMethod.validate_block_quant_shapes`, `per_token_group_quant_fp8`.
    """
    height, width = block
    if any(spec.shape[1] % width for spec in specs if len(spec.shape) == 2):
        return f"blocks of {width} columns do not divide them"
    latent = first.module.endswith(LATENT_DOWN)
    joined = [spec for spec in specs if not (latent and spec.name.endswith(f"{LATENT_DOWN[-1]}.weight"))]
    if (len(specs) > 1 or first.expert) and any(spec.shape[0] % height for spec in joined):
        return f"blocks of {height} rows do not divide what engines join to one layer"
    return None


def _check_dtypes(chosen: Sequence[TensorSpec]) -> None:
    if odd := [spec for spec in chosen if len(spec.shape) != 2 or spec.dtype not in COMPUTED]:
        raise CkptkitError(
            f"{odd[0]} cannot be quantized" + (f", nor can {len(odd) - 1} more" if odd[1:] else ""),
            "only matrices in bfloat16, float16 or float32 can; start from the unquantized release",
        )


def _left_out(matrices: Sequence[Matrix], names: Collection[str], tree: ClassTree) -> tuple[str, ...]:
    """Whole names of modules that are not quantized, sorted; of experts the name of their container.

    Beside the release's own name of a draft layer's or another tower's module stands the one that an engine asks by,
    and so for any other that an engine spells otherwise; of layers that are fused where parts are absent, all parts.
    """
    found, quantized = {tree.head}, {tail(name.removesuffix(".weight")) for name in names}
    for matrix in matrices:
        if matrix.tensor in names:
            continue
        elsewhere = tree.reason_in_any_format(matrix.module) is not None or tree.partly_fused or _is_respelled(matrix)
        for name in filter(None, (matrix.module, *((matrix.sglang, matrix.vllm) if elsewhere else ()))):
            parts = parts_of(name) if name != matrix.module else ()
            if quantized.isdisjoint((name, *parts)):  # SGLang calls MiMo's draft layer `self_attn.q_proj`
                found |= {container_of(name)} if ".experts." in name else {name, *parts}
    return tuple(sorted(found))


def _is_respelled(matrix: Matrix) -> bool:
    """Whether an engine asks about the module under another parent, or as part of a layer that it alone has.

    vLLM has the release's names otherwise.
    """
    name, layer = matrix.module.rpartition(".")[2], (matrix.sglang or "").rpartition(".")[2]
    moved = matrix.vllm is not None and matrix.vllm.rpartition(".")[0] not in matrix.module
    stacked = layer == "experts" and ".experts." not in matrix.module  # all experts of a layer in one tensor
    return moved or stacked or layer not in ("", name, "experts", *FUSED)


def _asked_by(matrices: Sequence[Matrix], names: Collection[str]) -> tuple[str, ...]:
    asked = (
        (matrix.module, matrix.sglang, matrix.sglang_own, matrix.vllm) for matrix in matrices if matrix.tensor in names
    )
    return tuple(sorted({container_of(name) for several in asked for name in filter(None, several)}))


def sharing_a_scale(names: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """The weights that kernels multiply by one scale, where they are several: q, k and v; gate and up of an expert."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in names:
        parent, _, projection = name.removesuffix(".weight").rpartition(".")
        if projection in _JOINED:
            found.setdefault((parent, _JOINED[projection]), []).append(name)
    return tuple(tuple(several) for several in found.values() if len(several) > 1)

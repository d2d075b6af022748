"""Decides which tensors are quantized: what a reference or the model's classes say, less what `ignore` names.

Refused where readers would disagree.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ckptkit.core.dtypes import COMPUTED
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec, summarize
from quant.formats.part_names import PACKED
from quant.formats.scheme import GROUP_SIZES, read_scheme
from quant.selection.class_tree import class_tree
from quant.selection.matrices import Matrix, matrices_named, matrices_of
from quant.selection.portable import Question, check_portable, packed_by
from quant.selection.readers import ALL_READERS, RULES, readers_of
from quant.selection.reading import Reading, ignored, read_all
from quant.selection.spelling import entries_for, ignore_options
from quant.selection.tiles import check_tiles
from quant.selection.tree import ClassTree


class Grouping(Protocol):
    """What a scheme says about weights here."""

    @property
    def ignore(self) -> tuple[str, ...]:
        """Entries for modules that are not quantized."""

    @property
    def group_size(self) -> int | None:
        """Neighbours in a row that share a scale; None: a whole row."""

    @property
    def divisor(self) -> int:
        """The number that must divide the input features."""


@dataclass(frozen=True)
class Verdict:
    """Whether a tensor is quantized, why, and whether each reader would take it for quantized."""

    quantize: bool
    reason: str
    readers: Mapping[str, bool]


_KEPT_BY_ALL: Mapping[str, bool] = dict.fromkeys(RULES, False)


def resolve(
    specs: Mapping[str, TensorSpec],
    config: Mapping[str, Any],
    scheme: Grouping,
    *,
    like: Collection[str] | None = None,
    tp: int | None = None,
    readers: Sequence[str] = ALL_READERS,
) -> dict[str, Verdict]:
    """A verdict for every tensor, with `scheme.ignore` taken as the whole list (`default_ignore` is not added here).

    `like` are the names of an INT4 checkpoint of the same model: what it has packed is packed. Otherwise what the
    model's classes allow and no entry covers. `tp`: a tensor parallel size that SGLang's kernels must be able to load.
    `readers`, as `--reader` takes them, are those that must agree; each tensor's verdict has all of them.

    Raises CkptkitError, naming tensors and the next move, when one of the readers takes an entry otherwise, when a
    tensor to quantize is not a float matrix or does not divide into groups or tiles, and when `like` packs what cannot
    be packed, or is of another model.
    """
    tree = class_tree(config)
    matrices = matrices_of(specs, tree, config)
    readings = read_all(RULES, matrices, scheme.ignore, config)
    base = readings["compressed-tensors"]
    packed = packed_by(matrices, base) if like is None else _packed_like(matrices, like)
    check_portable(Question(matrices, packed, config, readers_of(readers)), scheme.ignore)
    chosen = [specs[matrix.tensor] for matrix, packs in zip(matrices, packed, strict=True) if packs]
    _check_quantizable(chosen, scheme)
    if tp is not None:
        check_tiles(chosen, tree, config, scheme.group_size, tp)
    verdicts = {name: Verdict(False, "no weight matrix", _KEPT_BY_ALL) for name in specs}
    for index, matrix in enumerate(matrices):
        answers = {reader: reading.answers[index] == "packs" for reader, reading in readings.items()}
        reason = _reason(matrix, packed[index], index, base, like is not None)
        verdicts[matrix.tensor] = Verdict(packed[index], reason, answers)
    return verdicts


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


def _reason(matrix: Matrix, packed: bool, index: int, base: Reading, like: bool) -> str:
    if packed:
        return "packed in the reference" if like else "Linear"
    if matrix.reason:
        return matrix.reason
    if like:
        return "not packed in the reference"
    pattern = next(pattern for pattern in base.covers if base.covered(pattern, index))
    return f"ignored by '{pattern}'"


def default_ignore(config: Mapping[str, Any], like: Collection[str] | None = None) -> tuple[str, ...]:
    """Entries for embeddings, routers, the output embedding and draft layers, which must not be packed.

    With `like`, the names of an INT4 checkpoint, also for all that it leaves unpacked. Readers that know classes would
    spare embeddings and routers anyway; slime packs whatever is not named.
    """
    tree = class_tree(config)
    entries = default_entries(tree, config)
    if like is None:
        return entries
    matrices = matrices_named(like, tree, config)
    packed = {matrix.module for matrix in matrices if matrix.module + PACKED in like}
    return tuple(
        dict.fromkeys(
            [
                *entries,
                *entries_for(
                    {matrix.module: matrix.entry for matrix in matrices if matrix.module not in packed}, packed
                ),
            ]
        )
    )


def default_entries(tree: ClassTree, config: Mapping[str, Any]) -> tuple[str, ...]:
    """`default_ignore` of a model whose classes are known."""
    excluded = [*tree.others, *sorted(name for name in tree.linears - tree.packable if name != tree.head), tree.head]
    entries = [matrix.entry for matrix in matrices_named((f"{name}.weight" for name in excluded), tree, config)]
    outside = [
        matrix.entry for matrix in matrices_named((f"{prefix}x.weight" for prefix in tree.outside), tree, config)
    ]
    return tuple(dict.fromkeys([*entries, *outside, *(draft.entry for draft in tree.drafts)]))


def _check_quantizable(chosen: list[TensorSpec], scheme: Grouping) -> None:
    if odd := [spec for spec in chosen if len(spec.shape) != 2 or spec.dtype not in COMPUTED]:
        raise CkptkitError(
            f"{odd[0]} cannot be quantized" + (f", nor can {len(odd) - 1} more" if odd[1:] else ""),
            "only matrices in bfloat16, float16 or float32 can; start from the unquantized release",
        )
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

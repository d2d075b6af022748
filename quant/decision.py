"""Which tensors become INT4: what the model's classes allow, less what `ignore` names, refused when readers would disagree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckptkit.errors import CkptkitError
from ckptkit.specs import TensorSpec, summarize
from quant.class_tree import ClassTree, class_tree
from quant.portable import Matrix, check_portable, spell
from quant.readers import EXPANDS_FUSED, compressed_tensors
from quant.scheme import GROUP_SIZES, QuantScheme

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Decision:
    """Whether a tensor is quantized, and why."""

    quantize: bool
    reason: str


def decide(specs: Mapping[str, TensorSpec], config: Mapping[str, Any], scheme: QuantScheme) -> dict[str, Decision]:
    """A decision for every tensor, with `scheme.ignore` taken as the whole list (`default_ignore` is not added here).

    Raises CkptkitError, naming tensors and the next move, as `check_ignore` does, and when a tensor to quantize is no float
    matrix or does not divide into groups.
    """
    tree = class_tree(config)
    check_ignore(specs, config, scheme.ignore)
    decisions = {name: _decision(spec, tree, scheme.ignore) for name, spec in specs.items()}
    _check_quantizable([specs[name] for name, decision in decisions.items() if decision.quantize], scheme.group_size)
    return decisions


def check_ignore(specs: Mapping[str, TensorSpec], config: Mapping[str, Any], ignore: Sequence[str]) -> None:
    """Raises CkptkitError when transformers, SGLang or slime would take `ignore` differently from compressed-tensors for any tensor.

    `specs` are those of a checkpoint before or after quantization (`….weight` or `….weight_packed`). Also raises when it is not
    known how SGLang fuses the layers of this model_type.
    """
    expands = EXPANDS_FUSED.get(str(config.get("model_type")))
    if expands is None:
        known = ", ".join(sorted(EXPANDS_FUSED))
        raise CkptkitError(f"model_type {config.get('model_type')!r}: how SGLang fuses its layers is not known", f"INT4 is supported for {known}")
    check_portable(matrices_of(specs, class_tree(config)), ignore, expands)


def default_ignore(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Entries, read alike by every reader, for all that must not be packed: embeddings, routers, the output embedding, draft layers.

    Readers that know classes would spare embeddings and routers anyway; slime packs whatever is not named.
    """
    tree = class_tree(config)
    kept = [*tree.others, *sorted(tree.gates), *([tree.head] if tree.head else [])]
    return tuple(dict.fromkeys([*map(spell, kept), *map(_draft_entry, tree.draft_layers)]))


def _draft_entry(layer: int) -> str:
    # SGLang names the draft layer's modules model.decoder.*
    return rf"re:model\.(layers\.{layer}|decoder)\..*"


def matrices_of(specs: Mapping[str, TensorSpec], tree: ClassTree) -> list[Matrix]:
    """What a reader without classes may take for a Linear: every `….weight` with two or more axes."""
    weights = [name.removesuffix("_packed") for name, spec in specs.items() if name.endswith((".weight", ".weight_packed")) and len(spec.shape) >= 2]
    return [_matrix(name.removesuffix(".weight"), tree) for name in weights]


def _matrix(module: str, tree: ClassTree) -> Matrix:
    tensor = f"{module}.weight"
    if draft := tree.in_draft_layer(module):
        layer, rest = draft
        return Matrix(tensor, linear=False, packable=False, layer=f"model.decoder.{rest}", entry=_draft_entry(layer))
    packable = module in tree.packable
    return Matrix(tensor, module in tree.linears, packable, module if packable else None, spell(module))


def _decision(spec: TensorSpec, tree: ClassTree, ignore: tuple[str, ...]) -> Decision:
    module = spec.name.removesuffix(".weight")
    if module == spec.name or len(spec.shape) < 2:
        return Decision(False, "no weight matrix")
    if reason := tree.reason_to_keep(module):
        return Decision(False, reason)
    for pattern in ignore:
        if compressed_tensors(module, pattern):
            return Decision(False, f"ignored by {pattern!r}")
    return Decision(True, "Linear")


def _check_quantizable(chosen: list[TensorSpec], group_size: int) -> None:
    if odd := [spec for spec in chosen if len(spec.shape) != 2 or spec.dtype not in _DTYPES]:
        raise CkptkitError(
            f"{odd[0]} cannot be quantized" + (f", nor can {len(odd) - 1} more" if odd[1:] else ""),
            "only matrices in bfloat16, float16 or float32 can; start from the unquantized release",
        )
    if ragged := [spec for spec in chosen if spec.shape[1] % group_size]:
        sizes = sorted({spec.shape[1] for spec in ragged})
        fitting = [size for size in GROUP_SIZES if not any(columns % size for columns in sizes)]
        entries = dict.fromkeys(spell(spec.name.removesuffix(".weight")) for spec in ragged)
        raise CkptkitError(
            f"groups of {group_size} do not divide the {', '.join(map(str, sizes))} input features of {summarize(spec.name for spec in ragged)}",
            (f"use --group-size {fitting[-1]}, or " if fitting else "") + "leave them out: " + " ".join(f"--ignore '{entry}'" for entry in entries),
        )

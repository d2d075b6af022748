"""Summarizes a quantization: the number of packed matrices, their size, and their error."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckptkit.app.plan import ConversionPlan
from ckptkit.converters.stored import adapt_config
from ckptkit.core.plan import View
from ckptkit.core.progress import size
from ckptkit.core.specs import TensorSpec
from ckptkit.quant.ignore.names import matrices_of
from ckptkit.quant.ignore.tree import class_tree
from ckptkit.quant.schemes.interface import SquaredError
from ckptkit.quant.schemes.registry import Packing

_EXPERTS = ("experts", "shared_experts", "shared_expert")


@dataclass(frozen=True)
class PackedKind:
    """Matrices of one kind of layer, with the error of `PackedWeights`."""

    matrices: int
    relative_error: float | None


@dataclass(frozen=True)
class PackedSummary:
    """A summary of packed matrices.

    `scheme`: its name and options. `before`, `after`: bytes of the packed matrices in the source's dtype, and stored
    with their scales. `checkpoint_before`, `checkpoint_after`: the same for all tensors. `relative_error`: the
    Frobenius norm of the error, relative to that of the weights; None in a dry run, or if weights above 1e19 have
    squares beyond float32. `kinds`: by kind of layer (`q_proj`, `experts.down_proj`). `unpacked`: counts of the other
    matrices by reason and module (`self_attn`). `advice`: options with less error.
    """

    scheme: str
    matrices: int
    before: int
    after: int
    checkpoint_before: int
    checkpoint_after: int
    relative_error: float | None = None
    kinds: Mapping[str, PackedKind] = field(default_factory=dict)
    unpacked: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    advice: str | None = None


def summary(plan: ConversionPlan, errors: Mapping[str, SquaredError], chosen_by: str) -> PackedSummary | None:
    """Summarizes packing, if any. `errors`: by name of codes. `chosen_by`: the option that excludes matrices."""
    if plan.packing is None or not isinstance(plan.view, View):
        return None
    source = plan.view.source.specs
    total = sum(spec.nbytes for spec in source.values())
    written = sum(spec.nbytes for spec in plan.view.specs.values())
    before = sum(source[name].nbytes for name in plan.packing.names)
    scheme = replace(plan.packing.scheme, ignore=())
    return PackedSummary(
        " ".join([scheme.name, *scheme.command_line()]),
        len(plan.packing.names),
        before,
        before - total + written,
        total,
        written,
        SquaredError.total(errors.values()).relative if errors else None,
        _kinds(plan.packing, errors),
        _unpacked(plan.packing, source, plan.config, chosen_by),
        plan.packing.advice,
    )


def _unpacked(
    packing: Packing, source: Mapping[str, TensorSpec], config: Mapping[str, Any], chosen_by: str
) -> dict[str, dict[str, int]]:
    stored = adapt_config(config, source)
    counts = defaultdict[str, Counter[str]](Counter)
    for matrix in matrices_of(source, class_tree(stored), stored):
        if matrix.tensor not in packing.names:
            module = matrix.module.split(".")
            counts[matrix.reason or chosen_by][module[-2] if module[-1].endswith("_proj") else module[-1]] += 1
    return {reason: dict(modules) for reason, modules in counts.items()}


def _kinds(packing: Packing, errors: Mapping[str, SquaredError]) -> dict[str, PackedKind]:
    counts, measured = Counter(map(_kind, packing.names)), defaultdict[str, list[SquaredError]](list)
    for name, error in errors.items():
        measured[_kind(name)].append(error)
    return {
        kind: PackedKind(count, SquaredError.total(measured[kind]).relative if kind in measured else None)
        for kind, count in sorted(counts.items())
    }


def _kind(name: str) -> str:
    module = name.split(".")[:-1]
    experts = [part for part in module[:-1] if part in _EXPERTS]
    return ".".join([*experts[-1:], module[-1]])


def lines(packed: PackedSummary) -> list[str]:
    """Formats a summary."""
    ratio, total = packed.before / max(packed.after, 1), packed.checkpoint_before / max(packed.checkpoint_after, 1)
    sizes = f"{size(packed.before)} as {size(packed.after)}, {ratio:.2f} times smaller"
    text = [f"packed {packed.matrices} matrices by {packed.scheme}: {sizes} (the checkpoint {total:.2f} times)"]
    kept = [
        f"{', '.join(f'{module} ({count})' for module, count in modules.items())}: {reason}"
        for reason, modules in packed.unpacked.items()
    ]
    text += [f"not packed: {'; '.join(kept)}"] if kept else []
    if packed.relative_error is not None:
        each = [f"{kind} {_percent(one.relative_error)}" for kind, one in packed.kinds.items()]
        text.append(f"relative error {_percent(packed.relative_error)}: {', '.join(each)}")
    return [*text, packed.advice] if packed.advice else text


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.2%}"

"""Sums up a quantization: how many matrices were packed, how much smaller they are, and how far from their source."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    """Matrices of one kind of layer. The error as in `PackedWeights`."""

    matrices: int
    relative_error: float | None


@dataclass(frozen=True)
class PackedSummary:
    """What was packed.

    `before`, `after`: bytes of the packed matrices in the source's dtype, and as they are stored with their scales.
    `checkpoint_before`, `checkpoint_after`: the same of all tensors.
    `relative_error`: the Frobenius norm of what packing changed, as a share of that of the weights. None in a dry run,
    and where weights of more than 1e19 have squares beyond float32.
    `kinds`: by kind of layer (`q_proj`, `experts.down_proj`). `unpacked`: how many other matrices there are, by reason
    and by module (`self_attn`). `advice`: which options would lose less.
    """

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
    """Sums up what a plan packs, or None if nothing. `errors`: by the name of the tensor with the codes.

    `chosen_by`: the option that leaves out what could be packed, as the reason for it.
    """
    if plan.packing is None or not isinstance(plan.view, View):
        return None
    source = plan.view.source.specs
    total = sum(spec.nbytes for spec in source.values())
    written = sum(spec.nbytes for spec in plan.view.specs.values())
    before = sum(source[name].nbytes for name in plan.packing.names)
    found = SquaredError.total(errors.values()).relative if errors else None
    kinds = _kinds(plan.packing, errors)
    after, count, advice = before - total + written, len(plan.packing.names), plan.packing.advice
    unpacked = _unpacked(plan.packing, source, plan.config, chosen_by)
    return PackedSummary(count, before, after, total, written, found, kinds, unpacked, advice)


def _unpacked(
    packing: Packing, source: Mapping[str, TensorSpec], config: Mapping[str, Any], chosen_by: str
) -> dict[str, dict[str, int]]:
    stored = adapt_config(config, source)
    counts = defaultdict[str, Counter[str]](Counter)
    for matrix in matrices_of(source, class_tree(stored), stored):
        if matrix.tensor not in packing.names:
            module = matrix.module.split(".")
            counts[matrix.reason or chosen_by][module[-2] if module[-1].endswith("_proj") else module[-1]] += 1
    return {reason: dict(found) for reason, found in counts.items()}


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


def lines(found: PackedSummary) -> list[str]:
    """The summary in words."""
    ratio, whole = found.before / max(found.after, 1), found.checkpoint_before / max(found.checkpoint_after, 1)
    packed = f"{found.matrices} matrices: {size(found.before)} as {size(found.after)}, {ratio:.2f} times smaller"
    text = [f"packed {packed} (the checkpoint {whole:.2f} times)"]
    kept = [
        f"{', '.join(f'{module} ({count})' for module, count in modules.items())}: {reason}"
        for reason, modules in found.unpacked.items()
    ]
    text += [f"not packed: {'; '.join(kept)}"] if kept else []
    if found.relative_error is not None:
        each = [f"{kind} {_percent(one.relative_error)}" for kind, one in found.kinds.items()]
        text.append(f"relative error {_percent(found.relative_error)}: {', '.join(each)}")
    return [*text, found.advice] if found.advice else text


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.2%}"

"""Compares the parameters of a loaded SGLang model with the tensors that belong there, slot by slot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from converters.config.dims import ModelDims
from converters.planner import dims_of
from converters.registry import family_of
from verify.witnesses.bits import difference, poisoned
from verify.witnesses.sglang.job import Observation
from verify.witnesses.sglang.slots import Slot, block_rows, is_draft, left_empty, promised_names, slot_of
from verify.witnesses.sglang.writes import place


@dataclass
class Comparison:
    """What one pass over the reference found; `equal` are the names whose bits are where they should be."""

    equal: dict[str, int] = field(default_factory=dict)
    differing: list[Observation] = field(default_factory=list)
    rounded: list[Observation] = field(default_factory=list)


@dataclass(frozen=True)
class Model:
    """`tensors` are SGLang's parameters and persistent buffers by name; tied ones stand under each of their names.

    `fused_shared`: the shared expert is kept as one more routed expert.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    fused_shared: bool = False

    @cached_property
    def dims(self) -> ModelDims:
        """The sizes of the model."""
        return dims_of(self.config)

    @cached_property
    def block(self) -> int:
        """Rows that share a scale of an FP8 checkpoint."""
        return block_rows(self.config)

    @cached_property
    def owners(self) -> dict[int, str]:
        """The place of every storage with the first name it has; empty tensors have no place."""
        owners: dict[int, str] = {}
        for name, tensor in self.tensors.items():
            if tensor.numel():
                owners.setdefault(place(tensor), name)
        return owners

    def slot(self, name: str) -> Slot:
        """Where an HF tensor belongs."""
        return slot_of(name, self.dims, fused_shared=self.fused_shared, block=self.block)

    def region(self, slot: Slot) -> Tensor | None:
        """What SGLang holds there, as the HF tensor would look; None when it has no such parameter or index."""
        tensor = self.tensors.get(slot.param)
        if (
            tensor is None
            or len(slot.index) > tensor.dim()
            or any(at >= tensor.shape[0] for at in slot.index[:1] if isinstance(at, int))
        ):
            return None
        region = tensor.detach()[slot.index]
        return region.t() if slot.transposed and region.dim() == 2 else region


def compare(
    model: Model, reference: Iterable[tuple[str, Tensor]], wanted: Callable[[Slot], bool] = lambda slot: True
) -> Comparison:
    """Compares each tensor of the reference that has a slot with what SGLang holds there, bit for bit in its dtype."""
    result = Comparison()
    for name, tensor in reference:
        slot = model.slot(name)
        region = model.region(slot) if wanted(slot) else None
        if region is None or not slot.compared:
            continue
        expected = tensor.to(region.device).to(region.dtype)
        if what := difference(region, expected):
            result.differing.append(Observation(name, slot.param, what))
            continue
        result.equal[name] = tensor.nbytes
        if region.dtype != tensor.dtype and difference(expected.cpu().to(tensor.dtype), tensor.cpu()):
            result.rounded.append(
                Observation(name, slot.param, f"{_short(tensor.dtype)} rounded to {_short(region.dtype)}")
            )
    return result


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def unwritten(model: Model, landed: Mapping[str, set[str]], equal: Mapping[str, int]) -> Iterator[Observation]:
    """Every place that still holds the poison, by the HF name that belongs there, or by SGLang's where none does."""
    owners = model.owners
    wanting = (name for name in owners.values() if not left_empty(name, model.config))
    masks = {name: mask for name in wanting if (mask := poisoned(model.tensors[name])).any()}
    slots = {name: model.slot(name) for name in promised_names(model.config)}
    found = {
        name: slot
        for name, slot in slots.items()
        if model.region(slot) is not None and owners.get(place(model.tensors[slot.param])) in masks
    }
    for name, slot in found.items():
        mask = masks[owners[place(model.tensors[slot.param])]]
        if name not in equal and (count := int(mask[slot.index].sum())):
            given = "the checkpoint gave it, SGLang dropped it" if name in landed else "the checkpoint never gave it"
            yield Observation(
                name, slot.param, f"{count} of {mask[slot.index].numel()} elements were never written: {given}"
            )
    # Afterwards, since q, k and v of one layer may share a place (weight_shape).
    for slot in found.values():
        masks[owners[place(model.tensors[slot.param])]][slot.index] = False
    for name, mask in masks.items():
        if count := int(mask.sum()):
            yield Observation(
                name, name, f"{count} of {mask.numel()} elements were never written, and no HF tensor belongs there"
            )


def dropped(
    model: Model, landed: Mapping[str, set[str]], equal: Mapping[str, int], reference: Iterable[str]
) -> Iterator[Observation]:
    """Names that were given and written nowhere, were written where they do not belong, or were never asked for."""
    owners = model.owners
    for name in dict.fromkeys([*landed, *reference]):
        slot = model.slot(name)
        own = model.tensors.get(slot.param)
        if name in equal or is_draft(name, model.dims, model.config) or family_of(model.config).carries(name):
            continue
        if name not in landed:
            yield Observation(name, slot.param, "SGLang never read it")
        elif not landed[name]:
            yield Observation(name, slot.param, "it was given to load_weights and written nowhere")
        elif own is None or owners.get(place(own)) not in landed[name]:
            yield Observation(name, slot.param, f"it was written to {', '.join(sorted(landed[name]))}")


def dead_routers(model: Model) -> Iterator[Observation]:
    """Routers that cannot choose between experts, by HF name: unwritten, not finite, all zero or constant."""
    for layer in model.dims.moe:
        name = f"model.layers.{layer}.mlp.gate.weight"
        region = model.region(model.slot(name))
        if region is None:
            yield Observation(name, name, "SGLang has no such parameter")
        elif count := int(poisoned(region).sum()):
            yield Observation(name, name, f"{count} of {region.numel()} elements were never written")
        elif not region.isfinite().all():
            yield Observation(name, name, "not finite")
        elif region.min() == region.max():
            yield Observation(
                name,
                name,
                "all zero" if region.any().logical_not() else f"every element is {region.flatten()[0].item()}",
            )

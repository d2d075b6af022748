"""What a draft model holds, which an engine loads of multi-token prediction layers for speculative decoding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from converters.planner import copies_of, dims_of, expected_hf
from verify.evidence.folding import LAYER
from verify.witnesses.loading.compare import Loaded
from verify.witnesses.loading.engine import ModelBuild
from verify.witnesses.loading.job import Observation
from verify.witnesses.loading.names import draft_names, of_draft, promised_names, routers
from verify.witnesses.loading.placement import whole
from verify.witnesses.loading.region import Region

_TAIL = 2  # components of a name that engines leave as they are: module and leaf


def without_shared(tensors: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A draft model's own tensors, without those that are its target's."""
    shared = {tensor.data_ptr() for tensor in target.values()}
    return {name: tensor for name, tensor in tensors.items() if tensor.data_ptr() not in shared}


def draft_build(build: ModelBuild) -> ModelBuild:
    """The draft model of a model: it may look at `beyond_layers`, and must hold multi-token prediction layers."""
    prefixes = of_draft(build.config)
    weights = partial(build.weights, beyond_layers(build.config)) if build.weights else None
    reference = partial(build.reference, lambda name: name.startswith(prefixes))
    return replace(build, draft=True, weights=weights, reference=reference)


def beyond_layers(config: Mapping[str, Any]) -> Callable[[str], bool]:
    """Tells by its name whether a draft model may look at a tensor: any but those of the target's decoder layers."""
    prefixes, layers = of_draft(config), dims_of(config).layers

    def may_look(name: str) -> bool:
        layer = LAYER.match(name)
        return name.startswith(prefixes) or layer is None or int(layer[1]) >= layers

    return may_look


@dataclass(frozen=True)
class DraftLoaded(Loaded):
    """A draft model that was loaded for `target`; `sizes` has the tensors of multi-token prediction layers alone."""

    target: Loaded

    def promised(self) -> Iterable[str]:
        """Every HF name of multi-token prediction layers, without the copies of what the target shares."""
        return (name for name in draft_names(self.config, promised_names(self.config)) if name not in self._copies)

    def concerns(self, name: str) -> bool:
        """Whether a tensor is of a multi-token prediction layer, and the engine needs or was given it."""
        return name.startswith(self.draft_prefixes) and (name in self.sizes or name not in self._copies)

    def routers(self) -> Sequence[str]:
        """The HF names of the routers of multi-token prediction layers."""
        return routers(self.config, draft=True)

    def is_shared(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor that was not written repeats one that the target shares, bit for bit."""
        pieces = self.target.placement.pieces.get(self._copies.get(name, ""), ())
        return bool(pieces) and not any(self.target.differs(piece, tensor) for piece in pieces)

    def nowhere(self, name: str, param: str) -> Observation:
        """What is wrong with a tensor that was given and written nowhere."""
        if (original := self._copies.get(name)) is None:
            return super().nowhere(name, param)
        what = (
            f"{self.engine.FACTS.label}'s draft model takes {original} instead, which has other bits or was not loaded"
        )
        return Observation(name, param, what, original=original)

    def place(self, name: str) -> tuple[str, Region] | None:
        """Where a tensor stands or belongs; else the only parameter whose name ends like it and that is as large."""
        if (found := super().place(name)) is not None or ".experts." in name or self.placement.pieces.get(name):
            return found
        params = self._by_tail.get(_tail(name), ())
        if len(params) != 1 or math.prod(self._shapes.get(name, ())) != self.tensors[params[0]].numel():
            return None
        return params[0], whole(self.tensors[params[0]])

    @cached_property
    def _copies(self) -> Mapping[str, str]:
        return copies_of(self.config)

    @cached_property
    def _by_tail(self) -> Mapping[str, Sequence[str]]:
        found: dict[str, list[str]] = {}
        for param in self.tensors:
            found.setdefault(_tail(param), []).append(param)
        return found

    @cached_property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        return expected_hf(self.config)

    def unplaced(self, masks: Mapping[str, Tensor]) -> Iterator[Observation]:
        """Unwritten elements that one tensor of the same module without a place, or all of them together, would fill.

        Of several ranks each may want a share.
        """
        for param, mask in masks.items():
            count = int(mask.sum())
            # Tensors without a place whose module is beside the parameter's, or in it; else all of them.
            beside = param.split(".")[-3:-2]
            absent = {name: size for name, size in self._absent.items() if name.split(".")[-3:-2] == beside}
            absent = absent or dict(self._absent)
            fitting = [name for name, size in absent.items() if count in (size, size // self.build.sizes.ranks)]
            together = sum(absent.values())
            if len(fitting) != 1:
                fitting = list(absent) if count in (together, together // self.build.sizes.ranks) else []
            for name in fitting:
                yield Observation(name, param, f"{count} elements were never written: {self.why_absent(name)}")
            if not fitting:
                what = f"{count} of {mask.numel()} elements were never written: none that was given was written there"
                yield Observation(param, param, what)

    @cached_property
    def _absent(self) -> Mapping[str, int]:
        return {
            name: math.prod(self._shapes[name])
            for name in self.promised()
            if name in self._shapes and not self.placement.pieces.get(name) and self.place(name) is None
        }


def _tail(name: str) -> str:
    return ".".join(name.split(".")[-_TAIL:])

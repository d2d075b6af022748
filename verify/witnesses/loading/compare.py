"""Compares the tensors that a loaded model holds with the checkpoint's, at the places that `placement` recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ckptkit.converters.hf_names import LATENT_DOWN
from ckptkit.converters.ops.basic import ZeroPadded
from ckptkit.converters.planner import copies_of, expected_hf
from ckptkit.converters.registry import family_of
from ckptkit.converters.stored import unused_names
from ckptkit.quant.engines.registry import engine_class
from ckptkit.quant.formats.part_names import INT4_ENDINGS, WEIGHT_PACKED, WEIGHT_SCALE_INV, WEIGHT_SHAPE
from ckptkit.verify.evidence.folding import by_key
from ckptkit.verify.witnesses.loading.bits import difference, poisoned
from ckptkit.verify.witnesses.loading.engine import Engine, ModelBuild
from ckptkit.verify.witnesses.loading.job import LoadReport, Observation
from ckptkit.verify.witnesses.loading.names import draft_names, draft_prefixes, padded_names, promised_names, routers
from ckptkit.verify.witnesses.loading.placement import Piece, Placement, flat_elements, whole
from ckptkit.verify.witnesses.loading.region import Region, covered

_QUANTIZED_PARTS = (*INT4_ENDINGS, f".{WEIGHT_SCALE_INV}")
_MATRICES = ("w13_", "w2_")  # of experts
_WEIGHTS = ("weight", WEIGHT_PACKED)
_TAIL = 2  # components of a name that engines do not change: module and leaf


@dataclass(frozen=True)
class Loaded:
    """A loaded model, the place of each tensor in it, and the report on it."""

    engine: Engine
    build: ModelBuild
    model: nn.Module
    tensors: Mapping[str, Tensor]  # its parameters and persistent buffers
    placement: Placement
    sizes: Mapping[str, int]  # elements of each tensor of the checkpoint that was passed to the engine
    report: LoadReport
    target: Loaded | None = None  # of a draft model; `tensors` and `sizes` are then without the target's

    @property
    def config(self) -> Mapping[str, Any]:
        return self.build.config

    def compare(self, selects: Callable[[str], bool] = lambda param: True) -> list[str]:
        """Compares each reference tensor bit for bit with all its places in selected parameters. Returns their names.

        Fills `equal`, `differing`, `rounded` and `computed` of the report. Skips `weight_shape`: engines never use it,
        keep only the last of a fused layer's shards, and round those of experts to the model's dtype.
        """
        report, names = self.report, list[str]()
        differing, rounded, explained = list[Observation](), list[Observation](), set[str]()
        for name, tensor in self.build.reference():
            names.append(name)
            if name.endswith(f".{WEIGHT_SHAPE}"):
                continue
            pieces = [piece for piece in self.placement.pieces.get(name, ()) if selects(piece.param)]
            faults = [fault for piece in pieces if (fault := self.differs(piece, tensor))]
            computed = dict(self.computed(name, tensor))
            for param, is_right in computed.items():
                if is_right:
                    explained.add(param)
                else:
                    faults.append(Observation(name, param, "differs from the values computed from it"))
            if (op := self.in_padding.get(name)) is not None and not op.is_padded(tensor):
                lost = f"the values behind the first {op.size} are not 0 and were not written"
                faults.append(Observation(name, self.placement.pieces[name][0].param, lost))
            if faults:
                differing.append(faults[0])
            elif pieces or computed or (selects(name) and self.is_covered(name, tensor)):
                report.equal[name] = tensor.nbytes
                rounded += [loss for piece in pieces[:1] if (loss := _rounding(piece, tensor))]
        report.differing, report.rounded = tuple(differing), tuple(rounded)
        report.computed = tuple(param for param in self.placement.computed if param not in explained)
        return names

    def computed(self, name: str, tensor: Tensor) -> Iterator[tuple[str, bool]]:
        """Parameters computed only from this tensor by a known formula, and whether their values are right."""
        if not name.endswith((".mixer.A_log", ".mamba.A_log")):
            return
        # A = -exp(A_log), within the rounding of another device. Source: `composed_weight_loader` in SGLang
        # `layers/attention/mamba/mamba.py`, vLLM `layers/mamba/mamba_mixer2.py`.
        expected = -torch.exp(tensor.float())
        for param, origins in self.placement.computed.items():
            held = self.tensors.get(param)
            if held is not None and origins == {name} and held.shape == expected.shape:
                yield param, torch.allclose(held.float(), expected.to(held.device), rtol=1e-6, atol=0)

    def promised(self) -> Iterable[str]:
        """Every HF name that may belong to this model, without a draft model's copies of its target's tensors."""
        names = promised_names(self.config)
        if self.target is None:
            return names
        return (name for name in draft_names(self.config, names) if name not in self.copies)

    def concerns(self, name: str) -> bool:
        """Whether a tensor belongs to this model, not to a draft model or a tower that is only copied."""
        if self.target is not None:  # copies of its target's tensors belong if the engine was given them
            return name.startswith(self.draft_prefixes) and (name in self.sizes or name not in self.copies)
        # The scales and codes of a copied tower belong: engines load its weights, and misread them without these.
        carried = family_of(self.config).passes_through(name) and not name.endswith(_QUANTIZED_PARTS)
        return not carried and not name.startswith((*self.draft_prefixes, *self.carried_drafts))

    @cached_property
    def carried_drafts(self) -> tuple[str, ...]:
        """Prefixes of multi-token prediction layers that no Megatron model holds, so that no rule covers them."""
        family = family_of(self.config)
        if (release := family.release) is None:
            return ()
        drafts = release.drafts(release.text(self.config), release.root)
        return tuple(one.prefix for one in drafts if family.passes_through(one.prefix))

    @cached_property
    def draft_prefixes(self) -> tuple[str, ...]:
        return draft_prefixes(self.config)

    @cached_property
    def copies(self) -> Mapping[str, str]:
        """Maps a draft model's copy of a tensor to the target's tensor that it shares."""
        return {} if self.target is None else copies_of(self.config)

    def routers(self) -> Sequence[str]:
        return routers(self.config, draft=self.target is not None)

    def holds(self, pieces: Collection[Piece], tensor: Tensor) -> bool:
        return bool(pieces) and not any(self.differs(piece, tensor) for piece in pieces)

    def is_covered(self, name: str, tensor: Tensor) -> bool:
        return self.is_shared(name, tensor) or self.is_repeated(name, tensor)

    def is_shared(self, name: str, tensor: Tensor) -> bool:
        """Whether an unwritten tensor equals its target's, or the one in the parameter of its name (if tied)."""
        if self.target is not None:
            return self.target.holds(self.target.placement.pieces.get(self.copies.get(name, ""), ()), tensor)
        if (own := self.tensors.get(name)) is None:
            return False
        shared = {param for param, other in self.tensors.items() if other.data_ptr() == own.data_ptr()}
        pieces = [piece for found in self.placement.pieces.values() for piece in found if piece.param in shared]
        return self.holds(pieces, tensor)

    def is_repeated(self, name: str, tensor: Tensor) -> bool:
        """Whether an unwritten scale [] equals that of latent attention's other first projection, as SGLang assumes."""
        module, _, leaf = name.rpartition(".")
        parent, _, projection = module.rpartition(".")
        if tensor.dim() or projection not in LATENT_DOWN:
            return False
        names = [f"{parent}.{part}.{leaf}" for part in LATENT_DOWN]
        return self.holds([piece for one in names for piece in self.placement.pieces.get(one, ())], tensor)

    def differs(self, piece: Piece, tensor: Tensor) -> Observation | None:
        """The difference between a piece in the model and the reference tensor, or None if they are equal."""
        wrong: str | None
        label = self.engine.FACTS.label
        if (parameter := self.tensors.get(piece.param)) is None:
            wrong = f"{label} removed the parameter"
        elif tensor.numel() != self.sizes[piece.tensor]:
            wrong = f"{self.sizes[piece.tensor]} elements were loaded, but the source has {tensor.numel()}"
        elif piece.into.end > parameter.numel() or parameter.element_size() != piece.dtype.itemsize:
            wrong = f"{label} changed the parameter to {list(parameter.shape)} {_short(parameter.dtype)}"
        else:
            actual = piece.actual(parameter)
            wrong = difference(actual, piece.cast(piece.taken(tensor).to(actual.device)))
        return Observation(piece.tensor, piece.param, wrong) if wrong else None

    def unwritten(self) -> Iterator[Observation]:
        """Every place that still holds the poison, by its HF name or, without one, the engine's."""
        masks: dict[str, Tensor] = {}
        seen: set[int] = set()
        for param, tensor in self.tensors.items():
            if tensor.numel() and tensor.data_ptr() not in seen and not self.engine.left_empty(param, self.config):
                seen.add(tensor.data_ptr())
                if (mask := poisoned(flat_elements(tensor))).any():
                    masks[param] = mask
        if not masks:
            return
        # A checkpoint may contain the poison's value.
        for name in self.report.equal:
            for piece in self.placement.pieces.get(name, ()):
                if piece.param in masks and piece.surviving is None:
                    piece.into.of(masks[piece.param])[...] = False
        places = {name: place for name in self.promised() if (place := self.locate(name)) is not None}
        lacking = {param for name, (param, _) in places.items() if name not in self.sizes}
        is_free = not engine_class(self.engine.FACTS.name, self.config).requires_unused
        for name in unused_names(self.config) if is_free else ():
            if (place := self.locate(name)) is not None and place[0] in masks.keys() - lacking:
                masks[place[0]][...] = False
        for name, (param, region) in places.items():
            if param in masks and (count := int(region.of(masks[param]).sum())):
                what = f"{count} of {region.count} elements were never written: {self.why_absent(name)}"
                yield Observation(name, param, what)
        # In a second pass, since several tensors may share a place.
        for param, region in places.values():
            if param in masks:
                region.of(masks[param])[...] = False
        unplaced = self.unplaced if self.target is None else self.unplaced_draft
        yield from unplaced({param: mask for param, mask in masks.items() if mask.any()})

    def why_absent(self, name: str) -> str:
        gave = f"{self.engine.FACTS.label} dropped the tensor"
        return gave if name in self.sizes else "the checkpoint has no such tensor"

    def unplaced(self, masks: Mapping[str, Tensor]) -> Iterator[Observation]:
        """Unwritten elements of unknown tensors, matched to the module's absent tensors by their total size."""
        modules = by_key((param.rpartition(".")[0], param) for param in masks)
        shapes = {name: shape for name, shape in self.shapes.items() if name not in self.sizes}
        for param in [param for params in modules.values() for param in params if self.missing_siblings(param)]:
            module = param.rpartition(".")[0]
            modules[module].remove(param)
            names, count = self.missing_siblings(param), int(masks[param].sum())
            group = f" for {len(names)} tensors together" if len(names) > 1 else ""
            what = f"{count} of {masks[param].numel()} elements{group} were never written"
            yield from (Observation(name, param, f"{what}: {self.why_absent(name)}") for name in names)
        for module, params in modules.items():
            absent = {name: math.prod(shape) for name, shape in shapes.items() if name.startswith(f"{module}.")}
            if absent and sum(absent.values()) == sum(int(masks[param].sum()) for param in params):
                for name, count in absent.items():
                    what = f"{count} of {count} elements were never written: the checkpoint has no such tensor"
                    yield Observation(name, params[0], what)
                continue
            for param in params:
                in_part = any(piece.param == param for name in self.in_part for piece in self.placement.pieces[name])
                cause = "no HF tensor belongs in this parameter"
                if in_part:  # on one of several ranks every tensor is
                    is_single = self.build.sizes.ranks == 1
                    cause = "its tensor was written in part" if is_single else "no tensor was written there"
                what = f"{int(masks[param].sum())} of {masks[param].numel()} elements were never written: {cause}"
                yield Observation(param, param, what)

    def unplaced_draft(self, masks: Mapping[str, Tensor]) -> Iterator[Observation]:
        """The same for a draft model: unplaced tensors that fit, alone, together, or by a rank's share."""
        without_place = {
            name: math.prod(self.shapes[name])
            for name in self.promised()
            if name in self.shapes and not self.placement.pieces.get(name) and self.locate(name) is None
        }
        for param, mask in masks.items():
            count = int(mask.sum())
            # Tensors of a module next to the parameter's, or in it; otherwise all of them.
            parent = param.split(".")[-3:-2]
            absent = {name: size for name, size in without_place.items() if name.split(".")[-3:-2] == parent}
            absent = absent or without_place
            fitting = [name for name, size in absent.items() if count in (size, size // self.build.sizes.ranks)]
            together = sum(absent.values())
            if len(fitting) != 1:
                fitting = list(absent) if count in (together, together // self.build.sizes.ranks) else []
            for name in fitting:
                yield Observation(name, param, f"{count} elements were never written: {self.why_absent(name)}")
            if not fitting:
                cause = "no tensor of the checkpoint fills this parameter"
                yield Observation(param, param, f"{count} of {mask.numel()} elements were never written: {cause}")

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return expected_hf(self.config)

    def missing_siblings(self, param: str) -> list[str]:
        """Absent tensors that belong in a parameter, such as a fused layer's biases: siblings of its weights."""
        module, _, leaf = param.rpartition(".")
        matrix = next((one for one in _MATRICES if leaf.startswith(one)), "")
        if not matrix and leaf in _WEIGHTS:
            return []
        weights = [f"{module}.{matrix}{part}" for part in _WEIGHTS]
        siblings = [name.rpartition(".")[0] for weight in weights for name in self.in_param.get(weight, ())]
        names = [f"{sibling}.{leaf.removeprefix(matrix)}" for sibling in siblings]
        return [name for name in dict.fromkeys(names) if name not in self.sizes]

    @cached_property
    def in_param(self) -> Mapping[str, Sequence[str]]:
        return by_key((piece.param, name) for name, pieces in self.placement.pieces.items() for piece in pieces)

    @cached_property
    def in_part(self) -> Mapping[str, int]:
        """Tensors of which only some elements were written into parameters, with the number of those."""
        counts = ((name, covered(size, self.parts(name)), size) for name, size in self.sizes.items())
        return {name: count for name, count, size in counts if 0 < count < size}

    def parts(self, name: str) -> list[Region]:
        """The elements of a tensor that are in parameters, or that need not be."""
        op = self.in_padding.get(name)
        return [*self.placement.parts(name), *([] if op is None else [Region(op.size, (op.padding,), (1,))])]

    @cached_property
    def in_padding(self) -> Mapping[str, ZeroPadded]:
        """Tensors that were written without their padding."""
        parts = ((name, op, self.placement.parts(name)) for name, op in padded_names(self.config).items())
        return {name: op for name, op, own in parts if own and max(part.end for part in own) <= op.size}

    def locate(self, name: str) -> tuple[str, Region] | None:
        """The place of a tensor, one predicted from similar tensors, or the parameter of its name or its name's end."""
        if len(pieces := self.placement.pieces.get(name, ())) == 1:
            return pieces[0].param, pieces[0].into
        if pieces:
            return None
        if (predicted := self.placement.predicted(name)) and (own := self.tensors.get(predicted[0])) is not None:
            if predicted[1].offset >= 0 and predicted[1].end <= own.numel():
                return predicted
        elif (own := self.tensors.get(name)) is not None:
            return name, whole(own)
        params = self.by_tail.get(_tail(name), ()) if self.target is not None and ".experts." not in name else ()
        if len(params) != 1 or math.prod(self.shapes.get(name, ())) != self.tensors[params[0]].numel():
            return None
        return params[0], whole(self.tensors[params[0]])

    @cached_property
    def by_tail(self) -> Mapping[str, Sequence[str]]:
        return by_key((_tail(param), param) for param in self.tensors)

    def dropped(self, reference: Iterable[str]) -> Iterator[Observation]:
        """Tensors that were read but not written, or only in part, and tensors that were never read."""
        known = {*self.report.equal}.union(*self.placement.computed.values())
        for name in dict.fromkeys([*self.sizes, *reference]):
            if not self.concerns(name):
                continue
            place = self.locate(name)
            param = place[0] if place else name
            if name not in self.sizes:
                yield Observation(name, param, f"{self.engine.FACTS.label} never read the tensor")
            elif name in self.in_part:
                what = f"only {self.in_part[name]} of its {self.sizes[name]} elements were written"
                yield Observation(name, param, what, is_partial=True)
            elif not self.placement.pieces[name] and name not in known and self.sizes[name]:
                if not self.placement.written[name]:
                    what = "load_weights got the tensor but wrote it into no parameter"
                    if original := self.copies.get(name):
                        label = self.engine.FACTS.label
                        what = f"{label}'s draft model uses {original} instead, which differs or was not loaded"
                    yield Observation(name, param, what, original=original, is_dropped=not original)
                elif not name.endswith(f".{WEIGHT_SHAPE}"):
                    yield Observation(name, param, "another tensor overwrote it in the parameter")

    def dead_routers(self) -> Iterator[Observation]:
        """Routers that cannot choose between experts, by HF name: unwritten, not finite, all zero or constant."""
        for name in self.routers():
            if (place := self.locate(name)) is None:
                yield Observation(name, name, f"{self.engine.FACTS.label} has no such parameter", is_absent=True)
                continue
            param, region = place
            held = region.of(flat_elements(self.tensors[param]))
            if count := int(poisoned(held).sum()):
                yield Observation(name, param, f"{count} of {held.numel()} elements were never written")
            elif not (held := held.float()).isfinite().all():  # FP8 has no `isfinite`
                yield Observation(name, param, "the router has NaN or infinity")
            elif held.min() == held.max():
                what = "all zero" if held.any().logical_not() else f"all elements are {held.flatten()[0].item()}"
                yield Observation(name, param, what)


def _rounding(piece: Piece, tensor: Tensor) -> Observation | None:
    """The loss of precision in a parameter's dtype, or None without one."""
    if piece.dtype == tensor.dtype or piece.read_as is not None:
        return None
    taken = piece.taken(tensor)
    if not difference(piece.cast(taken).to(tensor.dtype), taken):
        return None
    return Observation(piece.tensor, piece.param, f"{_short(tensor.dtype)} rounded to {_short(piece.dtype)}")


def _tail(name: str) -> str:
    return ".".join(name.split(".")[-_TAIL:])


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

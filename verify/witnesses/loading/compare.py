"""Compares what a loaded model holds with the tensors that were loaded, where `placement` saw them go."""

from __future__ import annotations

import math
from collections import defaultdict
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
from ckptkit.verify.witnesses.loading.job import DROPPED, LoadReport, Observation
from ckptkit.verify.witnesses.loading.names import draft_names, of_draft, padded_names, promised_names, routers
from ckptkit.verify.witnesses.loading.placement import Piece, Placement, flat_elements, whole
from ckptkit.verify.witnesses.loading.region import Region, covered

_OF_QUANTIZED = (*INT4_ENDINGS, f".{WEIGHT_SCALE_INV}")
_MATRICES = ("w13_", "w2_")  # of experts
_WEIGHTS = ("weight", WEIGHT_PACKED)
_TAIL = 2  # components of a name that engines leave as they are: module and leaf


@dataclass(frozen=True)
class Loaded:
    """A model that was loaded, what went where, and the report on it.

    `target`: the loaded model that this one drafts for, or None if it is no draft model. A draft model has only
    multi-token prediction layers; `tensors` are then without those of its target, and `sizes` without other layers.
    """

    engine: Engine
    build: ModelBuild
    model: nn.Module
    tensors: Mapping[str, Tensor]  # its parameters and persistent buffers
    placement: Placement
    sizes: Mapping[str, int]  # how many elements each tensor had that was given
    report: LoadReport
    target: Loaded | None = None

    @property
    def config(self) -> Mapping[str, Any]:
        """The checkpoint's config."""
        return self.build.config

    def compare(self, wanted: Callable[[str], bool] = lambda param: True) -> list[str]:
        """Compares each tensor of the reference with every place it went to in `wanted` parameters, bit for bit.

        Returns their names.

        The report gets `equal`, `differing`, `rounded` and `computed`. Not compared is `weight_shape`: engines never
        use it, keep only the last of a fused layer's shards, and round those of experts to the model's dtype.
        """
        report, names = self.report, list[str]()
        differing, rounded, known = list[Observation](), list[Observation](), set[str]()
        for name, tensor in self.build.reference():
            names.append(name)
            if name.endswith(f".{WEIGHT_SHAPE}"):
                continue
            pieces = [piece for piece in self.placement.pieces.get(name, ()) if wanted(piece.param)]
            found = [one for piece in pieces if (one := self.differs(piece, tensor))]
            made = dict(self.computed(name, tensor))
            found += [
                Observation(name, param, "other values than it is computed to") for param in made if not made[param]
            ]
            known |= {param for param, right in made.items() if right}
            if name in self.in_padding and not self.padded[name].is_padded(tensor):
                lost = f"the values behind the first {self.padded[name].size} are not 0, and are nowhere"
                found.append(Observation(name, self.placement.pieces[name][0].param, lost))
            if found:
                differing.append(found[0])
            elif pieces or made or (wanted(name) and (self.is_shared(name, tensor) or self.is_repeated(name, tensor))):
                report.equal[name] = tensor.nbytes
                rounded += [one for piece in pieces[:1] if (one := _rounded(piece, tensor))]
        report.differing, report.rounded = tuple(differing), tuple(rounded)
        report.computed = tuple(one for one in self.placement.computed if one not in known)
        return names

    def computed(self, name: str, tensor: Tensor) -> Iterator[tuple[str, bool]]:
        """Whole parameters that were computed of this tensor alone by a known formula, and whether they are right.

        Of a Mamba mixer's `A_log` that is A = -exp(A_log), within what one exponential of another device may be off.
        Source: SGLang `layers/attention/mamba/mamba.py` and vLLM `layers/mamba/mamba_mixer2.py`,
        `composed_weight_loader`.
        """
        if not name.endswith((".mixer.A_log", ".mamba.A_log")):
            return
        expected = -torch.exp(tensor.float())
        for param, origins in self.placement.computed.items():
            held = self.tensors.get(param)
            if held is not None and origins == {name} and held.shape == expected.shape:
                yield param, torch.allclose(held.float(), expected.to(held.device), rtol=1e-6, atol=0)

    def promised(self) -> Iterable[str]:
        """Every HF name that may belong here, without the copies of tensors that a target shares."""
        names = promised_names(self.config)
        if self.target is None:
            return names
        return (name for name in draft_names(self.config, names) if name not in self.copies)

    def concerns(self, name: str) -> bool:
        """Whether a tensor belongs here, and not to a draft model or to what is only carried along.

        Scales and codes of a tower that is carried do: engines load the weight beside them, and without them as other
        numbers. A draft model's own copies of what its target shares do where the engine was given them.
        """
        if self.target is not None:
            return name.startswith(self.draft_prefixes) and (name in self.sizes or name not in self.copies)
        carried = family_of(self.config).passes_through(name) and not name.endswith(_OF_QUANTIZED)
        return not carried and not name.startswith((*self.draft_prefixes, *self.carried_drafts))

    @cached_property
    def carried_drafts(self) -> tuple[str, ...]:
        """How the names of multi-token prediction layers begin that no Megatron holds, and so no rule is for."""
        family = family_of(self.config)
        if (release := family.release) is None:
            return ()
        drafts = release.drafts(release.text(self.config), release.root)
        return tuple(one.prefix for one in drafts if family.passes_through(one.prefix))

    @cached_property
    def draft_prefixes(self) -> tuple[str, ...]:
        """How the names of multi-token prediction layers begin."""
        return of_draft(self.config)

    @cached_property
    def copies(self) -> Mapping[str, str]:
        """A draft model's copies of tensors that its target shares, with the names of these."""
        return {} if self.target is None else copies_of(self.config)

    def routers(self) -> Sequence[str]:
        """The HF names of the routers that belong here."""
        return routers(self.config, draft=self.target is not None)

    def holds(self, pieces: Collection[Piece], tensor: Tensor) -> bool:
        """Whether there are pieces, and all of them have the bits of a tensor."""
        return bool(pieces) and not any(self.differs(piece, tensor) for piece in pieces)

    def is_shared(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor that was not written stands in the parameter of its own name, which another was written to.

        That is the output layer where the engine's class ties it, whatever the release ships. Of a draft model: whether
        it repeats a tensor that the target shares.
        """
        if self.target is not None:
            return self.target.holds(self.target.placement.pieces.get(self.copies.get(name, ""), ()), tensor)
        if (own := self.tensors.get(name)) is None:
            return False
        shared = {param for param, other in self.tensors.items() if other.data_ptr() == own.data_ptr()}
        return self.holds(
            [piece for found in self.placement.pieces.values() for piece in found if piece.param in shared], tensor
        )

    def is_repeated(self, name: str, tensor: Tensor) -> bool:
        """Whether a scale [] that was not written equals that of the part of its layer whose scale was.

        SGLang takes that of q_a_proj for both first projections of latent attention.
        """
        module, _, leaf = name.rpartition(".")
        parent, _, projection = module.rpartition(".")
        if tensor.dim() or projection not in LATENT_DOWN:
            return False
        names = [f"{parent}.{part}.{leaf}" for part in LATENT_DOWN]
        return self.holds([piece for one in names for piece in self.placement.pieces.get(one, ())], tensor)

    def differs(self, piece: Piece, tensor: Tensor) -> Observation | None:
        """What is wrong in a piece, held against the tensor as the reference has it."""
        if (parameter := self.tensors.get(piece.param)) is None:
            return Observation(piece.tensor, piece.param, f"{self.engine.FACTS.label} has taken it away")
        if tensor.numel() != self.sizes[piece.tensor]:
            what = f"{self.sizes[piece.tensor]} elements were given, {tensor.numel()} are in the source"
            return Observation(piece.tensor, piece.param, what)
        if piece.into.end > parameter.numel() or parameter.element_size() != piece.dtype.itemsize:
            what = f"{self.engine.FACTS.label} has made it {list(parameter.shape)} {_short(parameter.dtype)}"
            return Observation(piece.tensor, piece.param, what)
        actual = piece.actual(parameter)
        wrong = difference(actual, piece.cast(piece.taken(tensor).to(actual.device)))
        return Observation(piece.tensor, piece.param, wrong) if wrong else None

    def unwritten(self) -> Iterator[Observation]:
        """Every place that still holds the poison, by the HF name that belongs there, else by the engine's."""
        masks: dict[str, Tensor] = {}
        seen: set[int] = set()
        for param, tensor in self.tensors.items():
            if tensor.numel() and tensor.data_ptr() not in seen and not self.engine.left_empty(param, self.config):
                seen.add(tensor.data_ptr())
                if (mask := poisoned(flat_elements(tensor))).any():
                    masks[param] = mask
        if not masks:
            return
        # The poison may stand in a file.
        for name in self.report.equal:
            for piece in self.placement.pieces.get(name, ()):
                if piece.param in masks and piece.surviving is None:
                    piece.into.of(masks[piece.param])[...] = False
        places = {name: place for name in self.promised() if (place := self.place(name)) is not None}
        lacking = {param for name, (param, _) in places.items() if name not in self.sizes}
        wanted = engine_class(self.engine.FACTS.name, self.config).wants_unused
        for name in () if wanted else unused_names(self.config):
            if (place := self.place(name)) is not None and place[0] in masks.keys() - lacking:
                masks[place[0]][...] = False
        for name, (param, region) in places.items():
            if param not in masks or not (count := int(region.of(masks[param]).sum())):
                continue
            why = self.why_absent(name)
            yield Observation(name, param, f"{count} of {region.count} elements were never written: {why}")
        # Afterwards, since several may share a place.
        for param, region in places.values():
            if param in masks:
                region.of(masks[param])[...] = False
        unplaced = self.unplaced if self.target is None else self.unplaced_draft
        yield from unplaced({param: mask for param, mask in masks.items() if mask.any()})

    def why_absent(self, name: str) -> str:
        """Why a tensor was not written."""
        gave = f"the checkpoint gave it, {self.engine.FACTS.label} dropped it"
        return gave if name in self.sizes else "the checkpoint never gave it"

    def unplaced(self, masks: Mapping[str, Tensor]) -> Iterator[Observation]:
        """Unwritten elements of which it was not seen what belongs there.

        Told by the tensors of a module, where all that were not given have as many elements together.
        """
        modules: dict[str, list[str]] = defaultdict(list)
        for param in masks:
            modules[param.rpartition(".")[0]].append(param)
        shapes = {name: shape for name, shape in self.shapes.items() if name not in self.sizes}
        for param in [param for params in modules.values() for param in params if self.absent_beside(param)]:
            module = param.rpartition(".")[0]
            modules[module].remove(param)
            names, count = self.absent_beside(param), int(masks[param].sum())
            others = f" of {len(names)} tensors together" if len(names) > 1 else ""
            for name in names:
                what = f"{count} of {masks[param].numel()} elements{others} were never written"
                yield Observation(name, param, f"{what}: {self.why_absent(name)}")
        for module, params in modules.items():
            absent = {name: math.prod(shape) for name, shape in shapes.items() if name.startswith(f"{module}.")}
            if absent and sum(absent.values()) == sum(int(masks[param].sum()) for param in params):
                for name, count in absent.items():
                    what = f"{count} of {count} elements were never written: the checkpoint never gave it"
                    yield Observation(name, params[0], what)
                continue
            for param in params:
                in_part = any(piece.param == param for name in self.in_part for piece in self.placement.pieces[name])
                why = "no HF tensor belongs there"
                if in_part:  # each tensor is, on one of several ranks
                    part = "what belongs there was written in part"
                    why = part if self.build.sizes.ranks == 1 else "none that was given was written there"
                what = f"{int(masks[param].sum())} of {masks[param].numel()} elements were never written: {why}"
                yield Observation(param, param, what)

    def unplaced_draft(self, masks: Mapping[str, Tensor]) -> Iterator[Observation]:
        """The same of a draft model, by tensors of the module that have no place: one that fits, or all together.

        Of several ranks each may want a share.
        """
        without_place = {
            name: math.prod(self.shapes[name])
            for name in self.promised()
            if name in self.shapes and not self.placement.pieces.get(name) and self.place(name) is None
        }
        for param, mask in masks.items():
            count = int(mask.sum())
            # Tensors whose module is beside the parameter's, or in it; else all of them.
            beside = param.split(".")[-3:-2]
            absent = {name: size for name, size in without_place.items() if name.split(".")[-3:-2] == beside}
            absent = absent or without_place
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
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor that config.json promises."""
        return expected_hf(self.config)

    def absent_beside(self, param: str) -> list[str]:
        """Tensors that no checkpoint gave and that belong in a parameter: parts of the weights in the one beside it.

        A bias of a fused layer, say, or the scales of experts.
        """
        module, _, leaf = param.rpartition(".")
        matrix = next((one for one in _MATRICES if leaf.startswith(one)), "")
        if not matrix and leaf in _WEIGHTS:
            return []
        weights = [f"{module}.{matrix}{one}" for one in _WEIGHTS]
        beside = [name for weight in weights for name in self.in_param.get(weight, ())]
        names = [f"{name.rpartition('.')[0]}.{leaf.removeprefix(matrix)}" for name in beside]
        return [name for name in dict.fromkeys(names) if name not in self.sizes]

    @cached_property
    def in_param(self) -> Mapping[str, Sequence[str]]:
        """Which tensors went into each parameter."""
        found: dict[str, list[str]] = defaultdict(list)
        for name, pieces in self.placement.pieces.items():
            for piece in pieces:
                found[piece.param].append(name)
        return found

    @cached_property
    def in_part(self) -> Mapping[str, int]:
        """Tensors of which not every element was written into a parameter, with the number of those that were."""
        counts = ((name, covered(size, self.parts(name)), size) for name, size in self.sizes.items())
        return {name: count for name, count, size in counts if 0 < count < size}

    def parts(self, name: str) -> list[Region]:
        """Which elements of a given tensor stand in parameters, or need not."""
        return [*self.placement.parts(name), *filter(None, [self.in_padding.get(name)])]

    @cached_property
    def padded(self) -> Mapping[str, ZeroPadded]:
        """As `names.padded_names`."""
        return padded_names(self.config)

    @cached_property
    def in_padding(self) -> Mapping[str, Region]:
        """The padding of tensors that were written without it."""
        found: dict[str, Region] = {}
        for name, op in self.padded.items():
            parts = self.placement.parts(name) if name in self.placement.pieces else []
            if parts and max(part.end for part in parts) <= op.size:
                found[name] = Region(op.size, (op.padding,), (1,))
        return found

    def place(self, name: str) -> tuple[str, Region] | None:
        """Where a tensor stands or, by others like it, belongs; else a parameter of its own name, if there is one.

        In a draft model else the only parameter whose name ends like it and that is as large.
        """
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
        """Parameters by the last components of their names."""
        return by_key((_tail(param), param) for param in self.tensors)

    def dropped(self, reference: Iterable[str]) -> Iterator[Observation]:
        """Names that were given and written nowhere, or not as a whole, and names that were never asked for."""
        known = {*self.report.equal}.union(*self.placement.computed.values())
        for name in dict.fromkeys([*self.sizes, *reference]):
            if not self.concerns(name):
                continue
            place = self.place(name)
            param = place[0] if place else name
            if name not in self.sizes:
                yield Observation(name, param, f"{self.engine.FACTS.label} never read it")
            elif name in self.in_part:
                what = f"only {self.in_part[name]} of its {self.sizes[name]} elements were written"
                yield Observation(name, param, what)
            elif not self.placement.pieces[name] and name not in known and self.sizes[name]:
                if not self.placement.written[name]:
                    original = self.copies.get(name)
                    instead = f"{self.engine.FACTS.label}'s draft model takes {original} instead, which has other bits"
                    what = f"{instead} or was not loaded" if original else DROPPED
                    yield Observation(name, param, what, original=original)
                elif not name.endswith(f".{WEIGHT_SHAPE}"):
                    yield Observation(name, param, "another tensor was written over it")

    def dead_routers(self) -> Iterator[Observation]:
        """Routers that cannot choose between experts, by HF name: unwritten, not finite, all zero or constant."""
        for name in self.routers():
            if (place := self.place(name)) is None:
                yield Observation(name, name, f"{self.engine.FACTS.label} has no such parameter", is_absent=True)
                continue
            param, region = place
            held = region.of(flat_elements(self.tensors[param]))
            if count := int(poisoned(held).sum()):
                yield Observation(name, param, f"{count} of {held.numel()} elements were never written")
            elif not (held := held.float()).isfinite().all():  # FP8 has no `isfinite`
                yield Observation(name, param, "not finite")
            elif held.min() == held.max():
                what = "all zero" if held.any().logical_not() else f"every element is {held.flatten()[0].item()}"
                yield Observation(name, param, what)


def _rounded(piece: Piece, tensor: Tensor) -> Observation | None:
    """What a parameter's dtype loses of a tensor."""
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

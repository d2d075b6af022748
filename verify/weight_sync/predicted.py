"""Predicts the checksums of engines' fused and cut parameters from sent tensors; an equal one proves cut and values."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from ckptkit.converters.hf_names import FUSED
from ckptkit.quant.formats.part_names import WEIGHT_G_IDX, WEIGHT_PACKED, WEIGHT_SCALE, WEIGHT_SHAPE
from ckptkit.verify.evidence.folding import pattern_of
from ckptkit.verify.weight_sync.engines import Digest
from ckptkit.verify.witnesses.loading.layouts.marlin import marlin_experts

Order = tuple[int, ...]  # of a part within its parameter: its index, or its expert and its index there
_PREFIX = re.compile(r"^(model\.language_model\.|language_model\.model\.|language_model\.|model\.)")
_VOCABULARY = re.compile(r"(.+\.)?(embed_tokens|lm_head)\.weight")
_ROUTER = re.compile(r".+\.(gate|router)\.weight")
_VOCABULARY_ROWS = 64  # engines pad to a multiple, with zeros (vocab_parallel_embedding.py, DEFAULT_VOCAB_PADDING_SIZE)
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w3|w2)\.(\w+)")
SHARED_EXPERT = re.compile(r"(.+)\.shared_experts\.(gate_proj|up_proj|down_proj)\.(\w+)")
SHARED = 1 << 30  # number of the shared expert, which SGLang may keep after the last routed one
_PLACE = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 0, "w2": 0}
# Fused layers (`packed_modules_mapping` of engines' models), and their parts from top to bottom.
_FUSED = {name: FUSED[name] for name in ("qkv_proj", "gate_up_proj", "fused_qkv_a_proj_with_mqa")}
# vLLM's names, and SGLang's.
_SPELLED = {".fused_qkv_a_proj.": ".fused_qkv_a_proj_with_mqa.", ".experts.routed_experts.": ".experts."}
_FUSED_IN = {part: (name, place) for name, parts in _FUSED.items() for place, part in enumerate(parts)}
_WIDE = ("torch.float32", "torch.float64")
# Engines keep the shape of one shard, rounded, and never read it; orders of columns are empty without activation order.
UNUSED = (WEIGHT_SHAPE, WEIGHT_G_IDX, "g_idx_sort_indices")


@dataclass(frozen=True)
class Part:
    """A part of a parameter."""

    param: str
    order: Order
    count: int | None  # parts of the parameter, or None for experts


def canonical(name: str) -> str:
    """SGLang's name without the prefix of the text model, which engines and releases spell in several ways."""
    for theirs, ours in _SPELLED.items():
        name = name.replace(theirs, ours)
    return _PREFIX.sub("", name)


def target_parts(name: str) -> list[Part]:
    """The parts that an HF tensor may be; an engine may keep a shared expert as one more routed expert."""
    name = canonical(name)
    if expert := _EXPERT.fullmatch(name):
        block, number, which, leaf = expert.groups()
        return [_part_of_expert(block, int(number), which, leaf)]
    module, _, leaf = name.rpartition(".")
    prefix, _, last = module.rpartition(".")
    if last not in _FUSED_IN:
        own = Part(name, (0,), 1)
    else:
        fused, place = _FUSED_IN[last]
        own = Part(f"{prefix}.{fused}.{leaf}", (place,), len(_FUSED[fused]))
    if shared := SHARED_EXPERT.fullmatch(name):
        return [own, _part_of_expert(f"{shared[1]}.experts", SHARED, shared[2], shared[3])]
    return [own]


def _part_of_expert(block: str, number: int, which: str, leaf: str) -> Part:
    fused = "w2" if which in ("down_proj", "w2") else "w13"
    return Part(f"{block}.{fused}_{leaf}", (number, _PLACE[which]), None)


def missing_parts(param: str, orders: Collection[Order]) -> list[str]:
    """The missing parts of an incomplete parameter: up with gate, k and v with q."""
    routed = routed_of(orders)
    if routed and len(routed[0]) == 2:
        experts, places = {expert for expert, _ in routed}, {place for _, place in routed}
        lost = sorted(set(product(experts, places)).difference(routed))
        return [f"{'up' if place else 'gate'}_proj of expert {expert}" for expert, place in lost]
    fused = param.rpartition(".")[0].rpartition(".")[2]
    return [name for place, name in enumerate(_FUSED.get(fused, ())) if (place,) not in orders]


@dataclass(frozen=True)
class ParamCut:
    """How a parameter is cut over tensor parallel ranks: into blocks of experts, and each part into pieces."""

    size: int = 1  # pieces of the first part
    axis: int = 0
    others: int = 1  # pieces of the second and later parts (k and v)
    experts: int = 1  # blocks of experts
    padded: bool = False  # rows are first padded as a vocabulary
    shared: bool = False  # the shared expert is the last one
    float32: bool = False  # the engine keeps float32, as SGLang 0.5.23 does for routers
    marlin: bool = False  # the engine repacks experts in INT4 for Marlin's kernels

    def at(self, rank: int) -> tuple[int, int]:
        """The block of experts and the piece of a rank."""
        return rank // self.size % self.experts, rank % self.size


# The checksum on a rank, by the cut of the parameter and by the rank's block of experts and piece.
Predicted = dict[tuple[ParamCut, tuple[int, int]], str]


def cuts(tp: int, parts: Mapping[Order, Tensor], param: str) -> list[ParamCut]:
    """Every way to cut a parameter of these parts over `tp` ranks, including the complete parameter on each rank."""
    routed = routed_of(parts)
    experts = len({order[0] for order in routed}) if len(next(iter(parts))) == 2 else 0
    fused = len(routed) < len(parts) and len({parts[order].shape for order in parts}) == 1
    paddings = (False, True) if _VOCABULARY.fullmatch(param) else (False,)
    casts = (False, True) if _ROUTER.fullmatch(param) else (False,)
    found = []
    for size in _divisors(tp):
        for axis in (0, 1) if size > 1 and next(iter(parts.values())).dim() > 1 else (0,):
            if experts:
                blocks = [number for number in _divisors(tp // size) if experts % number == 0]
                found += [ParamCut(size, axis, size, number) for number in blocks]
                found += [ParamCut(size, axis, size, shared=True)] if fused else []
            elif ".qkv_proj." in param:
                found += [ParamCut(size, axis, others) for others in _divisors(size) if axis == 0 or others == size]
            else:
                ways = product(paddings, casts)
                found += [ParamCut(size, axis, size, padded=padded, float32=cast) for padded, cast in ways]
    if experts and param.endswith((WEIGHT_PACKED, WEIGHT_SCALE)):
        found += [replace(cut, marlin=True) for cut in found]

    def divides(cut: ParamCut) -> bool:
        sizes = ((cut.others if order[-1] else cut.size, part.shape) for order, part in parts.items())
        rows = _VOCABULARY_ROWS if cut.padded else 1
        return all(size == 1 or -(-shape[cut.axis] // rows) * rows % size == 0 for size, shape in sizes)

    return list(filter(divides, found))


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def routed_of(parts: Collection[Order]) -> list[Order]:
    """The parts without those of a shared expert."""
    return [order for order in parts if order[0] != SHARED]


def has_all_parts(parts: Collection[Order]) -> bool:
    """Whether these are all parts of a parameter of experts: gate and up, or down, of experts 0 to the last."""
    experts = {order[0] for order in routed_of(parts)}
    return is_without_gap(parts) and bool(experts) and max(experts) == len(experts) - 1


def is_without_gap(parts: Collection[Order]) -> bool:
    """Whether all experts among these parts have the same ones."""
    return len(parts) == len({order[0] for order in parts}) * len({order[-1] for order in parts})


def piece(parts: Mapping[Order, Tensor], cut: ParamCut, at: tuple[int, int]) -> Tensor:
    """The part of a parameter on a rank with this block and piece."""
    block, index = at
    if cut.marlin:
        return marlin_experts(piece(parts, replace(cut, marlin=False), at))
    if cut.float32:
        parts = {order: part.float() for order, part in parts.items()}
    ordered = sorted(parts if cut.shared else routed_of(parts))
    if len(ordered[0]) == 1:
        return _join([parts[order] for order in ordered], cut, index)
    experts, places = sorted({order[0] for order in ordered}), sorted({order[1] for order in ordered})
    count = len(experts) // cut.experts
    local = experts[block * count : (block + 1) * count]
    return torch.stack([_join([parts[expert, place] for place in places], cut, index) for expert in local])


def _join(parts: Sequence[Tensor], cut: ParamCut, index: int) -> Tensor:
    pieces = []
    for place, part in enumerate(parts):
        size = cut.others if place else cut.size
        missing = -part.shape[0] % _VOCABULARY_ROWS if cut.padded else 0
        rows = torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) if missing else part
        pieces.append(rows.chunk(size, cut.axis)[index // (cut.size // size)] if size > 1 else rows)
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


class Sent:
    """The tensors of one update."""

    def __init__(
        self,
        digest: Digest,
        sizes: Collection[int],
        known: Mapping[str, Collection[ParamCut]],
        before: Mapping[str, int],
        room: int,
    ) -> None:
        """`sizes`: tensor parallel sizes of the engines. `known`: the possible cuts of a kind; a missing kind has any.

        `before`: the number of tensors of each parameter in an earlier update. `room`: bytes of tensors to keep.
        """
        self.sources: dict[str, dict[Order, tuple[str, str]]] = defaultdict(dict)  # names and checksums, by parameter
        self.predicted: dict[str, Predicted] = {}  # by parameter
        self.dtypes: dict[str, set[str]] = defaultdict(set)  # of the parts of each parameter
        self.constant: set[str] = set()  # parameters of one number, which are equal in every layout
        self.too_large: set[str] = set()  # parameters without room
        self.checksums: dict[str, str] = {}  # by name
        self._digest, self._sizes, self._known, self._before, self._room = digest, sizes, known, before, room
        self._parts: dict[str, dict[Order, Tensor]] = defaultdict(dict)
        self._held: dict[str, int] = defaultdict(int)

    def add(self, name: str, tensor: Tensor) -> None:
        """Records a tensor. Of two with one name the last counts."""
        if name.endswith(WEIGHT_SHAPE):
            return
        value = tensor.detach()
        self.checksums[canonical(name)] = checksum = self._digest(value)
        for part in target_parts(name):
            self.sources[part.param][part.order] = canonical(name), checksum
            self.dtypes[part.param].add(str(value.dtype))
            if part.param not in self.too_large:
                self._keep(part, value, checksum)

    def kind(self, param: str) -> str:
        """A key for parameters that are kept in the same way: equal but for the layer, with the same dtypes."""
        return " ".join([pattern_of(param), *sorted(self.dtypes.get(param, ()))])

    def wide(self, param: str) -> bool:
        """Whether a part was sent in float32 or float64, which the engine may round."""
        return not self.dtypes.get(param, set()).isdisjoint(_WIDE)

    def finish(self) -> None:
        """Predicts the parameters that are complete at the end of the update, and frees all tensors."""
        for param in list(self._parts):
            parts = self._parts.pop(param)
            if parts.keys() == {(0,), (1,)} and ".qkv_proj." in param:
                parts[2,] = parts[1,]  # some models use the keys as values, and store them once
                self._predict(param, parts)
            elif len(next(iter(parts))) == 2 and has_all_parts(parts):
                self._predict(param, parts)
        self._held.clear()

    def _keep(self, part: Part, value: Tensor, checksum: str) -> None:
        parts = self._parts[part.param]
        orders, count = {*parts, part.order}, part.count or self._before.get(part.param)
        # Two updates may lack as many experts' tensors, but not the same ones.
        if len(orders) == count and (part.count is not None or is_without_gap(orders)):
            del self._parts[part.param]
            self._held.pop(part.param, None)
            self._predict(part.param, {**parts, part.order: value}, checksum)
            return
        parts[part.order] = value.clone()  # the trainer may use its buffer for another tensor
        self._held[part.param] += value.nbytes
        if sum(self._held.values()) > self._room:
            largest = max(self._held, key=self._held.__getitem__)
            del self._parts[largest], self._held[largest]
            self.too_large.add(largest)

    def _predict(self, param: str, parts: Mapping[Order, Tensor], checksum: str | None = None) -> None:
        """`checksum`: that of the last part, which is also the parameter's if it has no other part."""
        known = self._known.get(self.kind(param))
        found: Predicted = {}
        for size in self._sizes:
            ways = [cut for cut in cuts(size, parts, param) if known is None or cut in known]
            if parts.keys() == {(0,)} and checksum is not None and ParamCut() in ways:
                ways.remove(ParamCut())
                found[ParamCut(), (0, 0)] = checksum
            places = [(cut, at) for cut in ways for at in {cut.at(rank) for rank in range(size)}]
            found |= {(cut, at): self._digest(piece(parts, cut, at)) for cut, at in places}
        self.predicted[param] = found
        if known is None and all(bool((part == part.flatten()[0]).all()) for part in parts.values() if part.numel()):
            self.constant.add(param)

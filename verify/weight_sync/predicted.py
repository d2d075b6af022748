"""What an engine's checksum of a parameter must be, computed from the tensors that a trainer sends.

SGLang's and vLLM's checksums are of their own parameters: q, k and v in one, all experts of a layer in one, cut over
ranks. Names say which tensors one is made of, and there are only a few ways to cut it. So the checksum of each is
computed here; one that is equal to the engine's proves at once the way and the values.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ckptkit.converters.hf_names import FUSED
from ckptkit.verify.evidence.folding import pattern_of
from ckptkit.verify.weight_sync.engines import Digest

if TYPE_CHECKING:
    from torch import Tensor


Order = tuple[int, ...]  # of a part within its parameter: its place, or its expert and its place there

_PREFIX = re.compile(r"(model\.language_model\.|language_model\.model\.|language_model\.|model\.)")
_VOCABULARY = re.compile(r"(.+\.)?(embed_tokens|lm_head)\.weight")
_ROUTER = re.compile(r".+\.(gate|router)\.weight")
_VOCABULARY_ROWS = 64  # engines pad to a multiple, with zeros (vocab_parallel_embedding.py, DEFAULT_VOCAB_PADDING_SIZE)
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w3|w2)\.(\w+)")
SHARED_EXPERT = re.compile(r"(.+)\.shared_experts\.(gate_proj|up_proj|down_proj)\.(\w+)")
SHARED = 1 << 30  # as the number of an expert: the shared one, which SGLang may keep behind the last
_PLACE = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 0, "w2": 0}
# Engines' names of fused layers (`packed_modules_mapping` of their models), and what is in them from top to bottom.
_FUSED = {name: FUSED[name] for name in ("qkv_proj", "gate_up_proj", "fused_qkv_a_proj_with_mqa")}
# vLLM's names of what SGLang calls otherwise.
_SPELLED = {".fused_qkv_a_proj.": ".fused_qkv_a_proj_with_mqa.", ".experts.routed_experts.": ".experts."}
_FUSED_IN = {part: (name, place) for name, parts in _FUSED.items() for place, part in enumerate(parts)}


@dataclass(frozen=True)
class Part:
    """Where a tensor goes: the parameter, which part of it, and how many parts it has (None: as many as experts)."""

    param: str
    order: Order
    count: int | None


def canonical(name: str) -> str:
    """A name as SGLang has it, without the text model's prefix, which engines and releases spell in several ways."""
    for theirs, ours in _SPELLED.items():
        name = name.replace(theirs, ours)
    return _PREFIX.sub("", name, count=1) if _PREFIX.match(name) else name


def target_parts(name: str) -> list[Part]:
    """Where a tensor goes by its HF name: the fused parameter, or the parameter of its own name.

    A shared expert's may also go into that of the routed ones, in an engine that keeps it as one more of them.
    """
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
    """The parts that a parameter lacks of those that go with the ones it has: up with gate, k and v with q."""
    routed = routed_of(orders)
    if routed and len(routed[0]) == 2:
        places = {place for _, place in routed}
        experts = {expert for expert, _ in routed}
        lost = sorted((expert, place) for expert in experts for place in places if (expert, place) not in orders)
        return [f"{'up' if place else 'gate'}_proj of expert {expert}" for expert, place in lost]
    fused = param.rpartition(".")[0].rpartition(".")[2]
    return [name for place, name in enumerate(_FUSED.get(fused, ())) if (place,) not in orders]


@dataclass(frozen=True)
class ParamCut:
    """How a parameter is cut over tensor parallel ranks.

    Of `experts` blocks of experts a rank has one, and within it every part is cut into `size` pieces along `axis`; the
    second and later parts (k and v) into `others` pieces. `padded`: rows are first padded as a vocabulary. `shared`:
    the shared expert stands behind the others. `float32`: the engine holds the values so, as 0.5.23 does routers.
    """

    size: int = 1
    axis: int = 0
    others: int = 1
    experts: int = 1
    padded: bool = False
    shared: bool = False
    float32: bool = False

    def at(self, rank: int) -> tuple[int, int]:
        """The block of experts and the piece that a rank has."""
        return rank // self.size % self.experts, rank % self.size


# The checksum of what a rank holds, by how a parameter is cut and by the rank's block of experts and piece.
Predicted = dict[tuple[ParamCut, tuple[int, int]], str]


def cuts(tp: int, parts: Mapping[Order, Tensor], param: str) -> list[ParamCut]:
    """Every way in which `tp` ranks may hold a parameter of these parts; the whole of it on each rank is one."""
    routed = routed_of(parts)
    experts = len({order[0] for order in routed}) if len(next(iter(parts))) == 2 else 0
    fused = len(routed) < len(parts) and len({parts[order].shape for order in parts}) == 1
    paddings = (False, True) if _VOCABULARY.fullmatch(param) else (False,)
    casts = (False, True) if _ROUTER.fullmatch(param) else (False,)
    found = []
    for size in _divisors(tp):
        for axis in (0, 1) if size > 1 and next(iter(parts.values())).dim() > 1 else (0,):
            if experts:
                found += [
                    ParamCut(size, axis, size, blocks) for blocks in _divisors(tp // size) if experts % blocks == 0
                ]
                found += [ParamCut(size, axis, size, shared=True)] if fused else []
            elif ".qkv_proj." in param:
                found += [ParamCut(size, axis, others) for others in _divisors(size) if axis == 0 or others == size]
            else:
                found += [
                    ParamCut(size, axis, size, padded=padded, float32=cast) for padded in paddings for cast in casts
                ]
    return [cut for cut in found if _divides(cut, parts)]


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def _divides(cut: ParamCut, parts: Mapping[Order, Tensor]) -> bool:
    sizes = [(cut.others if order[-1] else cut.size, part.shape) for order, part in parts.items()]
    rows = _VOCABULARY_ROWS if cut.padded else 1
    return all(size == 1 or -(-shape[cut.axis] // rows) * rows % size == 0 for size, shape in sizes)


def routed_of(parts: Collection[Order]) -> list[Order]:
    """The parts without those of a shared expert."""
    return [order for order in parts if order[0] != SHARED]


def has_all_parts(parts: Collection[Order]) -> bool:
    """Whether these are all parts of a parameter of experts: gate and up, or down, of experts 0 to the last."""
    experts, places = {order[0] for order in routed_of(parts)}, {order[1] for order in parts}
    complete = len(parts) == len({order[0] for order in parts}) * len(places)
    return complete and bool(experts) and max(experts) == len(experts) - 1


def piece(parts: Mapping[Order, Tensor], cut: ParamCut, at: tuple[int, int]) -> Tensor:
    """What a rank holds of a whole parameter that is cut so."""
    block, index = at
    if cut.float32:
        parts = {order: part.float() for order, part in parts.items()}
    ordered = sorted(parts if cut.shared else routed_of(parts))
    if len(ordered[0]) == 1:
        return _joined([parts[order] for order in ordered], cut, index)
    places = sorted({order[1] for order in ordered})
    experts = sorted({order[0] for order in ordered})
    held = len(experts) // cut.experts
    return torch.stack(
        [
            _joined([parts[expert, place] for place in places], cut, index)
            for expert in experts[block * held : (block + 1) * held]
        ]
    )


def _joined(parts: Sequence[Tensor], cut: ParamCut, index: int) -> Tensor:
    pieces = []
    for place, part in enumerate(parts):
        size = cut.others if place else cut.size
        missing = -part.shape[0] % _VOCABULARY_ROWS if cut.padded else 0
        rows = torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) if missing else part
        pieces.append(rows.chunk(size, cut.axis)[index // (cut.size // size)] if size > 1 else rows)
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


_WIDE = ("torch.float32", "torch.float64")
UNUSED = "weight_shape"  # engines keep that of one shard only, rounded, and never read it


class Sent:
    """One update, tensor by tensor.

    `sources`: by parameter, each tensor that goes into it with its checksum. `predicted`: by parameter, the checksum of
    what a rank must hold, for each way to cut it. `dtypes`: those of a parameter's parts. `constant`: parameters of one
    number alone, which look alike in every layout. `too_large`: those for which there was no room. `checksums`: of each
    tensor by its own name.
    """

    def __init__(
        self,
        digest: Digest,
        sizes: Collection[int],
        known: Mapping[str, Collection[ParamCut]],
        before: Mapping[str, int],
        room: int,
    ) -> None:
        """`sizes`: tensor parallel sizes of the engines. `known`: the cuts that a kind can have; of others any.

        `before`: of how many tensors each parameter was made in an earlier update. `room`: bytes of tensors to keep.
        """
        self.sources: dict[str, dict[Order, tuple[str, str]]] = defaultdict(dict)
        self.predicted: dict[str, Predicted] = {}
        self.dtypes: dict[str, set[str]] = defaultdict(set)
        self.constant: set[str] = set()
        self.too_large: set[str] = set()
        self.checksums: dict[str, str] = {}
        self._digest, self._sizes, self._known, self._before, self._room = digest, sizes, known, before, room
        self._parts: dict[str, dict[Order, Tensor]] = defaultdict(dict)
        self._held: dict[str, int] = defaultdict(int)

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes note of a tensor. One that comes again counts as it came last."""
        if name.endswith(f".{UNUSED}"):
            return
        value = tensor.detach()
        self.checksums[canonical(name)] = checksum = self._digest(value)
        for part in target_parts(name):
            self.sources[part.param][part.order] = canonical(name), checksum
            self.dtypes[part.param].add(str(value.dtype))
            if part.param not in self.too_large:
                self._keep(part, value, checksum)

    def kind(self, param: str) -> str:
        """Parameters that differ in their layer alone, and were sent in the same dtypes, are kept in the same way."""
        return " ".join([pattern_of(param), *sorted(self.dtypes.get(param, ()))])

    def wide(self, param: str) -> bool:
        """Whether a part was sent in float32, which the engine may round."""
        return not self.dtypes.get(param, set()).isdisjoint(_WIDE)

    def finish(self) -> None:
        """All was sent: what is complete now is predicted, and nothing is kept any longer."""
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
        count = part.count or self._before.get(part.param)
        if count is not None and len({*parts, part.order}) == count:
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
        """`checksum`: that of the last part, which is the parameter's own where it is the only one."""
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

"""What a trainer sent in one weight update: a checksum of every tensor, and of every parameter made of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from ckptkit.app.job.engines import Digest
from ckptkit.app.job.predicted import (
    Cut,
    Order,
    Part,
    Predicted,
    canonical,
    cuts,
    digests,
    kind_of,
    part_of,
    shared_part_of,
    whole,
)

if TYPE_CHECKING:
    from torch import Tensor

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
        known: Callable[[str], Collection[Cut] | None],
        before: Mapping[str, int],
        room: int,
    ) -> None:
        """`sizes`: tensor parallel sizes of the engines. `known`: the cuts that a kind can have (None: any).

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
        for part in (part_of(name), shared_part_of(name)):
            if part is None:
                continue
            self.sources[part.param][part.order] = canonical(name), checksum
            self.dtypes[part.param].add(str(value.dtype))
            if part.param not in self.too_large:
                self._keep(part, value, checksum)

    def kind(self, param: str) -> str:
        """Parameters that differ in their layer alone, and were sent in the same dtypes, are kept in the same way."""
        return " ".join([kind_of(param), *sorted(self.dtypes.get(param, ()))])

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
            elif len(next(iter(parts))) == 2 and whole(parts):
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
        known = self._known(self.kind(param))
        found: Predicted = {}
        for size in self._sizes:
            ways = [cut for cut in cuts(size, parts, param) if known is None or cut in known]
            if parts.keys() == {(0,)} and checksum is not None and Cut() in ways:
                ways.remove(Cut())
                found[Cut(), (0, 0)] = checksum
            found |= digests(parts, ways, size, self._digest)
        self.predicted[param] = found
        if known is None and all(bool((part == part.flatten()[0]).all()) for part in parts.values() if part.numel()):
            self.constant.add(param)

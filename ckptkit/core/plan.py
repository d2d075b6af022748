"""A conversion as data: steps with known inputs and outputs, before any bytes are read.

A plan over a checkpoint is also a checkpoint (`View`), so plans can be stacked.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import dtype_name
from ckptkit.core.errors import CkptkitError, MissingError
from ckptkit.core.extents import ByteRange, Extent, Reader, byte_ranges_of, extents_of, is_streamable, read_with
from ckptkit.core.specs import TensorSpec, summarize

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """A pure function from tensors to tensors. `label` names it in `--dry-run`.

    `is_byte_copy`: the bytes of the outputs in order are those of the inputs, or the first bytes of a single input.
    """

    inputs: tuple[str, ...]
    outputs: tuple[TensorSpec, ...]
    run: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    label: str
    is_byte_copy: bool = False


def identity(spec: TensorSpec) -> Step:
    """The step that copies a tensor."""
    return Step((spec.name,), (spec,), list, "copy", is_byte_copy=True)


@dataclass(frozen=True)
class Plan:
    """Steps that use or drop every source tensor and make every output once. Raises CkptkitError otherwise."""

    steps: tuple[Step, ...]
    sources: Collection[str]
    dropped: frozenset[str] = frozenset()
    where: str = "the checkpoint"
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A large model has a hundred thousand names, and sources may be a list.
        used, sources = {name for step in self.steps for name in step.inputs}, set(self.sources)
        require(self.where, used, sources)
        if left := sources - used - self.dropped:
            message = f"{self.where} has {len(left)} tensor(s) without a conversion rule in its model family"
            hint = "run `ckptkit verify` to see where config.json and tensors disagree; no tensor may be lost"
            raise CkptkitError(f"{message}: {summarize(sorted(left))}", hint)
        made = Counter(spec.name for step in self.steps for spec in step.outputs)
        if twice := [name for name, count in made.items() if count > 1]:
            raise CkptkitError(f"{self.where}: several conversion rules write {summarize(twice)}")


def require(where: str, needed: Iterable[str], sources: Collection[str]) -> None:
    """Raises MissingError naming the needed tensors that `where` does not have."""
    if missing := [name for name in dict.fromkeys(needed) if name not in sources]:
        message = f"{where} lacks {len(missing)} tensor(s) that its config requires: {summarize(missing)}"
        hint = "run `ckptkit verify` to see whether a shard is missing or config.json is of another model"
        raise MissingError(message, hint)


class View:
    """A lazily computed plan over a checkpoint, which is also a Checkpoint."""

    def __init__(self, source: Checkpoint, plan: Plan) -> None:
        self.source = source
        self._plan = plan
        self._step_of = {spec.name: step for step in plan.steps for spec in step.outputs}
        self.config: Mapping[str, Any] = plan.config
        self.specs: Mapping[str, TensorSpec] = {spec.name: spec for step in plan.steps for spec in step.outputs}

    @cached_property
    def groups(self) -> Sequence[tuple[str, ...]]:
        """Outputs of all steps that share a source group, in the source's reading order."""
        source = self.source.groups
        group_of = {name: index for index, names in enumerate(source) for name in names}
        merged = _Components(len(source))
        for step in self._plan.steps:
            if len(step.inputs) > 1:
                merged.join([group_of[name] for name in step.inputs])
        outputs: dict[int, list[str]] = {}
        for step in self._plan.steps:
            key = merged.find(group_of[step.inputs[0]])
            outputs.setdefault(key, []).extend([spec.name for spec in step.outputs])
        return [tuple(outputs[key]) for key in sorted(outputs)]

    def step(self, name: str) -> Step:
        """The step that makes a tensor."""
        return self._step_of[name]

    def _steps(self, names: Sequence[str]) -> Collection[Step]:
        return {id(step): step for step in (self._step_of[name] for name in names)}.values()

    def inputs(self, names: Sequence[str]) -> list[str]:
        """The source tensors for these outputs."""
        return list(dict.fromkeys(name for step in self._steps(names) for name in step.inputs))

    def files_of(self, names: Sequence[str]) -> list[str]:
        return self.source.files_of(self.inputs(names))

    def byte_ranges(self, names: Sequence[str]) -> Iterable[ByteRange]:
        return byte_ranges_of(self.source, self.inputs(names))

    def shares_memory(self, name: str) -> bool:
        """Whether a tensor shares the memory of its source tensor."""
        step = self._step_of[name]
        return step.is_byte_copy and len(step.inputs) == 1

    def is_streamable(self, name: str) -> bool:
        step = self._step_of[name]
        return step.is_byte_copy and all(is_streamable(self.source, source) for source in step.inputs)

    def extents(self, name: str) -> Sequence[Extent] | None:
        step = self._step_of[name]
        if not step.is_byte_copy:
            return None
        before = itertools.takewhile(lambda spec: spec.name != name, step.outputs)
        # A padded vocabulary omits its last rows.
        at, begin = 0, sum(spec.nbytes for spec in before)
        end, found = begin + self.specs[name].nbytes, list[Extent]()
        for source in step.inputs:
            extents = extents_of(self.source, source)
            if extents is None or (
                len(step.inputs) > 1 and sum(extent.nbytes for extent in extents) != self.source.specs[source].nbytes
            ):
                return None
            for extent in extents:
                if at < begin < at + extent.nbytes:
                    return None
                if begin <= at < end:
                    found.append(extent)
                at += extent.nbytes
        return found

    def read(self, names: Sequence[str], reader: Reader | None = None) -> dict[str, Tensor]:
        inputs = read_with(self.source, self.inputs(names), reader)
        requested = set(names)
        found: dict[str, Tensor] = {}
        for step in self._steps(names):
            tensors = [inputs[name] for name in step.inputs]
            results = _join_in_place(step, tensors) or step.run(tensors)
            for spec, tensor in zip(step.outputs, results, strict=True):
                if spec.name in requested:
                    found[spec.name] = checked(spec, tensor)
        return found


def _join_in_place(step: Step, tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """The outputs of a byte copy without copying, or None if its inputs are not adjacent in memory."""
    import torch

    if (
        not step.is_byte_copy
        or len(tensors) == 1
        or not all(tensor.numel() and tensor.is_contiguous() for tensor in tensors)
    ):
        return None
    first, ends = tensors[0].view(-1).view(torch.uint8), list(itertools.accumulate(tensor.nbytes for tensor in tensors))
    addresses = [(tensor.untyped_storage().data_ptr(), tensor.data_ptr()) for tensor in tensors]
    if addresses[1:] != [(addresses[0][0], addresses[0][1] + end) for end in ends[:-1]]:
        return None
    joined = torch.as_strided(first, (ends[-1],), (1,), first.storage_offset())
    parts = torch.split(joined, [spec.nbytes for spec in step.outputs])
    return [part.view(spec.torch_dtype).view(spec.shape) for part, spec in zip(parts, step.outputs, strict=True)]


def read_and_held(checkpoint: Checkpoint, names: Sequence[str]) -> tuple[int, int]:
    """Bytes to read for these tensors, and bytes of memory for them and their sources."""
    if not isinstance(checkpoint, View):
        stored = sum(checkpoint.specs[name].nbytes for name in names)
        return stored, stored
    read, held = read_and_held(checkpoint.source, checkpoint.inputs(names))
    return read, held + sum(checkpoint.specs[name].nbytes for name in names if not checkpoint.shares_memory(name))


def checked(spec: TensorSpec, tensor: Tensor) -> Tensor:
    """The tensor, contiguous. Raises CkptkitError if it differs from its spec."""
    if tuple(tensor.shape) != spec.shape or dtype_name(tensor.dtype) != spec.dtype:
        message = f"{spec} is expected, but {list(tensor.shape)} {tensor.dtype} was computed"
        raise CkptkitError(message, "this is a defect in a rule: please report it")
    return tensor.contiguous()


class _Components:
    """Union-find over 0..n-1; the representative is the smallest member."""

    def __init__(self, size: int) -> None:
        self._parent = list(range(size))

    def find(self, node: int) -> int:
        while self._parent[node] != node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def join(self, nodes: Sequence[int]) -> None:
        roots = [self.find(node) for node in nodes]
        smallest = min(roots)
        for root in roots:
            self._parent[root] = smallest


class Joined:
    """The tensors of two checkpoints, with the config of the first. Raises CkptkitError for names in both."""

    def __init__(self, first: Checkpoint, second: Checkpoint) -> None:
        if both := sorted(first.specs.keys() & second.specs.keys()):
            message = f"a checkpoint and the files to add to it both contain {summarize(both)}"
            raise CkptkitError(message, "pass the HF directory of this model with --hf")
        self._parts = (first, second)
        self.config: Mapping[str, Any] = first.config
        self.specs: Mapping[str, TensorSpec] = {**first.specs, **second.specs}

    @property
    def groups(self) -> Sequence[tuple[str, ...]]:
        return [*self._parts[0].groups, *self._parts[1].groups]

    def files_of(self, names: Sequence[str]) -> list[str]:
        found = (part.files_of([name for name in names if name in part.specs]) for part in self._parts)
        return list(dict.fromkeys(itertools.chain.from_iterable(found)))

    def byte_ranges(self, names: Sequence[str]) -> Iterator[ByteRange]:
        for part in self._parts:
            yield from byte_ranges_of(part, [name for name in names if name in part.specs])

    def extents(self, name: str) -> Sequence[Extent] | None:
        return next(extents_of(part, name) for part in self._parts if name in part.specs)

    def is_streamable(self, name: str) -> bool:
        return next(is_streamable(part, name) for part in self._parts if name in part.specs)

    def read(self, names: Sequence[str], reader: Reader | None = None) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for part in self._parts:
            found |= read_with(part, [name for name in names if name in part.specs], reader)
        return found

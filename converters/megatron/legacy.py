"""Reads Megatron's legacy `torch` format (`mp_rank_*`) as the global tensors that torch_dist would have stored.

Layers and experts get their global numbers from the training arguments. The parts of tensor parallel ranks are put
together by the inverse of the op that cuts them (`Op.shard`). What several ranks hold must be equal on all of them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.converters.megatron.hybrid_model import stored_pattern
from ckptkit.converters.megatron.module_names import CUT_IN_LOCAL_SPEC, global_name
from ckptkit.converters.megatron.pipeline import Pipeline
from ckptkit.converters.ops.basic import Copy, Op
from ckptkit.converters.ops.shapes import Shape, shape_of
from ckptkit.converters.planner import MCORE, Rule, dialect_of, dims_of, rules_of
from ckptkit.converters.stored import as_stored
from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.core.printable import shortened
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.side_files import config_in, hf_home
from ckptkit.formats.legacy import LegacyFiles, RankFile
from ckptkit.formats.torch_save.saved_file import SavedTensor
from ckptkit.storage.directory import Directory

if TYPE_CHECKING:
    from torch import Tensor

_LAYER = re.compile(r"decoder\.layers\.(\d+)\..+")


@dataclass(frozen=True)
class _Copy:
    """A tensor of one rank, by the name of its module there."""

    rank: RankFile
    local: str
    tensor: SavedTensor

    def __str__(self) -> str:
        return f"{self.rank}: {self.local}"


@dataclass(frozen=True)
class _Joined:
    """A global tensor: its parts, all copies of each, which `op` cut along `axis` (None: there is only one)."""

    spec: TensorSpec
    parts: Sequence[Sequence[_Copy]]
    op: Op | None = None
    axis: int | None = None

    def read(self) -> Tensor:
        if self.op is None or self.axis is None:
            return _same(self.parts[0])
        import torch

        whole = torch.empty(self.spec.shape, dtype=self.spec.torch_dtype)
        # Ops are frozen dataclasses, so they can be hashed.
        places = _places(self.op, self.spec.shape, self.axis, len(self.parts))  # type: ignore[arg-type]
        for copies, place in zip(self.parts, places, strict=True):
            whole.index_copy_(self.axis, place, _same(copies))
        return whole


def _same(copies: Sequence[_Copy]) -> Tensor:
    """The content of all these copies. Raises CkptkitError when two differ in a bit."""
    import torch

    first = copies[0].rank.file.read(copies[0].tensor)
    for copy in copies[1:]:
        other = copy.rank.file.read(copy.tensor)
        if not torch.equal(*(tensor.flatten().view(torch.uint8) for tensor in (first, other))):
            hint = "both are the same tensor of the model: one file is of another save, or the run went wrong"
            raise CkptkitError(f"{copy} differs from {copies[0]}", hint)
    return first


class LegacyCheckpoint:
    """An iteration in Megatron's legacy format. Weights are read one by one.

    The HF config comes from `hf`, or from `hf/` beside the iteration. Raises CkptkitError naming file and tensor.
    """

    def __init__(self, path: str | Path, hf: str | Path | Directory | None = None) -> None:
        self.path = Path(path).absolute()
        self.hf = hf_home(self.path, hf)
        self.files = LegacyFiles(self.path)

    @property
    def hf_path(self) -> Path:
        """The HF directory on this machine that gives the config; it need not exist."""
        return self.hf.path

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return config_in(self.hf, self.path)

    @property
    def args(self) -> Mapping[str, Any]:
        """The training arguments stored with the weights."""
        return self.files.args

    @cached_property
    def _tensors(self) -> Mapping[str, _Joined]:
        found = _named(self.files, self.config)
        config = as_stored(self.config, found)
        rules = {rule.megatron: rule for rule in rules_of(config, dialect_of(config, found))}
        return {name: _joined(name, copies, rules.get(name), self.files) for name, copies in found.items()}

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: joined.spec for name, joined in self._tensors.items()}

    @property
    def groups(self) -> Sequence[tuple[str, ...]]:
        return [(name,) for name in self.specs]

    def files_of(self, names: Sequence[str]) -> list[str]:
        copies = (copy for name in names for copies in self._tensors[name].parts for copy in copies)
        return list(dict.fromkeys(str(copy.rank) for copy in copies))

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: self._tensors[name].read() for name in names}


def _named(files: LegacyFiles, config: Mapping[str, Any]) -> dict[str, list[_Copy]]:
    """Every tensor of every rank, by the name of the global tensor that it is, or is a part of."""
    dims = dims_of(config)
    if (pattern := stored_pattern(files.args)) is not None:
        raise UnsupportedError(
            f"{files.path} is a HybridModel (its layer pattern is {shortened(pattern)}) in the legacy format",
            "ckptkit reads HybridModel's torch_dist: load it with Megatron and save with --ckpt-format torch_dist",
        )
    if files.args.get("num_layers") != dims.layers or dims.experts % files.sizes.ep:
        message = f"num_layers {files.args.get('num_layers')}, expert_model_parallel_size {files.sizes.ep}"
        raise CkptkitError(
            f"{files.path} was saved with {message}; config.json has {dims.layers} layers and {dims.experts} experts",
            "name the right HF directory",
        )
    names = frozenset(rule.megatron for dialect in (MCORE, "slime") for rule in rules_of(config, dialect))
    stages, count = Pipeline.from_args(files.args).stages, dims.experts // files.sizes.ep
    found: dict[str, list[_Copy]] = defaultdict(list)
    for rank in files.ranks:
        if len(stages[rank.pp]) != len(rank.chunks):
            message = (
                f"{rank} holds {len(rank.chunks)} model chunk(s), its training arguments say {len(stages[rank.pp])}"
            )
            raise CkptkitError(message, "copy it again")
        experts = range(rank.ep * count, (rank.ep + 1) * count)
        for layers, tensors in zip(stages[rank.pp], rank.chunks, strict=True):
            if {int(match[1]) for local in tensors if (match := _LAYER.fullmatch(local))} != set(range(len(layers))):
                message = f"{rank} does not hold the {len(layers)} layers that its training arguments say"
                raise CkptkitError(message, "the file is of another run; copy it again")
            for local, tensor in tensors.items():
                found[_global(rank, local, layers, experts, names)].append(_Copy(rank, local, tensor))
    return found


def _global(rank: RankFile, local: str, layers: Sequence[int], experts: Sequence[int], names: frozenset[str]) -> str:
    try:
        return global_name(local, layers, experts, names)
    except IndexError as error:
        hint = "config.json is of another model, or the file of another run"
        raise CkptkitError(f"{rank}: {local}: the rank has only {len(experts)} experts", hint) from error


def _joined(name: str, copies: Sequence[_Copy], rule: Rule | None, files: LegacyFiles) -> _Joined:
    """Joins a global tensor from the ranks' copies.

    Raises CkptkitError where one has another shape or dtype, or a part is missing.
    """
    first = copies[0].tensor
    if rule is None:
        # Nobody knows how it was cut. The planner refuses it by its name.
        return _Joined(TensorSpec(name, first.shape, first.dtype), [copies[:1]])
    routed, op, shape = ".experts.experts." in name, rule.mapping.op, rule.megatron_shape
    size = files.sizes.etp if routed else files.sizes.tp
    if CUT_IN_LOCAL_SPEC.fullmatch(name) and first.shape != shape:
        op = Copy(0)
    if rule.mapping.vocab:
        # Megatron pads the vocabulary, by how much the config does not say.
        shape = (first.shape[0] * size, *shape[1:])
    expected = shape_of(lambda tensors: op.shard(tensors[0], 0, size), [shape])
    axis = next((axis for axis, (whole, part) in enumerate(zip(shape, expected, strict=True)) if whole != part), None)
    parts: dict[int, list[_Copy]] = defaultdict(list)
    for copy in copies:
        if (copy.tensor.shape, copy.tensor.dtype) != (expected, first.dtype):
            is_, message = f"{list(copy.tensor.shape)} {copy.tensor.dtype}", f"{list(expected)} {first.dtype}"
            hint = "name the right HF directory, or copy the file again"
            raise CkptkitError(f"{copy} is {is_}; config.json and the training arguments say {message}", hint)
        place = files.etp_rank(copy.rank.tp) if routed else copy.rank.tp
        parts[0 if axis is None else place].append(copy)
    spec = TensorSpec(name, shape, first.dtype)
    if axis is None:
        return _Joined(spec, [parts[0]])
    if lost := sorted(set(range(size)) - set(parts)):
        where = "expert tensor" if routed else "tensor"
        hint = "a file is damaged or of another run; copy it again"
        raise CkptkitError(f"{files.path}: {name} lacks the part of {where} parallel rank {lost[0]}", hint)
    return _Joined(spec, [parts[index] for index in range(size)], op, axis)


@cache
def _places(op: Op, shape: Shape, axis: int, size: int) -> tuple[Tensor, ...]:
    """The indices along `axis` that each of `size` ranks gets of a global tensor.

    Found by cutting the indices themselves, so that it is the inverse of `Op.shard` whatever that does along its axis.
    """
    import torch

    line = torch.arange(shape[axis]).reshape([shape[axis] if each == axis else 1 for each in range(len(shape))])
    places = tuple(op.shard(line, rank, size).flatten() for rank in range(size))
    if not torch.equal(torch.cat(places).sort().values, line.flatten()):
        message = f"{type(op).__name__} does not give every part of {list(shape)} to one of {size} ranks"
        raise CkptkitError(message, "this is a defect in a rule: please report it")
    return places

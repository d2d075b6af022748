"""Reads Megatron's legacy `torch` format (`mp_rank_*`) as the global tensors that torch_dist stores.

Layers and experts get their global numbers from the training arguments. The parts of tensor parallel ranks are joined
by the inverse of `Op.shard`. Copies of a tensor on several ranks must be equal.
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
from ckptkit.converters.stored import adapt_config
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
    """A tensor of one rank, by its local name."""

    rank: RankFile
    local: str
    tensor: SavedTensor

    def __str__(self) -> str:
        return f"{self.rank}: {self.local}"


@dataclass(frozen=True)
class _Joined:
    """A global tensor: the copies of each part, and the `op` that cut it along `axis`, or None for a single part."""

    spec: TensorSpec
    parts: Sequence[Sequence[_Copy]]
    op: Op | None = None
    axis: int | None = None

    def read(self) -> Tensor:
        if self.op is None or self.axis is None:
            return _read_equal(self.parts[0])
        import torch

        tensor = torch.empty(self.spec.shape, dtype=self.spec.torch_dtype)
        # Ops are frozen dataclasses, so they can be hashed.
        indices = _rank_indices(self.op, self.spec.shape, self.axis, len(self.parts))  # type: ignore[arg-type]
        for copies, index in zip(self.parts, indices, strict=True):
            tensor.index_copy_(self.axis, index, _read_equal(copies))
        return tensor


def _read_equal(copies: Sequence[_Copy]) -> Tensor:
    """The content of equal copies. Raises CkptkitError if two differ in a bit."""
    import torch

    first = copies[0].rank.file.read(copies[0].tensor)
    for copy in copies[1:]:
        second = copy.rank.file.read(copy.tensor)
        if not torch.equal(*(tensor.flatten().view(torch.uint8) for tensor in (first, second))):
            hint = "copy both files again: one may be from another save; if not, the ranks diverged in training"
            raise CkptkitError(f"{copy} differs from {copies[0]}, but both are copies of one tensor", hint)
    return first


class LegacyCheckpoint:
    """An iteration in Megatron's legacy format. Weights are read one by one.

    The HF config comes from `hf`, or from `hf/` next to the iteration. Raises CkptkitError naming file and tensor.
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
        tensors = _name_tensors(self.files, self.config)
        config = adapt_config(self.config, tensors)
        rules = {rule.megatron: rule for rule in rules_of(config, dialect_of(config, tensors))}
        return {name: _join(name, copies, rules.get(name), self.files) for name, copies in tensors.items()}

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


def _name_tensors(files: LegacyFiles, config: Mapping[str, Any]) -> dict[str, list[_Copy]]:
    dims = dims_of(config)
    if (pattern := stored_pattern(files.args)) is not None:
        raise UnsupportedError(
            f"{files.path} is a HybridModel in the legacy format (layer pattern {shortened(pattern)})",
            "load the checkpoint with Megatron, and save it with --ckpt-format torch_dist",
        )
    if files.args.get("num_layers") != dims.layers or dims.experts % files.sizes.ep:
        message = f"num_layers {files.args.get('num_layers')}, expert_model_parallel_size {files.sizes.ep}"
        raise CkptkitError(
            f"{files.path} was saved with {message}; config.json has {dims.layers} layers and {dims.experts} experts",
            "pass the HF directory of this model with --hf",
        )
    names = frozenset(rule.megatron for dialect in (MCORE, "slime") for rule in rules_of(config, dialect))
    stages, count = Pipeline.from_args(files.args).stages, dims.experts // files.sizes.ep
    copies: dict[str, list[_Copy]] = defaultdict(list)
    for rank in files.ranks:
        if len(stages[rank.pp]) != len(rank.chunks):
            message = f"{rank} has {len(rank.chunks)} model chunk(s), but its arguments have {len(stages[rank.pp])}"
            raise CkptkitError(message, "copy this file again")
        experts = range(rank.ep * count, (rank.ep + 1) * count)
        for layers, tensors in zip(stages[rank.pp], rank.chunks, strict=True):
            if {int(match[1]) for local in tensors if (match := _LAYER.fullmatch(local))} != set(range(len(layers))):
                message = f"{rank} does not have the {len(layers)} layers of its training arguments"
                raise CkptkitError(message, "the file is from another run; copy it again")
            for local, tensor in tensors.items():
                copies[_global(rank, local, layers, experts, names)].append(_Copy(rank, local, tensor))
    return copies


def _global(rank: RankFile, local: str, layers: Sequence[int], experts: Sequence[int], names: frozenset[str]) -> str:
    try:
        return global_name(local, layers, experts, names)
    except IndexError as error:
        hint = "pass the HF directory of this model with --hf, or copy the file again"
        raise CkptkitError(f"{rank}: {local} is stored, but the rank has only {len(experts)} experts", hint) from error


def _join(name: str, copies: Sequence[_Copy], rule: Rule | None, files: LegacyFiles) -> _Joined:
    """Joins the ranks' copies. Raises CkptkitError if one has another shape or dtype, or a part is missing."""
    first = copies[0].tensor
    if rule is None:
        # It is unknown how it was cut. The planner rejects the name.
        return _Joined(TensorSpec(name, first.shape, first.dtype), [copies[:1]])
    routed, op, shape = ".experts.experts." in name, rule.mapping.op, rule.megatron_shape
    size = files.sizes.etp if routed else files.sizes.tp
    if CUT_IN_LOCAL_SPEC.fullmatch(name) and first.shape != shape:
        op = Copy(0)
    if rule.mapping.vocab:
        # Megatron pads the vocabulary by a number of rows that is not in the config.
        shape = (first.shape[0] * size, *shape[1:])
    expected = shape_of(lambda tensors: op.shard(tensors[0], 0, size), [shape])
    axis = next((axis for axis, (full, part) in enumerate(zip(shape, expected, strict=True)) if full != part), None)
    parts: dict[int, list[_Copy]] = defaultdict(list)
    for copy in copies:
        if (copy.tensor.shape, copy.tensor.dtype) != (expected, first.dtype):
            message = f"{copy} is {list(copy.tensor.shape)} {copy.tensor.dtype}, but config.json and the training "
            message += f"arguments require {list(expected)} {first.dtype}"
            raise CkptkitError(message, "pass the HF directory of this model with --hf, or copy the file again")
        index = files.etp_rank(copy.rank.tp) if routed else copy.rank.tp
        parts[0 if axis is None else index].append(copy)
    spec = TensorSpec(name, shape, first.dtype)
    if axis is None:
        return _Joined(spec, [parts[0]])
    if missing := sorted(set(range(size)) - set(parts)):
        kind = "expert tensor" if routed else "tensor"
        hint = "a file is damaged or from another run; copy it again"
        raise CkptkitError(f"{files.path}: {name} lacks the part of {kind} parallel rank {missing[0]}", hint)
    return _Joined(spec, [parts[index] for index in range(size)], op, axis)


@cache
def _rank_indices(op: Op, shape: Shape, axis: int, size: int) -> tuple[Tensor, ...]:
    """The indices along `axis` of each of `size` ranks in a global tensor, from `Op.shard` of the indices."""
    import torch

    line = torch.arange(shape[axis]).reshape([shape[axis] if each == axis else 1 for each in range(len(shape))])
    indices = tuple(op.shard(line, rank, size).flatten() for rank in range(size))
    if not torch.equal(torch.cat(indices).sort().values, line.flatten()):
        message = f"{type(op).__name__} does not assign every part of {list(shape)} to one of {size} ranks"
        raise CkptkitError(message, "this is a defect in a rule: please report it")
    return indices

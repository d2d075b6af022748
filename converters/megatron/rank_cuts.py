"""Positions where tensor-parallel ranks cut Megatron's tensors; chunks on disk end there, so ranks read only theirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptkit.converters.ops.basic import Op, Qkv
from ckptkit.converters.ops.shapes import Shape, shape_of
from ckptkit.converters.planner import mappings_of
from ckptkit.converters.rules import ParamMapping
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.torch_dist.writer import Cuts

if TYPE_CHECKING:
    from torch import Tensor

_SIZES = (8, 4, 2)  # tensor parallel sizes; 8 is a node of GPUs
_SMALLEST = 1 << 20  # bytes of a chunk; smaller reads cost as much
# Megatron pads a vocabulary by an amount that depends on the size before it cuts it, so no cut fits all sizes.
_VOCAB_CHUNKS, _VOCAB_ROWS = 32, 128


def rank_cuts(config: Mapping[str, Any], dialect: str, specs: Mapping[str, TensorSpec]) -> dict[str, Cuts]:
    """The cuts of Megatron's global tensors, by name, if ranks share them and they are large enough.

    The cuts fit the largest tensor parallel size of 8, 4 and 2 that divides the tensor, and all smaller sizes. Experts
    have none: each is a chunk.
    """
    cuts_of: dict[str, Cuts] = {}
    for mapping in mappings_of(config, dialect):
        if "{expert}" in mapping.megatron:
            continue
        names = [name for name, _ in mapping.expand(0)]
        if names and (cuts := _cuts(mapping, specs[names[0]].nbytes)) is not None:
            cuts_of |= dict.fromkeys(names, cuts)
    return cuts_of


def _cuts(mapping: ParamMapping, nbytes: int) -> Cuts | None:
    if mapping.vocab:
        rows = mapping.megatron_shape[0]
        most = max(1, min(_VOCAB_CHUNKS, nbytes // _SMALLEST))
        return Cuts(0, tuple(range(0, rows, -(-rows // most // _VOCAB_ROWS) * _VOCAB_ROWS)))
    return next(
        (cuts for cuts in _cut_by_size(mapping.op, mapping.megatron_shape) if nbytes // len(cuts.starts) >= _SMALLEST),
        None,
    )


def _cut_by_size(op: Op, shape: Shape) -> Iterator[Cuts]:
    """The cuts of every size that divides a sharded tensor, without cuts inside query groups."""
    import torch

    for size in _SIZES:
        if isinstance(op, Qkv) and op.groups % size:
            continue
        try:
            part = shape_of(partial(_first_part, op, size), [shape])
        except CkptkitError:  # this size does not divide it
            continue
        for axis in [axis for axis, (whole, own) in enumerate(zip(shape, part, strict=True)) if whole != own]:
            places = torch.arange(shape[axis]).reshape([-1 if at == axis else 1 for at in range(len(shape))])
            starts = {start for rank in range(size) for start in _starts(op.shard(places, rank, size).flatten())}
            yield Cuts(axis, tuple(sorted(starts)))


def _first_part(op: Op, size: int, tensors: Sequence[Tensor]) -> Tensor:
    return op.shard(tensors[0], 0, size)


def _starts(places: Tensor) -> list[int]:
    """The first index of every run of consecutive indices."""
    line: list[int] = places.tolist()
    return [place for place, before in zip(line, [-2, *line], strict=False) if place != before + 1]

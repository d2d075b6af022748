"""Where tensor-parallel ranks cut Megatron's tensors: chunks on disk end there, so that a rank reads its own alone."""

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
_SMALLEST = 1 << 20  # bytes of a chunk: to read less costs as much
# Megatron pads a vocabulary before it cuts it, by an amount that follows from the size: no cut fits all.
_VOCAB_CHUNKS, _VOCAB_ROWS = 32, 128


def rank_cuts(config: Mapping[str, Any], dialect: str, specs: Mapping[str, TensorSpec]) -> dict[str, Cuts]:
    """The cuts, by name, of Megatron's global tensors that ranks share and that are large enough.

    They are those of the largest tensor parallel size of 8, 4 and 2 that divides the tensor, and so of every smaller
    one too. Experts have none: each is a chunk already.
    """
    found: dict[str, Cuts] = {}
    for mapping in mappings_of(config, dialect):
        if "{expert}" in mapping.megatron:
            continue
        names = [name for name, _ in mapping.expand(0)]
        if names and (cuts := _cuts(mapping, specs[names[0]].nbytes)) is not None:
            found |= dict.fromkeys(names, cuts)
    return found


def _cuts(mapping: ParamMapping, nbytes: int) -> Cuts | None:
    if mapping.vocab:
        rows = mapping.megatron_shape[0]
        most = max(1, min(_VOCAB_CHUNKS, nbytes // _SMALLEST))
        return Cuts(0, tuple(range(0, rows, -(-rows // most // _VOCAB_ROWS) * _VOCAB_ROWS)))
    return next(
        (cuts for cuts in _of_ranks(mapping.op, mapping.megatron_shape) if nbytes // len(cuts.starts) >= _SMALLEST),
        None,
    )


def _of_ranks(op: Op, shape: Shape) -> Iterator[Cuts]:
    """The cuts of every size that divides the tensor; none where each rank holds all of it. Query groups stay whole."""
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
            yield Cuts(
                axis,
                tuple(
                    sorted({start for rank in range(size) for start in _starts(op.shard(places, rank, size).flatten())})
                ),
            )


def _first_part(op: Op, size: int, tensors: Sequence[Tensor]) -> Tensor:
    return op.shard(tensors[0], 0, size)


def _starts(places: Tensor) -> list[int]:
    """The first of every run of neighbours."""
    line: list[int] = places.tolist()
    return [place for place, before in zip(line, [-2, *line], strict=False) if place != before + 1]

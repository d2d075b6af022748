"""Reads what an HF checkpoint says of its packed INT4 weights: format, shapes of parts, and values of scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.quant.formats.groups import Group
from ckptkit.quant.formats.part_names import (
    SCALE,
    SHAPE,
    WEIGHT_G_IDX,
    WEIGHT_PACKED,
    WEIGHT_SCALE,
    WEIGHT_SHAPE,
    WEIGHT_ZERO_POINT,
    packed_in,
)
from ckptkit.quant.formats.scheme import EXPERTS_ZERO_POINTS
from ckptkit.verify.core.subject import Subject, once
from ckptkit.verify.evidence.both_sides import threads
from ckptkit.verify.evidence.expected import weights_in, weights_of


@dataclass(frozen=True)
class Int4Format:
    """What `quantization_config` says of the packed weights."""

    bits: int
    group: int | None  # weights that share a scale; None: a whole row
    symmetric: bool
    sglang_experts: bool = False  # zero points of routed experts are stored as SGLang reads them

    @property
    def title(self) -> str:
        """Bits and groups, for a message."""
        return f"INT{self.bits}, " + ("one scale a row" if self.group is None else f"groups of {self.group}")

    def groups(self, columns: int) -> int:
        """Scales a row of `columns` weights has."""
        return 1 if self.group is None else -(-columns // self.group)

    def words(self, columns: int) -> int:
        """int32 words that a row of `columns` weights takes."""
        return -(-columns * self.bits // 32)


def int4_format_of(config: Mapping[str, Any]) -> Int4Format | None:
    """The format of the first group of INT4; None when `quantization_config` describes no packed integer weights."""
    return int4_format(weights_of(config))


def int4_format_in(config: Mapping[str, Any], groups: Sequence[Group], module: str) -> Int4Format:
    """The format of a packed module, by the group that it is a target of; else that of the first group of INT4."""
    form = int4_format(weights_in(config, groups, module)) or int4_format_of(config)
    assert form is not None
    return form


def int4_format(weights: Mapping[str, Any]) -> Int4Format | None:
    """The format of a group's `weights`; None where these are not packed integers."""
    bits, size = weights.get("num_bits"), weights.get("group_size")
    if not isinstance(bits, int) or weights.get("type", "int") != "int":
        return None
    group = size if isinstance(size, int) and size > 0 else None
    sglang_experts = observer_kwargs(weights).get(EXPERTS_ZERO_POINTS) == "sglang"
    return Int4Format(bits, group, weights.get("symmetric", True) is not False, sglang_experts)


def observer_kwargs(weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the `weights` of a config group say of how they were quantized; empty where they say nothing."""
    stated = weights.get("observer_kwargs")
    return stated if isinstance(stated, Mapping) else {}


@dataclass(frozen=True)
class Scale:
    """What the scale of one module holds."""

    module: str
    values: int
    not_finite: int
    zero: int
    negative: int
    median: float | None  # of the sizes of finite values other than zero
    shape: tuple[int, ...] | None  # what its weight_shape says
    nbytes: int  # read


@once
def read_scales(subject: Subject) -> list[Scale]:
    """Every scale of the checkpoint with the weight_shape beside it, in order. Raises CkptkitError."""
    checkpoint = subject.checkpoint
    modules = list(packed_in(checkpoint.specs))
    largest = max((spec.nbytes for name, spec in checkpoint.specs.items() if name.endswith(SCALE)), default=0)
    # Several threads of torch's own would wait for one another at every small step, on a busy machine for minutes.
    with threads(largest) as pool:
        return list(pool.map(partial(_scale, checkpoint), modules))


def _scale(checkpoint: Checkpoint, module: str) -> Scale:
    parts = [module + SCALE, module + SHAPE]
    found = checkpoint.read([part for part in parts if part in checkpoint.specs])
    scale, shape = found.get(parts[0]), found.get(parts[1])
    nbytes = sum(tensor.nbytes for tensor in found.values())
    stated = None if shape is None else tuple(int(size) for size in shape.flatten().tolist())
    if scale is None:
        return Scale(module, 0, 0, 0, 0, None, stated, nbytes)
    good = scale[scale.isfinite() & (scale != 0)].float().abs()
    wrong, zero, negative = (int(found.sum()) for found in (~scale.isfinite(), scale == 0, scale < 0))
    middle = float(good.median()) if good.numel() else None
    return Scale(module, scale.numel(), wrong, zero, negative, middle, stated, nbytes)


def part_shapes(
    form: Int4Format, shape: tuple[int, ...], module: str
) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Shape and permitted dtypes of each part of a [rows, columns] weight.

    Source: compressed-tensors `pack_quantized/base.py`.

    Zero points of routed experts may be stored as SGLang reads them (`ckptkit.quant.formats.packing`).
    """
    rows, columns = shape
    groups = form.groups(columns)
    turned = form.sglang_experts and ".experts." in module
    return {
        WEIGHT_PACKED: ((rows, form.words(columns)), ("int32",)),
        WEIGHT_SCALE: ((rows, groups), ("bfloat16", "float16", "float32")),
        WEIGHT_SHAPE: ((2,), ("int64", "int32")),
        WEIGHT_ZERO_POINT: ((groups, form.words(rows)) if turned else (form.words(rows), groups), ("int32",)),
        WEIGHT_G_IDX: ((columns,), ("int32",)),
    }

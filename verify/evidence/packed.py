"""Reads the packed INT4 weights of an HF checkpoint: format, shapes of parts, and values of scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.quant.formats import part_names
from ckptkit.quant.formats.groups import Group
from ckptkit.quant.formats.scheme import EXPERTS_ZERO_POINTS
from ckptkit.verify.core.subject import Subject, once
from ckptkit.verify.evidence.both_sides import threads
from ckptkit.verify.evidence.expected import Shape, weights_in, weights_of


@dataclass(frozen=True)
class Int4Format:
    """The format of packed weights by `quantization_config`."""

    bits: int
    group: int | None  # weights that share a scale, or None for a row
    symmetric: bool
    sglang_experts: bool = False  # zero points of routed experts are stored as SGLang reads them

    @property
    def title(self) -> str:
        """Bits and groups, for a message."""
        return f"INT{self.bits}, " + ("one scale per row" if self.group is None else f"groups of {self.group}")

    def groups(self, columns: int) -> int:
        """The number of scales in a row of `columns` weights."""
        return 1 if self.group is None else -(-columns // self.group)

    def words(self, columns: int) -> int:
        """The number of int32 words in a row of `columns` weights."""
        return -(-columns * self.bits // 32)


def int4_format_of(config: Mapping[str, Any]) -> Int4Format | None:
    """The format of the first integer group, or None without packed integers."""
    return int4_format(weights_of(config))


def int4_format_in(config: Mapping[str, Any], groups: Sequence[Group], module: str) -> Int4Format:
    """The format of a packed module, by the group that targets it, else by the first integer group."""
    form = int4_format(weights_in(config, groups, module)) or int4_format_of(config)
    assert form is not None
    return form


def int4_format(weights: Mapping[str, Any]) -> Int4Format | None:
    """The format of a group's `weights`, or None if they are not packed integers."""
    bits, size = weights.get("num_bits"), weights.get("group_size")
    if not isinstance(bits, int) or weights.get("type", "int") != "int":
        return None
    group = size if isinstance(size, int) and size > 0 else None
    sglang_experts = observer_kwargs(weights).get(EXPERTS_ZERO_POINTS) == "sglang"
    return Int4Format(bits, group, weights.get("symmetric", True) is not False, sglang_experts)


def observer_kwargs(weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the quantizer in the `weights` of a config group; may be empty."""
    settings = weights.get("observer_kwargs")
    return settings if isinstance(settings, Mapping) else {}


@dataclass(frozen=True)
class Scale:
    """The scale of one module."""

    module: str
    values: int
    not_finite: int
    zero: int
    negative: int
    median: float | None  # of the sizes of finite values other than zero
    shape: Shape | None  # by its weight_shape
    nbytes: int  # read


@once
def read_scales(subject: Subject) -> list[Scale]:
    """Every scale of the checkpoint with its weight_shape, in order. Raises CkptkitError."""
    checkpoint = subject.checkpoint
    sizes = [spec.nbytes for name, spec in checkpoint.specs.items() if name.endswith(part_names.SCALE)]
    # torch's own threads would wait for one another at every small step, on a busy machine for minutes.
    with threads(max(sizes, default=0)) as pool:
        return list(pool.map(partial(_scale, checkpoint), part_names.packed_in(checkpoint.specs)))


def _scale(checkpoint: Checkpoint, module: str) -> Scale:
    names = [module + part_names.SCALE, module + part_names.SHAPE]
    tensors = checkpoint.read([name for name in names if name in checkpoint.specs])
    scale, sizes = map(tensors.get, names)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    shape = None if sizes is None else tuple(map(int, sizes.flatten().tolist()))
    if scale is None:
        return Scale(module, 0, 0, 0, 0, None, shape, nbytes)
    good = scale[scale.isfinite() & (scale != 0)].float().abs()
    wrong, zero, negative = (int(mask.sum()) for mask in (~scale.isfinite(), scale == 0, scale < 0))
    median = float(good.median()) if good.numel() else None
    return Scale(module, scale.numel(), wrong, zero, negative, median, shape, nbytes)


def part_shapes(form: Int4Format, shape: Shape, module: str) -> dict[str, tuple[Shape, tuple[str, ...]]]:
    """Shape and permitted dtypes of each part of a weight (compressed-tensors `pack_quantized/base.py`)."""
    rows, columns = shape
    groups = form.groups(columns)
    zeros = (groups, form.words(rows)) if form.sglang_experts and ".experts." in module else (form.words(rows), groups)
    return {
        part_names.WEIGHT_PACKED: ((rows, form.words(columns)), ("int32",)),
        part_names.WEIGHT_SCALE: ((rows, groups), ("bfloat16", "float16", "float32")),
        part_names.WEIGHT_SHAPE: ((2,), ("int64", "int32")),
        part_names.WEIGHT_ZERO_POINT: (zeros, ("int32",)),
        part_names.WEIGHT_G_IDX: ((columns,), ("int32",)),
    }

"""The two forms of weights that the online quantizer sends: INT4, and FP8 in blocks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.side_files import quantization_of
from ckptkit.quant.formats.dequantize import format_of
from ckptkit.quant.formats.grids import check, check_matrix, not_finite
from ckptkit.quant.formats.part_names import FP8_SCALE_INV, PACKED, SCALE, SHAPE
from ckptkit.quant.formats.release import Floats
from ckptkit.quant.formats.scheme import CODES_PER_WORD, QuantScheme
from ckptkit.quant.kernels.dispatch import quantize_pack
from ckptkit.quant.kernels.float_roundings import blocks_of, scale_dtype
from ckptkit.quant.kernels.floats import quantize_fp8_matrices

if TYPE_CHECKING:
    from ckptkit.quant.kernels.triton_kernels import Launcher

Pair = tuple[str, Tensor]
_BLOCKS: Mapping[str, tuple[int, int]] = {"fp8": (128, 128), "mxfp8": (1, 32)}


class Part(NamedTuple):
    """The shape [rows, width] and dtype of one output of a kernel for one matrix."""

    dtype: torch.dtype
    rows: int
    width: int


class Form(Protocol):
    """The form of quantized weights in a bucket."""

    sends_shape: ClassVar[bool]  # the shape of each matrix is sent too, int64 [2], after its parts

    def quantize(self, weights: Mapping[str, Tensor]) -> Sequence[Sequence[Tensor]]:
        """Quantizes weights at once to the parts in `names`. Raises CkptkitError, naming an unsuitable tensor."""

    def check(self, weight: Tensor, name: str) -> None:
        """Raises CkptkitError, naming the tensor, for an unsuitable dtype or shape."""

    def not_finite(self, weight: Tensor, name: str) -> CkptkitError:
        """The error for a matrix that a kernel marked as bad."""

    def has_kernel(self, weight: Tensor) -> bool:
        """Whether `launcher` supports this matrix on a GPU."""

    def launcher(self, weight: Tensor) -> Launcher:
        """Launches the kernel for matrices like this one; matrices with equal launchers share a launch."""

    def parts(self, weight: Tensor) -> tuple[Part, ...]:
        """The outputs of the kernel for a matrix."""

    def names(self, name: str) -> tuple[str, ...]:
        """The names of the parts of a weight."""


def quantize_bucket(form: Form, named: Sequence[Pair], packed: Collection[str]) -> list[Pair]:
    """Replaces each weight in `packed` by its parts; `named` has the checkpoint's names. Raises as `Form.quantize`."""
    weights = {name: tensor.detach().contiguous() for name, tensor in named if name in packed}
    parts = dict(zip(weights, form.quantize(weights), strict=True)) if weights else {}
    bucket: list[Pair] = []
    for name, tensor in named:
        if name in parts:
            bucket += zip(form.names(name), parts[name], strict=True)
        else:
            bucket.append((name, tensor.detach()))
    return bucket


@dataclass(frozen=True)
class Int4Form:
    """`N.weight` [rows, columns] becomes `N.weight_packed`, `N.weight_scale` and `N.weight_shape`."""

    scheme: QuantScheme
    sends_shape: ClassVar[bool] = True

    def quantize(self, weights: Mapping[str, Tensor]) -> Sequence[Sequence[Tensor]]:
        packed = quantize_pack(list(weights.values()), self.scheme, list(weights))
        shapes = torch.tensor([weight.shape for weight in weights.values()], dtype=torch.int64)
        shapes = shapes.to(packed[0].words.device)  # one copy for all shapes
        return [(one.words, one.scale, shape) for one, shape in zip(packed, shapes.unbind(), strict=True)]

    def check(self, weight: Tensor, name: str) -> None:
        check(weight, self.scheme, name)

    def not_finite(self, weight: Tensor, name: str) -> CkptkitError:
        return not_finite(weight, self.scheme.scale_dtype or weight.dtype, name)

    def has_kernel(self, weight: Tensor) -> bool:
        return self.scheme.search == "none" and self.scheme.symmetric

    def launcher(self, weight: Tensor) -> Launcher:
        """As `Form.launcher`. Groups are consecutive, so that a matrix and its transpose share a launch."""
        # Imported here because it needs Triton, which comes with CUDA builds of torch.
        from ckptkit.quant.kernels.triton_kernels import launcher

        rows, columns = weight.shape
        return launcher(self.scheme, rows, columns, weight.dtype)

    def parts(self, weight: Tensor) -> tuple[Part, ...]:
        rows, columns = weight.shape
        words = Part(torch.int32, rows, columns // CODES_PER_WORD)
        return words, Part(self.scheme.scale_dtype or weight.dtype, rows, self.scheme.groups(columns))

    def names(self, name: str) -> tuple[str, ...]:
        module = name.removesuffix(".weight")
        return module + PACKED, module + SCALE, module + SHAPE


@dataclass(frozen=True)
class Fp8Form:
    """`N.weight` becomes float8_e4m3fn of the same shape, followed by `N.weight_scale_inv`."""

    block: tuple[int, int]  # rows and columns that share a scale
    rounding: str  # of `ROUNDINGS`
    sends_shape: ClassVar[bool] = False

    def quantize(self, weights: Mapping[str, Tensor]) -> Sequence[Sequence[Tensor]]:
        return quantize_fp8_matrices(list(weights.values()), self.block, self.rounding, list(weights))

    def check(self, weight: Tensor, name: str) -> None:
        check_matrix(weight, name)

    def not_finite(self, weight: Tensor, name: str) -> CkptkitError:
        return not_finite(weight, weight.dtype, name)

    def has_kernel(self, weight: Tensor) -> bool:
        from ckptkit.quant.kernels.triton_kernels import has_kernel

        return has_kernel(weight, self.block)

    def launcher(self, weight: Tensor) -> Launcher:
        from ckptkit.quant.kernels.triton_kernels import fp8_launcher

        return fp8_launcher(weight, self.block, self.rounding)

    def parts(self, weight: Tensor) -> tuple[Part, ...]:
        stored = scale_dtype(self.rounding, weight.dtype)
        return Part(torch.float8_e4m3fn, *weight.shape), Part(stored, *blocks_of(weight.shape, self.block))

    def names(self, name: str) -> tuple[str, ...]:
        return name, name + FP8_SCALE_INV


def fp8_form(config: Mapping[str, Any]) -> Fp8Form | None:
    """Reads the form from a config.json, or returns None for other values of `quant_method` than fp8 and mxfp8.

    Scales are rounded like those of updates by slime, miles and verl: float32, with `scale_fmt` "ue8m0" powers of two.
    Raises CkptkitError for blocks and activations that trainers do not send.
    """
    content = quantization_of(config)
    method = content.get("quant_method") if isinstance(content, Mapping) else None
    if not isinstance(method, str) or method not in _BLOCKS:
        return None
    block = _BLOCKS[method]
    supported: dict[str, tuple[Any, ...]] = {
        "weight_block_size": (list(block),),
        "activation_scheme": ("dynamic", None),
        "fmt": ("e4m3", None),
    }
    for key, known in supported.items():
        if (value := content.get(key)) not in known:
            hint = f"serve a checkpoint with {key} {known[0]!r}, as `ckptkit quantize --scheme fp8-block` writes it"
            raise CkptkitError(f"config.json: an engine with {method} and {key} {value!r} cannot be updated", hint)
    if method == "mxfp8":
        return Fp8Form(block, "modelopt")
    return Fp8Form(block, "deepgemm" if content.get("scale_fmt") == "ue8m0" else "online")


def refuse_nvfp4(config: Mapping[str, Any]) -> None:
    """Raises CkptkitError if the engine serves NVFP4, of which SGLang cannot restore the loading layout.

    It repacks codes for Marlin or swizzles scales, and deletes the scale of each layer. Source: SGLang 0.5.16
    `modelopt_quant.py`, `prepare_nvfp4_layer_for_marlin`.
    """
    try:
        form = format_of(config)
    except CkptkitError:
        return  # the caller refuses unknown formats by name
    if isinstance(form, Floats) and any(layout.second for layout in form.layouts):
        raise CkptkitError(
            "SGLang cannot load NVFP4 weights a second time: it repacks them for its kernels and cannot undo that",
            "update an engine in block FP8 or MXFP8 (`ckptkit quantize --scheme fp8-block`), or restart it",
        )

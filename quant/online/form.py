"""The two forms in which the online quantizer sends a trainer's weights: INT4, and FP8 in blocks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

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
    """A tensor [rows, width] that a kernel makes of a matrix."""

    dtype: torch.dtype
    rows: int
    width: int


def _bucket(named: Sequence[Pair], made: Mapping[str, Sequence[Tensor]], form: Form) -> list[Pair]:
    """The tensors of `named` in their order, with the parts in `made` instead of each weight that is quantized."""
    bucket: list[Pair] = []
    for name, tensor in named:
        if name in made:
            bucket += zip(form.names(name), made[name], strict=True)
        else:
            bucket.append((name, tensor.detach()))
    return bucket


@dataclass(frozen=True)
class Int4Form:
    """`N.weight` [rows, columns] becomes `N.weight_packed`, `N.weight_scale` and `N.weight_shape`."""

    scheme: QuantScheme
    sends_shape: bool = True  # the shape of each matrix is sent too, int64 [2], after its parts

    def quantize(self, named: Sequence[Pair], packed: Collection[str]) -> list[Pair]:
        """Quantizes those in `packed` at once, in one call of `quantize_pack`; `named` has the checkpoint's names.

        Raises CkptkitError, naming a tensor that cannot be quantized.
        """
        chosen = {name: tensor.detach().contiguous() for name, tensor in named if name in packed}
        if not chosen:
            return _bucket(named, {}, self)
        weights = list(chosen.values())
        # One copy to the device for all shapes.
        shapes = torch.tensor([weight.shape for weight in weights], dtype=torch.int64).to(weights[0].device)
        made = zip(quantize_pack(weights, self.scheme, list(chosen)), shapes.unbind(), strict=True)
        parts = [(one.words, one.scale, shape) for one, shape in made]
        return _bucket(named, dict(zip(chosen, parts, strict=True)), self)

    def check(self, weight: Tensor, name: str) -> None:
        """Raises CkptkitError, naming the tensor, for what cannot be quantized, whatever its values."""
        check(weight, self.scheme, name)

    def not_finite(self, weight: Tensor, name: str) -> CkptkitError:
        """The error for a matrix that a kernel marked as bad."""
        return not_finite(weight, self.scheme.scale_dtype or weight.dtype, name)

    def has_kernel(self, weight: Tensor) -> bool:
        """Whether `launcher` takes this matrix on a GPU."""
        return self.scheme.search == "none" and self.scheme.symmetric

    def launcher(self, weight: Tensor) -> Launcher:
        """Launches the kernel for matrices like this one; matrices with equal launchers share a launch.

        Groups follow one another, so that a matrix and one with its axes swapped share one.
        """
        # Imported here because it needs Triton, which comes with CUDA builds of torch.
        from ckptkit.quant.kernels.triton_kernels import launcher

        rows, columns = weight.shape
        return launcher(self.scheme, rows, columns, weight.dtype)

    def parts(self, weight: Tensor) -> tuple[Part, ...]:
        """What the kernel makes of a matrix, in the order of its outputs: words and scales."""
        rows, columns = weight.shape
        return (
            Part(torch.int32, rows, columns // CODES_PER_WORD),
            Part(self.scheme.scale_dtype or weight.dtype, rows, self.scheme.groups(columns)),
        )

    def names(self, name: str) -> tuple[str, ...]:
        """The names of words, scales and shape."""
        module = name.removesuffix(".weight")
        return module + PACKED, module + SCALE, module + SHAPE


@dataclass(frozen=True)
class Fp8Form:
    """`N.weight` becomes float8_e4m3fn of the same shape, followed by `N.weight_scale_inv`.

    `block`: rows and columns that share a scale. `rounding`: the formula, of `ROUNDINGS`.
    """

    block: tuple[int, int]
    rounding: str
    sends_shape: bool = False

    def quantize(self, named: Sequence[Pair], packed: Collection[str]) -> list[Pair]:
        """As `Int4Form.quantize`."""
        chosen = {name: tensor for name, tensor in named if name in packed}
        made = quantize_fp8_matrices(list(chosen.values()), self.block, self.rounding, list(chosen))
        return _bucket(named, dict(zip(chosen, made, strict=True)), self)

    def check(self, weight: Tensor, name: str) -> None:
        """As `Int4Form.check`."""
        check_matrix(weight, name)

    def not_finite(self, weight: Tensor, name: str) -> CkptkitError:
        """As `Int4Form.not_finite`."""
        return not_finite(weight, weight.dtype, name)

    def has_kernel(self, weight: Tensor) -> bool:
        """As `Int4Form.has_kernel`."""
        from ckptkit.quant.kernels.triton_kernels import has_kernel

        return has_kernel(weight, self.block)

    def launcher(self, weight: Tensor) -> Launcher:
        """As `Int4Form.launcher`."""
        from ckptkit.quant.kernels.triton_kernels import fp8_launcher

        return fp8_launcher(weight, self.block, self.rounding)

    def parts(self, weight: Tensor) -> tuple[Part, ...]:
        """What the kernel makes of a matrix: codes and scales."""
        stored = scale_dtype(self.rounding, weight.dtype)
        return Part(torch.float8_e4m3fn, *weight.shape), Part(stored, *blocks_of(weight.shape, self.block))

    def names(self, name: str) -> tuple[str, ...]:
        """The names of codes and scales."""
        return name, name + FP8_SCALE_INV


Form = Int4Form | Fp8Form


def fp8_form(config: Mapping[str, Any]) -> Fp8Form | None:
    """Reads the form from a whole config.json; None for another `quant_method` than fp8 and mxfp8.

    Scales are rounded as slime, miles and verl round those of an update: float32, with `scale_fmt` "ue8m0" powers of
    two. Raises CkptkitError for blocks and activations that trainers do not send.
    """
    content = quantization_of(config)
    method = content.get("quant_method") if isinstance(content, Mapping) else None
    if not isinstance(method, str) or method not in _BLOCKS:
        return None
    block = _BLOCKS[method]
    wanted: tuple[tuple[str, tuple[Any, ...]], ...] = (
        ("weight_block_size", (list(block),)),
        ("activation_scheme", ("dynamic", None)),
        ("fmt", ("e4m3", None)),
    )
    for key, known in wanted:
        if (value := content.get(key)) not in known:
            raise CkptkitError(
                f"config.json: weights of {method} with {key} {value!r} are not sent to an engine",
                f"serve a checkpoint with {key} {known[0]!r}, as `ckptkit quantize --scheme fp8-block` writes it",
            )
    if method == "mxfp8":
        return Fp8Form(block, "modelopt")
    return Fp8Form(block, "deepgemm" if content.get("scale_fmt") == "ue8m0" else "online")


def refuse_nvfp4(config: Mapping[str, Any]) -> None:
    """Raises CkptkitError where the engine serves NVFP4, in which SGLang keeps no way back to what it loaded.

    It repacks codes for Marlin or swizzles scales, and deletes the scale of each layer. Source: SGLang 0.5.16
    `modelopt_quant.py`, `prepare_nvfp4_layer_for_marlin`.
    """
    try:
        found = format_of(config)
    except CkptkitError:
        return  # what is not read is refused by name elsewhere
    if isinstance(found, Floats) and any(layout.second for layout in found.layouts):
        raise CkptkitError(
            "SGLang cannot take NVFP4 weights a second time: it repacks them for its kernels and keeps no way back",
            "update an engine in block FP8 or MXFP8 (`ckptkit quantize --scheme fp8-block`), or start it anew",
        )

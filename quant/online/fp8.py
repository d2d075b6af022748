"""What an engine in block FP8 or MXFP8 serves, and a trainer's tensors in that form.

Unlike INT4's, these weights lie in an engine as they were loaded, so that single tensors may be sent again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.side_files import quantization_of
from quant.formats.dequantize import format_of
from quant.formats.floats.release import Floats
from quant.formats.grids import not_finite
from quant.formats.part_names import FP8_SCALE_INV
from quant.kernels.float_roundings import blocks_of, scale_dtype
from quant.kernels.floats import check_matrix, quantize_fp8_matrices
from quant.online.form import Pair, Part
from quant.online.served import Served, names_of, served_of

if TYPE_CHECKING:
    from quant.kernels.triton_launch import Launcher

_BLOCKS: Mapping[str, tuple[int, int]] = {"fp8": (128, 128), "mxfp8": (1, 32)}


@dataclass(frozen=True)
class Fp8Form:
    """A `Form`: `N.weight` becomes float8_e4m3fn of the same shape, followed by `N.weight_scale_inv`.

    `block`: rows and columns that share a scale. `rounding`: the formula, of `ROUNDINGS`.
    """

    block: tuple[int, int]
    rounding: str
    sends_shape: bool = False

    def quantize(self, named: Sequence[Pair], packed: Collection[str]) -> list[Pair]:
        """As `Form.quantize`."""
        chosen = {name: tensor for name, tensor in named if name in packed}
        made = quantize_fp8_matrices(list(chosen.values()), self.block, self.rounding, list(chosen))
        made_of = dict(zip(chosen, made, strict=True))
        bucket: list[Pair] = []
        for name, tensor in named:
            if name in made_of:
                bucket += zip(self.names(name), made_of[name], strict=True)
            else:
                bucket.append((name, tensor.detach()))
        return bucket

    def check(self, weight: Tensor, name: str) -> None:
        """As `Form.check`."""
        check_matrix(weight, name)

    def not_finite(self, weight: Tensor, name: str) -> CkptkitError:
        """As `Form.not_finite`."""
        return not_finite(weight, weight.dtype, name)

    def has_kernel(self, weight: Tensor) -> bool:
        """As `Form.has_kernel`."""
        from quant.kernels.triton_floats import has_kernel

        return has_kernel(weight, self.block)

    def launcher(self, weight: Tensor) -> Launcher:
        """As `Form.launcher`."""
        # Imported here because it needs Triton, which comes with CUDA builds of torch.
        from quant.kernels.triton_floats import fp8_launcher

        return fp8_launcher(weight, self.block, self.rounding)

    def parts(self, weight: Tensor) -> tuple[Part, ...]:
        """As `Form.parts`: codes and scales."""
        stored = scale_dtype(self.rounding, weight.dtype)
        return Part(torch.float8_e4m3fn, *weight.shape), Part(stored, *blocks_of(weight.shape, self.block))

    def names(self, name: str) -> tuple[str, ...]:
        """As `Form.names`."""
        return name, name + FP8_SCALE_INV


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


def served_in_fp8(reference: str | Path | Iterable[str] | None) -> Served:
    """What an engine serves from the FP8 checkpoint at `reference`: its directory, or its tensor names.

    Every tensor that has a `_scale_inv` there is quantized. Raises CkptkitError without a reference, and where that has
    no such tensor.
    """
    names, specs = names_of(reference)
    if names is None:
        raise CkptkitError(
            "which weights an engine has in FP8 is not known from its config alone",
            "give `reference`, the checkpoint that it serves, or the names of its tensors",
        )
    known = set(names)
    scales = {name + FP8_SCALE_INV for name in known} & known
    weights = {name: name + FP8_SCALE_INV in scales for name in names if name not in scales}
    if not any(weights.values()):
        raise CkptkitError(
            f"the engine's checkpoint has no tensor that ends in {FP8_SCALE_INV}",
            "give the FP8 checkpoint that the engine serves, not the BF16 one",
        )
    shapes = {name: specs[name].shape for name in weights if name in specs and len(specs[name].shape) > 1}
    return served_of(weights, shapes, together=False)

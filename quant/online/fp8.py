"""What an engine in block FP8 or MXFP8 serves, and a trainer's tensors in that form.

Unlike INT4's, these weights lie in an engine as they were loaded, so that single tensors may be sent again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.side_files import quantization_of
from quant.formats.part_names import FP8_SCALE_INV
from quant.kernels.floats import quantize_fp8
from quant.online.served import Served, names_of, served_of

_BLOCKS: Mapping[str, tuple[int, int]] = {"fp8": (128, 128), "mxfp8": (1, 32)}


@dataclass(frozen=True)
class Fp8Form:
    """How the engine's weights are quantized: rows and columns that share a scale, and the formula."""

    block: tuple[int, int]
    rounding: str


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


def quantize_fp8_bucket(named: Sequence[tuple[str, Tensor]], what: Served, form: Fp8Form) -> list[tuple[str, Tensor]]:
    """Quantizes what the engine has in FP8; `named` has the checkpoint's names.

    `N.weight` becomes float8_e4m3fn of the same shape, followed by `N.weight_scale_inv`, on its own device. Raises
    CkptkitError, naming a tensor that cannot be quantized.
    """
    bucket: list[tuple[str, Tensor]] = []
    for name, tensor in named:
        if name not in what.packed:
            bucket.append((name, tensor.detach()))
            continue
        codes, scales = quantize_fp8(tensor, form.block, form.rounding, name)
        bucket += [(name, codes), (name + FP8_SCALE_INV, scales)]
    return bucket

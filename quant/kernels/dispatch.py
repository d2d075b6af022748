"""Quantizes and packs weights in one pass on their own device; the bytes are the same on every device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ckptkit.core.errors import CkptkitError
from ckptkit.core.isolation import refuse_numba_settings
from ckptkit.quant.formats.grids import check, quantize
from ckptkit.quant.formats.packing import Packed
from ckptkit.quant.formats.scheme import QuantScheme

refuse_numba_settings()  # here and not in a thread that is the first to need Numba


def quantize_pack(weights: Sequence[Tensor], scheme: QuantScheme, names: Sequence[str]) -> list[Packed]:
    """Quantizes and packs matrices [rows, columns] in bfloat16, float16 or float32, all on one device, to that device.

    Raises CkptkitError, naming the tensor, for NaN or infinity, a scale that overflows its dtype, columns that do not
    divide into groups, a tensor that is not a float matrix, or tensors on several devices.
    """
    if not weights:
        return []
    for weight, name in zip(weights, names, strict=True):
        if weight.device != weights[0].device:
            message = f"{name} is on {weight.device}, but {names[0]} is on {weights[0].device}"
            raise CkptkitError(message, "quantize the tensors of one device at a time")
    if scheme.search == "none" and weights[0].is_cuda:
        # Imported here because it needs Triton, which comes with CUDA builds of torch.
        from ckptkit.quant.kernels.triton_kernels import quantize_pack_cuda

        return quantize_pack_cuda(weights, scheme, names)
    for weight, name in zip(weights, names, strict=True):
        check(weight, scheme, name)
    if scheme.search == "none" and weights[0].device.type == "cpu":
        from ckptkit.quant.kernels.cpu import quantize_pack_cpu

        return quantize_pack_cpu(weights, scheme, names)
    return [Packed.of(*quantize(weight, scheme, name)) for weight, name in zip(weights, names, strict=True)]

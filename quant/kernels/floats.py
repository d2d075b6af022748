"""Quantizes matrices to float8_e4m3fn or E2M1 with a scale for each block; the bytes are the same on every device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from ckptkit.core.errors import CkptkitError
from ckptkit.quant.formats.floats.decode import as_float, spread
from ckptkit.quant.formats.floats.layout import E2M1_NUMBERS
from ckptkit.quant.formats.grids import check_matrix, not_finite
from ckptkit.quant.kernels.float_roundings import MAX_VALUE, ROUNDINGS, Fp8Weight, Rounding
from ckptkit.quant.kernels.threads import bits_of, on_all_cores, row_tasks

_NARROW = 32  # the width of MXFP8's and MXFP4's groups
# Between the numbers of E2M1; every other one is rounded up.
_TIES = tuple((one + other) / 2 for one, other in pairwise(E2M1_NUMBERS[:8]))


def quantize_fp8(
    weight: Tensor, block: tuple[int, int | None], rounding: str, name: str, *, kernel: bool = True
) -> Fp8Weight:
    """Quantizes [rows, columns] in bfloat16, float16 or float32, on its own device.

    `block`: rows and columns that share a scale, None for a complete row; the last blocks may be smaller. `rounding`:
    of `ROUNDINGS`. Without `kernel` in plain torch on every device, which gives the same bits. Raises CkptkitError,
    naming the tensor, for NaN, infinity, or anything but a float matrix.
    """
    if not kernel:
        return _quantized(weight, block, ROUNDINGS[rounding], name, kernel=False)
    return quantize_fp8_matrices([weight], block, rounding, [name])[0]


def quantize_fp8_matrices(
    weights: Sequence[Tensor], block: tuple[int, int | None], rounding: str, names: Sequence[str]
) -> list[Fp8Weight]:
    """Does the same as `quantize_fp8` for several matrices: on one GPU in a few launches and with one wait."""
    for weight, name in zip(weights, names, strict=True):
        check_matrix(weight, name)
    if weights and weights[0].is_cuda:
        # Imported here because it needs Triton, which comes with CUDA builds of torch.
        from ckptkit.quant.kernels.triton_kernels import has_kernel, quantize_fp8_cuda

        if all(has_kernel(weight, block) and weight.device == weights[0].device for weight in weights):
            return quantize_fp8_cuda(weights, block, rounding, names)
    return [_quantized(weight, block, ROUNDINGS[rounding], name) for weight, name in zip(weights, names, strict=True)]


def quantize_mxfp4(weight: Tensor, name: str, *, kernel: bool = True) -> Fp8Weight:
    """Quantizes as `quantize_fp8` does, to E2M1 with a power of two for each 32 neighbours in a row.

    Scales are the exponents of float8_e8m0fnu, uint8. Without `kernel` in plain torch on every device. Raises
    CkptkitError as `quantize_fp8`, and if 32 does not divide the columns.
    """
    return _quantized(weight, (1, 32), ROUNDINGS["mxfp4 compressed-tensors"], name, kernel)


def quantize_nvfp4(
    weights: Sequence[Tensor], writer: str, names: Sequence[str], *, kernel: bool = True
) -> tuple[list[Fp8Weight], Tensor]:
    """Quantizes as `quantize_mxfp4`, in groups of 16 with scales float8_e4m3fn, as modelopt or compressed-tensors.

    All weights share a scale, float32: the second result, which multiplies (modelopt, []) or divides
    (compressed-tensors, [1]) those of groups. Without `kernel` in plain torch on every device.
    """
    for weight, name in zip(weights, names, strict=True):
        check_matrix(weight, name)
    largest = [torch.stack(weight.aminmax()).abs().amax() for weight in weights if weight.numel()]
    rounding = ROUNDINGS[f"nvfp4 {writer}"]
    assert rounding.shared is not None
    second = rounding.shared(torch.stack(largest).amax() if largest else weights[0].new_zeros(()))
    rounding = replace(rounding, scales=partial(rounding.scales, shared=second))
    pairs = zip(weights, names, strict=True)
    return [_quantized(weight, (1, 16), rounding, name, kernel) for weight, name in pairs], second


def check_exact(weight: Tensor, packed: Fp8Weight, block: tuple[int, int | None], name: str) -> None:
    """Raises CkptkitError, with count and first difference, unless codes times scales are the weights, in float32."""
    height, changed, first = block[0], 0, ""
    for part in row_tasks(weight.shape[0], weight.shape[1], height):
        begin, original = part.start, weight[part].float()
        scales = as_float(packed.scales[begin // height : -(-part.stop // height)])
        stored = numbers_of(packed.codes[part]) * spread(scales, block, original.shape)
        differ = stored != original
        if not first and bool(differ.any()):
            row, column = differ.nonzero()[0].tolist()
            first = f"[{begin + row}, {column}] is {original[row, column]:g} but would be {stored[row, column]:g}"
        changed += int(differ.sum())
    if changed:
        message = f"{name}: rounding would change {changed} of {weight.numel()} weights: {first}"
        raise CkptkitError(message, "exclude the tensor with --ignore, or remove --exact to round it")


def numbers_of(codes: Tensor) -> Tensor:
    """The number of each code, float32 [rows, columns]. E2M1 is uint8, two codes a byte."""
    if codes.dtype != torch.uint8:
        return codes.float()
    each = torch.tensor(E2M1_NUMBERS, device=codes.device)
    return each[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).int()]


def _quantized(
    weight: Tensor, block: tuple[int, int | None], rounding: Rounding, name: str, kernel: bool = True
) -> Fp8Weight:
    check_matrix(weight, name)
    kernel = kernel and weight.device.type == "cpu"
    rows, columns = weight.shape
    if rounding.four_bit and columns % (block[1] or columns):
        message = f"{name} has {columns} columns, which groups of {block[1]} do not divide"
        raise CkptkitError(message, "exclude the tensor with --ignore")
    job = _Job(weight.detach().contiguous(), (block[0], block[1] or max(columns, 1)), rounding)
    tasks = row_tasks(rows, columns, block[0])
    finished = list(on_all_cores(job.run_kernel, tasks) if kernel else map(job.run, tasks))
    if not all(finite for _, finite in finished):
        raise not_finite(weight, weight.dtype, name)
    codes = job.codes if rounding.four_bit else job.codes.view(torch.float8_e4m3fn)
    scales = [one for one, _ in finished] or [rounding.scales(weight.new_zeros(0, 0))[0]]  # or of no blocks
    return Fp8Weight(codes, torch.cat(scales))


class _Job:
    """One matrix and its codes and scales, made from some rows of blocks at a time."""

    def __init__(self, weight: Tensor, block: tuple[int, int], rounding: Rounding) -> None:
        self.weight, self.block, self.rounding = weight, block, rounding
        columns = weight.shape[1] // 2 if rounding.four_bit else weight.shape[1]
        self.codes = torch.empty((len(weight), columns), dtype=torch.uint8, device=weight.device)
        self.quotient = weight.dtype if rounding.in_weight_dtype else torch.float32

    def run_kernel(self, rows: slice) -> tuple[Tensor, bool]:
        """Quantizes these rows. Returns their scales, and whether all weights are finite."""
        # Imported here because Numba takes a while.
        from ckptkit.quant.kernels.cpu import codes_kernel, largest_kernel

        weight, codes, four_bit = self.weight[rows], self.codes[rows], self.rounding.four_bit
        height, width = self.block
        bits = bits_of(weight).numpy()
        largest = weight.new_zeros(-(-len(weight) // height), -(-weight.shape[1] // width))
        largest_kernel(weight.dtype)(bits, bits_of(largest).numpy(), height, width)
        scales, factors = self.rounding.scales(largest)
        narrow = 0 if width > _NARROW or weight.shape[1] % width else width
        encode = codes_kernel(weight.dtype, self.quotient, self.rounding.divides, four_bit, narrow)
        one_each = torch.empty(weight.shape, dtype=torch.uint8) if four_bit else codes
        encode(bits, factors.numpy(), one_each.numpy(), height, width)
        if four_bit:
            codes[:] = _in_pairs(one_each)
        return scales, bool(torch.isfinite(largest.amax()))

    def run(self, part: slice) -> tuple[Tensor, bool]:
        """As `run_kernel`, in plain torch on any device."""
        weight, (height, width) = self.weight[part], self.block
        rows, columns = weight.shape
        padded = functional.pad(weight, (0, -columns % width, 0, -rows % height))
        blocks = padded.view(len(padded) // height, height, -1, width)
        largest = blocks.abs().amax((1, 3))
        scales, factors = self.rounding.scales(largest)
        across = factors[:, None, :, None]
        quotients = blocks.float() / across if self.rounding.divides else blocks.float() * across
        quotients = quotients.to(self.quotient).float()
        if self.rounding.four_bit:
            self.codes[part] = _in_pairs(_nearest_e2m1(quotients).view(weight.shape))
        else:
            codes = quotients.clamp_(-MAX_VALUE, MAX_VALUE).to(torch.float8_e4m3fn).view(torch.uint8)
            self.codes[part] = codes.view(padded.shape)[:rows, :columns]
        return scales, bool(torch.isfinite(largest.amax()))


def _nearest_e2m1(numbers: Tensor) -> Tensor:
    """The codes uint8 of float32 numbers. A negative number that becomes zero keeps its sign; -0 does not."""
    magnitude, codes = numbers.abs(), (numbers < 0).to(torch.uint8) << 3
    for index, tie in enumerate(_TIES):
        codes += magnitude >= tie if index % 2 else magnitude > tie
    return codes


def _in_pairs(codes: Tensor) -> Tensor:
    both = codes.view(torch.int16)  # the even column in the low byte
    return (both | (both >> 4)).to(torch.uint8)

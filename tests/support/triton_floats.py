"""Runs the Triton kernel of FP8 in Triton's interpreter, without a GPU, and compares its bytes with the formulas.

    TRITON_INTERPRET=1 python -m support.triton_floats

Prints how many cases it compared. The interpreter cuts a float32 off to bfloat16 where a GPU rounds, and misreads
subnormal bfloat16. So neither is in a case here; tests/gpu/test_floats_gpu.py has them.
"""

from itertools import product

import torch

from ckptkit.quant.kernels.float_roundings import ROUNDINGS, Fp8Weight, blocks_of, scale_dtype
from ckptkit.quant.kernels.floats import quantize_fp8
from ckptkit.quant.kernels.triton_kernels import fp8_launcher
from support.quant_weights import hard_weights

# Roundings that are offered for each block: the interpreter takes a third of a second for a launch.
OFFERED = {
    (128, 128): ("online", "slime", "slime-cuda", "transformers", "deepgemm", "compressed-tensors"),
    (1, None): ("slime", "slime-cuda", "compressed-tensors"),
    (1, 32): ("modelopt",),
}
WIDTHS = [(torch.bfloat16, 300), (torch.float16, 300), (torch.float32, 544)]


def launched(weights, block, rounding):
    one = weights[0]
    codes = torch.empty((len(weights), *one.shape), dtype=torch.float8_e4m3fn)
    scales = torch.empty((len(weights), *blocks_of(one.shape, block)), dtype=scale_dtype(rounding, one.dtype))
    bad = torch.zeros(len(weights), dtype=torch.int32)
    fp8_launcher(one, block, rounding).start(weights, [codes, scales], bad)
    return codes, scales, bad


def matrices(dtype, columns):
    """[130, columns]: weights of every kind with a block of zeros, random ones, and every code and tie between two."""
    hard = torch.cat([hard_weights(dtype, columns)[:-1] for _ in range(3)])[:130]
    if dtype == torch.bfloat16:
        hard = torch.where(hard.abs() < torch.finfo(dtype).smallest_normal, 0, hard)
    hard[:128, :128], hard[-1, -1] = 0, -0.0
    values = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    steps = torch.cat([values, (values[:-1] + values[1:]) / 2])
    row = torch.cat([steps, -steps])[:columns]
    row = torch.cat([torch.full((1,), 448.0), row, torch.zeros(columns)])[:columns]
    exhaustive = row.roll(1)[None].repeat(130, 1)
    exhaustive[:, ::32] = 448.0  # so that every scale is a power of two
    return [hard, (torch.randn(130, columns) * 0.02).to(dtype), exhaustive.to(dtype)]


def differing():
    found, count = [], 0
    cases = [(block, rounding) for block, roundings in OFFERED.items() for rounding in roundings]
    for (dtype, columns), (block, rounding) in product(WIDTHS, cases):
        if ROUNDINGS[rounding].in_weight_dtype and dtype == torch.bfloat16:
            continue
        torch.manual_seed(columns)
        weights = matrices(dtype, columns)
        codes, scales, bad = launched(weights, block, rounding)
        for index, weight in enumerate(weights):
            wanted = quantize_fp8(weight, block, rounding, "a", kernel=False)
            made = Fp8Weight(codes[index], scales[index])
            equal = all(
                torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(made, wanted, strict=True)
            )
            count += 1
            if not equal or bool(bad.any()):
                found.append(f"{dtype} {columns} {rounding} {block}: matrix {index}")
    return count, found


def unmarked():
    """Which weights that are not finite the kernel leaves unmarked, or marks beside them."""
    found = []
    for block, value in product(OFFERED, (torch.nan, torch.inf, -torch.inf)):
        weights = [torch.ones(130, 160, dtype=torch.bfloat16) for _ in range(3)]
        weights[1][129, 159] = value
        if launched(weights, block, OFFERED[block][0])[2].tolist() != [0, 1, 0]:
            found.append(f"{block} {value}")
    return found


if __name__ == "__main__":
    compared, other = differing()
    print(compared, "compared")
    print("differ:", other)
    print("unmarked:", unmarked())

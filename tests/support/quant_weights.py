"""Rows of every kind that has broken a quantizer, and compressed-tensors' own answer for them."""

from dataclasses import replace

import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils.helpers import calculate_qparams

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def hard_weights(dtype, columns=256):
    """Random, zero, nearly zero, subnormal, of one sign, ties, huge, one outlier, -0, constant."""
    torch.manual_seed(0)
    random = torch.randn(40, columns) * 0.02
    smallest, largest = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max / 4
    rows = [
        *random,
        torch.zeros(columns),
        -torch.zeros(columns),
        torch.full((columns,), 1e-6),
        random[0] * 1e-3,
        random[1].abs() + 1.0,
        -random[2].abs() - 1.0,
        torch.arange(columns) % 16 - 7.5,  # every tie between two codes of the /7.5 grid, at scale 1
        (torch.arange(columns) % 15 - 7) / 2 * 0.875,
        (torch.arange(columns) % 29 - 14) / 2,  # every tie of the /7 grid, at scale 1
        torch.cat([torch.tensor([100.0]), random[4][1:]]),
        torch.full((columns,), 0.3),
        torch.full((columns,), -0.3),
        torch.linspace(-1, 1, columns),
        random[5] * smallest,  # subnormal
        random[6].abs() * smallest * 4,
        -random[7].abs() * smallest * 4,
        random[8].clamp(-0.05, 0.05) * 20 * largest,
    ]
    return torch.stack([row.to(dtype) for row in rows])


def ct_scheme(scheme):
    args = QuantizationArgs(
        num_bits=4,
        type="int",
        symmetric=scheme.symmetric,
        strategy="group" if scheme.group_size else "channel",
        group_size=scheme.group_size,
        scale_dtype=scheme.scale_dtype,
    )
    return QuantizationScheme(targets=["Linear"], weights=args, format="pack-quantized")


def ct_packed(weight, scheme):
    """What compressed-tensors stores: its scales, in the scheme's dtype as its modules hold them, and packed codes."""
    own = ct_scheme(scheme)
    groups = weight.reshape(weight.shape[0], -1, scheme.group_size or weight.shape[1])
    stored = scheme.scale_dtype or weight.dtype
    # Its `calculate_qparams` fails for a scale dtype with a wider range than the weight's, which needs no rounding.
    fails = torch.finfo(stored).max > torch.finfo(weight.dtype).max
    args = ct_scheme(replace(scheme, scale_dtype=None)).weights if fails else own.weights
    scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    epsilon = (scale == torch.finfo(weight.dtype).eps) & (
        groups.abs().amax(-1).float() < 1e-6
    )  # not the scale of these weights
    scale = torch.where(epsilon, torch.finfo(stored).eps, scale.to(stored)) if fails else scale.to(stored)
    return PackedQuantizationCompressor.compress(
        {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}, own
    )

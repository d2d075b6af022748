"""Every byte of MXFP4 at every scale, to BF16 and on to FP8: expectations from the bits that the format defines.

E2M1: a sign, two bits of exponent with bias 1, one of mantissa; the scale is 2^(byte - 127), and 255 is NaN.
Source: OCP Microscaling Formats 1.0, sections 5.3.3 and 5.4.1.
"""

from __future__ import annotations

import math

import pytest
import torch
from support.models import InMemory

from ckptkit.core.errors import CkptkitError
from quant.formats.dequantize import dequantized
from quant.kernels.floats import check_exact, quantize_fp8

BYTES = range(256)
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {"group_0": GROUP},
    "ignore": [],
}


def number(code: int, scale: int) -> float:
    """What four bits mean at a scale: a float has every product."""
    value = math.ldexp(MAGNITUDES[code & 7], scale - 127)
    return -value if code & 8 else value


def read(layout: str, scales: range) -> torch.Tensor:
    """What all bytes mean at each of these scales, in a row each."""
    rows = len(scales)
    codes = torch.tensor(BYTES, dtype=torch.uint8).repeat(rows, 1)
    powers = torch.tensor(scales, dtype=torch.uint8).reshape(rows, 1).repeat(1, 16)
    tensors = {"x.weight_packed": codes, "x.weight_scale": powers}
    config: dict[str, object] = {"quantization_config": COMPRESSED}
    if layout == "gpt-oss":
        tensors = {"x_blocks": codes.reshape(1, rows, 16, 16), "x_scales": powers.reshape(1, rows, 16)}
        config = {"quantization_config": {"quant_method": "mxfp4"}}
    elif layout == "deepseek-v4":
        tensors = {"x.weight": codes.view(torch.int8), "x.scale": powers.view(torch.float8_e8m0fnu)}
        fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        config = {"quantization_config": fp8, "expert_dtype": "fp4"}
    view = dequantized(InMemory(config, tensors), "here")
    (name,) = view.specs
    found = view.read([name])[name]
    return found[0].T if layout == "gpt-oss" else found


@pytest.mark.parametrize("layout", ["compressed-tensors", "gpt-oss", "deepseek-v4"])
def test_every_byte_at_every_scale_is_exact_in_bfloat16(layout: str) -> None:
    expected = [[number(half, scale) for byte in BYTES for half in (byte & 15, byte >> 4)] for scale in range(253)]
    wanted = torch.tensor(expected, dtype=torch.float64)
    found = read(layout, range(253))
    assert torch.equal(found.double(), wanted)
    assert torch.equal(found.signbit(), wanted.signbit())
    assert (number(1, 0), number(7, 252)) == (2.0**-128, 1.5 * 2.0**127)


@pytest.mark.parametrize("layout", ["compressed-tensors", "gpt-oss", "deepseek-v4"])
@pytest.mark.parametrize("scale", [253, 254, 255])
def test_scales_that_may_give_infinity_or_are_nan_are_refused(scale: int, layout: str) -> None:
    """6 x 2^126 is more than BF16 has, and 255 is NaN."""
    with pytest.raises(CkptkitError, match=r"scale.* (gives|give) NaN or infinity"):
        read(layout, range(scale, scale + 1))


@pytest.mark.parametrize("code", range(1, 8))
@pytest.mark.parametrize("spread", range(13, 19))
def test_a_spread_of_exponents_is_exact_in_fp8_just_where_e4m3_has_the_number(code: int, spread: int) -> None:
    """A block of 128 x 128 with 6 at one exponent, and one code so far below: E4M3 has multiples of 2^-9.

    With 6 x 2^e as the largest weight the scale is 2^(e - 6), so the code lies at its number times 2^(6 - spread).
    """
    weight = torch.zeros(128, 128, dtype=torch.bfloat16)
    weight[0, 0], weight[1, 40] = 6.0, math.ldexp(MAGNITUDES[code], -spread)
    packed = quantize_fp8(weight, (128, 128), "deepgemm", "w")
    assert packed.scales.item() == 2.0**-6
    fits = math.ldexp(MAGNITUDES[code], 6 - spread + 9).is_integer()
    assert fits == (spread <= {1: 14, 3: 14, 2: 15, 5: 15, 4: 16, 7: 16, 6: 17}[code])
    if fits:
        check_exact(weight, packed, (128, 128), "w")
        return
    with pytest.raises(CkptkitError, match=r"w: 1 of 16384 weights are not exact: \[1, 40\] is "):
        check_exact(weight, packed, (128, 128), "w")

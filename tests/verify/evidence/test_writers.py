"""Which formula made an FP8 weight, against other programs' own code and numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from support import floats
from support.fixture_types import PathOf
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from verify.evidence.floats.writers import formulas_of
from verify.run import verify

# Two blocks of 2 x 2 and what writers make of them: the scale's bits, and the codes.
ONE = torch.tensor([[0.337890625, -0.0131225586], [1.2265625, 0.0021057129]], dtype=torch.bfloat16)
TWO = torch.tensor([[0.65625, -0.314453125], [-0.466796875, -0.36328125]], dtype=torch.bfloat16)


def stored(scale: int, *codes: int) -> tuple[Tensor, Tensor]:
    bits = torch.tensor([[scale]], dtype=torch.int32).view(torch.float32)
    return torch.tensor(codes, dtype=torch.uint8).view(2, 2).view(torch.float8_e4m3fn), bits


@pytest.mark.parametrize(
    ("weight", "scale", "codes", "beginnings"),
    [
        (
            TWO,
            0x3AC00000,
            (0x7E, 0xF5, 0xFA, 0xF8),
            ["absmax/448, as", "1/(448/absmax)", "absmax/448 in"],
        ),
        (TWO, 0x3AC00001, (0x7E, 0xF5, 0xFA, 0xF7), ["absmax x (1/448)"]),
        (TWO, 0x3B000000, (0x7A, 0xF2, 0xF7, 0xF4), ["the power of two"]),
        (ONE, 0x3B330000, (0x6F, 0xCA, 0x7E, 0x34), ["absmax/448 in bfloat16"]),
        (ONE, 0x3B800000, (0x6B, 0xC5, 0x7A, 0x31), ["the power of two"]),
        # Codes of the unrounded scale beside the rounded one, as transformers 5.12.1 writes them.
        (ONE, 0x3B800000, (0x6F, 0xCA, 0x7E, 0x34), []),
    ],
)
def test_blocks_by_hand(weight: Tensor, scale: int, codes: tuple[int, ...], beginnings: list[str]) -> None:
    found = [name for name in formulas_of(*stored(scale, *codes), weight, (2, 2)) if "transformers" not in name]
    assert len(found) == len(beginnings)
    assert all(name.startswith(beginning) for name, beginning in zip(found, beginnings, strict=True))


def weights(rows: int = 256, columns: int = 384) -> Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)) * 0.02).to(torch.bfloat16)


def test_transformers_own_quantizer_is_named() -> None:
    weight = weights()
    config = SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
    made = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"x.weight": weight})
    (found,) = formulas_of(made["x.weight"], made["x.weight_scale_inv"], weight, (128, 128))
    assert found.endswith("as transformers makes it, and torch code of 448 / absmax")


def test_compressed_tensors_own_quantizer_is_named() -> None:
    weight = weights()
    args = QuantizationArgs(num_bits=8, type="float", strategy="channel")
    scale, zero_point = calculate_qparams(weight.amin(1, keepdim=True), weight.amax(1, keepdim=True), args)
    codes = quantize(weight, scale, zero_point, args, torch.float8_e4m3fn)
    (found,) = formulas_of(codes, scale, weight, (1, 384))
    assert found == "absmax/448 in bfloat16, as compressed-tensors makes it"


def test_formula_is_noted(releases: PathOf, tmp_path: Path) -> None:
    path = floats.write(releases("qwen2-untied"), tmp_path / "fp8", floats.SPELLINGS["fp8"])
    notes = verify(path, source=releases("qwen2-untied")).facts["notes"]
    assert [note for note in notes if note.startswith("CK305: 14 of 14 FP8 weights") and "as slime makes it" in note]

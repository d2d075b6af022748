"""Which formula made a weight in floats, against other programs' own code and numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from support import floats
from support.fixture_types import PathOf
from support.nightly import daily
from support.quantized import E2M1
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from quant.formats.floats import table
from quant.formats.floats.layout import E4M3, Layout
from verify.evidence.floats.group_writers import group_formulas
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


# Groups of 32 that begin so, all else 0: the byte of the scale and the first codes that each writer makes of them.
BY_HAND = [
    (table.mxfp8(), (1.75, -0.4, 0.2, 0.02), 119, (0x7E, 0xED, 0x65, 0x4A), ["the power of two above absmax/448"]),
    (table.mxfp8(), (1.75, -0.4, 0.2, 0.02), 120, (0x76, 0xE5, 0x5D, 0x42), ["the power of two nearest absmax"]),
    (table.mxfp8(), (1.765625, -0.4, 0.2, 0.02), 120, (0x76, 0xE5, 0x5D, 0x42), ["the power of two"] * 2),
    (
        table.mxfp4(packed=False),
        (6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75),
        127,
        (7, 0, 1, 2, 3, 4, 5, 6, 8, 9),
        ["the power of two above absmax/6, ties toward zero"],
    ),
    (
        table.mxfp4(packed=False),
        (6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75),
        127,
        (7, 0, 2, 2, 4, 4, 6, 6, 8, 10),
        ["the power of two above absmax/6, ties to even", "the power of two nearest absmax"],
    ),
    (table.mxfp4(packed=False), (6.03125, 1, 0.5, -3), 127, (7, 2, 1, 13), ["the power of two nearest absmax"]),
    (table.mxfp4(packed=False), (6.03125, 1, 0.5, -3), 127, (7, 2, 2, 13), []),
]


@pytest.mark.parametrize(("layout", "values", "byte", "codes", "beginnings"), BY_HAND)
def test_groups_by_hand(
    layout: Layout, values: tuple[float, ...], byte: int, codes: tuple[int, ...], beginnings: list[str]
) -> None:
    weight = torch.tensor([[*values, *[0.0] * (32 - len(values))]], dtype=torch.bfloat16)
    raw = torch.tensor([*codes, *[0] * (32 - len(codes))], dtype=torch.uint8)
    numbers = raw.view(torch.float8_e4m3fn).float() if layout.number == E4M3 else E2M1[raw.long()]
    found = group_formulas(layout, numbers.reshape(1, 32), torch.tensor([[2.0 ** (byte - 127)]]), None, weight)
    assert len(found) == len(beginnings)
    assert all(name.startswith(beginning) for name, beginning in zip(found, beginnings, strict=True))


@pytest.mark.parametrize(
    ("layout", "args"),
    [
        (table.mxfp8(), {"num_bits": 8, "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}),
        (table.mxfp4(packed=True), {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}),
        (
            table.compressed_nvfp4(),
            {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn},
        ),
    ],
)
def test_compressed_tensors_own_quantizer_of_groups_is_named(layout: Layout, args: dict[str, Any]) -> None:
    weight, scheme = weights(), QuantizationArgs(type="float", symmetric=True, **args)
    weight[3, 32:64] = 0
    whole = {} if args["num_bits"] == 8 or layout.second == "" else {"global_scale": _global_scale(weight)}
    groups = weight.unflatten(-1, (-1, args["group_size"]))
    scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme, **whole)
    codes = quantize(weight, scale, zero_point, scheme, **whole)
    (found,) = group_formulas(layout, codes.float(), scale.float(), whole.get("global_scale"), weight)
    assert "as compressed-tensors" in found
    codes[0] = -codes[0]
    assert group_formulas(layout, codes.float(), scale.float(), whole.get("global_scale"), weight) == []


def _global_scale(weight: Tensor) -> Tensor:
    return generate_gparam(weight.amin(), weight.amax())


@pytest.mark.parametrize(("zero", "words"), [(1.0, "1.0 for zeros, as ModelOpt"), (0.0, "0 for zeros, as Transformer")])
def test_writer_of_nvfp4_is_told_by_groups_of_zeros(zero: float, words: str) -> None:
    weight = weights()
    weight[3, 32:48] = 0
    whole = float(weight.float().abs().max()) / 2688
    packed, scale = floats.nvfp4(weight, whole)
    scale[3, 2] = zero
    numbers = E2M1[torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()]
    (found,) = group_formulas(table.modelopt_nvfp4(), numbers, scale.float(), torch.tensor(whole), weight)
    assert words in found


@pytest.mark.parametrize("spelling", daily(("mxfp8", "mxfp4-quark", "nvfp4-weights"), ("nvfp4-weights",)))
def test_formula_of_groups_is_noted(spelling: str, releases: PathOf, tmp_path: Path) -> None:
    path = floats.write(releases("qwen2-untied"), tmp_path / "made", floats.SPELLINGS[spelling])
    notes = [note for note in verify(path, source=releases("qwen2-untied")).facts["notes"] if note.startswith("CK305")]
    assert any("weights that were recomputed are exactly" in note for note in notes), notes


def test_formula_is_noted(releases: PathOf, tmp_path: Path) -> None:
    path = floats.write(releases("qwen2-untied"), tmp_path / "fp8", floats.SPELLINGS["fp8"])
    notes = [note for note in verify(path, source=releases("qwen2-untied")).facts["notes"] if note.startswith("CK305")]
    assert any("as slime makes it" in note for note in notes)
    # None that makes some by chance.
    assert all(note.startswith("CK305: 14 of 14 FP8 weights") for note in notes), notes

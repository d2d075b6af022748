"""CK304 and CK305 of negative scales: AutoRound's symmetric grid passes, and faults in it are found."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from support import models, quantized
from support.fixture_types import CopyOf, PathOf, RunAlone
from torch import Tensor

from ckptkit.app.api import convert, quantize
from ckptkit.formats.hf.reader import HfCheckpoint
from quant.formats.scheme import QuantScheme
from quant.planner import quantized as as_int4
from quant.schemes.interface import Request
from quant.schemes.w4a16 import int4_scheme
from verify.run import verify

MODULE = "model.layers.3.mlp.up_proj"
SYMMETRIC = {"strategy": "group", "group_size": 32, "symmetric": True}


def autoround(weight: Tensor, learned: float = 0.0, ends: tuple[float, float] = (1.0, 1.0)) -> dict[str, Tensor]:
    """AutoRound's symmetric grid: the largest weight becomes -8, whatever its sign, and the other end at most 7.

    `learned`: how far its training moves the rounding, to either side. `ends`: the least and the largest factor that it
    learned for the ends of a range. Source: AutoRound `quant_tensor_sym`.
    """
    draw = torch.Generator().manual_seed(7)
    groups = weight.float().unflatten(1, (-1, 32))
    low, high = ends
    factor = low + (high - low) * torch.rand((2, *groups.shape[:2]), generator=draw)
    least, most = -groups.amin(-1).clamp(max=0) * factor[0], groups.amax(-1).clamp(min=0) * factor[1]
    scale = (torch.where(most < least, least, -most) / 8).to(weight.dtype)
    moved = (2 * torch.rand(groups.shape, generator=draw) - 1) * learned
    codes = (groups / scale.float().unsqueeze(-1) + moved).round().clamp(-8, 7).to(torch.int8).flatten(1)
    shape = torch.tensor(weight.shape)
    return {"_packed": pack_to_int32(codes, 4), "_scale": scale, "_shape": shape}


def decompressed(parts: Mapping[str, Tensor]) -> Tensor:
    """What compressed-tensors itself makes of the parts."""
    args = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32, symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format="pack-quantized")
    weight: Tensor = PackedQuantizationCompressor.decompress({f"weight{k}": v for k, v in parts.items()}, scheme)[
        "weight"
    ]
    return weight


@pytest.fixture(scope="module")
def exported(releases: PathOf, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`exported(learned, low, high)`: qwen2 as AutoRound writes it for compressed-tensors. Read only."""
    root = tmp_path_factory.mktemp("autoround")
    view, _ = as_int4(HfCheckpoint(releases("qwen2-tied")), QuantScheme(32, "qmax7"), Request("here"))
    packed = {key.removesuffix("_packed") for key in view.specs if key.endswith("_packed")}
    ignore = view.config["quantization_config"]["ignore"]
    content = quantized.compressed_config("pack-quantized", **SYMMETRIC) | {"ignore": ignore}

    def write(learned: float = 0.0, low: float = 1.0, high: float = 1.0) -> Path:
        path = root / f"{learned}-{low}-{high}"
        if not path.exists():

            def quantizer(weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
                parts = autoround(weight, learned, (low, high))
                return parts, decompressed(parts)

            quantized.write(
                releases("qwen2-tied"),
                path,
                packed.__contains__,
                quantizer,
                lambda config: config | {"quantization_config": content},
            )
        return path

    return write


@pytest.mark.parametrize("training", [(0.0, 1.0, 1.0), (0.5, 1.0, 1.0), (0.5, 0.5, 1.0)])
def test_what_autoround_writes_passes(
    training: tuple[float, float, float], exported: Callable[..., Path], releases: PathOf
) -> None:
    """Plain rounding, learned rounding, and ranges that were learned too."""
    report = verify(exported(*training), source=releases("qwen2-tied"))
    assert report.findings == []
    assert report.status == "passed"
    (note,) = [note for note in report.facts["notes"] if note.startswith("CK304")]
    assert note.endswith("scales are negative, as AutoRound's are; readers keep their sign")
    scales = [tensor for name, tensor in models.tensors(exported(*training)).items() if name.endswith("_scale")]
    assert f"{sum(int((one < 0).sum()) for one in scales)} of {sum(one.numel() for one in scales)} " in note


def test_it_is_dequantized_as_by_compressed_tensors_and_comes_back_bit_for_bit(
    exported: Callable[..., Path], tmp_path: Path
) -> None:
    source = exported()
    convert(source, tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "plain")
    plain, stored = models.tensors(tmp_path / "plain"), models.tensors(source)
    modules = [name.removesuffix("_packed") for name in stored if name.endswith("_packed")]
    assert len(modules) > 50
    for name in modules:
        parts = {part: stored[name + part] for part in ("_packed", "_scale", "_shape")}
        assert torch.equal(plain[name], decompressed(parts))
    quantize(tmp_path / "plain", tmp_path / "back", int4_scheme(source), like=source)
    back = models.tensors(tmp_path / "back")
    assert back.keys() == stored.keys()
    assert all(torch.equal(tensor, back[name]) for name, tensor in stored.items())
    assert verify(tmp_path / "back", source=tmp_path / "plain").findings == []


def negated(scale: Tensor) -> Tensor:
    scale[5, 1] = -scale[5, 1]
    return scale


def positive(scale: Tensor) -> Tensor:
    return scale.abs()


def coarser(scale: Tensor) -> Tensor:
    return scale * 1.25


def zeroed(scale: Tensor) -> Tensor:
    scale[5, 1] = 0
    return scale


@pytest.mark.parametrize(
    ("change", "code", "name"),
    [(negated, "CK305", ""), (positive, "CK305", ""), (coarser, "CK305", ""), (zeroed, "CK304", "_scale")],
)
def test_faults_of_signed_scales_are_found(
    change: Callable[[Tensor], Tensor],
    code: str,
    name: str,
    exported: Callable[..., Path],
    copy_of: CopyOf,
    releases: PathOf,
    alone: RunAlone,
) -> None:
    path = copy_of(exported())
    models.edit(path, f"{MODULE}.weight_scale", change(models.tensors(path)[f"{MODULE}.weight_scale"]))
    _, found = alone(code, path, source_path=releases("qwen2-tied"))
    assert [finding.tensor for finding in found] == [f"{MODULE}.weight{name}"]


@pytest.mark.parametrize("code", [3, 7])
def test_a_wrong_code_is_found_although_the_end_of_the_grid_may_be_far(
    code: int, exported: Callable[..., Path], copy_of: CopyOf, releases: PathOf, alone: RunAlone
) -> None:
    """In the place of -8, the largest weight of a group."""
    path = copy_of(exported())
    stored = models.tensors(path)
    codes = unpack_from_int32(stored[f"{MODULE}.weight_packed"], 4, torch.Size(stored[f"{MODULE}.weight_shape"]))
    row, column = (codes == -8).nonzero()[0].tolist()
    codes[row, column] = code
    models.edit(path, f"{MODULE}.weight_packed", pack_to_int32(codes, 4))
    _, (finding,) = alone("CK305", path, source_path=releases("qwen2-tied"))
    assert (finding.tensor, finding.expected) == (f"{MODULE}.weight", "at most 1.094 quantization steps off")


def test_a_negative_scale_among_positive_ones_is_a_fault(
    exported: Callable[..., Path], releases: PathOf, tmp_path: Path, alone: RunAlone
) -> None:
    """llm-compressor's grid has none, though its config names no grid."""
    content = json.loads((exported() / "config.json").read_text())["quantization_config"]
    quantized.write(
        releases("qwen2-tied"),
        tmp_path / "int4",
        lambda name: f"{name}_packed" in models.tensors(exported()),
        quantized.int4(**SYMMETRIC),
        lambda config: config | {"quantization_config": content},
    )
    name = f"{MODULE}.weight_scale"
    models.edit(tmp_path / "int4", name, negated(models.tensors(tmp_path / "int4")[name]))
    _, (finding,) = alone("CK304", tmp_path / "int4")
    assert (finding.tensor, finding.expected) == (name, "scales above zero")

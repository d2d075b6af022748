"""CK3xx: an INT4 checkpoint is broken in one way; the error bound holds for compressed-tensors' own output."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from mutations.edits import replace
from support import models, quantized
from support.fixture_types import CopyOf, OnlyFinding, PathOf, RunAlone
from torch import Tensor

from ckptkit.app.api import convert, quantize
from ckptkit.core.errors import CkptkitError
from ckptkit.quant.formats.packing import for_sglang_experts
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.quant.ignore.lint import lint
from ckptkit.quant.schemes.w4a16 import int4_scheme
from ckptkit.verify.evidence.packed import Int4Format
from ckptkit.verify.evidence.rounding import bound_in_steps, group_distances
from ckptkit.verify.run import verify

EXPERT = "model.layers.5.mlp.experts.11.down_proj"


@pytest.fixture(scope="session")
def int4(releases: PathOf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """glm4_moe in INT4, group size 32. Read only."""
    path = tmp_path_factory.mktemp("int4") / "glm4_moe"
    quantize(releases("glm4_moe"), path, QuantScheme(32, "qmax7"))
    return path


@pytest.mark.parametrize(("name", "grid"), [("qwen2-untied", "minmax"), ("qwen3_moe", "minmax"), ("glm4_moe", "qmax7")])
def test_int4_checkpoint_without_defect_has_no_finding(
    name: str, grid: Literal["qmax7", "minmax"], releases: PathOf, converted: PathOf, tmp_path: Path
) -> None:
    quantize(releases(name), tmp_path / "int4", QuantScheme(32, grid))
    for source in (releases(name), converted(name)):
        report = verify(tmp_path / "int4", source=source)
        assert report.findings == []
        assert {check.status for check in report.checks} == {"passed"}
        assert {f"CK30{digit}" for digit in range(1, 6)} <= {check.code for check in report.checks}


def test_int4_checkpoint_against_fused_experts_has_no_finding(
    int4: Path, releases: PathOf, passes: Callable[..., None]
) -> None:
    passes("CK305", int4, 12 * 4 + 2 * 3 + 10 * 13 * 3, source_path=releases("glm4_moe", fused=True))


def test_a_plain_checkpoint_is_not_checked_for_packing(releases: PathOf) -> None:
    report = verify(releases("qwen2-tied"))
    assert not [check for check in report.checks if check.code.startswith("CK3")]
    assert any("CK301" in line and "no quantization_config" in line for line in report.facts["not applicable"])


def test_a_config_that_declares_int4_and_leaves_every_layer_out(int4: Path, fresh: PathOf, only: OnlyFinding) -> None:
    path = fresh("glm4_moe")
    config = json.loads((int4 / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["re:.*"]
    (path / "config.json").write_text(json.dumps(config))
    finding = only(verify(path))
    assert (finding.code, finding.severity, finding.file) == ("CK302", "error", str(path / "config.json"))
    report = lint(path)
    assert (report.failed, report.packed) == (True, 0)
    assert [one.kind for one in report.findings if one.severity == "error"] == ["nothing packed"]


@pytest.mark.parametrize("like", ["release", "no list", "fp8", "ignored"])
def test_quantizing_nothing_to_int4_is_refused(
    like: str, int4: Path, releases: PathOf, fresh: PathOf, edit_json: Callable[..., None], tmp_path: Path
) -> None:
    reference = fresh("glm4_moe")
    if like == "no list":
        shutil.copy(int4 / "config.json", reference)
    elif like == "fp8":
        declared = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
        edit_json(reference / "config.json", quantization_config=declared)
    scheme = QuantScheme(32, "qmax7", ignore=("re:.*",) if like == "ignored" else ())
    options: dict[str, Any] = {} if like == "ignored" else {"like": reference}
    for dry_run in (False, True):
        with pytest.raises(CkptkitError, match="--like has no INT4 weights" if options else "quantize"):
            quantize(releases("glm4_moe"), tmp_path / "out", scheme, dry_run=dry_run, **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("part", "tensor", "expected", "actual"),
    [
        ("weight_scale", torch.ones(128, 1, dtype=torch.bfloat16), "[128, 3]", "[128, 1] bfloat16"),
        ("weight_shape", torch.tensor([128]), "[2]", "[1] int64"),
    ],
)
def test_parts_of_the_wrong_shape(
    part: str, tensor: Tensor, expected: str, actual: str, int4: Path, copy_of: CopyOf, alone: RunAlone
) -> None:
    path = copy_of(int4)
    replace(path, {f"{EXPERT}.{part}": tensor})
    (finding,) = alone("CK303", path)[1]
    assert finding.tensor == f"{EXPERT}.{part}"
    assert expected in finding.expected
    assert actual in finding.actual


def test_two_int4_checkpoints_are_compared_bit_for_bit(int4: Path, copy_of: CopyOf) -> None:
    assert verify(int4, source=int4).findings == []
    path = copy_of(int4)
    packed = models.tensors(path)[f"{EXPERT}.weight_packed"]
    packed[0, 0] ^= 0x0000F000
    models.edit(path, f"{EXPERT}.weight_packed", packed)
    found = verify(path, source=int4).findings
    assert [(finding.code, finding.tensor) for finding in found] == [("CK202", f"{EXPERT}.weight_packed")]


def args(symmetric: bool, group: int) -> QuantizationArgs:
    return QuantizationArgs(num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=group)


def compressed(weight: Tensor, *, symmetric: bool, group: int = 32) -> dict[str, Tensor]:
    """The weight as compressed-tensors itself quantizes and packs it."""
    grouped = weight.reshape(len(weight), -1, group)
    scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args(symmetric, group))
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    scheme = QuantizationScheme(targets=["Linear"], weights=args(symmetric, group))
    return {f"m.{part}": tensor for part, tensor in PackedQuantizationCompressor.compress(state, scheme).items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_bound_holds_for_what_compressed_tensors_writes_and_is_tight(dtype: torch.dtype, symmetric: bool) -> None:
    torch.manual_seed(3)
    form = Int4Format(4, 32, symmetric)
    steps = []
    for spread in (1e-3, 0.02, 1.0):
        weight = (torch.randn(512, 256) * spread).to(dtype)
        weight[::2] = weight[::2].abs()
        parts = compressed(weight, symmetric=symmetric)
        steps.append(group_distances(parts, "m", form, weight).worst_steps)
    limit = bound_in_steps(dtype, symmetric)
    assert max(steps) <= limit
    assert max(steps) > 0.45
    assert limit < (0.6 if symmetric else 0.7)


def decompressed(parts: Mapping[str, Tensor], *, symmetric: bool = True, group: int = 32) -> Tensor:
    """What compressed-tensors itself makes of the parts."""
    scheme = QuantizationScheme(targets=["Linear"], weights=args(symmetric, group), format="pack-quantized")
    state = {f"weight_{name.rpartition('weight_')[2].removeprefix('_')}": one for name, one in parts.items()}
    weight: Tensor = PackedQuantizationCompressor.decompress(state, scheme)["weight"]
    return weight


@pytest.mark.parametrize("layout", ["symmetric", "asymmetric", "asymmetric, as SGLang reads experts"])
def test_dequantization_agrees_with_compressed_tensors_in_every_group(layout: str) -> None:
    """Of 204 rows, of which eight share a word of zero points, one weight is 3 steps off."""
    torch.manual_seed(5)
    symmetric, turned, rows = layout == "symmetric", layout.endswith("experts"), 208 if "SGLang" in layout else 204
    parts = compressed(torch.randn(rows, 2048) + torch.linspace(-2, 2, rows)[:, None], symmetric=symmetric, group=128)
    weight = decompressed(parts, symmetric=symmetric, group=128).float()
    parts = {name.replace("m.", "m.experts.0."): tensor for name, tensor in parts.items()}
    if turned:
        zero = parts["m.experts.0.weight_zero_point"]
        parts["m.experts.0.weight_zero_point"] = for_sglang_experts(zero, rows, "m.experts.0")
    weight[-1, -1] += 3 * parts["m.experts.0.weight_scale"][-1, -1]
    steps = group_distances(parts, "m.experts.0", Int4Format(4, 128, symmetric, turned), weight).steps
    assert float(steps.flatten()[:-1].max()) < 1e-4
    assert float(steps[-1, -1]) == pytest.approx(3, abs=1e-3)


# CK304 and CK305 of negative scales: AutoRound's symmetric grid passes, and faults in it are found.


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


@pytest.fixture(scope="module")
def exported(releases: PathOf, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`exported(learned, low, high)`: qwen2 as AutoRound writes it for compressed-tensors. Read only."""
    release, root = releases("qwen2-tied"), tmp_path_factory.mktemp("autoround")
    ignore = ["re:.*embed_tokens", "re:.*norm", "lm_head"]
    content = quantized.compressed_config("pack-quantized", **SYMMETRIC) | {"ignore": ignore}

    def write(learned: float = 0.0, low: float = 1.0, high: float = 1.0) -> Path:
        path = root / f"{learned}-{low}-{high}"
        if not path.exists():

            def quantizer(weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
                parts = autoround(weight, learned, (low, high))
                return parts, decompressed(parts)

            quantized.write(
                release, path, is_packed, quantizer, lambda config: config | {"quantization_config": content}
            )
        return path

    return write


def is_packed(name: str) -> bool:
    return name.endswith("_proj.weight")


@pytest.mark.parametrize("training", [(0.0, 1.0, 1.0), (0.5, 0.5, 1.0)])
def test_what_autoround_writes_passes(
    training: tuple[float, float, float], exported: Callable[..., Path], releases: PathOf
) -> None:
    """Plain rounding, and learned rounding with learned ranges."""
    report = verify(exported(*training), source=releases("qwen2-tied"))
    assert (report.findings, report.status) == ([], "passed")
    (note,) = [note for note in report.facts["notes"] if note.startswith("CK304")]
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


@pytest.fixture
def autoround_copy(exported: Callable[..., Path], copy_of: CopyOf) -> Path:
    return copy_of(exported())


def with_element(factor: float) -> Callable[[Tensor], Tensor]:
    """The scales with one of them multiplied."""

    def change(scale: Tensor) -> Tensor:
        scale[5, 1] *= factor
        return scale

    return change


@pytest.mark.parametrize(
    ("change", "code", "name"),
    [
        (with_element(-1), "CK305", ""),
        (torch.abs, "CK305", ""),
        (lambda scale: scale * 1.25, "CK305", ""),
        (with_element(0), "CK304", "_scale"),
    ],
)
def test_faults_of_signed_scales_are_found(
    change: Callable[[Tensor], Tensor], code: str, name: str, autoround_copy: Path, releases: PathOf, alone: RunAlone
) -> None:
    path = autoround_copy
    models.edit(path, f"{MODULE}.weight_scale", change(models.tensors(path)[f"{MODULE}.weight_scale"]))
    _, found = alone(code, path, source_path=releases("qwen2-tied"))
    assert [finding.tensor for finding in found] == [f"{MODULE}.weight{name}"]


@pytest.mark.parametrize("code", [3, 7])
def test_a_wrong_code_is_found_although_the_end_of_the_grid_may_be_far(
    code: int, autoround_copy: Path, releases: PathOf, alone: RunAlone
) -> None:
    """In the place of -8, the largest weight of a group."""
    path = autoround_copy
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
        is_packed,
        quantized.int4(**SYMMETRIC),
        lambda config: config | {"quantization_config": content},
    )
    name = f"{MODULE}.weight_scale"
    models.edit(tmp_path / "int4", name, with_element(-1)(models.tensors(tmp_path / "int4")[name]))
    _, (finding,) = alone("CK304", tmp_path / "int4")
    assert (finding.tensor, finding.expected) == (name, "scales above zero")

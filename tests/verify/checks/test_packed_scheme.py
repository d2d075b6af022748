"""CK306 to CK308, and the scales of CK305: an INT4 checkpoint whose parts do not belong together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from mutations.edits import edit_json, replace, tensor
from mutations.int4 import awq, codes, unpack
from support import models
from support.fixture_types import CopyOf, PathOf, RunAlone
from support.messages import text_with
from support.quantized import small_groups_allowed

from ckptkit.app.api import quantize
from ckptkit.quant.formats.scheme import QuantScheme

EXPERT = "model.layers.5.mlp.experts.11"
ATTENTION = "model.layers.3.self_attn"
DOWN, SHARED = "model.layers.5.mlp.experts.{}.down_proj", "model.layers.{}.mlp.shared_experts.gate_proj"


@pytest.fixture(scope="module")
def int4(releases: PathOf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """glm4_moe in INT4, group size 32. Read only."""
    path = tmp_path_factory.mktemp("int4") / "glm4_moe"
    quantize(releases("glm4_moe"), path, QuantScheme(32, "qmax7"))
    return path


def weights_of(config: dict[str, Any]) -> Any:
    return config["quantization_config"]["config_groups"]["group_0"]["weights"]


def test_packed_checkpoint_without_defect_is_silent(
    int4: Path, releases: PathOf, tmp_path: Path, passes: Callable[..., None], alone: RunAlone
) -> None:
    """q, k, v of 12 layers, gate and up of 2 dense layers and 10 shared experts, 10 x 12 x 3 of experts twice."""
    passes("CK306", int4, 12 * 3 + 12 * 2 + 2 * 360)
    passes("CK308", int4, 444)  # all that are packed
    for code in ("CK306", "CK307", "CK308"):
        assert alone(code, releases("glm4_moe"), tp=2) == (None, [])
    models.save("phi3", tmp_path / "plain")  # with qkv_proj and gate_up_proj in one piece
    quantize(tmp_path / "plain", tmp_path / "int4", QuantScheme(32, "qmax7"))
    passes("CK306", tmp_path / "int4")


# CK306


@pytest.mark.parametrize(
    "modules",
    [
        [f"{ATTENTION}.k_proj"],
        [f"{EXPERT}.down_proj"],
        [DOWN.format(expert) for expert in range(12)],
        [SHARED.format(layer) for layer in range(2, 12)],
    ],
)
def test_fused_layer_packed_in_part_is_found(modules: list[str], int4: Path, copy_of: CopyOf, alone: RunAlone) -> None:
    path = copy_of(int4)
    unpack(path, modules)
    found = alone("CK306", path)[1]
    # Of gate and up either may be the odd one.
    odd = {name.replace("gate_proj", "up_proj") for finding in found for name in finding.names}
    assert odd == {f"{module}.weight".replace("gate_proj", "up_proj") for module in modules}
    packed = "packed integers" if ".experts." in modules[0] else "INT4, groups of 32, scales in bfloat16"
    assert all({one.actual, one.expected.split(", as ")[0]} == {"unquantized", packed} for one in found)


def test_fused_layer_wholly_unpacked_has_no_finding(int4: Path, copy_of: CopyOf, alone: RunAlone) -> None:
    path = copy_of(int4)
    parts = [DOWN.replace("down", part) for part in ("gate", "up", "down")]
    experts = (part.format(expert) for expert in range(12) for part in parts)
    unpack(path, [*(f"{ATTENTION}.{part}_proj" for part in "qkv"), *experts])
    assert alone("CK306", path)[1] == []


@pytest.mark.parametrize(
    ("name", "part", "said"),
    [
        (f"{ATTENTION}.v_proj.weight_scale", torch.ones(64, 2).bfloat16(), "groups of 64"),
        (f"{ATTENTION}.v_proj.weight_scale", torch.ones(64, 4), "scales in float32"),
        (f"{EXPERT}.gate_proj.weight_zero_point", torch.zeros(12, 4).int(), ", zero points"),
    ],
)
def test_fused_parts_with_other_group_sizes_or_dtypes_or_zero_points_are_found(
    name: str, part: torch.Tensor, said: str, int4: Path, copy_of: CopyOf, alone: RunAlone
) -> None:
    path = copy_of(int4)
    replace(path, {name: part})
    _, (finding,) = alone("CK306", path)
    assert finding.tensor == f"{name.rpartition('.')[0]}.weight"
    assert said in finding.actual


# CK307


@pytest.mark.usefixtures("kernel_tiles")
def test_layers_that_no_kernel_runs_are_found_without_tensor_parallelism(int4: Path, alone: RunAlone) -> None:
    """Experts of 96 features, and a down projection of 288 columns: an engine ends at its first prompt."""
    _, (finding,) = alone("CK307", int4)
    assert finding.severity == "error"
    assert finding.actual == text_with("96 features 1 96 64")
    assert finding.actual == text_with("128 288 tiles 128 64 64 128")
    assert "--reader vllm" in finding.hint
    assert alone("CK307", int4, readers=("vllm",)) == (None, [])


# CK308


def test_scales_that_differ_by_a_little_are_normal(int4: Path, copy_of: CopyOf, alone: RunAlone) -> None:
    """Those that differ by more are mutations."""
    path, name = copy_of(int4), f"{EXPERT}.down_proj.weight_scale"
    replace(path, {name: tensor(path, name) * 16})
    assert alone("CK308", path)[1] == []


# CK305


def requantized(original: torch.Tensor, factor: float) -> dict[str, torch.Tensor]:
    """Parts with scales that are too large by a factor: every weight is still within half a step."""
    scale = (original.float().unflatten(1, (-1, 32)).abs().amax(-1) / 7 * factor).bfloat16()
    codes = (original.float() / scale.float().repeat_interleave(32, 1)).round().clamp(-8, 7).to(torch.int8)
    return {"weight_scale": scale, "weight_packed": pack_to_int32(codes, 4)}


@pytest.mark.parametrize(("factor", "named"), [(2.0, True), (2.0, False), (1.0, True)])
def test_quantization_steps_too_large_for_the_named_grid_are_found(
    factor: float, named: bool, int4: Path, copy_of: CopyOf, releases: PathOf, alone: RunAlone
) -> None:
    path, module = copy_of(int4), f"{EXPERT}.up_proj"
    parts = requantized(models.tensors(releases("glm4_moe"))[f"{module}.weight"], factor)
    replace(path, {f"{module}.{part}": one for part, one in parts.items()})
    if not named:
        edit_json(path / "config.json", lambda config: weights_of(config).update(observer_kwargs={}))
    found = [(one.tensor, one.actual) for one in alone("CK305", path, source_path=releases("glm4_moe"))[1]]
    assert found == ([(f"{module}.weight_scale", "up to 101% off")] if factor == 2 and named else [])


def moved(codes: torch.Tensor) -> torch.Tensor:
    """Every 32nd code three steps nearer to zero, as GPTQ may move it to make up for others."""
    changed = codes.clone()
    changed[:, ::32] -= 3 * changed[:, ::32].sign()
    return changed


@pytest.mark.parametrize("actorder", ["static", "weight", None])
@pytest.mark.parametrize("change", [moved, awq])
def test_weights_of_gptq_are_judged_by_the_distance_of_their_rows(
    actorder: str | None,
    change: Callable[[torch.Tensor], torch.Tensor],
    int4: Path,
    copy_of: CopyOf,
    releases: PathOf,
    alone: RunAlone,
) -> None:
    path, name = copy_of(int4), f"{EXPERT}.up_proj.weight_packed"
    replace(path, {name: codes(change)(tensor(path, name))})
    edit_json(path / "config.json", lambda config: weights_of(config).update(actorder=actorder))
    assert alone("CK302", path)[1] == []
    found = [(one.tensor, one.expected) for one in alone("CK305", path, source_path=releases("glm4_moe"))[1]]
    expected = "rows within 50% of their norm" if actorder else "at most 0.547 quantization steps off"
    assert found == ([] if actorder and change is moved else [(f"{EXPERT}.up_proj.weight", expected)])


@pytest.fixture(scope="module")
def asymmetric(releases: PathOf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """glm4_moe with zero points, those of routed experts as SGLang reads them, shared ones in BF16. Read only."""
    path = tmp_path_factory.mktemp("int4") / "glm4_moe"
    scheme = QuantScheme(32, "minmax", (r"re:.*\.mlp\.shared_experts\..*",), symmetric=False)
    with small_groups_allowed():
        quantize(releases("glm4_moe"), path, scheme, readers=("sglang",))
    return path


def test_zero_points_as_sglang_reads_them(asymmetric: Path, releases: PathOf, passes: Callable[..., None]) -> None:
    # every packed weight: 4 of attention in 12 layers, 3 of 2 dense layers, 3 of 12 experts in 10
    for code, compared in (("CK303", None), ("CK305", 12 * 4 + 2 * 3 + 10 * 12 * 3), ("CK306", None)):
        passes(code, asymmetric, compared, source_path=releases("glm4_moe"))


@pytest.mark.parametrize("change", [lambda zero: zero.flip(0), lambda zero: zero.bitwise_not()])
def test_zero_points_of_other_groups(
    change: Callable[[torch.Tensor], torch.Tensor], asymmetric: Path, copy_of: CopyOf, releases: PathOf, alone: RunAlone
) -> None:
    path, name = copy_of(asymmetric), f"{EXPERT}.up_proj.weight_zero_point"
    models.edit(path, name, change(models.tensors(path)[name]).contiguous())
    _, (finding,) = alone("CK305", path, source_path=releases("glm4_moe"))
    assert finding.tensor == f"{EXPERT}.up_proj.weight"


@pytest.mark.parametrize("reader", ["sglang", "vllm"])
def test_zero_points_of_experts_suit_the_reader_that_they_were_written_for(
    reader: str, releases: PathOf, tmp_path: Path, alone: RunAlone
) -> None:
    """One scale a row."""
    path = tmp_path / "own"
    scheme = QuantScheme(None, "minmax", (r"re:.*\.mlp\.shared_experts\..*",), symmetric=False)
    quantize(releases("glm4_moe"), path, scheme, readers=(reader,))
    experts = [f"model.layers.{{2..11}}.mlp.experts.{{0..11}}.{part}_proj" for part in ("down", "gate", "up")]
    wrong = [(f"{expert}.weight_zero_point", "error") for expert in experts] if reader == "vllm" else []
    for readers in ((), ("vllm", "sglang")):
        result, found = alone("CK309", path, readers=readers or None)
        assert result is not None
        assert (result.status, result.tensors_compared > 0) == ("failed" if wrong else "passed", True)
        assert sorted((one.tensor, one.severity) for one in found) == wrong
    assert alone("CK309", path, readers=("vllm",)) == (None, [])
    assert alone("CK309", path, against=frozenset({"vllm"})) == (None, [])

"""Whole checkpoints in NVFP4 of weights alone: one scale for what kernels join, ModelOpt's layout, and who loads it."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from families import case
from support import models
from support.engine_models import saved
from support.nightly import daily
from support.sglang_sizes import widened
from torch import Tensor

from ckptkit.app.api import quantize
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.reader import HfCheckpoint
from quant.lint.lint import lint
from quant.schemes.floats import FloatScheme
from verify.run import verify

MODELOPT = FloatScheme("nvfp4")
# What an engine calls the layer that it makes of a projection and others; by hand.
JOINED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "gate_up"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "qkv_a"),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`plain(name)`: one of the models of `support.engine_models`."""
    root = tmp_path_factory.mktemp("plain")
    return lambda name: root / name if (root / name).exists() else saved(name, root)


@pytest.fixture(scope="module")
def packed(plain: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`packed(name)`: the same in NVFP4. Not to be changed."""
    root = tmp_path_factory.mktemp("packed")

    def made(name: str) -> Path:
        if not (root / name).exists():
            quantize(plain(name), root / name, MODELOPT)
        return root / name

    return made


def largest(weights: list[Tensor]) -> Tensor:
    """The largest absolute weight, divided by 6 x 448."""
    return torch.stack([weight.float().abs().amax() for weight in weights]).amax() / torch.tensor(2688.0)


@pytest.mark.parametrize("name", ["dense", "moe", "mla", "mixtral"])
def test_what_kernels_join_has_one_scale_and_passes(
    name: str, plain: Callable[[str], Path], packed: Callable[[str], Path]
) -> None:
    written, source = models.tensors(packed(name)), models.tensors(plain(name))
    sets: dict[tuple[str, ...], list[str]] = defaultdict(list)
    codes = [name.removesuffix("_scale_2") for name in written if name.endswith(".weight_scale_2")]
    for weight in codes:
        parent, _, projection = weight.removesuffix(".weight").rpartition(".")
        sets[parent, JOINED.get(projection, projection)].append(weight)
    sizes = {len(weights) for weights in sets.values()}
    assert sizes == ({1, 2} if name == "mla" else {1, 2, 3})
    for weights in sets.values():
        wanted = largest([source[weight] for weight in weights])
        assert [float(written[f"{weight}_scale_2"]) for weight in weights] == [float(wanted)] * len(weights)
    report = verify(packed(name), source=plain(name))
    assert report.status == "passed", report.findings
    assert (lint(packed(name)).findings, lint(packed(name)).packed) == ((), len(codes))


def test_latent_attention_keeps_what_sglang_computes_with_itself(packed: Callable[[str], Path]) -> None:
    written = models.tensors(packed("mla"))
    kept = {name for name in written if name.endswith("kv_b_proj.weight")}
    assert len(kept) == 7
    assert {written[name].dtype for name in kept} == {torch.bfloat16}


def test_config_names_each_layer_as_engines_ask_for_it(packed: Callable[[str], Path]) -> None:
    """By itself and fused, and experts by their container: SGLang 0.5.16 knows W4A16_NVFP4 by layer alone."""
    content = json.loads((packed("moe") / "config.json").read_text())["quantization_config"]
    layers = content.pop("quantized_layers")
    assert content == {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None}
    parts = ("mlp.experts", *(f"self_attn.{one}_proj" for one in ("k", "o", "q", "qkv", "v")))
    assert list(layers) == [f"model.layers.{layer}.{part}" for layer in range(6) for part in parts]
    assert {json.dumps(one) for one in layers.values()} == {'{"quant_algo": "W4A16_NVFP4", "group_size": 16}'}


def test_parts_stay_in_the_shards_of_their_weights(plain: Callable[[str], Path], packed: Callable[[str], Path]) -> None:
    """Where shards cut through q, k and v, too."""
    before, after = HfCheckpoint(plain("dense")).layout, HfCheckpoint(packed("dense")).layout
    assert {file: {re.sub(r"_scale(_2)?$", "", name) for name in names} for file, names in after.items()} == {
        file: set(names) for file, names in before.items()
    }
    attention = [name for file, names in before.items() for name in names if ".1.self_attn." in name]
    assert len({file for file, names in before.items() if set(attention) & set(names)}) > 1


@pytest.mark.parametrize("source", ["mxfp4", "fp8-block"])
def test_quantized_sources_are_dequantized_first(source: str, plain: Callable[[str], Path], tmp_path: Path) -> None:
    quantize(plain("dense"), tmp_path / "source", FloatScheme(source))
    with pytest.raises(CkptkitError, match="weights are not exact"):
        quantize(tmp_path / "source", tmp_path / "out", FloatScheme("nvfp4", exact=True))
    quantize(tmp_path / "source", tmp_path / "out", MODELOPT)
    report = verify(tmp_path / "out", source=tmp_path / "source")
    assert report.status == "passed", report.findings


def test_like_quantizes_what_another_has_in_nvfp4(plain: Callable[[str], Path], tmp_path: Path) -> None:
    quantize(plain("dense"), tmp_path / "like", FloatScheme("nvfp4", ignore=(r"re:.*\.self_attn\..*",)))
    quantize(plain("dense"), tmp_path / "out", MODELOPT, like=tmp_path / "like")
    like, out = (models.tensors(tmp_path / name) for name in ("like", "out"))
    assert like.keys() == out.keys()
    assert not [name for name in out if "self_attn" in name and name.endswith("_scale_2")]


@pytest.mark.usefixtures("kernel_tiles")
def test_a_layer_that_no_kernel_runs_is_noted(plain: Callable[[str], Path], tmp_path: Path) -> None:
    """The first projections of latent attention have 96 and 576 rows together: no multiple of 64."""
    notes = quantize(plain("mla"), tmp_path / "out", MODELOPT).notes
    assert ["no NVFP4 kernel of SGLang runs" in note for note in notes] == [True]
    assert "q_a_proj.weight: 672 rows of 256 columns" in notes[0]
    assert not quantize(plain("mla"), tmp_path / "other", MODELOPT, readers=["vllm"]).notes


def test_sglangs_names_beside_a_vision_tower_are_noted(tmp_path: Path) -> None:
    case.save("qwen2_5_vl", widened("qwen2_5_vl"), tmp_path / "plain", torch.bfloat16)
    notes = quantize(tmp_path / "plain", tmp_path / "out", MODELOPT).notes
    assert ["SGLang 0.5.16 does not load Qwen2.5-VL" in note for note in notes] == [True]
    assert quantize(tmp_path / "plain", tmp_path / "other", MODELOPT, readers=["vllm"]).notes == ()


def halved(written: dict[str, Tensor], weight: str) -> tuple[str, Tensor]:
    """One scale of a group at half its size."""
    scales = written[f"{weight}_scale"].clone()
    scales[3, 1] = (scales[3, 1].float() / 2).to(torch.float8_e4m3fn)
    return f"{weight}_scale", scales


def shifted(written: dict[str, Tensor], weight: str) -> tuple[str, Tensor]:
    """The codes of one row one byte on."""
    codes = written[weight].clone()
    codes[5] = codes[5].roll(1)
    return weight, codes


def grown(written: dict[str, Tensor], weight: str) -> tuple[str, Tensor]:
    """Another scale of the whole tensor than the layer's other parts have."""
    return f"{weight}_scale_2", written[f"{weight}_scale_2"] * 1.7


@pytest.mark.parametrize(("change", "codes"), [(grown, {"CK305", "CK306"}), (halved, {"CK305"}), (shifted, {"CK305"})])
def test_what_is_changed_is_named(
    change: Callable[[dict[str, Tensor], str], tuple[str, Tensor]],
    codes: set[str],
    plain: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    quantize(plain("moe"), tmp_path / "out", MODELOPT)
    weight = "model.layers.2.mlp.experts.11.gate_proj.weight"
    name, tensor = change(models.tensors(tmp_path / "out"), weight)
    models.edit(tmp_path / "out", name, tensor)
    report = verify(tmp_path / "out", source=plain("moe"))
    assert {finding.code for finding in report.findings if finding.severity == "error"} >= codes
    assert any("experts.11" in str(finding.tensor) for finding in report.findings if finding.code in codes)


@pytest.mark.usefixtures("served_sglang")
@pytest.mark.sglang
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", daily(["dense", "moe", "mla", "glm"], ["mla"]))
def test_sglang_loads_every_value(name: str, plain: Callable[[str], Path], packed: Callable[[str], Path]) -> None:
    """With its draft model. Of latent attention's first projections SGLang takes one scale, and drops the other."""
    report = verify(packed(name), source=plain(name), against=frozenset({"sglang"}))
    assert [finding.code for finding in report.findings if finding.severity == "error"] == []
    assert {"CK501", "CK502", "CK503", "CK504"} <= {check.code for check in report.checks if check.status == "passed"}


@pytest.mark.usefixtures("served_sglang")
@pytest.mark.sglang
@pytest.mark.timeout(900)
def test_a_scale_that_sglang_drops_is_named_where_it_is_another(plain: Callable[[str], Path], tmp_path: Path) -> None:
    quantize(plain("mla"), tmp_path / "out", MODELOPT)
    name = "model.layers.2.self_attn.kv_a_proj_with_mqa.weight_scale_2"
    models.edit(tmp_path / "out", name, models.tensors(tmp_path / "out")[name] * 1.5)
    findings = verify(tmp_path / "out", against=frozenset({"sglang"})).findings
    assert [finding.tensor for finding in findings if finding.code == "CK503"] == [name]


@pytest.mark.usefixtures("served_sglang")
@pytest.mark.sglang
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_sglang_loads_linear_attention_and_its_draft_model(tmp_path: Path) -> None:
    """The draft class asks by the names of the model's first layer. Of in_proj_qkvz SGLang fills one scale of four."""
    case.save("qwen3_next", widened("qwen3_next"), tmp_path / "plain", torch.bfloat16)
    quantize(tmp_path / "plain", tmp_path / "out", MODELOPT)
    report = verify(tmp_path / "out", source=tmp_path / "plain", against=frozenset({"sglang"}))
    assert [finding.code for finding in report.findings if finding.severity == "error"] == []
    assert {"CK501", "CK502", "CK503", "CK508"} <= {check.code for check in report.checks if check.status == "passed"}
    assert not [name for name in models.tensors(tmp_path / "out") if "in_proj_qkvz" in name and "scale" in name]


@pytest.mark.vllm
@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", daily(["dense", "moe", "mla"], []))
def test_vllm_loads_compressed_tensors_layout(name: str, plain: Callable[[str], Path], tmp_path: Path) -> None:
    quantize(plain(name), tmp_path / "out", FloatScheme("nvfp4", "compressed-tensors"))
    report = verify(tmp_path / "out", source=plain(name), against=frozenset({"vllm"}))
    assert [finding.code for finding in report.findings if finding.severity == "error"] == []
    assert {"CK521", "CK522", "CK523"} <= {check.code for check in report.checks if check.status == "passed"}

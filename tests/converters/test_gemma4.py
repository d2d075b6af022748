"""Gemma 4: the spellings of its configs, the keys that nobody uses, and the scalars of its layers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import UNWITNESSED
from families.case import save
from families.table import config_of
from safetensors.torch import load_file, save_file
from support import floats, models
from support.fixture_types import CopyOf, PathOf
from torch import Tensor

from converters.planner import dims_of, expected_hf
from converters.stored import as_stored
from verify.checks.config.spellings import keys_of
from verify.launch.checks.gpus import engine_fit
from verify.launch.stacks.sizes import Cut
from verify.report import Report
from verify.run import verify

ROOT = "model.language_model.layers."


def nested(name: str = "gemma4", **changes: Any) -> dict[str, Any]:
    """config.json of a test model with changes."""
    return config_of(UNWITNESSED[name], **changes)


def by_layer(**sizes: int) -> dict[str, Any]:
    """The sizes of full layers as transformers writes them from 5.15 on."""
    flat = {"global_head_dim": ..., "num_global_key_value_heads": ...}
    return flat | {"per_layer_config": {layer: dict(sizes) for layer in ("05", "11")}}


def codes(report: Report) -> list[str]:
    return [finding.code for finding in report.findings]


def test_sizes_of_full_layers_are_read_under_both_spellings() -> None:
    flat, written = nested(), nested(**by_layer(head_dim=48, num_key_value_heads=1))
    assert expected_hf(written) == expected_hf(flat)
    assert keys_of(flat)[0] == {}
    needed = {"text_config.global_head_dim": 48, "text_config.num_global_key_value_heads": 1}
    assert keys_of(written) == (needed, needed)


def test_what_a_config_without_them_means() -> None:
    """The defaults of transformers' class: heads of 512 in full layers, and embeddings of 256 for each layer."""
    absent = dict.fromkeys(("global_head_dim", "hidden_size_per_layer_input", "rope_parameters"), ...)
    dims = dims_of(nested("gemma4-small", **absent))
    assert (dims.rope_theta, dims.local_rope_theta) == (1e6, 1e4)
    assert dims.other_attention is not None
    assert (dims.other_attention.head_dim, dims.own.size) == (512, 256)


@pytest.fixture(scope="module")
def small(releases: PathOf) -> Mapping[str, Path]:
    return {name: releases(f"gemma4-small{name}") for name in ("", "-as-released")}


def test_keys_that_nobody_uses_are_stored_or_not(small: Mapping[str, Path]) -> None:
    """As released, 15 tensors more than transformers saves, and both without a finding."""
    names = {name: models.tensors(path).keys() for name, path in small.items()}
    config = nested("gemma4-small")
    more = names["-as-released"] - names[""]
    assert more == expected_hf(as_stored(config, names["-as-released"])).keys() - expected_hf(config).keys()
    assert len(more) == 15
    assert {name: codes(verify(path)) for name, path in small.items()} == {"": [], "-as-released": []}


@pytest.mark.parametrize("leaf", ["k_proj", "v_proj", "k_norm"])
def test_some_of_the_keys_that_nobody_uses_are_not_all(leaf: str, small: Mapping[str, Path], copy_of: CopyOf) -> None:
    path, name = copy_of(small["-as-released"]), f"{ROOT}9.self_attn.{leaf}.weight"
    models.edit(path, name, None)
    assert "CK104" in codes(verify(path))


def test_values_of_a_layer_that_has_none_are_not_promised(releases: PathOf, copy_of: CopyOf) -> None:
    """A v_proj beside keys that are the values too is read by nobody."""
    path = copy_of(releases("gemma4"))
    tensors = models.tensors(path)
    name = f"{ROOT}5.self_attn.v_proj.weight"
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    beside = name.replace("v_proj", "k_proj")
    file = path / content["weight_map"][beside]
    save_file(load_file(file) | {name: tensors[beside].clone()}, file, metadata={"format": "pt"})
    content["weight_map"][name] = file.name
    index.write_text(json.dumps(content))
    assert (verify(path).findings[0].code, verify(path).findings[0].tensor) == ("CK104", name)


def test_a_scalar_of_a_layer_comes_through_untouched_and_is_not_zero(releases: PathOf, copy_of: CopyOf) -> None:
    source, name = releases("gemma4_text"), "model.layers.3.layer_scalar"
    path = copy_of(source)
    assert codes(verify(path, source=source)) == []
    models.edit(path, name, models.tensors(path)[name] * 1.01)
    assert codes(verify(path, source=source)) == ["CK202"]
    models.edit(path, name, torch.zeros(1, dtype=torch.bfloat16))
    assert codes(verify(path)) == ["CK205"]


def test_keys_that_transformers_leaves_out_of_a_unified_model_are_named(tmp_path: Path) -> None:
    """SGLang's default is an embedding of 256 for each layer."""
    as_saved = replace(UNWITNESSED["gemma4_unified"], edit=lambda config: config)
    save("gemma4_unified", as_saved, tmp_path / "release", torch.bfloat16)
    report = verify(tmp_path / "release")
    assert codes(report) == ["CK731"]
    assert '"text_config.hidden_size_per_layer_input": 0' in str(report.findings[0].expected)


def test_tie_flags_that_sglang_reads_elsewhere_are_compared(releases: PathOf, copy_of: CopyOf) -> None:
    path = copy_of(releases("gemma4"))
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = False
    (path / "config.json").write_text(json.dumps(config))
    assert "CK705" in codes(verify(path))


def test_blocks_of_fp8_are_held_against_both_sizes_of_heads() -> None:
    """Full layers have 1 key head of 48 rows here, the others 2 of 32."""
    config = nested() | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 128]}}
    found = [issue.expected for issue in engine_fit(dims_of(config), config, Cut("rollout", "sglang", 1, "--tp"))]
    assert any("num_key_value_heads 1 x head_dim 48" in text for text in found)
    assert not any("num_key_value_heads 2 x head_dim 32" in text for text in found)


def apart(found: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """One tensor an expert and projection, as quantized releases have them."""
    stored: dict[str, Tensor] = {}
    for name, tensor in found.items():
        block, _, kind = name.rpartition(".experts.")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind, ())
        for number, expert in enumerate(tensor) if parts else ():
            pieces = zip(parts, expert.chunk(len(parts)), strict=True)
            stored |= {f"{block}.experts.{number}.{part}.weight": piece for part, piece in pieces}
        stored |= {} if parts else {name: tensor}
    return stored


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "spelling", "wanted"),
    [
        ("gemma4", "nvfp4-modelopt", r".*\.experts\.\d+\..*"),
        ("gemma4", "fp8-channel", r".*language_model\.layers\..*(mlp|self_attn|experts)\..*_proj\.weight"),
        ("gemma4_text", "nvfp4-modelopt", r".*\.mlp\..*"),
    ],
    ids=["26B-A4B in NVFP4", "26B-A4B in FP8", "31B in NVFP4"],
)
def test_quantized_releases_are_read_beside_their_source(
    name: str, spelling: str, wanted: str, releases: PathOf, tmp_path: Path
) -> None:
    """The experts alone, all projections, or the MLPs alone; the source has the experts of a layer in one tensor."""
    save(name, replace(UNWITNESSED[name], whole=apart), tmp_path / "plain", torch.bfloat16)
    packed = floats.write(
        tmp_path / "plain",
        tmp_path / "packed",
        floats.SPELLINGS[spelling],
        lambda one: re.fullmatch(wanted, one) is not None,
    )
    report = verify(packed, source=releases(name))
    assert (report.status, report.findings) == ("passed", [])
    scales = sorted(one for one in models.tensors(packed) if one.endswith("weight_scale"))
    (first, second) = (models.tensors(packed)[one] for one in scales[:2])
    models.edit(packed, scales[0], second if second.shape == first.shape else first.flip(0))
    assert codes(verify(packed, source=releases(name))) == ["CK305"]

"""MiniMax-M3: names and dtypes of its release, and configs that its readers read differently."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from families import UNWITNESSED, minimax_m3
from families.case import build
from families.table import config_of
from mutations.edits import edit_config, replace
from support import floats, models
from support.fixture_types import PathOf
from transformers import AutoModelForImageTextToText

from converters.planner import expected_hf
from verify.run import verify

NAME = "minimax_m3_vl"
CASE = UNWITNESSED[NAME]
CONFIG = config_of(CASE)
LAYERS = "language_model.model.layers."
GATE = f"{LAYERS}5.block_sparse_moe.gate.weight"


@pytest.fixture
def release(releases: PathOf) -> Path:
    return releases(NAME)


def findings(path: Path, **options: Any) -> list[tuple[str, str, str]]:
    """Code, severity and tensor of each finding."""
    return [(one.code, one.severity, str(one.tensor)) for one in verify(path, **options).findings]


def with_text(config: Mapping[str, Any], changes: Mapping[str, Any], sparse: Mapping[str, Any]) -> dict[str, Any]:
    """The config with other keys of the language model, and of its sparse attention."""
    text = config["text_config"]
    attention = text["sparse_attention_config"] | sparse
    return {**config, "text_config": text | {"sparse_attention_config": attention} | changes}


def test_heads_of_the_indexer_need_not_be_those_of_attention() -> None:
    shapes = expected_hf(with_text(CONFIG, {}, {"sparse_index_dim": 24, "sparse_num_index_heads": 3}))
    assert shapes[f"{LAYERS}3.self_attn.index_q_proj.weight"] == (72, 128)
    assert shapes[f"{LAYERS}3.self_attn.index_k_proj.weight"] == (24, 128)
    assert shapes[f"{LAYERS}3.self_attn.index_k_norm.weight"] == (24,)


def test_vision_tower_is_compared_with_that_of_the_source(release: Path, tmp_path: Path) -> None:
    name = "vision_tower.vision_model.encoder.layers.1.mlp.fc1.weight"
    path = shutil.copytree(release, tmp_path / "made")
    replace(path, {name: models.tensors(path)[name].roll(1, 0)})
    assert findings(path, source=release) == [("CK202", "error", name)]


def test_mxfp8_as_released_is_sound(release: Path, tmp_path: Path) -> None:
    """Attention, indexer, dense layers and experts; not routers, head, embeddings and vision tower."""
    quantized = re.compile(rf"{LAYERS}\d+\.(self_attn\.\w+_proj|mlp\.\w+|block_sparse_moe\..*experts\..*)\.weight")
    path = floats.write(
        release, tmp_path / "made", floats.SPELLINGS["mxfp8"], lambda name: bool(quantized.fullmatch(name))
    )
    assert findings(path) == []
    assert findings(path, source=release) == []


def test_names_of_transformers_modules_are_named(tmp_path: Path) -> None:
    build(NAME, CASE, torch.bfloat16).save_pretrained(tmp_path / "made", save_original_format=False)
    (finding,) = (one for one in verify(tmp_path / "made").findings if one.code == "CK104")
    assert "transformers' own modules" in finding.actual


def test_transformers_finds_every_tensor_where_its_class_wants_it(release: Path) -> None:
    _, info = AutoModelForImageTextToText.from_pretrained(release, dtype=torch.bfloat16, output_loading_info=True)
    assert {key: list(found) for key, found in info.items() if found} == {}


def test_a_config_that_transformers_wrote_describes_the_same_model_and_lacks_keys(
    release: Path, tmp_path: Path
) -> None:
    written = json.loads(minimax_m3.config().to_json_string(use_diff=False))
    assert "moe_layer_freq" not in written["text_config"]
    assert expected_hf(written) == expected_hf(CONFIG)
    path = shutil.copytree(release, tmp_path / "made")
    edit_config(path, text_config=written["text_config"])
    (finding,) = (one for one in verify(path).findings if one.code == "CK731")
    assert '"text_config.moe_layer_freq": [0, 0, 0, 1' in finding.expected
    assert "text_config.sparse_attention_config" in finding.actual

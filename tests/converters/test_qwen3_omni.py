"""Qwen3-Omni: where its language model is, in config.json and among the tensors, by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from families import CASES

from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.side_files import write_config
from converters.config.values import language_part
from converters.megatron.arguments import megatron_args
from converters.planner import dims_of
from converters.registry import family_of


def config_of(**changes: Any) -> dict[str, Any]:
    """What config.json of the whole test model says, with changes in the thinker's text_config."""
    case = CASES["qwen3_omni_moe"]
    stated = case.edit(json.loads(case.config().to_json_string(use_diff=False)))
    stated["thinker_config"]["text_config"] |= changes
    return stated


def test_the_thinker_alone_is_the_same_model_under_shorter_names() -> None:
    whole = config_of()
    alone = {**whole["thinker_config"], "model_type": "qwen3_omni_moe_thinker"}
    found, shorter = dims_of(whole), dims_of(alone)
    assert (found.root, found.head) == ("thinker.model.", "thinker.lm_head.weight")
    assert (shorter.root, shorter.head) == ("model.", "lm_head.weight")
    assert megatron_args(found) == megatron_args(shorter)
    assert megatron_args(found)["rotary_interleaved"] is False  # whatever `interleaved` says of the three axes
    assert language_part(whole) == language_part(alone) == whole["thinker_config"]["text_config"]


def test_what_is_beside_the_language_model_is_carried() -> None:
    family = family_of(config_of())
    carried = ["thinker.audio_tower.conv2d1.weight", "thinker.visual.merger.ln_q.weight", "talker.codec_head.weight"]
    assert [name for name in (*carried, "code2wav.x", "thinker.model.norm.weight") if not family.carries(name)] == [
        "thinker.model.norm.weight"
    ]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**config_of(), "thinker_config": None}, "qwen3_omni_moe without a thinker_config"),
        ({**config_of(), "thinker_config": {"text_config": None}}, "text_config is None, not an object"),
        ({**config_of(), "thinker_config": 7}, "thinker_config is 7, not an object"),
        (config_of(num_hidden_layers=5000), "thinker_config.text_config.num_hidden_layers is 5000, not at most 1,000"),
    ],
)
def test_a_config_that_is_unsupported_is_refused_by_name(config: Mapping[str, Any], message: str) -> None:
    with pytest.raises(CkptkitError, match=message):
        dims_of(family_of(config) and config)


def test_a_written_config_states_the_dtype_where_the_release_does(tmp_path: Path) -> None:
    """Nowhere at the top; null in the text_config of the releases stays null."""
    config = config_of(dtype=None)
    config["thinker_config"]["dtype"] = "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_config(tmp_path, config, {"x": TensorSpec("x", (2,), "float32")})
    config["thinker_config"]["dtype"] = "float32"
    assert json.loads((tmp_path / "config.json").read_text()) == config

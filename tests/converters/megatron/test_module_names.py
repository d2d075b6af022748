"""Names of global tensors for the names that modules have on a rank, against names written by hand."""

from __future__ import annotations

import pytest
from support import models

from converters.megatron.module_names import global_name
from converters.planner import rules_of

RULES = {rule.megatron for rule in rules_of(models.configs()["glm4_moe"].to_dict())}
MTP = {rule.megatron for rule in rules_of(models.configs()["glm4_moe"].to_dict() | {"num_nextn_predict_layers": 2})}
TIED = {rule.megatron for rule in rules_of(models.configs()["qwen2-tied"].to_dict())}
STAGE = range(6, 12)  # global layers of the second of two pipeline stages
FIRST = range(6)


@pytest.mark.parametrize(
    ("layers", "local", "name"),
    [
        # Megatron's local spec
        (STAGE, "0.input_layernorm.weight", "6.self_attention.linear_qkv.layer_norm_weight"),
        (FIRST, "1.pre_mlp_layernorm.weight", "1.mlp.linear_fc1.layer_norm_weight"),
        (STAGE, "1.pre_mlp_layernorm.weight", "7.pre_mlp_layernorm.weight"),
        (STAGE, "5.mlp.experts.local_experts.2.linear_fc1.weight", "11.mlp.experts.experts.8.linear_fc1.weight"),
        (STAGE, "5.mlp.router.expert_bias", "11.mlp.router.expert_bias"),
        # Transformer Engine's
        (STAGE, "0.self_attention.linear_qkv.layer_norm_weight", "6.self_attention.linear_qkv.layer_norm_weight"),
        (FIRST, "0.mlp.linear_fc1.layer_norm_weight", "0.mlp.linear_fc1.layer_norm_weight"),
        (STAGE, "5.mlp.experts.linear_fc2.weight5", "11.mlp.experts.experts.11.linear_fc2.weight"),
    ],
)
def test_global_name_of_a_parameter(layers: range, local: str, name: str) -> None:
    assert global_name(f"decoder.layers.{local}", layers, range(6, 12), RULES) == f"decoder.layers.{name}"
    assert f"decoder.layers.{name}" in RULES


@pytest.mark.parametrize(
    "module", ["transformer_layer", "mtp_model_layer"]
)  # up to megatron-core 0.16, and from then on
@pytest.mark.parametrize(
    ("local", "name"),
    [
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("self_attention.linear_qkv.layer_norm_weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("pre_mlp_layernorm.weight", "pre_mlp_layernorm.weight"),
        ("mlp.experts.local_experts.2.linear_fc1.weight", "mlp.experts.experts.8.linear_fc1.weight"),
        ("mlp.experts.linear_fc2.weight5", "mlp.experts.experts.11.linear_fc2.weight"),
        ("mlp.router.expert_bias", "mlp.router.expert_bias"),
    ],
)
def test_global_name_in_a_multi_token_prediction_layer(module: str, local: str, name: str) -> None:
    expected = f"mtp.layers.1.transformer_layer.{name}"
    assert global_name(f"mtp.layers.1.{module}.{local}", STAGE, range(6, 12), MTP) == expected
    assert expected in MTP


@pytest.mark.parametrize(
    "name",
    [
        "mtp.layers.1.eh_proj.weight",
        "mtp.layers.1.final_layernorm.weight",
        "embedding.word_embeddings.weight",
        "decoder.final_layernorm.weight",
    ],
)
def test_the_rest_of_a_multi_token_prediction_stage_has_global_names(name: str) -> None:
    assert global_name(name, STAGE, range(6, 12), MTP) == name
    assert name in MTP


def test_second_copy_of_tied_embeddings() -> None:
    assert global_name("output_layer.weight", STAGE, range(0), TIED) == "embedding.word_embeddings.weight"
    assert global_name("output_layer.weight", STAGE, range(0), RULES) == "output_layer.weight"

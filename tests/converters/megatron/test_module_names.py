"""Names of global tensors for the names that modules have on a rank, against names written by hand."""

from support import models

from ckptkit.converters.megatron.module_names import global_name
from ckptkit.converters.planner import rules_of

RULES = {rule.megatron for rule in rules_of(models.configs()["glm4_moe"].to_dict())}
MTP = {rule.megatron for rule in rules_of(models.configs()["glm4_moe"].to_dict() | {"num_nextn_predict_layers": 2})}
TIED = {rule.megatron for rule in rules_of(models.configs()["qwen2-tied"].to_dict())}
STAGE = range(6, 12)  # global layers of the second of two pipeline stages
FIRST = range(6)


# Layers of a stage, the name in the second of two ranks of experts, and the global one.
NAMES = [
    # Megatron's local spec
    (STAGE, "0.input_layernorm.weight", "6.self_attention.linear_qkv.layer_norm_weight"),
    (FIRST, "1.pre_mlp_layernorm.weight", "1.mlp.linear_fc1.layer_norm_weight"),
    (STAGE, "1.pre_mlp_layernorm.weight", "7.pre_mlp_layernorm.weight"),
    (STAGE, "5.mlp.experts.local_experts.2.linear_fc1.weight", "11.mlp.experts.experts.8.linear_fc1.weight"),
    # Transformer Engine's
    (FIRST, "0.mlp.linear_fc1.layer_norm_weight", "0.mlp.linear_fc1.layer_norm_weight"),
    (STAGE, "5.mlp.experts.linear_fc2.weight5", "11.mlp.experts.experts.11.linear_fc2.weight"),
]
# In a layer for multi-token prediction: up to megatron-core 0.16, and from then on.
EXPERT = "mlp.experts.experts.8.linear_fc1.weight"
OF_MTP = {
    "transformer_layer.input_layernorm": "transformer_layer.self_attention.linear_qkv.layer_norm_weight",
    "mtp_model_layer.pre_mlp_layernorm": "transformer_layer.pre_mlp_layernorm.weight",
    "mtp_model_layer.mlp.experts.local_experts.2.linear_fc1": f"transformer_layer.{EXPERT}",
    "eh_proj": "eh_proj.weight",
}


def test_global_name_of_a_parameter():
    for layers, local, name in NAMES:
        assert global_name(f"decoder.layers.{local}", layers, range(6, 12), RULES) == f"decoder.layers.{name}"
        assert f"decoder.layers.{name}" in RULES
    for local, name in OF_MTP.items():
        assert global_name(f"mtp.layers.1.{local}.weight", STAGE, range(6, 12), MTP) == f"mtp.layers.1.{name}"
        assert f"mtp.layers.1.{name}" in MTP


def test_second_copy_of_tied_embeddings():
    assert global_name("output_layer.weight", STAGE, range(0), TIED) == "embedding.word_embeddings.weight"
    assert global_name("output_layer.weight", STAGE, range(0), RULES) == "output_layer.weight"

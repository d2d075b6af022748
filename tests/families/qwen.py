"""Qwen2, Qwen3 MoE and Qwen2.5-VL."""

from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig, Qwen2Config, Qwen3MoeConfig

from families.case import MOE, SIZES, Case

ROPE = {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [2, 3, 3]}
VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4}
VISION |= {"out_hidden_size": 128}


def qwen2_5_vl(*, tied):
    """A head is hidden_size / num_attention_heads wide, whatever `head_dim` says."""
    text = {key: size for key, size in SIZES.items() if key != "head_dim"}
    text |= {"num_attention_heads": 8, "bos_token_id": 1, "rope_parameters": ROPE}
    return Qwen2_5_VLConfig(text_config=text, vision_config=VISION | {"window_size": 16}, tie_word_embeddings=tied)


def as_released(config):
    """The language model's sizes at the top, and rotary settings as transformers v4 spells them."""
    text = {key: value for key, value in config.pop("text_config").items() if key not in ("layer_types", "model_type")}
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    return text | config | {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}


CASES = {
    "qwen2-tied": Case(lambda: Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen2-untied": Case(lambda: Qwen2Config(**SIZES, tie_word_embeddings=False)),
    "qwen3_moe": Case(lambda: Qwen3MoeConfig(**SIZES, **MOE, num_experts=12, norm_topk_prob=True), fused=True),
    "qwen2_5_vl": Case(lambda: qwen2_5_vl(tied=False), auto=AutoModelForImageTextToText),
    "qwen2_5_vl-tied-as-released": Case(
        lambda: qwen2_5_vl(tied=True), edit=as_released, auto=AutoModelForImageTextToText
    ),
}

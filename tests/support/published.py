"""Ignore lists as they are published, with the models that they belong to, cut to four layers."""

import json
from collections.abc import Mapping
from pathlib import Path

from releases.record import unfolded

LAYERS, EXPERTS = 4, 12
# Sizes of no importance, as families read them.
_SIZES = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-6,
}
_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
}

KIMI = {
    **_SIZES,
    **_LATENT,
    "model_type": "kimi_k2",
    "routed_scaling_factor": 2.827,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
GLM = {
    **_SIZES,
    "model_type": "glm4_moe",
    "routed_scaling_factor": 1.0,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
QWEN = {**_SIZES, "model_type": "qwen3_moe", "num_experts": EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": []}
MINIMAX = {**_SIZES, "model_type": "minimax_m2", "num_local_experts": EXPERTS}

KIMI_LIST = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
QWEN_LIST = ["lm_head", "re:.*mlp.gate$"]
# GLM-4.5 as slime's documentation has it, by parameter names.
GLM_RULES = [r"re:.*mlp\.gate\..*", "re:.*eh_proj.*", "model.embed_tokens.weight"]
GLM_LIST = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
# MiniMax-M2 is quantized by name: the alias gate_up stands in the target for engines that fuse the two.
MINIMAX_LIST = ["lm_head", "model.embed_tokens", "re:.*self_attn.*", r"re:.*block_sparse_moe\.gate$"]


def quantization(ignore, targets=("Linear",), groups=1):
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
    group = {"targets": list(targets), "weights": weights, "input_activations": None, "output_activations": None}
    content = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
    return {**content, "config_groups": {f"group_{index}": group for index in range(groups)}, "ignore": list(ignore)}


def write(path, config, ignore, names=None, **options):
    return write_config(path, config, quantization(ignore, **options), names)


def write_config(path, config, content, names=None):
    """A directory with config.json and, with `names`, an index; the weights that it names are not there."""
    path.mkdir(parents=True, exist_ok=True)
    stated = {} if content is None else {"quantization_config": content}
    (path / "config.json").write_text(json.dumps({**config, **stated}))
    if names is not None:
        (path / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")})
        )
    return path


def packed(module):
    yield from (f"{module}.weight_{part}" for part in ("packed", "scale", "shape"))


def kimi_names():
    yield from ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        latent = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
        yield from (f"{at}self_attn.{name}.weight" for name in (*latent, "o_proj"))
        yield from (f"{at}{name}.weight" for name in ("input_layernorm", "post_attention_layernorm"))
        if layer == 0:
            yield from (f"{at}mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
            continue
        yield from (f"{at}mlp.gate.weight", f"{at}mlp.gate.e_score_correction_bias")
        yield from (f"{at}mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down"))
        for expert in range(EXPERTS):
            for name in ("gate", "up", "down"):
                yield from packed(f"{at}mlp.experts.{expert}.{name}_proj")


# Configs of published releases; names that differ in numbers alone are folded, and experts cut to 16.
PUBLISHED_FILE = Path(__file__).parents[1] / "quant/ignore/published_configs.json"
PUBLISHED = {entry["release"]: entry for entry in json.loads(PUBLISHED_FILE.read_text())["releases"]}
_NUMBERS_OF_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")


def restored(value):
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {"folded"}:
        return [name for one in value["folded"] for name in unfolded(one)]
    if value.keys() == {"folded_keys"}:
        return {name: content for content, several in value["folded_keys"] for one in several for name in unfolded(one)}
    return {key: 16 if key in _NUMBERS_OF_EXPERTS else restored(one) for key, one in value.items()}

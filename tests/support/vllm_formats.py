"""Small models in sizes that kernels of an H100 take, in every format: for vLLM's steps after loading."""

import re
import shutil
from dataclasses import replace

import torch
from families import CASES
from families.case import save
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from support import engine_models
from support.engine_models import model_of
from support.quantized import compressed_config, fp8_blocks, fp8_config, int4, write

SIZES = engine_models.SIZES | {"vocab_size": 512, "num_hidden_layers": 4, "max_position_embeddings": 256}
EXPERTS = {"moe_intermediate_size": 256, "num_experts_per_tok": 2}
# Tiles of 64 outputs and 128 inputs: not of these experts, nor of the layer for queries, keys and values, nor `down`.
ODD = {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 288}
_MOE = {**SIZES, **EXPERTS, "head_dim": 64, "num_experts": 8, "norm_topk_prob": True}
_GROUPED = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "q_lora_rank": 128}
MODELS = {
    "dense": model_of("qwen3-untied", Qwen3Config, SIZES, head_dim=64),
    "biases": model_of("qwen2-untied", Qwen2Config, SIZES),
    "moe": model_of("qwen3_moe", Qwen3MoeConfig, _MOE),
    "odd": model_of("qwen3_moe", Qwen3MoeConfig, _MOE | ODD, moe_intermediate_size=96, mlp_only_layers=[1]),
    # Experts no wider than a group of 128.
    "narrow": model_of("qwen3_moe", Qwen3MoeConfig, _MOE, moe_intermediate_size=128),
    "mla": model_of("deepseek_v3", DeepseekV3Config, SIZES | EXPERTS | engine_models.MLA | _GROUPED),
}
_QUANTIZED = re.compile(r".*layers\.\d+\..*(?<!eh)_proj(_with_mqa)?\.weight")
_KEPT = ["lm_head", r"re:.*\.mlp\.gate$"]
_GROUPS = {
    "groups of 32": {"strategy": "group", "group_size": 32},
    "groups of 64": {"strategy": "group", "group_size": 64},
    "groups of 128": {"strategy": "group", "group_size": 128},
    "rows": {"strategy": "channel"},
}
SYMMETRIC = tuple(_GROUPS)
ZERO_POINTS = tuple(f"{name} with zero points" for name in _GROUPS)
FP8 = "FP8"
FORMATS = ("BF16", *SYMMETRIC, *ZERO_POINTS, FP8)
ROWS = ("rows", "rows with zero points")


def is_linear(name):
    return _QUANTIZED.fullmatch(name) is not None


def labels(models, forms=FORMATS):
    return [f"{model}, {form}" for model in models for form in forms]


_SMALL_GROUPS = ("groups of 32", "groups of 32 with zero points")  # the only ones that divide 96 and 288
REFUSED = labels(("moe", "mla", "odd"), ROWS)
# Of experts no wider than a group vLLM 0.26 orders the scales of gate and up as if a row had one.
MISORDERED = labels(("narrow",), ("groups of 128", "groups of 128 with zero points"))
CLEAN = [
    label
    for label in [
        *labels(("dense", "moe", "mla")),
        *labels(("biases",), (*_SMALL_GROUPS, "groups of 128", "rows", FP8)),
        *labels(("odd",), ("BF16", *_SMALL_GROUPS)),
        *labels(("narrow",), ("BF16", *_SMALL_GROUPS, FP8)),
    ]
    if label not in REFUSED
]
NO_GROUPS = "'>' not supported between instances of 'NoneType' and 'int'"  # what vLLM 0.26 says of REFUSED


def write_all(root, wanted, meant=None):
    """Makes the checkpoints of these labels, and gives each with its path.

    `meant` gets, under the same names, plain ones with the weights that these stand for.
    """
    for label in wanted:
        model, _, form = label.partition(", ")
        family, config = MODELS[model]
        if not (plain := root / model).exists():
            save(family, replace(CASES[family], config=config), plain, torch.bfloat16)
        if form == "BF16":
            yield label, plain
            continue
        target = root / label
        quantizer, edit = in_fp8(config()) if form == FP8 else in_int4(form)
        weights = write(plain, target, is_linear, quantizer, edit)
        if meant is not None:
            shutil.copytree(plain, meant / label)
            for file in (meant / label).glob("*.safetensors"):
                save_file({name: weights[name] for name in load_file(file)}, file, metadata={"format": "pt"})
        yield label, target


def in_int4(form, kept=()):
    arguments = {**_GROUPS[form.removesuffix(" with zero points")], "symmetric": form in SYMMETRIC}
    stated = compressed_config("pack-quantized", **arguments) | {"ignore": [*_KEPT, *kept]}
    return int4(**arguments), lambda config: config | {"quantization_config": stated}


def in_fp8(config):
    """Blocks of 128 x 128; vLLM makes the routers of Qwen3-MoE FP8 that are not named."""
    kept = [f"model.layers.{layer}.mlp.gate" for layer in range(config.num_hidden_layers)]
    stated = fp8_config((128, 128), ["lm_head", *kept])
    return fp8_blocks(128, 128), lambda content: content | {"quantization_config": stated}

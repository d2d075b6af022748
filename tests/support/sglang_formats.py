"""Test models of every model type in INT4 and in FP8 blocks, for SGLang."""

import re

from families import HF_CASES

from ckptkit.app.api import quantize
from ckptkit.quant.engines.registry import engine_class
from ckptkit.quant.schemes.w4a16 import int4_scheme
from support import models
from support.quantized import fp8_blocks, fp8_config, small_groups_allowed, write
from support.sglang_families import CLEAN

EXPERTS = r"re:.*\.mlp\.shared_expert\..*"  # 72 inputs in two test models, which no group of 32 divides
# Others with such inputs.
ODD = {**dict.fromkeys(("qwen3_next", "qwen3_5_moe"), EXPERTS), "step3p": r"re:.*\.share_expert\..*"}
# Whose Linear layers are not known, whose experts SGLang does not load, or that it loads in other formats alone. It
# runs Gemma 4's unified text model and Seed-OSS by transformers' classes, whose layers no target of a config names.
NOT_INT4 = ("bailing_moe", "deepseek_v4", "gpt_oss", "nemotron_h", "qwen3_omni", "seed_oss")
INT4 = {
    name: {"group_size": 32, "ignore": tuple(entry for start, entry in ODD.items() if name.startswith(start))}
    for name in CLEAN
    if not name.startswith(NOT_INT4)
}
CHANNEL = ("qwen2-untied", "qwen3_moe", "deepseek_v3", "glm4_moe")
# GLM's shared expert is kept among the routed ones if it is packed, and SGLang takes no zero points of it there.
SHARED = r"re:.*\.mlp\.shared_experts\..*"
ZERO_POINTS = {"qwen2-tied": (), "qwen3_moe": (), "deepseek_v3": (), "minimax_m2": (), "glm4_moe": (SHARED,)}
FP8 = ("qwen2-tied", "qwen3_moe", "glm4_moe", "deepseek_v3", "glm4_moe_lite", "minimax_m2", "glm4", "gemma3_text")
# Mistral 3 has a tower too, whose class loads its scales.
NOT_IN_FP8 = [
    name
    for name in CLEAN
    if not name.startswith("mistral3") and not engine_class("sglang", HF_CASES[name].config().to_dict()).fp8_blocks
]
_LINEAR = re.compile(r".*layers\.\d+\..*(_proj|_proj_with_mqa|\.w[123])\.weight")


def _is_linear(name):
    return _LINEAR.fullmatch(name) is not None


def _in_fp8(config):
    return config | {"quantization_config": fp8_config((16, 16))}


def options_of(label):
    kind, _, name = label.rpartition(" ")
    if kind == "groups":
        return INT4[name]
    if kind == "rows":
        return {"grid": "minmax", "group_size": "channel"}
    return {"grid": "minmax", "group_size": 32, "symmetric": False, "ignore": ZERO_POINTS[name]}


def write_all(root, labels):
    for label in labels:
        kind, _, name = label.rpartition(" ")
        if not (plain := root / name).exists():
            models.save(name, plain)
        target = root / label
        if kind == "fp8":
            write(plain, target, _is_linear, fp8_blocks(16, 16), _in_fp8)
        else:
            # Zero points of experts are in a layout of SGLang's own, of which its kernel does not read small groups.
            readers = {"readers": ("sglang",)} if kind == "zero points" else {}
            with small_groups_allowed():
                quantize(plain, target, int4_scheme(**options_of(label)), **readers)
        yield label, target


IN_INT4 = [
    *(f"groups {name}" for name in INT4),
    *(f"rows {name}" for name in CHANNEL),
    *(f"zero points {name}" for name in ZERO_POINTS),
]
LABELS = [*IN_INT4, *(f"fp8 {name}" for name in FP8)]

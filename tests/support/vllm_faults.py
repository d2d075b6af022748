"""Faults of a feed, and of vLLM's steps after loading, that the witness must name; on a GPU as without one.

Each is a name of ALTER. A fault of a step replaces a function of vLLM until `restored` puts it back.
"""

import re
from contextlib import ExitStack
from importlib import import_module
from unittest.mock import patch

import torch

EXPERT = "model.layers.2.mlp.experts.3."
LINEAR = "model.layers.2.self_attn.o_proj."
ROUTER = "model.layers.2.mlp.gate.weight"
_PATCHES = ExitStack()


def restored(alter):
    def altered(weights):
        _PATCHES.close()
        return alter(weights)

    return altered


def _changed(pattern, change):
    return lambda weights: ((name, change(one) if re.fullmatch(pattern, name) else one) for name, one in weights)


def _half(tensor):
    return tensor / 2


def experts_exchanged(weights):
    other = EXPERT.replace(".3.", ".4.")
    for name, tensor in weights:
        first = name.replace(EXPERT, other) if name.startswith(EXPERT) else name
        yield first if first != name else name.replace(other, EXPERT), tensor


FEED = {
    "experts 3 and 4 exchanged": experts_exchanged,
    "a scale of an expert halved": _changed(re.escape(EXPERT) + r"up_proj\.weight_scale(_inv)?", _half),
    "a scale halved": _changed(re.escape(LINEAR) + r"weight_scale(_inv)?", _half),
    "a router zeroed": _changed(re.escape(ROUTER), torch.zeros_like),
}

_OPS = "vllm._custom_ops"
_LAYERS = "vllm.model_executor.layers."
_MARLIN = "vllm.model_executor.kernels.linear.mixed_precision.marlin"
_EXPERTS = _LAYERS + "fused_moe.oracle.int_wna16"
_DEEP_GEMM = "vllm.model_executor.kernels.linear.scaled_mm.deep_gemm"


def _with(change, *places):
    """Changes what functions of vLLM return while weights are repacked; `places`: modules and names in them."""

    def alter(weights):
        yield from weights
        for module, name in places:
            original = getattr(import_module(module), name)

            def changed(*words, original=original, **options):
                return change(original(*words, **options))

            _PATCHES.enter_context(patch.object(import_module(module), name, changed))

    return alter


def _last_row_lost(found):
    found = found.clone()
    found[..., -1, :] = 0
    return found


def _of_first_expert_lost(found):
    found = found.clone()
    found[0, -1] = 0
    return found


def _reversed_heads(weight):
    return weight.reshape(4, -1, weight.shape[-1]).flip(0).reshape(weight.shape)


# What each changes, by a part of the parameter's name.
STEPS = {
    "words of a Marlin layer lost": (_with(_last_row_lost, (_OPS, "gptq_marlin_repack")), ".weight_packed"),
    "words of a Machete layer lost": (_with(_last_row_lost, (_OPS, "machete_prepack_B")), ".weight_packed"),
    "words of an expert lost": (_with(_of_first_expert_lost, (_OPS, "gptq_marlin_moe_repack")), "_weight_packed[0]"),
    "scales halved": (_with(_half, (_MARLIN, "marlin_permute_scales")), ".weight_scale"),
    "scales of experts halved": (
        _with(lambda found: found / 2, (_EXPERTS, "marlin_moe_permute_scales")),
        "_weight_scale",
    ),
    "zero points in another order": (
        _with(lambda found: found.flip(-1), (_MARLIN, "marlin_zero_points")),
        "zero_point",
    ),
    "a bias in another order": (_with(lambda found: found.flip(-1), (_MARLIN, "marlin_permute_bias")), ".bias"),
    "scales of FP8 doubled": (
        _with(lambda found: (found[0], found[1] * 2), (_DEEP_GEMM, "deepgemm_post_process_fp8_weight_block")),
        ".weight",
    ),
    "heads exchanged": (
        _with(_reversed_heads, (_LAYERS + "attention.mla_attention", "get_and_maybe_dequant_weights")),
        ".W_U",
    ),
}
ALTER = {**FEED, **{name: alter for name, (alter, _) in STEPS.items()}}
# In which checkpoints of `vllm_formats` each can be planted.
PLANTED = {
    "experts 3 and 4 exchanged": ("moe, BF16", "moe, groups of 32", "moe, FP8", "mla, groups of 128"),
    "a scale of an expert halved": ("moe, groups of 32", "moe, groups of 128 with zero points", "mla, FP8"),
    "a scale halved": ("dense, groups of 32", "dense, rows", "dense, FP8", "mla, groups of 64"),
    "a router zeroed": ("moe, BF16", "moe, groups of 128", "mla, FP8"),
    "words of a Marlin layer lost": ("dense, groups of 32", "mla, groups of 32"),
    "words of a Machete layer lost": ("dense, groups of 128", "dense, rows with zero points", "mla, groups of 64"),
    "words of an expert lost": ("moe, groups of 32", "moe, groups of 64 with zero points", "mla, groups of 128"),
    "scales halved": ("dense, groups of 32",),
    "scales of experts halved": ("moe, groups of 128",),
    "zero points in another order": ("dense, groups of 32 with zero points",),
    "a bias in another order": ("biases, groups of 32",),
    "scales of FP8 doubled": ("dense, FP8",),
    "heads exchanged": ("mla, BF16", "mla, groups of 128"),
}
CASES = [(fault, label) for fault, several in PLANTED.items() for label in several]

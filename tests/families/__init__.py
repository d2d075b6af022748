"""Test models of every family that converts, by name. test_families.py runs all its tests on each."""

from families import (
    bailing_moe,
    dsa,
    exaone_moe,
    glm5_next,
    gpt_oss,
    gqa,
    hy_v3,
    hybrid,
    kimi_k3,
    mla,
    mtp,
    nemotron_h,
    qwen,
    qwen3_omni,
    sandwich,
    unwitnessed,
)
from families.case import Case as Case

_LOADED = (qwen, mtp, gqa, mla, dsa, hy_v3, exaone_moe, qwen3_omni, bailing_moe, sandwich, gpt_oss, hybrid, nemotron_h)
CASES = {name: case for module in _LOADED for name, case in module.CASES.items()}
# Those that no released Megatron loads, and all whose HF checkpoints are read, written and quantized.
UNWITNESSED = unwitnessed.CASES | kimi_k3.CASES | glm5_next.CASES
HF_CASES = CASES | UNWITNESSED
ALL_CASES = HF_CASES | unwitnessed.OTHERS
# One of each kind: what repeats the same code over all models runs on these in `make test`, on the others nightly.
OF_A_KIND = (
    *("qwen2-tied", "qwen3_moe", "glm4_moe-mtp", "mimo", "llama-biases", "mixtral", "qwen2_moe", "minimax_m2"),
    *("deepseek_v3", "kimi_k25", "glm_moe_dsa-shared", "gemma3", "gpt_oss-v4", "qwen3_next", "qwen3_5_moe"),
    *("qwen2_5_vl-tied-as-released", "nemotron_h-latent"),
)

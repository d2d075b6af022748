"""Test models in sizes that groups and blocks of 128 and the tiles of SGLang's INT4 kernels divide."""

import tomllib
from dataclasses import replace
from pathlib import Path

from families import HF_CASES

_SIZES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
ATTENTION, MLP = _SIZES["attention"], _SIZES["mlp"]
_OF_16, _EXPERTS_OF_256 = _SIZES["heads_of_16"], {**ATTENTION, "intermediate_size": 256}
_STATED_OF_16, _MIXERS = {**_OF_16, "head_dim": 16}, {**ATTENTION, **_SIZES["mixers"]}
_STATED = ("llama-tied", "llama-biases", "qwen2-tied", "qwen2-untied", "qwen2_moe", "qwen2_moe-dense-between")
OWN = {
    **dict.fromkeys(("llama", "gemma3_text", "gemma3_text-v4"), _SIZES["heads_of_64"]),
    **dict.fromkeys(_STATED, _STATED_OF_16),
    **dict.fromkeys(("qwen2_5_vl", "qwen2_5_vl-tied-as-released", "olmoe"), _OF_16),
    "deepseek_v4": {"q_lora_rank": 128, "o_lora_rank": 128},  # all queries share one key
    # In these classes it is the size of an expert.
    **dict.fromkeys(("minimax_m2", "gpt_oss", "gpt_oss-v4"), _EXPERTS_OF_256),
    **dict.fromkeys(("nemotron_h", "nemotron_h-latent"), _MIXERS),
}


def widened(name):
    """The test model with these sizes; those that its config does not have, or has as None, stay away."""
    case = HF_CASES[name]

    def config():
        whole = case.config()
        text = getattr(whole, "text_config", whole)
        for key, size in sizes_of(name, text).items():
            if getattr(text, key, None) is not None:
                setattr(text, key, size)
        return whole

    return replace(case, config=config)


def sizes_of(name, text):
    attention = _SIZES["latent"] if hasattr(text, "kv_lora_rank") else OWN.get(name, ATTENTION)
    return {**MLP, **_SIZES["linear_attention"], **attention}

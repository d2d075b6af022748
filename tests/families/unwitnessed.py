"""Families that no released Megatron loads: transformers' own save is the truth of their names, shapes and dtypes."""

from types import ModuleType

from transformers import AutoModelForCausalLM, Ernie4_5_MoeConfig, GraniteMoeHybridConfig, OlmoeConfig
from transformers.integrations import hub_kernels

from families import deepseek_v4, gemma4, minimax_m3, step3p5
from families.case import SIZES, Case, mixer_value
from families.gqa import as_v4

# A head is hidden_size / num_attention_heads wide.
WITHOUT_HEAD_DIM = {key: value for key, value in SIZES.items() if key != "head_dim"} | {"num_attention_heads": 8}
# Layers 3, 4, 6 and 7 have attention, which the mutations of the tests change.
GRANITE = WITHOUT_HEAD_DIM | {
    "intermediate_size": 96,
    "shared_intermediate_size": 72,
    "num_local_experts": 12,
    "num_experts_per_tok": 3,
    "layer_types": ["attention" if layer in (3, 4, 6, 7) else "mamba" for layer in range(12)],
    "position_embedding_type": "nope",
    "rms_norm_eps": 1e-5,
    "mamba_n_heads": 16,
    "mamba_d_head": 16,
    "mamba_n_groups": 4,
    "mamba_d_state": 18,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.015625,
    "logits_scaling": 6.0,
}


class WithoutKernels:
    """Builds a model with Mamba layers without kernels of a GPU, which transformers would download."""

    @staticmethod
    def from_config(config, dtype):
        for name in ("causal-conv1d", "mamba-ssm"):
            hub_kernels._KERNEL_MODULE_MAPPING.setdefault(name, ModuleType(name))
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


CASES = {
    "olmoe": Case(
        lambda: OlmoeConfig(
            **WITHOUT_HEAD_DIM | {"intermediate_size": 96, "num_key_value_heads": 8},
            num_experts=12,
            num_experts_per_tok=3,
        ),
        fused=True,
    ),
    "ernie4_5_moe": Case(
        lambda: Ernie4_5_MoeConfig(
            **SIZES,
            moe_intermediate_size=96,
            moe_num_experts=12,
            moe_k=3,
            moe_layer_start_index=2,
            tie_word_embeddings=True,
        ),
        fused=True,
    ),
    **deepseek_v4.CASES,
    **step3p5.CASES,
}
# Models of no family of ours, which public reports are about.
OTHERS = {
    **gemma4.CASES,
    **minimax_m3.CASES,
    "granitemoehybrid": Case(
        lambda: GraniteMoeHybridConfig(**GRANITE), value=mixer_value, auto=WithoutKernels, edit=as_v4
    ),
}

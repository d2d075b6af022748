"""Families with sparse attention: DeepSeek V3.2, GLM-5, and GLM-5.2, in which most layers share an indexer.

Attention sees 5 of up to 16 tokens, so a wrong choice of the indexer changes the logits. transformers 5.12 ignores
`indexer_rope_interleave` and turns GLM-5's indexer as DeepSeek's (corrected later: huggingface/transformers#46842).
Here it turns in pairs, as in SGLang and in the releases.
"""

from unittest import mock

from transformers import DeepseekV32Config, GlmMoeDsaConfig
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32DecoderLayer
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaDecoderLayer

from families.case import Case, random
from families.mla import DEEPSEEK_ROUTER, MLA, UNGROUPED, YARN
from families.mtp import added_layer, reference

# The Hadamard transform needs a head size that is a power of two. The rotary part is not half of it.
# With 14 heads scores are hardly ever all zero.
INDEXER = {"index_n_heads": 14, "index_head_dim": 64, "index_topk": 5}
# What the releases of GLM-5 say beside what transformers writes; SGLang and vLLM read most of it.
GLM_AS_RELEASED = {
    "num_nextn_predict_layers": 1,
    "indexer_rope_interleave": True,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


def glm_as_released(config):
    """A config of GLM-5 as its releases have it.

    transformers 5.12 also writes its default of `num_experts`, 256, and from 5.20 takes it for `n_routed_experts`.
    """
    return {key: value for key, value in config.items() if key != "num_experts"} | GLM_AS_RELEASED


def strong(name, tensor, dtype):
    return stronger(name, random(name, tensor, dtype))


def stronger(name, value):
    """A random value of a release's tensor, made to matter."""
    return value * 5 if ".self_attn." in name and value.dim() > 1 else value


class SparseGlmLayer(GlmMoeDsaDecoderLayer):
    """A decoder layer of GLM-5 without its second result, the tokens chosen."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)[0]


def deepseek_layer(config, number):
    """The lists of layer kinds leave out the MTP layer. It is like layer 10: routed, with its own indexer."""
    return DeepseekV32DecoderLayer(config, 10)


def glm_layer(config, number):
    """As `deepseek_layer`."""
    return SparseGlmLayer(config, 10)


def in_pairs(compute):
    """Runs `compute` while the indexer of transformers' GLM-5 turns in pairs."""
    if not hasattr(modeling_glm_moe_dsa, "apply_rotary_pos_emb"):  # corrected: there is nothing but pairs
        return compute

    def run(*args):
        with mock.patch.object(
            modeling_glm_moe_dsa, "apply_rotary_pos_emb", modeling_glm_moe_dsa.apply_rotary_pos_emb_interleave
        ):
            return compute(*args)

    return run


def deepseek():
    """DeepSeek V3.2, with YaRN. transformers makes `num_experts` experts and routes over `n_routed_experts`."""
    routing = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "num_experts": 12}
    return DeepseekV32Config(
        **MLA,
        **INDEXER,
        **routing,
        n_shared_experts=1,
        first_k_dense_replace=3,
        routed_scaling_factor=2.5,
        rope_parameters=YARN,
    )


def glm(**sharing):
    rope = {"rope_type": "default", "rope_theta": 1e6}
    return GlmMoeDsaConfig(
        **MLA, **INDEXER, **UNGROUPED, **sharing, n_shared_experts=1, first_k_dense_replace=3, rope_parameters=rope
    )


def glm_case(since=(0, 0), **sharing):
    """With `indexer_rope_interleave`, as all releases have it."""
    return Case(
        lambda: glm(**sharing),
        added=added_layer(glm_layer, change=stronger),
        edit=glm_as_released,
        value=strong,
        reference=in_pairs(lambda model, tokens: model(tokens).logits),
        mtp=in_pairs(reference(glm_layer)),
        witness="transformers, its indexer turned in pairs; "
        "MTP: its decoder layer in the equations of the DeepSeek-V3 report",
        since=since,
    )


CASES = {
    "deepseek_v32": Case(
        deepseek,
        added=added_layer(deepseek_layer, change=stronger),
        edit=lambda config: config | DEEPSEEK_ROUTER | {"num_nextn_predict_layers": 1},
        value=strong,
        mtp=reference(deepseek_layer),
        witness="transformers; MTP: its decoder layer in the equations of the DeepSeek-V3 report",
    ),
    "glm_moe_dsa": glm_case(),
    "glm_moe_dsa-shared": glm_case((0, 19), index_topk_freq=4, index_skip_topk_offset=3),
}

"""DeepSeek V3.2, and GLM-5, 5.1 and 5.2.

DeepSeek V3 with an indexer in every layer, the MTP layer too, that chooses the tokens attention sees. In GLM-5 it turns
rotary dimensions in pairs, and in GLM-5.2 most layers share one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from converters.blocks.decoder import ROTARY_FREQUENCIES, appended_drafts, multi_token_prediction
from converters.blocks.indexer import indexer, read_indexer, slime_indexer
from converters.blocks.latent_attention import read_mla
from converters.blocks.sigmoid_moe import ABSENT, dense_layers, read_sigmoid_moe
from converters.config.dims import ModelDims, base_dims
from converters.config.values import integer, unsupported
from converters.families import deepseek_v3
from converters.family import ModelFamily, Release
from converters.rules import ParamMapping

# Corrected after that release: https://github.com/huggingface/transformers/pull/46842
_WRONG_INDEXER = (5, 12)


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a deepseek_v32 or glm_moe_dsa config. Source: transformers `DeepseekV32Config`, `GlmMoeDsaConfig`.

    The indexer of the first turns the rotary dimensions as halves, the config of the second must say.
    """
    mla, is_glm = read_mla(config), config["model_type"] == "glm_moe_dsa"
    first = {"first_k_dense_replace": integer(config, "first_k_dense_replace", 3)}
    dims = base_dims(
        config,
        mla=mla,
        head_dim=mla.nope,
        indexer=read_indexer(config, mla, interleaved=None if is_glm else False),
        dense_layers=dense_layers({**config, **first}),
        mtp_layers=integer(config, "num_nextn_predict_layers", 0),
        **read_sigmoid_moe(config, ABSENT if is_glm else {}),
    )
    if dims.mtp_layers > 1 and len(dims.indexer.layers) < dims.layers:  # type: ignore[union-attr]
        raise unsupported(
            f"{dims.mtp_layers} multi-token prediction layers with shared indexers",
            "Megatron would share the indexer of the first; no released model has more than one",
        )
    return dims


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All rules of a DeepSeek V3 with an indexer, in megatron-core's names."""
    return _with_indexer(dims, indexer)


def slime_mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """The same in the names of slime's modules."""
    return _with_indexer(dims, slime_indexer)


def _with_indexer(dims: ModelDims, rules: Callable[..., tuple[ParamMapping, ...]]) -> tuple[ParamMapping, ...]:
    places = [multi_token_prediction(dims, depth)[0] for depth in range(dims.mtp_layers)]
    return (*deepseek_v3.mappings(dims), *(rule for at in (None, *places) for rule in rules(dims, at)))


def _unlike_transformers(config: Mapping[str, Any], tokens: int) -> str | None:
    """Where the indexer of GLM-5 chooses among the tokens, transformers 5.12 turns it as DeepSeek's."""
    found, sizes = version("transformers"), read_dims(config).indexer
    wrong = tuple(map(int, found.split(".")[:2])) <= _WRONG_INDEXER
    if not wrong or sizes is None or not sizes.rope_interleaved or tokens <= sizes.top_k:
        return None
    return f"transformers {found} takes no notice of indexer_rope_interleave"


FAMILIES = (
    ModelFamily(
        ("deepseek_v32",),
        ("DeepseekV32ForCausalLM",),
        read_dims,
        mappings,
        {"slime": slime_mappings},
        carried_ends=ROTARY_FREQUENCIES,
        release=Release(drafts=appended_drafts, classes={"Router": "DeepseekV32TopkRouter"}),
        engines={"sglang": deepseek_v3.SGLANG},
    ),
    ModelFamily(
        ("glm_moe_dsa",),
        ("GlmMoeDsaForCausalLM",),
        read_dims,
        mappings,
        {"slime": slime_mappings},
        release=Release(drafts=appended_drafts, classes={"Router": "GlmMoeDsaTopkRouter"}),
        engines={"sglang": deepseek_v3.SGLANG},
        unlike_transformers=_unlike_transformers,
    ),
)

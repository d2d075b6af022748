"""GLM-5, 5.1 and 5.2: DeepSeek V3.2's layers.

The indexer turns rotary dimensions in pairs, and in GLM-5.2 most layers share one.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from converters.blocks.decoder import appended_drafts
from converters.config.dims import ModelDims
from converters.families.deepseek import deepseek_v3, deepseek_v32
from converters.family import ModelFamily, Release


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a glm_moe_dsa config. Source: transformers `GlmMoeDsaConfig`."""
    return deepseek_v32.sparse_dims(
        config, interleaved=None, absent={"n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    )


# Corrected after that release: https://github.com/huggingface/transformers/pull/46842
_WRONG_INDEXER = (5, 12)


def _unlike_transformers(config: Mapping[str, Any], tokens: int) -> str | None:
    """Where the indexer chooses among the tokens, transformers 5.12 turns it as DeepSeek's."""
    found, indexer = version("transformers"), read_dims(config).indexer
    wrong = tuple(map(int, found.split(".")[:2])) <= _WRONG_INDEXER
    if not wrong or indexer is None or not indexer.rope_interleaved or tokens <= indexer.top_k:
        return None
    return f"transformers {found} takes no notice of indexer_rope_interleave"


FAMILIES = (
    ModelFamily(
        ("glm_moe_dsa",),
        ("GlmMoeDsaForCausalLM",),
        read_dims,
        deepseek_v32.mappings,
        {"slime": deepseek_v32.slime_mappings},
        release=Release(drafts=appended_drafts, classes={"Router": "GlmMoeDsaTopkRouter"}),
        engines={"sglang": deepseek_v3.SGLANG},
        unlike_transformers=_unlike_transformers,
    ),
)

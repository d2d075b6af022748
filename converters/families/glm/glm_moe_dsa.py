"""GLM-5, 5.1 and 5.2: DeepSeek V3.2's layers.

The indexer turns rotary dimensions in pairs, and in GLM-5.2 most layers share one.
"""

from __future__ import annotations

from collections.abc import Mapping
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


FAMILIES = (
    ModelFamily(
        ("glm_moe_dsa",),
        ("GlmMoeDsaForCausalLM",),
        read_dims,
        deepseek_v32.mappings,
        {"slime": deepseek_v32.slime_mappings},
        release=Release(drafts=appended_drafts, classes={"Router": "GlmMoeDsaTopkRouter"}),
        sglang=deepseek_v3.SGLANG,
    ),
)

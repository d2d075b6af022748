"""What other programs do with models of which transformers' class says the rest (`converters.by_class`), as rows.

A row has the fields of `ModelFamily` and of its `Release` that no class states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from converters.config.values import rope_of, sliding_layers
from converters.family import EngineClass


@dataclass(frozen=True)
class Known:
    """Fields of a `model_type` in place of those that follow from its class: of `ModelFamily`, and of `Release`."""

    family: Mapping[str, Any] = field(default_factory=dict)
    release: Mapping[str, Any] = field(default_factory=dict)


def _olmo3_unlike_transformers(config: Mapping[str, Any], tokens: int) -> str | None:
    """transformers 5 gives YaRN to the layers with a window too, from the first token on.

    Its own class says that they have none, as OLMo 3's report does; vLLM and SGLang give them none. Run: 5.12.1.
    """
    if rope_of(config)["rope_type"] == "default" or not sliding_layers(config, 4):
        return None
    return "transformers scales rotary embedding in layers with a window too (transformers#45945)"


def _granite_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's config class takes 10000 where `rope_theta` is absent, and turns no other dimension."""
    theta = rope_of(config)["rope_theta"]
    return {"rope_theta": theta} if config.get("position_embedding_type") == "rope" and theta != 10000 else {}


# Both engines join the indexer's projections of MiniMax-M3: SGLang as a layer of their own, vLLM with attention's.
_M3_IN_SGLANG = (("block_sparse_moe", "mlp"), *((f"index_{one}_proj", "index_qkv_proj") for one in "qk"))
_M3_IN_VLLM = tuple((f"index_{one}_proj", "qkv_proj") for one in "qk")
_M3_TOWER_IN_VLLM = (
    (".mlp.fc", ".fc"),
    ("multi_modal_projector.", "vision_tower.multi_modal_projector."),
    ("patch_merge_mlp.", "vision_tower.patch_merge_mlp."),
)
_MIXER = (("mamba", "mixer"),)
KNOWN: Mapping[str, Known] = {
    # No release that was read has `layer_id`.
    "granitemoehybrid": Known(
        {
            "engines": {
                "sglang": EngineClass(("qkv_proj",), inside=_MIXER, keys=_granite_keys),
                "vllm": EngineClass(inside=_MIXER),
            }
        }
    ),
    "minimax_m3_vl": Known(
        {
            "engines": {
                "sglang": EngineClass(inside=_M3_IN_SGLANG),
                # It takes `weight_scale_inv` for the scales of MXFP8.
                "vllm": EngineClass(inside=_M3_IN_VLLM, outside=_M3_TOWER_IN_VLLM, fp8_blocks=False),
            }
        }
    ),
    "olmo3": Known({"unlike_transformers": _olmo3_unlike_transformers}),
}

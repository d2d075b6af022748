"""vLLM's classes of models, by `model_type`, as 0.26 to 0.33 have them.

Source: `vllm/model_executor/models/*.py` of vLLM 0.26.0.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptkit.quant.engines.facts import EngineClass

_TOWER_ADAPTERS = EngineClass(adapters_of_text=False)
_GEMMA4 = EngineClass(inside=(("experts", "moe.experts"),), requires_unused=True)
_STEP = EngineClass(inside=(("share_expert", "moe.share_expert"),))
_DEEPSEEK_V4_PARTS = (
    *(("wq_a", "fused_wqa_wkv"), ("wkv", "fused_wqa_wkv")),
    *(("w1", "gate_up_proj"), ("w3", "gate_up_proj"), ("w2", "down_proj")),
)

CLASSES: Mapping[str, EngineClass] = {
    # Without the key, it expects experts in MXFP4.
    "deepseek_v4": EngineClass(inside=_DEEPSEEK_V4_PARTS, cache_dtype="fp8", fp8_keys={"expert_dtype": "fp8"}),
    **dict.fromkeys(("gemma3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"), _TOWER_ADAPTERS),
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), _GEMMA4),
    "granitemoehybrid": EngineClass(inside=(("mamba", "mixer"),)),
    "minimax_m3_vl": EngineClass(
        inside=tuple((f"index_{one}_proj", "qkv_proj") for one in "qk"),  # joined with attention's
        outside=(
            (".mlp.fc", ".fc"),
            ("multi_modal_projector.", "vision_tower.multi_modal_projector."),
            ("patch_merge_mlp.", "vision_tower.patch_merge_mlp."),
        ),
        fp8_blocks=False,  # it treats `weight_scale_inv` as the scales of MXFP8
    ),
    "mistral3": EngineClass(fp8_blocks=False),
    "qwen3_moe": EngineClass(packs_routers=True),
    "qwen3_vl": _TOWER_ADAPTERS,
    "qwen3_vl_moe": EngineClass(packs_routers=True, adapters_of_text=False),
    **dict.fromkeys(("step3p5", "step3p7"), _STEP),
}

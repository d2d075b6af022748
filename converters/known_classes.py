"""Facts about engines and releases that transformers' class of a model does not contain, as rows.

`converters.by_class` adds them to what the class contains: fields of `ModelFamily` and of its `Release`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from converters.config.values import rope_of, sliding_layers, text_part
from converters.family import QKV_GATE_UP, EngineClass, TieFlag


@dataclass(frozen=True)
class Known:
    """Fields of a `model_type` in place of those that follow from its class: of `ModelFamily`, and of `Release`.

    `configs`: of a config those whose classes have, together, all of the tensors; usually the same one.
    """

    family: Mapping[str, Any] = field(default_factory=dict)
    release: Mapping[str, Any] = field(default_factory=dict)
    configs: Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]] = lambda config: (config,)


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
# Marks a config of Gemma 4 whose tensors have keys and values in layers that use those of another.
_STORED = "_stores_unused_keys"


def _gemma4_with_unused(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with the keys and values of layers that use another's, which readers but vLLM leave aside.

    Releases of E2B and E4B store them; their QAT releases, and whatever transformers saves, do not.
    """
    return {**config, _STORED: True} if text_part(config)[0].get("num_kv_shared_layers") else config


def _gemma4_configs(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The model, and for the keys that nobody uses the same with no layer that shares them."""
    plain = {key: value for key, value in config.items() if key != _STORED}
    yield plain
    if _STORED in config:
        own = {"num_kv_shared_layers": 0, "use_double_wide_mlp": False}
        text = plain.get("text_config")
        yield plain | ({"text_config": {**text, **own}} if isinstance(text, Mapping) else own)


def _gemma4(engines: Mapping[str, EngineClass], **more: Any) -> Known:
    kept = (".per_layer_input_gate", ".per_layer_projection", ".per_layer_model_projection")
    family = {"engines": engines, "with_unused": _gemma4_with_unused} | more
    return Known(family, {"kept": kept, "partly_fused": True}, lambda config: tuple(_gemma4_configs(config)))


_G4_INSIDE = (("experts", "moe.experts"),)
_G4_ENGINES = {
    "sglang": EngineClass(QKV_GATE_UP, inside=_G4_INSIDE),
    "vllm": EngineClass(inside=_G4_INSIDE, wants_unused=True),
}
# Each layer of the vision tower clips what goes in and out of it; SGLang's joined layers do so themselves.
_G4_JOINED = tuple((f".{name}_proj.linear", ".qkv_proj") for name in "qkv")
_G4_JOINED += tuple((f".{name}_proj.linear", ".gate_up_proj") for name in ("gate", "up"))
_G4_TIE = TieFlag(("transformers", "vLLM"), ("SGLang",), absent=True)
_MIXER = (("mamba", "mixer"),)
KNOWN: Mapping[str, Known] = {
    "gemma4": _gemma4(
        _G4_ENGINES | {"sglang": EngineClass(QKV_GATE_UP, inside=_G4_INSIDE, outside=_G4_JOINED)}, tie=_G4_TIE
    ),
    "gemma4_text": _gemma4(_G4_ENGINES),
    "gemma4_unified": _gemma4(_G4_ENGINES, tie=_G4_TIE),
    "gemma4_unified_text": _gemma4(_G4_ENGINES),
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

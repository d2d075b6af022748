"""Names in HF checkpoints that several packages share: layers, routed experts, and shards that engines fuse."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")
GATE_UP_DOWN = (*GATE_UP, "down_proj")
LATENT_DOWN = ("q_a_proj", "kv_a_proj_with_mqa")

# Fused layers of engines -> their shards in a checkpoint.
FUSED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "qkv_proj": QKV,
        "gate_up_proj": GATE_UP,
        "fused_qkv_a_proj_with_mqa": LATENT_DOWN,
        "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
        "in_proj_ba": ("in_proj_b", "in_proj_a"),
    }
)

# A name inside a layer: the prefix, the layer's number, and the name within the layer.
IN_LAYER = re.compile(r"(.*?\blayers\.)(\d+)\.(.+)")
# A routed expert's module: the block, the expert, the projection.
EXPERT = re.compile(r"(.+\.experts)\.(\d{1,6})\.(\w+)")
_EXPERT_NUMBER = re.compile(r"(?<=\.experts\.)\d+")


def layer_of(name: str) -> int | None:
    """The layer number in a name, or None outside the layers."""
    match = IN_LAYER.match(name)
    return int(match[2]) if match else None


def name_in_layer(module: str) -> str:
    """A module's name within its layer, without its expert's number."""
    match = IN_LAYER.match(module)
    return _EXPERT_NUMBER.sub("#", match[3] if match else module)

"""How Megatron's global tensors are named on disk in torch_dist, and which objects its models also ask for.

Sources: megatron-core `transformer_block.py` (`sharded_state_dict`: stacked or one key a layer), `moe/experts.py` (one key
for all experts, expert axis first), `gpt_layer_specs.py` (norm names of the local and the Transformer Engine spec).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_EXPERT = re.compile(r"(.*\.experts\.experts)\.(\d+)\.(.+)")
_MOE_NORM = re.compile(r"(decoder\.layers\.(?:\d+\.)?)(pre_mlp_layernorm\.weight|mlp\.linear_fc1\.layer_norm_weight)")
_NO_EXTRA_STATE = ("embedding.word_embeddings", "output_layer", ".router")


def disk_key(name: str) -> tuple[str, int | None]:
    """Key on disk of a global tensor, and its place on the key's expert axis (None: the key has none)."""
    if match := _EXPERT.fullmatch(name):
        return f"{match[1]}.{match[3]}", int(match[2])
    return name, None


def norm_alias(name: str, names: Iterable[str] | set[str]) -> str | None:
    """The other name of an MoE layer's norm: Transformer Engine asks for one, the local spec for the other."""
    match = _MOE_NORM.fullmatch(name)
    if not match or f"{match[1]}mlp.linear_fc1.weight" in names:
        return None
    other = {"pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight"}
    return match[1] + other[match[2]]


def extra_states(names: Iterable[str], experts: int) -> Iterator[str]:
    """Keys of the `_extra_state` objects that a model may ask for: those of the local spec and of Transformer Engine, old and new."""
    modules: dict[str, bool] = {}
    for name in names:
        key, expert = disk_key(name)
        module, _, leaf = key.rpartition(".")
        if leaf == "weight" and not module.endswith(_NO_EXTRA_STATE):
            modules[module] = expert is not None
        if module.endswith(".self_attention.linear_qkv"):
            modules[module.removesuffix("linear_qkv") + "core_attention"] = False
    for module, per_expert in modules.items():
        for index in range(experts if per_expert else 1):
            yield f"{module}._extra_state/shard_{index}_{experts if per_expert else 1}"

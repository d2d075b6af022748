"""Names of Megatron's global tensors on disk in torch_dist, and of additional objects that its models load.

Sources in megatron-core: `transformer_block.py` (`sharded_state_dict`: stacked or one key per layer), `moe/experts.py`
(one key for all experts, expert axis first), `gpt_layer_specs.py` (norm names of the local and the Transformer Engine
spec), `mlp.py`, `ssm/gated_delta_net` and `ssm/mamba_mixer.py` (tensors whose rows are saved in parts).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

_EXPERT = re.compile(r"(.*\.experts\.experts)\.(\d+)\.(.+)")
_LAYER = re.compile(r"(decoder\.layers\.(?:\d+\.)?|mtp\.layers\.\d+\.transformer_layer\.)(.+)")
# Names of a norm in the Transformer Engine spec, which fuses it into the next linear layer, and in the local spec.
_MLP_NORM, _MOE_NORM = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"
_LATENT_NORMS = tuple(
    (f"self_attention.linear_{part}_up_proj.layer_norm_weight", f"self_attention.{part}_layernorm.weight")
    for part in ("q", "kv")
)
_NO_EXTRA_STATE = ("embedding.word_embeddings", "output_layer", ".router")
# HybridModel has only Transformer Engine's layers, and loads the `_extra_state` of the output layer even if tied.
_HYBRID_NORM = "decoder.final_norm"
# The norm before a Mamba mixer, fused in megatron-core's spec, and a separate module in mcore-bridge's.
_MIXER_NORM = re.compile(r"(decoder\.layers\.\d+\.)(norm\.weight|mixer\.in_proj\.layer_norm_weight)")
# megatron-core's `singleton_local_shards` stores gate and up of a SwiGLU separately.
_GATE_UP, _GATE_UP_PARTS = re.compile(r"(.+\.linear_fc1\.(?:weight|bias))(_[wv])"), ("_w", "_v")
# A gated delta net stores the kinds of rows of its input projection and convolution separately.
_DELTA_NET = re.compile(r"(.+\.self_attention\.(in_proj|conv1d)\.weight)(\.[a-z]+)?")
_DELTA_NET_ROWS = (".query", ".key", ".value", ".z", ".beta", ".alpha")
_DELTA_NET_PARTS = {"in_proj": _DELTA_NET_ROWS, "conv1d": _DELTA_NET_ROWS[:3]}
# So does a Mamba mixer, including the bias of its convolution.
_MIXER = re.compile(r"(.+\.mixer\.(in_proj\.weight|conv1d\.weight|conv1d\.bias))(\.[a-zBC]+)?")
_MIXER_ROWS = (".z", ".x", ".B", ".C", ".dt")
_MIXER_PARTS = {"in_proj.weight": _MIXER_ROWS} | dict.fromkeys(("conv1d.weight", "conv1d.bias"), _MIXER_ROWS[1:4])


def disk_key(name: str) -> tuple[str, int | None]:
    """Key on disk of a global tensor, and its index on the key's expert axis, or None without that axis."""
    if match := _EXPERT.fullmatch(name):
        return f"{match[1]}.{match[3]}", int(match[2])
    return name, None


def joined_name(key: str) -> tuple[str, tuple[str, ...]] | None:
    """The tensor that a key is a part of, and the suffixes of all its keys in order, or None for a complete tensor."""
    if match := _GATE_UP.fullmatch(key):
        return match[1], _GATE_UP_PARTS
    if (match := _DELTA_NET.fullmatch(key)) and match[3] in _DELTA_NET_PARTS[match[2]]:
        return match[1], _DELTA_NET_PARTS[match[2]]
    if (match := _MIXER.fullmatch(key)) and match[3] in _MIXER_PARTS[match[2]]:
        return match[1], _MIXER_PARTS[match[2]]
    return None


def split_row_counts(key: str, args: Mapping[str, Any]) -> dict[str, int]:
    """Rows of each key of a tensor that Megatron saves in parts, from the training arguments, or empty."""
    if (match := _MIXER.fullmatch(key)) and not match[3]:
        heads, shared = args["mamba_num_heads"], args["mamba_num_groups"] * args["mamba_state_dim"]
        inner = heads * args["mamba_head_dim"]
        sizes = dict(zip(_MIXER_ROWS, (inner, inner, shared, shared, heads), strict=True))
        return {key + part: sizes[part] for part in _MIXER_PARTS[match[2]]}
    match = _DELTA_NET.fullmatch(key)
    if not match or match[3]:
        return {}
    keys, heads = args["linear_num_key_heads"] * args["linear_key_head_dim"], args["linear_num_value_heads"]
    values = heads * args["linear_value_head_dim"]
    sizes = dict(zip(_DELTA_NET_ROWS, (keys, keys, values, values, heads, heads), strict=True))
    return {key + part: sizes[part] for part in _DELTA_NET_PARTS[match[2]]}


def _norm_names(name: str, names: Container[str]) -> tuple[str, str] | None:
    """Both names of a norm, Transformer Engine's first, or None for other tensors and for norms with one name."""
    if f"{_HYBRID_NORM}.weight" in names:
        found = _MIXER_NORM.fullmatch(name)
        return (f"{found[1]}mixer.in_proj.layer_norm_weight", f"{found[1]}norm.weight") if found else None
    match = _LAYER.fullmatch(name)
    if not match:
        return None
    layer, rest = match.groups()
    routed = f"{layer}mlp.router.weight" in names
    # The local spec saves the norm before routed experts under linear_fc1 only in layers without latent attention.
    if f"{layer}self_attention.linear_kv_up_proj.weight" in names:
        pairs = _LATENT_NORMS if routed else (*_LATENT_NORMS, (_MLP_NORM, _MOE_NORM))
    else:
        pairs = ((_MOE_NORM, _MLP_NORM),) if routed else ()
    return next(((layer + engine, layer + local) for engine, local in pairs if rest in (engine, local)), None)


def norm_alias(name: str, names: Container[str]) -> str | None:
    """The other name of a norm with two names, or None. `names`: of the model or checkpoint."""
    pair = _norm_names(name, names)
    return pair and pair[pair.index(name) - 1]


def second_names(names: Iterable[str]) -> dict[str, str]:
    """The local spec's name of norms, or HybridModel's fused one of a mixer's norm -> the given name, in order."""
    known = dict.fromkeys(names)
    pairs = ((alias, name) for name in known if (alias := norm_alias(name, known)))
    hybrid = f"{_HYBRID_NORM}.weight" in known
    return {alias: name for alias, name in pairs if (engine_name(alias, known) == name) != hybrid}


def engine_name(name: str, names: Container[str]) -> str:
    """The name of a tensor in Transformer Engine's spec, from that name or the local spec's."""
    pair = _norm_names(name, names)
    return pair[0] if pair else name


def extra_states(names: Iterable[str], experts: int) -> Iterator[str]:
    """Keys of the `_extra_state` objects that a model may load: local spec and Transformer Engine, old and new."""
    modules: dict[str, bool] = {}
    for name in names:
        key, expert = disk_key(name)
        module, _, leaf = key.rpartition(".")
        if leaf == "weight" and not module.endswith(_NO_EXTRA_STATE):
            modules[module] = expert is not None
        if module.endswith(".self_attention.linear_proj"):
            modules[module.removesuffix("linear_proj") + "core_attention"] = False
    if _HYBRID_NORM in modules:
        modules["output_layer"] = False
    for module, per_expert in modules.items():
        for index in range(experts if per_expert else 1):
            yield f"{module}._extra_state/shard_{index}_{experts if per_expert else 1}"

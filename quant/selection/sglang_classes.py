"""How SGLang's class of each model names its layers, and whether it tells its quantizer of what a fused layer is made.

Source: `sglang/srt/models/*.py` of SGLang 0.5.16; `tests/quant/test_sglang_classes.py` builds every class and compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

_QKV = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
_GATE_UP = {"gate_up_proj": ("gate_proj", "up_proj")}
_LATENT = {"fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa")}
_GATED_DELTA = {"in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a")}

# Layers that an engine builds as one from several of a checkpoint, where all of those are there.
FUSED: Mapping[str, tuple[str, ...]] = MappingProxyType({**_QKV, **_GATE_UP, **_LATENT, **_GATED_DELTA})


@dataclass(frozen=True)
class Dense:
    """Linear layers that a class can hold dense only: a pattern of their names, the entry of `ignore` that leaves them out, and why."""

    pattern: str
    entry: str
    reason: str


# `DeepseekV2AttentionMLA` and the blocks with a shared expert read `.weight` of these layers, which an INT4 layer does not have;
# the indexer joins its projections in BF16. `Qwen3NextGatedDeltaNet` and Qwen3.5's have loaders of their own for dense parts.
_LATENT_DENSE = (
    Dense(r".*\.self_attn\..*", r"re:.*\.self_attn\..*", "SGLang's latent attention reads the dense weight"),
    Dense(
        r".*\.shared_experts\..*", r"re:.*\.shared_experts\..*", "SGLang reads the dense weight of the shared expert"
    ),
)
_LINEAR_ATTENTION_DENSE = (
    Dense(
        r".*\.linear_attn\..*", r"re:.*\.linear_attn\..*", "SGLang cuts the dense projections of linear attention anew"
    ),
)


@dataclass(frozen=True)
class SglangClass:
    """SGLang's class of a model.

    `packed_modules`: what it declares as `packed_modules_mapping`, and so takes apart before it looks at `ignore`; a fused
    layer that is not in it is looked up by its own name. `root`: a released module's beginning, and what SGLang has instead.
    `entries`: beginnings that SGLang rewrites in plain entries of `ignore` (`hf_to_sglang_mapper`), the first that fits.
    `outside`: whether it also asks about layers outside the language model. `dense`: what it cannot hold as INT4.
    """

    packed_modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    root: tuple[str, str] = ("", "")
    entries: tuple[tuple[str, str], ...] = ()
    outside: bool = False
    dense: tuple[Dense, ...] = ()

    def layer(self, module: str) -> str:
        """The name in SGLang of a module that it does not fuse."""
        old, new = self.root
        return new + module.removeprefix(old) if module.startswith(old) else module

    def entry(self, pattern: str) -> str:
        """An entry of `ignore` as SGLang holds it against its layers' names."""
        for old, new in self.entries:
            if pattern.startswith(old):
                return new + pattern.removeprefix(old)
        return pattern


_PLAIN = SglangClass()
_MAPPED = SglangClass({**_QKV, **_GATE_UP})
_LATENT_ATTENTION = SglangClass(_LATENT, dense=_LATENT_DENSE)
_GATED_DELTA_NET = SglangClass({**_QKV, **_GATE_UP, **_GATED_DELTA}, dense=_LINEAR_ATTENTION_DENSE)
_VISION = SglangClass(
    entries=(
        ("model.language_model.", "language_model.model."),
        ("model.visual.", "visual."),
        ("lm_head.", "language_model.lm_head."),
        ("model.", "language_model.model."),
    )
)

CLASSES: Mapping[str, SglangClass] = MappingProxyType(
    {
        "deepseek_v3": _LATENT_ATTENTION,
        "deepseek_v32": _LATENT_ATTENTION,
        "gemma3": SglangClass({**_QKV, **_GATE_UP}, outside=True),
        "gemma3_text": _MAPPED,
        "glm4": _PLAIN,
        "glm4_moe": _PLAIN,
        "glm4_moe_lite": SglangClass(dense=_LATENT_DENSE),
        "glm_moe_dsa": _LATENT_ATTENTION,
        "kimi_k2": _LATENT_ATTENTION,
        "kimi_k25": SglangClass(
            _LATENT,
            ("language_model.", ""),
            (("language_model.layers.", "language_model.model.layers."),),
            dense=_LATENT_DENSE,
        ),
        "llama": _PLAIN,
        "mimo": _PLAIN,
        "minimax_m2": _MAPPED,
        "mistral": _PLAIN,
        "mixtral": SglangClass(root=("model.", "")),
        "qwen2": _PLAIN,
        "qwen2_moe": _PLAIN,
        "qwen3": _PLAIN,
        "qwen3_5": _GATED_DELTA_NET,
        "qwen3_5_moe": _GATED_DELTA_NET,
        "qwen3_5_moe_text": _GATED_DELTA_NET,
        "qwen3_5_text": _GATED_DELTA_NET,
        "qwen3_moe": _MAPPED,
        "qwen3_next": SglangClass({**_QKV, **_GATE_UP}, dense=_LINEAR_ATTENTION_DENSE),
        "qwen3_vl": _VISION,
        "qwen3_vl_moe": _VISION,
    }
)

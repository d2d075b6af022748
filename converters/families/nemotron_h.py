"""Nemotron-H, Nemotron Nano v2, and Nemotron 3 Nano, Super and Ultra.

A layer is a Mamba-2 mixer, attention, an MLP without a gate, or experts. Attention has no rotary embedding. The experts
of Super and Ultra work in a smaller size, and those two and Lightning have an MTP layer. Only Megatron's HybridModel
holds these models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.core.installation import package_release
from converters.blocks.sigmoid_moe import ABSENT, read_sigmoid_moe
from converters.blocks.single import layers_of_one_block, read_pattern, refuse_time_step_limit
from converters.config.dims import EXPERTS, MIXER, Mamba, ModelDims, base_dims
from converters.config.values import agreed, integer, number, require, unsupported, wrong
from converters.family import Draft, EngineClass, FusedExperts, ModelFamily, Release
from converters.ops.basic import Copy
from converters.rules import ParamMapping

# What every release says; neither the rules nor Megatron's mixer do anything else.
_FIXED: Mapping[str, Any] = {
    "attention_bias": False,
    "conv_kernel": 4,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "n_shared_experts": 1,
    "sliding_window": None,
    "use_bias": False,
    "use_conv_bias": True,
}
# The norm behind Megatron's mixer has it whatever the arguments say.
_EPSILON = 1e-5
_CHUNK = 128  # tokens that transformers' mixer computes together, in the releases
_UP_DOWN = ("up_proj", "down_proj")
_ENGINE_ROOT = ("backbone.", "model.")
_PATTERN = ("layers_block_type", "hybrid_override_pattern")
_MTP = ("mtp_layers_block_type", "mtp_hybrid_override_pattern")


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a nemotron_h config. Source: transformers `NemotronHConfig` and the releases' own config.json."""
    require(config, "nemotron_h", _FIXED, strict=True)
    refuse_time_step_limit(config)
    pattern = read_pattern(config, *_PATTERN)
    mtp_layers = integer(config, "num_nextn_predict_layers", 0)
    mtp_pattern = read_pattern(config, *_MTP, absent="*E") if mtp_layers else ""
    if integer(config, "num_hidden_layers", len(pattern)) != len(pattern):
        raise wrong("num_hidden_layers", config["num_hidden_layers"], f"the {len(pattern)} that the pattern names")
    if not set(mtp_pattern) <= set(pattern):
        raise unsupported(
            f"a multi-token prediction layer of other kinds ({mtp_pattern}) than the model's layers are",
            "no released model has one",
        )
    text = {
        **config,
        "num_hidden_layers": len(pattern),
        "head_dim": agreed(config, ("head_dim", "attention_head_dim"), 128),
        "rms_norm_eps": _epsilon(config, mixers=MIXER in pattern),
    }
    return base_dims(
        text,
        activation="relu2",
        root="backbone.",
        rotary=False,
        pattern=pattern,
        mtp_layers=mtp_layers,
        mtp_pattern=mtp_pattern,
        mamba=_mamba(config) if MIXER in pattern else None,
        **(_experts(config) if EXPERTS in pattern else {}),
    )


def _epsilon(config: Mapping[str, Any], *, mixers: bool) -> float:
    """The epsilon of all norms, which releases repeat under other keys."""
    epsilon = float(agreed(config, ("layer_norm_epsilon", "norm_eps", "rms_norm_eps"), _EPSILON, number))
    if mixers and epsilon != _EPSILON:
        raise unsupported(
            f"nemotron_h with an epsilon of {epsilon:g}",
            f"the norm behind Megatron's mixer always has {_EPSILON:g}",
        )
    return epsilon


def _mamba(config: Mapping[str, Any]) -> Mamba:
    return Mamba(
        heads=integer(config, "mamba_num_heads", 128),
        head_dim=integer(config, "mamba_head_dim", 64),
        groups=agreed(config, ("mamba_n_groups", "n_groups"), 8),
        state=integer(config, "ssm_state_size", 128),
        kernel=agreed(config, ("mamba_d_conv", "conv_kernel"), 4),
    )


def _drafts(text: Mapping[str, Any], root: str) -> tuple[Draft, ...]:
    """Every layer of the multi-token prediction layers, which the release numbers through."""
    count = integer(text, "num_nextn_predict_layers", 0)
    if not count:
        return ()
    pattern, model = read_pattern(text, *_MTP, absent="*E"), read_pattern(text, *_PATTERN)
    drafts = []
    for layer, kind in enumerate(pattern * count):
        at = f"mtp.layers.{layer}."
        joint = f"{at}eh_proj" if layer % len(pattern) == 0 else ""
        drafts.append(Draft(at, at, r"re:mtp\..*", at, joint, vllm_joint=True, like=model.find(kind)))
    return tuple(drafts)


def _sglang_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's config class knows the groups of mixers under another name, and takes 8 where that is absent."""
    mamba = read_dims(config).mamba
    return {} if mamba is None or mamba.groups == 8 else {"mamba_n_groups": mamba.groups}


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    latent = config.get("moe_latent_size")
    return {
        **read_sigmoid_moe(config, {**ABSENT, "routed_scaling_factor": 1.0}),
        "shared_ffn": integer(config, "moe_shared_expert_intermediate_size"),
        "expert_hidden": None if latent is None else integer(config, "moe_latent_size"),
    }


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All rules of a nemotron_h model."""
    table = (dims.vocab, dims.hidden)
    embedding = ParamMapping(
        "embedding.word_embeddings.weight",
        {"backbone.embeddings.weight": table},
        Copy(0),
        vocab=True,
        copies=(dims.head,) if dims.tied else (),
        kind="Embedding",
    )
    head = ParamMapping("output_layer.weight", {dims.head: table}, Copy(0), vocab=True)
    norm = ParamMapping("decoder.final_norm.weight", {"backbone.norm_f.weight": (dims.hidden,)})
    return (embedding, norm, *(() if dims.tied else (head,)), *layers_of_one_block(dims))


def _unlike_transformers(config: Mapping[str, Any], tokens: int) -> str | None:
    """transformers 5.12 carries the state of its mixer wrongly from one chunk of tokens to the next.

    Run: 5.12.1, and 5.17.0, which does not.
    """
    if tokens <= _CHUNK or package_release("transformers") >= (5, 17):
        return None
    return f"without kernels its Mamba mixer is right for {_CHUNK} tokens at most, before transformers 5.17"


FAMILIES = (
    ModelFamily(
        ("nemotron_h",),
        ("NemotronHForCausalLM",),
        read_dims,
        mappings,
        fused=FusedExperts(renamed=True),
        release=Release(
            "backbone.", moe="mixer", experts=_UP_DOWN, drafts=_drafts, classes={"Router": "NemotronHTopkRouter"}
        ),
        # Its kernels come from a hub, and without them it keeps time steps from falling below `time_step_min`.
        reference={"use_mamba_kernels": False, "time_step_min": 1e-30, "chunk_size": _CHUNK},
        unlike_transformers=_unlike_transformers,
        engines={"sglang": EngineClass(("qkv_proj",), root=_ENGINE_ROOT, entries=(_ENGINE_ROOT,), keys=_sglang_keys)},
    ),
)

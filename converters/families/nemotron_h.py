"""Nemotron-H, Nemotron Nano v2, and Nemotron 3 Nano, Super and Ultra.

A layer is a Mamba-2 mixer, attention, an MLP without a gate, or experts. Attention has no rotary embedding. The experts
of Super and Ultra work in a smaller size, and those two and Lightning have an MTP layer. Only Megatron's HybridModel
holds these models, and the names are its. Each layer has one norm, before its block.

Source: megatron-core 0.19 `ssm/mamba_mixer.py`, `moe/moe_layer.py`; transformers `models/nemotron_h`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ckptkit.converters.blocks.decoder import attention, embeddings, joining_rules
from ckptkit.converters.blocks.sigmoid_moe import ABSENT, read_sigmoid_moe
from ckptkit.converters.config.bounds import MAX_LAYERS
from ckptkit.converters.config.dims import ATTENTION, DENSE, EXPERTS, MIXER, Mamba, ModelDims, base_dims
from ckptkit.converters.config.values import agreed, integer, number, require, unsupported, wrong
from ckptkit.converters.family import Draft, FusedExperts, ModelFamily, Release
from ckptkit.converters.ops.basic import Copy, StackedRows
from ckptkit.converters.rules import NamePrefix, ParamMapping, decoder
from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened

_NO_LIMIT = 1e30  # of the time step, which is about 1
# The words of lists: those of releases, and those that later transformers save.
_WORDS = {
    "mamba": MIXER,
    "linear_attention": MIXER,
    "attention": ATTENTION,
    "full_attention": ATTENTION,
    "moe": EXPERTS,
    "mlp": DENSE,
}


def read_pattern(config: Mapping[str, Any], as_list: str, as_string: str, absent: str | None = None) -> str:
    """One letter per layer, from a list of words under `as_list` or a string of letters under `as_string`.

    `absent`: the default without either. Raises CkptkitError if both are present and differ, and for unknown words and
    letters.
    """
    words, letters = config.get(as_list), config.get(as_string)
    found = {key: value for key, value in ((as_list, words), (as_string, letters)) if value is not None}
    known = set(_WORDS.values())
    if words is not None:
        if not isinstance(words, list) or not all(isinstance(word, str) and word in _WORDS for word in words):
            raise unsupported(f"{as_list} {shortened(words)}", f"each layer must be one of {', '.join(_WORDS)}")
        found[as_list] = "".join(_WORDS[word] for word in words)
    if letters is not None and (not isinstance(letters, str) or set(letters) - known):
        raise unsupported(f"{as_string} {shortened(letters)}", f"each layer must be one of {' '.join(sorted(known))}")
    if len(set(found.values())) > 1:
        message = f"config.json: {as_list} and {as_string} describe different layers"
        raise CkptkitError(message, "restore both from the release: each engine reads only one")
    if not found and absent is None:
        raise CkptkitError(f"config.json has neither {as_list!r} nor {as_string!r}", "restore one from the release")
    pattern = next(iter(found.values()), absent) or ""
    if not 0 < len(pattern) <= MAX_LAYERS:
        raise CkptkitError(
            f"config.json: {as_list} has {len(pattern)} layers, not 1 to {MAX_LAYERS}", "compare it with the release"
        )
    return pattern


def refuse_time_step_limit(config: Mapping[str, Any]) -> None:
    """Raises CkptkitError for a limit of the time steps, which Megatron's and SGLang's mixers do not support."""
    limit = config.get("time_step_limit")
    if limit is None:
        return
    low, high = limit if isinstance(limit, list) and len(limit) == 2 else (None, None)
    # transformers saves infinity as {"__float__": "Infinity"}.
    open_end = isinstance(high, dict) or (isinstance(high, (int, float)) and high > _NO_LIMIT)
    if low != 0 or not open_end:
        hint = "neither Megatron's mixer nor SGLang's limits its time steps; the releases have [0, Infinity]"
        raise unsupported(f"time_step_limit {shortened(limit)}", hint)


def _mtp(dims: ModelDims, depth: int) -> list[ParamMapping]:
    """A multi-token prediction layer; the release numbers the blocks of all such layers consecutively.

    The first has the norms of embedding and hidden state and their projection (of [embedding, hidden state]), the last
    the norm before the output layer. Source: SGLang `nemotron_h_mtp.py`.
    """
    count = len(dims.mtp_pattern)
    first, last = (f"mtp.layers.{depth * count + place}." for place in (0, count - 1))
    megatron = f"mtp.layers.{depth}."
    names = (f"{first}enorm", f"{first}hnorm", f"{first}eh_proj", f"{last}final_layernorm")
    rules = joining_rules(dims, NamePrefix(megatron, "", None), names)
    for place, kind in enumerate(dims.mtp_pattern):
        inner = f"{megatron}mtp_model_layer.layers.{place}."
        rules += _BLOCKS[kind](dims, NamePrefix(inner, f"mtp.layers.{depth * count + place}.", None))
    return rules


def mixer(dims: ModelDims, at: NamePrefix) -> tuple[ParamMapping, ...]:
    """A Mamba-2 mixer. Tensor parallelism cuts each kind of row of its input projection and convolution separately."""
    net = dims.mamba
    assert net is not None, "a family without Mamba layers has no such rules"
    inputs, conv = StackedRows((sum(net.in_proj),), net.in_proj), StackedRows((sum(net.conv),), net.conv)
    return (
        at.rule("mixer.in_proj.layer_norm_weight", {"norm.weight": (dims.hidden,)}),
        at.rule("mixer.in_proj.weight", {"mixer.in_proj.weight": (sum(net.in_proj), dims.hidden)}, inputs),
        at.rule("mixer.conv1d.weight", {"mixer.conv1d.weight": (sum(net.conv), 1, net.kernel)}, conv, kind="Conv1d"),
        at.rule("mixer.conv1d.bias", {"mixer.conv1d.bias": (sum(net.conv),)}, conv),
        *(
            at.rule(f"mixer.{name}", {f"mixer.{name}": (net.heads,)}, Copy(0), fp32=True)
            for name in ("A_log", "D", "dt_bias")
        ),
        at.rule("mixer.norm.weight", {"mixer.norm.weight": (net.inner,)}, Copy(0)),
        at.rule("mixer.out_proj.weight", {"mixer.out_proj.weight": (dims.hidden, net.inner)}, Copy(1)),
    )


def mlp(dims: ModelDims, at: NamePrefix) -> tuple[ParamMapping, ...]:
    """An MLP without a gate: linear_fc1 is only the up projection."""
    return (
        at.rule("mlp.linear_fc1.layer_norm_weight", {"norm.weight": (dims.hidden,)}),
        *_up_down(at, "mlp.", "mixer.", dims.hidden, dims.ffn),
    )


def experts(dims: ModelDims, at: NamePrefix) -> tuple[ParamMapping, ...]:
    """Experts without a gate, a router with an fp32 selection bias, and a shared expert.

    Routed experts may have a smaller hidden size, between two projections that are complete on every rank.
    """
    inner = dims.expert_hidden or dims.hidden
    latent = {"fc1_latent_proj": (inner, dims.hidden), "fc2_latent_proj": (dims.hidden, inner)}
    return (
        at.rule("pre_mlp_layernorm.weight", {"norm.weight": (dims.hidden,)}),
        at.rule("mlp.router.weight", {"mixer.gate.weight": (dims.experts, dims.hidden)}, kind="Router"),
        at.rule("mlp.router.expert_bias", {"mixer.gate.e_score_correction_bias": (dims.experts,)}, fp32=True),
        *(
            at.rule(f"mlp.{name}.weight", {f"mixer.{name}.weight": shape})
            for name, shape in latent.items()
            if dims.expert_hidden
        ),
        *_up_down(at, "mlp.experts.experts.{expert}.", "mixer.experts.{expert}.", inner, dims.expert_ffn),
        *_up_down(at, "mlp.shared_experts.", "mixer.shared_experts.", dims.hidden, dims.shared_ffn),
    )


def _up_down(at: NamePrefix, megatron: str, hf: str, hidden: int, ffn: int) -> tuple[ParamMapping, ...]:
    return (
        at.rule(megatron + "linear_fc1.weight", {hf + "up_proj.weight": (ffn, hidden)}, Copy(0)),
        at.rule(megatron + "linear_fc2.weight", {hf + "down_proj.weight": (hidden, ffn)}, Copy(1)),
    )


_BLOCKS: Mapping[str, Callable[..., tuple[ParamMapping, ...]]] = {
    MIXER: mixer,
    ATTENTION: partial(attention, norm="norm", block="mixer."),
    DENSE: mlp,
    EXPERTS: experts,
}


# Values in every release, which the rules and Megatron's mixer require.
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
# The norm after Megatron's mixer always has it.
_EPSILON = 1e-5
_UP_DOWN = ("up_proj", "down_proj")
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
        raise wrong("num_hidden_layers", config["num_hidden_layers"], f"{len(pattern)}, the length of the pattern")
    if not set(mtp_pattern) <= set(pattern):
        message = f"a multi-token prediction pattern ({mtp_pattern}) with other kinds of layers than the decoder"
        raise unsupported(message, "compare it with the release")
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
            f"nemotron_h with an epsilon of {epsilon:g}", f"the norm after Megatron's mixer always has {_EPSILON:g}"
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
    """Every layer of the multi-token prediction layers, which the release numbers consecutively."""
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


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    latent = config.get("moe_latent_size")
    return {
        **read_sigmoid_moe(config, {**ABSENT, "routed_scaling_factor": 1.0}),
        "shared_ffn": integer(config, "moe_shared_expert_intermediate_size"),
        "expert_hidden": None if latent is None else integer(config, "moe_latent_size"),
    }


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    kinds = ((MIXER, dims.mixers), (ATTENTION, dims.softmax_layers), (DENSE, dims.dense), (EXPERTS, dims.moe))
    rules = [*embeddings(dims, name="embeddings", norm=("decoder.final_norm", "norm_f"))]
    rules += (rule for kind, layers in kinds if layers for rule in _BLOCKS[kind](dims, decoder(dims, layers)))
    return (*rules, *(rule for depth in range(dims.mtp_layers) for rule in _mtp(dims, depth)))


FAMILIES = (
    ModelFamily(
        ("nemotron_h",),
        ("NemotronHForCausalLM",),
        read_dims,
        mappings,
        fused=FusedExperts(renames_tensors=True),
        release=Release(
            "backbone.", moe="mixer", experts=_UP_DOWN, drafts=_drafts, classes={"Router": "NemotronHTopkRouter"}
        ),
    ),
)

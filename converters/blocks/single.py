"""Layers that are one block each: a Mamba-2 mixer, attention, an MLP without a gate, or experts (Nemotron-H).

Each has one norm, before the block. The names on Megatron's side are HybridModel's, which counts layers the same way.
Source: megatron-core 0.19 `ssm/mamba_mixer.py`, `moe/moe_layer.py`; transformers `models/nemotron_h`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from converters.config.bounds import MAX_LAYERS
from converters.config.dims import ATTENTION, DENSE, EXPERTS, MIXER, ModelDims
from converters.config.values import unsupported
from converters.hf_names import QKV
from converters.ops.basic import Copy, Qkv
from converters.ops.hybrid import StackedRows
from converters.rules import NamePrefix, ParamMapping, decoder

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
    """One letter a layer, from a list of words under `as_list` or a string of letters under `as_string`.

    `absent`: what a config without either means. Raises CkptkitError where both are there and disagree, and for words
    and letters that are not known.
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
        raise CkptkitError(
            f"config.json: {as_list} and {as_string} name other layers",
            "readers look at one or the other; take both from the release",
        )
    if not found and absent is None:
        raise CkptkitError(f"config.json has neither {as_list!r} nor {as_string!r}", "compare it with the release")
    pattern = next(iter(found.values()), absent) or ""
    if not 0 < len(pattern) <= MAX_LAYERS:
        raise CkptkitError(f"config.json: {len(pattern)} layers cannot be right", f"compare {as_list} with the release")
    return pattern


def refuse_time_step_limit(config: Mapping[str, Any]) -> None:
    """Raises CkptkitError for a limit of the time steps, which neither Megatron's mixer nor SGLang's has."""
    limit = config.get("time_step_limit")
    if limit is None:
        return
    low, high = limit if isinstance(limit, list) and len(limit) == 2 else (None, None)
    # transformers saves infinity as {"__float__": "Infinity"}.
    open_end = isinstance(high, dict) or (isinstance(high, (int, float)) and high > _NO_LIMIT)
    if low != 0 or not open_end:
        raise unsupported(
            f"time_step_limit {shortened(limit)}",
            "neither Megatron's mixer nor SGLang's limits its time steps; the releases have [0, Infinity]",
        )


def layers_of_one_block(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """The rules of all decoder layers and of the multi-token prediction layers, each with its kind's block."""
    kinds = ((MIXER, dims.mixers), (ATTENTION, dims.softmax_layers), (DENSE, dims.dense), (EXPERTS, dims.moe))
    rules = [rule for kind, layers in kinds if layers for rule in _BLOCKS[kind](dims, decoder(dims, layers))]
    for depth in range(dims.mtp_layers):
        rules += _mtp(dims, depth)
    return tuple(rules)


def _mtp(dims: ModelDims, depth: int) -> list[ParamMapping]:
    """A multi-token prediction layer, whose blocks the release numbers on through all of them.

    The first has the norms of embedding and hidden state and their projection (of [embedding, hidden state]), the last
    the norm before the output layer. Source: SGLang `nemotron_h_mtp.py`.
    """
    count, hidden = len(dims.mtp_pattern), dims.hidden
    first, last = (f"mtp.layers.{depth * count + place}." for place in (0, count - 1))
    megatron = f"mtp.layers.{depth}."
    start, end = NamePrefix(megatron, first, None), NamePrefix(megatron, last, None)
    rules = [
        start.rule("enorm.weight", {"enorm.weight": (hidden,)}),
        start.rule("hnorm.weight", {"hnorm.weight": (hidden,)}),
        start.rule("eh_proj.weight", {"eh_proj.weight": (hidden, 2 * hidden)}, Copy(0)),
        end.rule("final_layernorm.weight", {"final_layernorm.weight": (hidden,)}),
    ]
    for place, kind in enumerate(dims.mtp_pattern):
        inner = f"{megatron}mtp_model_layer.layers.{place}."
        rules += _BLOCKS[kind](dims, NamePrefix(inner, f"mtp.layers.{depth * count + place}.", None))
    return rules


def mixer(dims: ModelDims, at: NamePrefix, *, hf: str = "mixer", norm: str = "norm.weight") -> tuple[ParamMapping, ...]:
    """A Mamba-2 mixer. Tensor parallelism cuts each kind of row of its input projection and convolution alone.

    `hf` is the HF module's name, `norm` that of the norm before it.
    """
    net = dims.mamba
    assert net is not None, "a family without Mamba layers has no such rules"
    inputs, conv = StackedRows((sum(net.in_proj),), net.in_proj), StackedRows((sum(net.conv),), net.conv)
    return (
        at.rule("mixer.in_proj.layer_norm_weight", {norm: (dims.hidden,)}),
        at.rule("mixer.in_proj.weight", {f"{hf}.in_proj.weight": (sum(net.in_proj), dims.hidden)}, inputs),
        at.rule("mixer.conv1d.weight", {f"{hf}.conv1d.weight": (sum(net.conv), 1, net.kernel)}, conv, kind="Conv1d"),
        at.rule("mixer.conv1d.bias", {f"{hf}.conv1d.bias": (sum(net.conv),)}, conv),
        *(
            at.rule(f"mixer.{name}", {f"{hf}.{name}": (net.heads,)}, Copy(0), fp32=True)
            for name in ("A_log", "D", "dt_bias")
        ),
        at.rule("mixer.norm.weight", {f"{hf}.norm.weight": (net.inner,)}, Copy(0)),
        at.rule("mixer.out_proj.weight", {f"{hf}.out_proj.weight": (dims.hidden, net.inner)}, Copy(1)),
    )


def attention(dims: ModelDims, at: NamePrefix) -> tuple[ParamMapping, ...]:
    """Grouped-query attention without biases and without norms of queries and keys."""
    out, groups = dims.heads * dims.head_dim, dims.groups * dims.head_dim
    rows = dict(zip(QKV, (out, groups, groups), strict=True))
    return (
        at.rule("self_attention.linear_qkv.layer_norm_weight", {"norm.weight": (dims.hidden,)}),
        at.rule(
            "self_attention.linear_qkv.weight",
            {f"mixer.{part}.weight": (count, dims.hidden) for part, count in rows.items()},
            Qkv(dims.heads, dims.groups, dims.head_dim),
        ),
        at.rule("self_attention.linear_proj.weight", {"mixer.o_proj.weight": (dims.hidden, out)}, Copy(1)),
    )


def mlp(dims: ModelDims, at: NamePrefix) -> tuple[ParamMapping, ...]:
    """An MLP without a gate: linear_fc1 is the up projection alone."""
    return (
        at.rule("mlp.linear_fc1.layer_norm_weight", {"norm.weight": (dims.hidden,)}),
        *_up_down(at, "mlp.", "mixer.", dims.hidden, dims.ffn),
    )


def experts(dims: ModelDims, at: NamePrefix) -> tuple[ParamMapping, ...]:
    """Experts without a gate, a router with an fp32 selection bias, and a shared expert.

    Routed experts may work in a smaller size, between two projections that every tensor-parallel rank holds whole.
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


_BLOCKS = {MIXER: mixer, ATTENTION: attention, DENSE: mlp, EXPERTS: experts}

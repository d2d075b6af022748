"""Megatron's HybridModel as a dialect: its names for the tensors of a GPTModel, its layer pattern, its arguments.

A GPTModel layer is two HybridModel layers: attention is layer 2i, MLP or experts are layer 2i + 1. All other
differences are also renamings, so tensors do not change. A model with one block per layer (`ModelDims.pattern`) exists
only as a HybridModel, and its family's rules have these names. Source: megatron-core 0.16 `ssm/mamba_block.py` (where
the class is called MambaModel), 0.19 `models/hybrid/` and `transformer/multi_token_prediction.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ckptkit.converters.config.dims import ATTENTION, DENSE, EXPERTS, LATENT, LINEAR, SPARSE, ModelDims
from ckptkit.converters.megatron.pipeline import Pipeline
from ckptkit.converters.rules import ParamMapping
from ckptkit.core.errors import CkptkitError

FINAL_NORM = "decoder.final_norm.weight"
_FINAL_LAYERNORM = "decoder.final_layernorm.weight"
_LAYER = "decoder.layers.{layer}."
_MTP = re.compile(r"(mtp\.layers\.\d+)\.transformer_layer\.(.+)")
_OF_ATTENTION = re.compile(r"(?:input_layernorm|self_attention)\.")
_NUMBERED = re.compile(r"decoder\.layers\.(\d+)\.(.+)")

# In `--hybrid-layer-pattern`, `|` separates pipeline stages, and `/` precedes each multi-token prediction layer.
_PAIRS = re.compile(rf"(?:[{re.escape(ATTENTION + LATENT + SPARSE + LINEAR)}][{DENSE}{EXPERTS}])+")
# With an indexer, the norms of latent attention are separate modules.
_NORMS_OF_SPARSE = re.compile(r"(self_attention\.)linear_(q|kv)_up_proj\.layer_norm_weight")
# Arguments that the pattern determines; those in _INSTEAD are not given together with it.
_INSTEAD = ("moe_layer_freq", "linear_attention_freq", "experimental_attention_variant")
# Lists with one number per attention layer.
_LISTS = ("window_attn_skip_freq", "no_rope_freq")
SAID_BY_THE_PATTERN = (*_INSTEAD, "num_layers", "mtp_num_layers")


def hybrid_mappings(mappings: Sequence[ParamMapping]) -> tuple[ParamMapping, ...]:
    """The rules of a family with HybridModel's names instead of GPTModel's."""
    sparse = any(".core_attention.indexer." in mapping.megatron for mapping in mappings)
    norms = partial(_NORMS_OF_SPARSE.sub, r"\1\2_layernorm.weight") if sparse else str
    return tuple(replace(mapping, megatron=_rename(norms(mapping.megatron))) for mapping in mappings)


def _rename(name: str) -> str:
    if name == _FINAL_LAYERNORM:
        return FINAL_NORM
    if name.startswith(_LAYER):
        module = name.removeprefix(_LAYER)
        return f"decoder.layers.{{{'2*layer' if _OF_ATTENTION.match(module) else '2*layer+1'}}}.{module}"
    if match := _MTP.fullmatch(name):
        return f"{match[1]}.mtp_model_layer.layers.{0 if _OF_ATTENTION.match(match[2]) else 1}.{match[2]}"
    return name


def is_hybrid(names: Collection[str]) -> bool:
    """Whether these Megatron names are a HybridModel's.

    The final norm's name decides; if it is missing, a HybridModel has no layer with both attention and MLP.
    """
    if FINAL_NORM in names or _FINAL_LAYERNORM in names:
        return FINAL_NORM in names
    modules = [match.groups() for name in names if (match := _NUMBERED.fullmatch(name))]
    attention = {number for number, module in modules if _OF_ATTENTION.match(module)}
    mlp = {number for number, module in modules if not _OF_ATTENTION.match(module)}
    return bool(attention and mlp) and attention.isdisjoint(mlp)


def refuse_gpt_only(dims: ModelDims) -> None:
    """Raises CkptkitError for a model that GPTModel supports but HybridModel (0.19.2) does not."""
    for reason in gpt_only(dims):
        message = f"Megatron's HybridModel does not support this model: {reason}"
        raise CkptkitError(message, "remove --dialect hybrid: GPTModel supports this model", code="unsupported")


def refuse_hybrid_only(dims: ModelDims) -> None:
    """Raises CkptkitError for a model that HybridModel supports but GPTModel does not."""
    if dims.pattern:
        raise CkptkitError(
            "Megatron's GPTModel does not support this model: each layer is only a mixer, attention, an MLP or experts",
            "remove --dialect, or pass --dialect hybrid: HybridModel supports this model",
            code="unsupported",
        )


def gpt_only(dims: ModelDims) -> Iterator[str]:
    """The reasons why HybridModel does not support a model that GPTModel supports, or nothing."""
    if dims.rope_scaling is not None and dims.rope_scaling["rope_type"] == "llama3":
        yield "HybridModel has no rope scaling of Llama 3 (rope_scaling in config.json)"
    if dims.sandwich:
        yield "HybridModel has no norms after attention and MLP"
    if dims.qk_norm_full:
        yield "HybridModel has no norm over all heads at once"
    if dims.mla is not None and dims.mla.q_rank is None:
        yield "HybridModel has a norm before linear_q_proj, but a model without q_lora_rank does not"
    if dims.indexer is not None and len(dims.indexer.layers) < dims.layers:
        yield "HybridModel's layers cannot share an indexer"


def needs_release(dims: ModelDims, vpp: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """The HybridModel features that a model needs with `vpp` chunks per stage, and their first megatron-core release.

    Up to 0.17 the class is called MambaModel. By the sources of 0.16.1, 0.17.1, 0.18.2 and 0.19.2.
    """
    if dims.mtp_layers:
        yield "multi-token prediction layers", (0, 17)
    if dims.linear is not None:
        yield "linear attention (G)", (0, 17)
    if dims.indexer is not None:
        yield "indexer with the rotary layout of this model (D)", (0, 19)
    if vpp > 1:
        yield "several chunks per pipeline stage", (0, 17)
    if dims.mla is not None:
        yield "latent attention (+)", (0, 19)
    elif dims.rope_scaling is not None and dims.rope_scaling["rope_type"] == "yarn":
        yield "YaRN", (0, 18)


def hybrid_pattern(dims: ModelDims) -> str:
    """The value of `--hybrid-layer-pattern`: `*-*E*E/*E` is one dense layer, two with experts and one of MTP."""
    if dims.pattern:
        return "/".join([dims.pattern, *[dims.mtp_pattern] * dims.mtp_layers])
    linear, moe = set(dims.linear.layers if dims.linear else ()), set(dims.moe)
    softmax = SPARSE if dims.indexer else LATENT if dims.mla else ATTENTION
    pairs = [
        (LINEAR if layer in linear else softmax) + (EXPERTS if layer in moe else DENSE) for layer in dims.all_layers
    ]
    return "/".join(["".join(pairs), *[pairs[-1]] * dims.mtp_layers])


def hybrid_dims(dims: ModelDims) -> ModelDims:
    """The sizes of a model with HybridModel's number of layers, which its pipeline divides."""
    return dims if dims.pattern else replace(dims, layers=2 * dims.layers)


def with_stages(pattern: str, pipeline: Pipeline) -> str:
    """A layer pattern with `|` between the chunks of a pipeline over its letters, in Megatron's order."""
    main, *mtp = pattern.split("/")
    chunks = [stage[chunk] for chunk in range(pipeline.vpp) for stage in pipeline.stages]
    return "/".join(["|".join("".join(main[place] for place in chunk) for chunk in chunks), *mtp])


def hybrid_args(args: Mapping[str, Any], dims: ModelDims) -> dict[str, Any]:
    """Converts GPTModel's arguments of a model to HybridModel's. Raises CkptkitError like `refuse_gpt_only`."""
    refuse_gpt_only(dims)
    pattern = hybrid_pattern(dims)
    kept = {name: value for name, value in args.items() if name not in _INSTEAD}
    # One number per layer; only those of attention layers count.
    twice = {name: [one for one in kept[name] for _ in range(2)] for name in _LISTS if isinstance(kept.get(name), list)}
    return {"hybrid_layer_pattern": pattern, **kept, **twice, "num_layers": hybrid_dims(dims).layers}


# The arguments with a layer pattern: from megatron-core 0.17 on, and before.
PATTERNS = frozenset({"hybrid_layer_pattern", "hybrid_override_pattern"})


def stored_pattern(args: Mapping[str, Any]) -> str | None:
    """The layer pattern in a HybridModel run's arguments, or None for a GPTModel."""
    pattern = args.get("hybrid_layer_pattern") or args.get("hybrid_override_pattern")
    return pattern if isinstance(pattern, str) else None


def own_layers(args: Mapping[str, Any]) -> str | None:
    """The main layer pattern of a run if it does not consist of a GPTModel's layers, else None."""
    main = (stored_pattern(args) or "").replace("|", "").partition("/")[0]
    return main if main and not _PAIRS.fullmatch(main) else None


def as_gpt_args(args: Mapping[str, Any]) -> Mapping[str, Any]:
    """Converts a HybridModel's arguments to GPTModel's for a comparison; a GPTModel's arguments are unchanged.

    If the pattern does not consist of pairs of attention and MLP, each of its layers counts.
    """
    if (pattern := stored_pattern(args)) is None:
        return args
    main, *mtp = pattern.replace("|", "").split("/")
    if not _PAIRS.fullmatch(main):
        freq = [int(one == EXPERTS) for one in main]
        return {**args, "num_layers": len(main), "moe_layer_freq": freq, "mtp_num_layers": len(mtp)}
    attention, mlp = main[::2], main[1::2]
    changes: dict[str, Any] = {"num_layers": len(attention), "moe_layer_freq": [int(one == EXPERTS) for one in mlp]}
    if SPARSE in attention:
        changes["experimental_attention_variant"] = "dsa"
    if LINEAR in attention:
        changes["linear_attention_freq"] = [int(one == LINEAR) for one in attention]
        changes["experimental_attention_variant"] = "gated_delta_net"
    changes |= {name: list(args[name][::2]) for name in _LISTS if isinstance(args.get(name), (list, tuple))}
    return {**args, **changes, "mtp_num_layers": len(mtp) or args.get("mtp_num_layers")}

"""The spec of HybridModel's layers: megatron-core's own, or without Transformer Engine one of Megatron's own modules.

megatron-core's own has only Transformer Engine's modules. Without these it is built from GPTModel's layers, each
divided into attention and MLP: the same classes, and on disk the names that HybridModel requests.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import fields, replace
from importlib.util import find_spec
from typing import Any

from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from ckptkit.converters.config.dims import ATTENTION, DENSE, EXPERTS, LATENT, LINEAR, MIXER, SPARSE, ModelDims
from ckptkit.converters.megatron.hybrid_model import hybrid_pattern
from ckptkit.verify.witnesses.megatron.variants.recurrent import mixer_layer

# Before megatron-core 0.18 the class is MambaModel, in another place.
if find_spec("megatron.core.models.hybrid") is not None:
    from megatron.core.models.hybrid import hybrid_block as block
    from megatron.core.models.hybrid import hybrid_layer_specs
    from megatron.core.models.hybrid.hybrid_model import HybridModel as Model

    ENGINE_STACK: ModuleSpec = hybrid_layer_specs.hybrid_stack_spec
    _Stack, _Submodules = block.HybridStack, block.HybridStackSubmodules
else:
    from megatron.core.models.mamba import mamba_layer_specs
    from megatron.core.models.mamba.mamba_model import MambaModel as Model
    from megatron.core.ssm import mamba_block as block

    ENGINE_STACK = mamba_layer_specs.mamba_stack_spec
    _Stack, _Submodules = block.MambaStack, block.MambaStackSubmodules

_FIELDS = {
    MIXER: "mamba_layer",
    ATTENTION: "attention_layer",
    LATENT: "mla_layer",
    SPARSE: "dsa_layer",
    LINEAR: "gdn_layer",
    DENSE: "mlp_layer",
    EXPERTS: "moe_layer",
}
_MLP_ONLY: Any = {"input_layernorm": IdentityOp, "self_attention": IdentityOp, "self_attn_bda": IdentityFuncOp}
# Names on disk of the local spec's norms that HybridModel always fuses into the linear layer after them.
_FUSED = {
    ATTENTION: {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
    LATENT: {
        "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
        "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    },
    DENSE: {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
}


def local_stack(dims: ModelDims, layers: Sequence[ModuleSpec], mtp: Any, tp: int) -> ModuleSpec:
    """The spec of Megatron's own modules: from GPTModel's layers, in their order, and from its MTP layers."""
    block.TENorm = WrappedTorchNorm  # of the process: the stack's own last norm is Transformer Engine's
    slots: dict[str, Any] = {}
    for place, letter in enumerate(hybrid_pattern(dims).partition("/")[0]):
        if letter == MIXER:
            slots[_FIELDS[letter]] = mixer_layer()
            continue
        # A layer gives two of HybridModel, or one if the model's own layers are one block each.
        layer = layers[place if dims.pattern else place // 2]
        is_mlp = letter in (DENSE, EXPERTS)
        # With tensor parallelism the class of sparse attention is GPTModel's, with the same names of parameters, since
        # HybridModel's then needs the sequence parallelism that local norms lack.
        half = replace(layer.submodules, **_MLP_ONLY) if is_mlp else _attention(layer, letter == SPARSE and tp == 1)
        names = replace(half, sharded_state_dict_keys_map=_FUSED.get(letter, {}))
        slots.setdefault(_FIELDS[letter], replace(layer, submodules=names))
    if mtp is not None:  # HybridModel builds a stack in place of the transformer layer of these
        specs = [replace(spec, submodules=replace(spec.submodules, mtp_model_layer=None)) for spec in mtp.layer_specs]
        parts = replace(mtp, layer_specs=specs)
        slots["mtp_block_spec"] = ModuleSpec(module=MultiTokenPredictionBlock, submodules=parts)
    return ModuleSpec(module=_Stack, submodules=_Submodules(**slots))


def _attention(layer: ModuleSpec, is_absorbed: bool) -> Any:
    half = replace(layer.submodules, pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp)
    if not is_absorbed:
        return half
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla

    given = half.self_attention.submodules
    parts = absorbed_mla.AbsorbedMLASelfAttentionSubmodules
    slots = {field.name: getattr(given, field.name) for field in fields(parts) if hasattr(given, field.name)}
    attention = replace(half.self_attention, module=absorbed_mla.AbsorbedMLASelfAttention, submodules=parts(**slots))
    return replace(half, self_attention=attention)


def hybrid_model(spec: ModuleSpec, pattern: str, stage: int | None) -> functools.partial[Any]:
    """The class with its own arguments: a stack and a layer pattern, which `|` may divide into pipeline stages."""
    known = inspect.signature(Model).parameters
    words = {next(name for name in ("hybrid_stack_spec", "mamba_stack_spec") if name in known): spec}
    words |= {next(name for name in ("hybrid_layer_pattern", "hybrid_override_pattern") if name in known): pattern}
    # MambaModel of megatron-core 0.16 has no chunks.
    return functools.partial(Model, **words, **({"vp_stage": stage} if "vp_stage" in known else {}))

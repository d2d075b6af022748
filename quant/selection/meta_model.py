"""Builds transformers' class of a model on the meta device from the sizes in its config, and sorts its modules.

Tests compare the families with this; at run time it is asked only about configs that a family does not convert. A
config.json comes with the checkpoint, so from anyone. transformers makes every key of it an attribute, and by some of
them it fetches code and runs it: an attention implementation may be a repository of kernels. So only the keys below get
through, only with values that can be nothing but a size, a switch or a word of a fixed list, and what transformers
could choose by itself is fixed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from huggingface_hub import constants
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.integrations import hub_kernels
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from ckptkit.core.errors import CkptkitError, words_of
from converters.family import ModelFamily, Release
from quant.selection.tree import ClassTree, is_gate

_SIZE, _SIZES, _SWITCH = (
    "a whole number that is not negative",
    "a list of whole numbers that are not negative",
    "true or false",
)
_MAX_SIZE = 2**31
_ACTIVATIONS = ("gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "silu", "swish")
_ATTENTION = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "linear_attention",
    "deepseek_sparse_attention",
    "indexed_attention",
    "mamba",
    "attention",
)
_INDEXERS = {"F": "full", "S": "shared"}  # indexers of their own, by the letter of a pattern
_BLOCKS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # kinds of layers, the same
# What the values of a key must be: one of the three kinds above, a word of these, or (`list`) a list of such words.
Kind = str | tuple[str, ...] | list[str]


def _each(kind: Kind, keys: str) -> dict[str, Kind]:
    return dict.fromkeys(keys.split(), kind)


_LANGUAGE: Mapping[str, Kind] = MappingProxyType(
    _each(
        _SIZE,
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "n_routed_experts num_experts num_local_experts num_experts_per_tok n_shared_experts num_shared_experts "
        "moe_intermediate_size shared_expert_intermediate_size first_k_dense_replace decoder_sparse_step "
        "moe_num_experts moe_k moe_num_shared_experts moe_layer_start_index moe_layer_end_index moe_layer_interval "
        "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim "
        "index_head_dim index_n_heads index_topk index_topk_freq index_skip_topk_offset "
        "linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads "
        "full_attention_interval "
        "mamba_num_heads mamba_head_dim n_groups ssm_state_size conv_kernel chunk_size "
        "mamba_n_heads mamba_d_head mamba_n_groups mamba_d_state mamba_d_conv mamba_expand shared_intermediate_size "
        "moe_shared_expert_intermediate_size moe_latent_size "
        "global_head_dim num_global_key_value_heads top_k_experts num_kv_shared_layers hidden_size_per_layer_input "
        "vocab_size_per_layer_input",
    )
    | _each(_SWITCH, "attention_k_eq_v enable_moe_block use_double_wide_mlp")
    | {"mlp_only_layers": _SIZES, "hidden_act": _ACTIVATIONS, "hidden_activation": _ACTIVATIONS}
    | {"mlp_hidden_act": _ACTIVATIONS, "layers_block_type": list(_BLOCKS.values())}
    | {
        "layer_types": list(_ATTENTION),
        "mlp_layer_types": ["dense", "sparse"],
        "indexer_types": list(_INDEXERS.values()),
    }
)
_VISION: Mapping[str, Kind] = MappingProxyType(
    _each(
        _SIZE,
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_channels image_size patch_size "
        "depth num_heads in_channels spatial_merge_size temporal_patch_size out_hidden_size num_position_embeddings",
    )
    | {"deepstack_visual_indexes": _SIZES, "vision_use_head": _SWITCH, "hidden_act": _ACTIVATIONS}
)
_BOTH: Mapping[str, Kind] = MappingProxyType({"mm_tokens_per_image": _SIZE})
# These give layers other sizes than the keys above say, in one transformers or another, so that no answer would be
# right.
_OVERRIDING = ("per_layer_config",)

_OFFLINE = Lock()
_KERNELS = ("causal-conv1d", "falcon_mamba-ssm", "mamba-ssm")


def is_known(model_type: Any) -> bool:
    """Whether the installed transformers has a class of its own for this `model_type`.

    SGLang registers more (kimi_k2) in the process that imports it.
    """
    return model_type in CONFIG_MAPPING_NAMES


def text_model(release: Release, config: Mapping[str, Any]) -> PreTrainedModel:
    """The language model alone. Raises CkptkitError naming the key by which it cannot be built."""
    model_type = release.model_type or str(release.text(config).get("model_type"))
    return _build(config, model_type, _language(release, config))


def whole_model(release: Release, config: Mapping[str, Any]) -> PreTrainedModel | None:
    """The language model (its `language_model`) with all that stands beside it; None: there is no such model.

    Raises as `text_model`.
    """
    vision = config.get("vision_config")
    if release.linears_outside is None or not isinstance(vision, Mapping):
        return None
    parts = {
        "text_config": _language(release, config),
        "vision_config": _checked(vision, _VISION, config, "vision_config."),
    }
    return _build(config, str(config["model_type"]), {**_checked(config, _BOTH, config), **parts})


def _language(release: Release, config: Mapping[str, Any]) -> dict[str, Any]:
    text, where = release.text(config), "text_config." if release.nested else ""
    fields = _checked(text, _LANGUAGE, config, where)
    if (pattern := text.get("index_topk_pattern")) is not None and fields.get("indexer_types") is None:
        fields["indexer_types"] = _words(pattern, _INDEXERS, "indexer_types", f"{where}index_topk_pattern", config)
    if (pattern := text.get("hybrid_override_pattern")) is not None and fields.get("layers_block_type") is None:
        key = f"{where}hybrid_override_pattern"
        fields["layers_block_type"] = _words(pattern, _BLOCKS, "layers_block_type", key, config)
    # The default of some classes lies outside a small vocabulary, and a mixer would ask a hub for kernels.
    return fields | {"pad_token_id": None, "use_mamba_kernels": False}


def _checked(
    part: Mapping[str, Any], known: Mapping[str, Kind], config: Mapping[str, Any], where: str = ""
) -> dict[str, Any]:
    """The known keys of a part of the config.

    null is passed on: it means the default, or that there is no such thing.
    """
    if wrong := next((key for key in _OVERRIDING if part.get(key) is not None), None):
        raise _refused(config, f"{where}{wrong} gives layers sizes of their own, which is not supported")
    fields = {key: part[key] for key in known if key in part}
    for key, value in fields.items():
        if value is not None and not _fits(value, known[key]):
            raise _refused(config, f"{where}{key} is {value!r:.80}, not {_describe(known[key])}")
    return fields


def _fits(value: Any, kind: Kind) -> bool:
    if kind == _SIZE:
        return type(value) is int and 0 <= value < _MAX_SIZE
    if kind == _SWITCH:
        return type(value) is bool
    if kind == _SIZES:
        return isinstance(value, list) and all(_fits(one, _SIZE) for one in value)
    if isinstance(kind, list):
        return isinstance(value, list) and all(type(one) is str and one in kind for one in value)
    return type(value) is str and value in kind


def _describe(kind: Kind) -> str:
    if isinstance(kind, str):
        return kind
    return ("a list of " if isinstance(kind, list) else "one of ") + ", ".join(kind)


def _words(pattern: Any, words: Mapping[str, str], key: str, where: str, config: Mapping[str, Any]) -> list[str]:
    """The value of `key` that a word of one letter a layer stands for, or the list that it is already."""
    kinds = [words.get(letter, letter) for letter in pattern] if isinstance(pattern, str) else pattern
    if not _fits(kinds, _LANGUAGE[key]):
        raise _refused(config, f"{where} is {pattern!r:.80}, not a word of {' and '.join(words)}")
    return list(kinds)


def _build(config: Mapping[str, Any], model_type: str, fields: dict[str, Any]) -> PreTrainedModel:
    try:
        with hub_offline(), torch.device("meta"):
            parsed = AutoConfig.for_model(model_type, **fields)
            model: PreTrainedModel = AutoModel.from_config(
                parsed, attn_implementation="eager", experts_implementation="eager", trust_remote_code=False
            )
    except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, StrictDataclassError) as error:
        raise _refused(config, words_of(error)[:300]) from error
    return model


def _refused(config: Mapping[str, Any], reason: str) -> CkptkitError:
    return CkptkitError(
        f"transformers cannot build model_type {config.get('model_type')!r} from config.json: {reason}",
        "which tensors are Linear layers is read from the model's classes; update transformers, or repair config.json",
    )


@contextmanager
def hub_offline() -> Iterator[None]:
    """Lets no request to the Hugging Face hub through. The switch is the process's, so builds take turns.

    Mixers of some classes ask the hub for kernels; an empty module stands for each meanwhile.
    """
    with _OFFLINE:
        before, kernels = constants.HF_HUB_OFFLINE, dict(hub_kernels._KERNEL_MODULE_MAPPING)
        constants.HF_HUB_OFFLINE = True
        hub_kernels._KERNEL_MODULE_MAPPING.update({name: ModuleType(name) for name in _KERNELS})
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = before
            hub_kernels._KERNEL_MODULE_MAPPING.clear()
            hub_kernels._KERNEL_MODULE_MAPPING.update(kernels)


def meta_tree(family: ModelFamily, release: Release, config: Mapping[str, Any]) -> ClassTree:
    """Builds the model that an HF config describes without weights, and sorts its modules.

    Raises CkptkitError naming the key by which transformers cannot build it.
    """
    whole = whole_model(release, config)
    model = text_model(release, config) if whole is None else whole.get_submodule("language_model")
    modules = dict(model.named_modules())
    fused = {release.name(name): module for name, module in modules.items() if is_fused_experts(module)}
    blocks = {name.rpartition(".")[0] for name in fused}
    linears = {release.name(name) for name, module in modules.items() if isinstance(module, nn.Linear)}
    others = {
        release.name(name): type(module).__name__
        for name, module in modules.items()
        if not isinstance(module, nn.Linear)
        and isinstance(weight := getattr(module, "weight", None), torch.Tensor)
        and weight.ndim >= 2
    }
    experts = frozenset(
        name for prefix, module in fused.items() for name in _each_expert(prefix, module, release.experts)
    )
    outside = family.beside(config) if release.nested else ()
    spelled = {"lm_head", *(release.own_name(name) for name in linears)}
    return ClassTree(
        frozenset(linears | experts | {release.head}),
        release.head,
        frozenset(name for name in linears if is_gate(blocks, name, release.routers)),
        experts,
        others,
        release.drafts(release.text(config), release.root),
        outside,
        family.engine("sglang").dense,
        frozenset(spelled | (_linears_outside(outside, whole) if whole is not None else set())),
        release.kept,
        release.partly_fused,
        whole is not None or not outside,
    )


def _linears_outside(outside: tuple[str, ...], whole: nn.Module) -> set[str]:
    """Linear layers beside the language model, as transformers and, in some versions, the release spell them.

    Up to 4.57 transformers had the layers of Gemma's tower under `vision_model`, as the release has them.
    """
    found: set[str] = set()
    for name, module in whole.named_modules():
        if isinstance(module, nn.Linear) and not name.startswith("language_model."):
            spellings = {name, re.sub(r"^vision_tower\.(?=encoder\.|head\.)", "vision_tower.vision_model.", name)}
            found |= {f"model.{one}" for one in spellings} | {one for one in spellings if one.startswith(outside)}
    return found


def is_fused_experts(module: nn.Module) -> bool:
    parameters = [getattr(module, name, None) for name in ("gate_up_proj", "up_proj", "down_proj")]
    return sum(isinstance(parameter, torch.Tensor) and parameter.ndim == 3 for parameter in parameters) == 2


def _each_expert(prefix: str, module: nn.Module, projections: tuple[str, ...]) -> Iterator[str]:
    for expert in range(module.get_parameter("down_proj").shape[0]):
        for projection in projections:
            yield f"{prefix}.{expert}.{projection}"

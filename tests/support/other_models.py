"""Small models of the classes of transformers, of any type, saved by transformers itself."""

import torch
import transformers
from transformers.models.auto import modeling_auto

_WIDTHS = dict.fromkeys(
    ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "word_embed_proj_dim", "hidden_dim", "embedding_size"), 64
)
_INNER = dict.fromkeys(
    ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 96
)
_LAYERS = dict.fromkeys(
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "depth"), 2
)
_HEADS = dict.fromkeys(
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), 4
)
_EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
_OTHERS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "d_kv": 32, "vocab_size": 320}
_ROOM = {"max_position_embeddings": 128, "n_positions": 128, "image_size": 32, "patch_size": 8}
_OPTIONAL = {"num_key_value_heads": 2, "head_dim": 16}  # some classes take none
_SIZES = _WIDTHS | _INNER | _LAYERS | _HEADS | _EXPERTS | _OTHERS | _ROOM | _OPTIONAL
_TASKS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "SEQUENCE_CLASSIFICATION")


def class_for(model_type):
    """The class of transformers for a `model_type`, with the first of these heads that there is one with."""
    kind = transformers.CONFIG_MAPPING[model_type]
    for task in _TASKS:
        if kind in (mapping := getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING")):
            found = mapping[kind]
            return found[0] if isinstance(found, list | tuple) else found
    return None


def small_config(kind):
    usual = kind()
    given = {name: size for name, size in _SIZES.items() if isinstance(getattr(usual, name, None), int)}
    for name, value in vars(usual).items():
        if name.endswith("_token_id") and isinstance(value, int) and value >= _OTHERS["vocab_size"]:
            given[name] = 3
    parts = {name: type(part) for name in kind.sub_configs if (part := getattr(usual, name, None)) is not None}
    given |= {name: small_config(part).to_dict() for name, part in parts.items()}
    given = {name: value for name, value in given.items() if name not in getattr(kind, "attribute_map", {})}
    try:
        return kind(**given)
    except (AttributeError, ValueError):
        return kind(**{name: value for name, value in given.items() if name not in _OPTIONAL})


def save_small(model_type, path):
    torch.manual_seed(0)
    model_class = class_for(model_type)
    model_class(small_config(transformers.CONFIG_MAPPING[model_type])).save_pretrained(path)
    return path

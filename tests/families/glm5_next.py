"""GLM-5.3-Flash, of which transformers has a class from 5.16 on: names, shapes and dtypes are those of its save.

They were taken from transformers 5.24.0, built from this very config, and are written down here by hand; the layer for
multi-token prediction, which transformers leaves out, is written down from public readers of the release. Nothing
computes its logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from releases.record import load
from torch import Tensor
from transformers import PreTrainedModel

from families.by_name import BF16, F32, LATENT, Shapes, classes
from families.case import Case

KINDS = (["linear_attention"] * 3 + ["deepseek_sparse_attention"]) * 3
# The release's, with other sizes.
RELEASE = load("zai-org/GLM-5.3-Flash-BF16").config
TEXT: dict[str, Any] = RELEASE["text_config"] | LATENT
TEXT |= {"hc_mult": 3, "index_head_dim": 16, "index_n_heads": 4, "index_topk": 12, "layer_types": KINDS}
TEXT |= {"n_routed_experts": 12, "n_shared_experts": 2, "num_experts_per_tok": 3, "pad_token_id": 0}
TEXT |= {"indexer_types": ["full"] * 12, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 10}
TEXT["linear_attn_config"] |= {"head_dim": 18, "num_heads": 6}
TEXT["linear_attn_config"] |= {"full_attn_layers": [3, 7, 11], "kda_layers": [0, 1, 2, 4, 5, 6, 8, 9, 10]}
VISION: dict[str, Any] = RELEASE["vision_config"] | {"depth": 2, "hidden_size": 24, "image_size": 28, "num_heads": 2}
VISION |= {"intermediate_size": 40, "out_hidden_size": 128, "projection_intermediate_size": 40}


def config() -> Any:
    """As the release's config.json, with the sizes of the test model."""
    content = {"text_config": deepcopy(TEXT), "vision_config": dict(VISION)}
    content |= {"tie_word_embeddings": False, "dtype": "bfloat16"}
    return CONFIG(architectures=["Glm5NextForConditionalGeneration"], **content)


def published() -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    """Every tensor of the language model: name, shape and dtype."""
    yield "lm_head.weight", (352, 128), BF16
    yield "model.language_model.embed_tokens.weight", (352, 128), BF16
    yield "model.language_model.norm.weight", (128,), BF16
    for layer, kind in enumerate(KINDS):
        attention = kda() if kind == "linear_attention" else sparse_attention()
        for name, (shape, dtype) in (streams() | attention | (dense() if layer < 2 else experts())).items():
            yield f"model.language_model.layers.{layer}.{name}", shape, dtype
    for name, (shape, dtype) in (joint() | sparse_attention() | experts()).items():
        yield f"model.language_model.layers.12.{name}", shape, dtype


def streams() -> Shapes:
    """What mixes 3 residual streams: 3 weights before, 3 behind, and 3 x 3 between them."""
    return {
        f"hc_{block}_{name}": form
        for block in ("attn", "ffn")
        for name, form in {"fn": ((15, 384), BF16), "base": ((15,), F32), "scale": ((3,), F32)}.items()
    }


def norms() -> Shapes:
    """The norms before attention and MLP, which every layer has."""
    return dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), ((128,), BF16))


def kda() -> Shapes:
    """6 heads of 18."""
    return norms() | {
        "self_attn.A_log": ((6,), F32),
        "self_attn.dt_bias": ((108,), F32),
        "self_attn.b_proj.weight": ((6, 128), BF16),
        "self_attn.f_a_proj.weight": ((18, 128), BF16),
        "self_attn.f_b_proj.weight": ((108, 18), BF16),
        "self_attn.g_a_proj.weight": ((18, 128), BF16),
        "self_attn.g_b_proj.weight": ((108, 18), BF16),
        **{f"self_attn.{part}_proj.weight": ((108, 128), BF16) for part in "qkv"},
        **{f"self_attn.{part}_conv1d.weight": ((108, 1, 4), F32) for part in "qkv"},
        "self_attn.o_norm.weight": ((18,), BF16),
        "self_attn.o_proj.weight": ((128, 108), BF16),
    }


def sparse_attention() -> Shapes:
    """10 heads: 24 of a query or key, 20 of a value. The indexer has 4 heads of 16 and pools 4 keys."""
    return norms() | {
        "self_attn.q_a_proj.weight": ((48, 128), BF16),
        "self_attn.q_a_layernorm.weight": ((48,), BF16),
        "self_attn.q_b_proj.weight": ((240, 48), BF16),
        "self_attn.kv_a_proj_with_mqa.weight": ((40, 128), BF16),
        "self_attn.kv_a_layernorm.weight": ((40,), BF16),
        "self_attn.kv_b_proj.weight": ((440, 40), BF16),
        "self_attn.o_proj.weight": ((128, 200), BF16),
        "self_attn.indexer.wq_b.weight": ((64, 48), BF16),
        "self_attn.indexer.wk.weight": ((16, 128), BF16),
        "self_attn.indexer.weights_proj.weight": ((4, 128), BF16),
        "self_attn.indexer.k_norm.weight": ((16,), BF16),
        "self_attn.indexer.k_norm.bias": ((16,), BF16),
        "self_attn.indexer.index_kpool_compress_ape": ((4, 16), BF16),
        "self_attn.indexer.index_kpool_compress_gate": ((16, 128), BF16),
    }


def dense() -> Shapes:
    """The MLP of the first layers."""
    return {
        "mlp.gate_proj.weight": ((288, 128), BF16),
        "mlp.up_proj.weight": ((288, 128), BF16),
        "mlp.down_proj.weight": ((128, 288), BF16),
    }


def experts() -> Shapes:
    """12 experts and two shared ones, which are one MLP."""
    found: Shapes = {
        "mlp.gate.weight": ((12, 128), F32),
        "mlp.gate.e_score_correction_bias": ((12,), F32),
        "mlp.shared_experts.gate_proj.weight": ((192, 128), BF16),
        "mlp.shared_experts.up_proj.weight": ((192, 128), BF16),
        "mlp.shared_experts.down_proj.weight": ((128, 192), BF16),
    }
    for expert in range(12):
        found |= {f"mlp.experts.{expert}.{name}_proj.weight": ((96, 128), BF16) for name in ("gate", "up")}
        found |= {f"mlp.experts.{expert}.down_proj.weight": ((128, 96), BF16)}
    return found


def joint() -> Shapes:
    """What joins the embedding and the hidden state in the multi-token prediction layer, which mixes no streams."""
    names = ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")
    return {"eh_proj.weight": ((128, 256), BF16)} | dict.fromkeys(names, ((128,), BF16))


CONFIG, MODEL = classes("glm5_next", "Glm5NextForConditionalGeneration", lambda config: published())


def vision(model: PreTrainedModel, dtype: torch.dtype) -> Mapping[str, Tensor]:
    """The vision tower, as SGLang 0.5.23 builds it of `VISION`, gate and up apart."""
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (24, 3, 2, 14, 14),
        "patch_embed.proj.bias": (24,),
        "post_layernorm.weight": (24,),
        "downsample.weight": (128, 24, 2, 2),
        "downsample.bias": (128,),
        "merger.proj.weight": (128, 128),
        "merger.post_projection_norm.weight": (128,),
        "merger.post_projection_norm.bias": (128,),
        "merger.gate_proj.weight": (40, 128),
        "merger.up_proj.weight": (40, 128),
        "merger.down_proj.weight": (128, 40),
    }
    for layer in range(2):
        block: dict[str, tuple[int, ...]] = dict.fromkeys(("norm1.weight", "norm2.weight"), (24,))
        block |= dict.fromkeys(("attn.q_norm.weight", "attn.k_norm.weight"), (12,))
        block |= {"attn.qkv.weight": (72, 24), "attn.proj.weight": (24, 24), "attn.proj.bias": (24,)}
        for name, shape in {"gate_proj": (40, 24), "up_proj": (40, 24), "down_proj": (24, 40)}.items():
            block |= {f"mlp.{name}.weight": shape, f"mlp.{name}.bias": shape[:1]}
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in block.items()}
    return {f"model.visual.{name}": torch.randn(shape).to(dtype) for name, shape in shapes.items()}


CASES = {"glm5_next": Case(config, added=vision, auto=MODEL)}

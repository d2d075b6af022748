"""Step-3.5-Flash and Step-3.7-Flash. transformers 5.12 has no class of them: names and shapes are the published ones.

They are written out from the loaders of SGLang 0.5.16 and vLLM 0.26.0 and from public listings, and not from our rules.
The forward pass of the text model is in the equations of transformers 5.24, whose logits it has to 1e-6 (run by hand).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from releases.record import load
from torch import Tensor

from families.by_name import BF16, F32, Published, classes
from families.case import Case, random

LAYERS, DRAFTS = 12, 2
FULL, SLIDING = "full_attention", "sliding_attention"
KINDS = [FULL, SLIDING, SLIDING, SLIDING] * 3 + [SLIDING, FULL]
# Heads of full layers and of those with a window.
HEADS = {FULL: 10, SLIDING: 14}
# The release's, with other sizes.
TEXT: dict[str, Any] = dict(load("stepfun-ai/Step-3.5-Flash").config)
TEXT |= {"vocab_size": 352, "hidden_size": 128, "intermediate_size": 288, "num_hidden_layers": LAYERS, "head_dim": 32}
TEXT |= {"num_attention_heads": HEADS[FULL], "num_attention_groups": 2, "sliding_window": 7, "layer_types": KINDS}
TEXT |= {"max_position_embeddings": 256, "num_nextn_predict_layers": DRAFTS, "share_expert_dim": 80}
TEXT |= {"moe_num_experts": 12, "moe_top_k": 3, "moe_intermediate_size": 96}
TEXT["attention_other_setting"] |= {"num_attention_heads": HEADS[SLIDING], "num_attention_groups": 2, "head_dim": 32}
TEXT |= {
    "rope_theta": [5000000.0 if kind == FULL else 10000.0 for kind in KINDS],
    "partial_rotary_factors": [0.5 if kind == FULL else 1.0 for kind in KINDS],
    "moe_layers_enum": ",".join(map(str, range(3, LAYERS))),
    "swiglu_limits": [0.0] * 10 + [7.0, 7.0] + [0.0] * DRAFTS,
    "swiglu_limits_shared": [0.0] * 10 + [16.0, 16.0] + [0.0] * DRAFTS,
}
VISION: dict[str, Any] = {
    "model_type": "perception_encoder",
    "image_size": 28,
    "patch_size": 14,
    "width": 24,
    "layers": 2,
    "heads": 2,
    "mlp_ratio": 2.0,
    "use_abs_posemb": True,
    "use_cls_token": False,
    "use_rope2d": True,
    "use_ln_pre": True,
    "use_ln_post": False,
    "ls_init_value": 0.1,
    "hidden_act": "quick_gelu",
    "output_dim": None,
    "pool_type": "none",
}


def layer_shapes(kind: str, *, experts: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names inside a decoder layer."""
    rows = HEADS[kind] * 32
    yield from (("input_layernorm.weight", (128,)), ("post_attention_layernorm.weight", (128,)))
    yield from (("self_attn.q_proj.weight", (rows, 128)), ("self_attn.o_proj.weight", (128, rows)))
    yield from (("self_attn.k_proj.weight", (64, 128)), ("self_attn.v_proj.weight", (64, 128)))
    yield from (("self_attn.q_norm.weight", (32,)), ("self_attn.k_norm.weight", (32,)))
    yield "self_attn.g_proj.weight", (HEADS[kind], 128)
    if experts:
        yield from (("moe.gate.weight", (12, 128)), ("moe.router_bias", (12,)))
        yield from (("moe.gate_proj.weight", (12, 96, 128)), ("moe.up_proj.weight", (12, 96, 128)))
        yield "moe.down_proj.weight", (12, 128, 96)
    mlp, ffn = ("share_expert", 80) if experts else ("mlp", 288)
    yield from ((f"{mlp}.gate_proj.weight", (ffn, 128)), (f"{mlp}.up_proj.weight", (ffn, 128)))
    yield f"{mlp}.down_proj.weight", (128, ffn)


def text_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every name of the language model with its multi-token prediction layers."""
    yield from (
        ("model.embed_tokens.weight", (352, 128)),
        ("model.norm.weight", (128,)),
        ("lm_head.weight", (352, 128)),
    )
    for layer, kind in enumerate(KINDS):
        for name, shape in layer_shapes(kind, experts=3 <= layer < LAYERS):
            yield f"model.layers.{layer}.{name}", shape
        if layer >= LAYERS:
            more = {"enorm": (128,), "hnorm": (128,), "eh_proj": (128, 256), "transformer.shared_head.norm": (128,)}
            more |= {"transformer.shared_head.output": (352, 128)}
            yield from ((f"model.layers.{layer}.{name}.weight", shape) for name, shape in more.items())


def vision_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """The vision tower and its projector, as the releases name them."""
    for block in range(2):
        inside = {"attn.in_proj": (72, 24), "attn.out_proj": (24, 24), "mlp.c_fc": (48, 24), "mlp.c_proj": (24, 48)}
        for name, shape in inside.items():
            at, separator = (
                f"vision_model.transformer.resblocks.{block}.{name}",
                "_" if name.endswith("in_proj") else ".",
            )
            yield from ((f"{at}{separator}weight", shape), (f"{at}{separator}bias", shape[:1]))
        for name in ("ln_1", "ln_2"):
            yield from (
                (f"vision_model.transformer.resblocks.{block}.{name}.{leaf}", (24,)) for leaf in ("weight", "bias")
            )
        yield from ((f"vision_model.transformer.resblocks.{block}.ls_{one}.gamma", (24,)) for one in (1, 2))
    yield from ((f"vision_model.ln_pre.{leaf}", (24,)) for leaf in ("weight", "bias"))
    yield from (("vision_model.conv1.weight", (24, 3, 14, 14)), ("vision_model.positional_embedding", (4, 24)))
    yield from (("vision_model.vit_downsampler1.weight", (48, 24, 3, 3)), ("vision_model.vit_downsampler1.bias", (48,)))
    yield from (("vision_model.vit_downsampler2.weight", (96, 48, 3, 3)), ("vision_model.vit_downsampler2.bias", (96,)))
    yield "vit_large_projector.weight", (128, 96)


def published(config: Any) -> Published:
    """Every tensor; the router's bias alone is float32."""
    shapes = [*text_shapes(), *(vision_shapes() if config.vision else ())]
    return ((name, shape, F32 if name.endswith("router_bias") else BF16) for name, shape in shapes)


CONFIG, MODEL = classes("step3p5", "Named", published)


def value(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Norms around 0, as they are stored minus one; selection biases that bfloat16 would round."""
    if name.endswith("router_bias"):
        return 3 + 0.1 * torch.randn(tensor.shape)
    if "norm" in name and tensor.dim() == 1:
        return (0.2 * torch.randn(tensor.shape)).to(dtype)
    return random(name, tensor, dtype)


def multimodal(config: dict[str, Any]) -> dict[str, Any]:
    """As 3.7 is released: its text_config does not say that norms are stored minus one, nor whether heads are tied."""
    text = {key: value for key, value in TEXT.items() if key not in ("zero_centered", "tie_word_embeddings")}
    return {
        "architectures": ["Step3p7ForConditionalGeneration"],
        "model_type": "step3p7",
        "torch_dtype": "bfloat16",
        "image_token_id": 349,
        "understand_projector_stride": 2,
        "projector_bias": False,
        "vision_config": dict(VISION),
        "text_config": text,
    }


_CASE = Case(
    lambda: CONFIG(vision=False),
    value=value,
    auto=MODEL,
    edit=lambda config: dict(TEXT),
)
CASES = {"step3p5": _CASE, "step3p7": replace(_CASE, config=lambda: CONFIG(vision=True), edit=multimodal)}

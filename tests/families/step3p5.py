"""Step-3.5-Flash and Step-3.7-Flash, of which transformers 5.12 has no class.

The forward pass of the text model is in the equations of transformers 5.24, whose logits it has to 1e-6 (run by hand).
"""

from dataclasses import replace

import torch
from releases.record import load

from families.by_name import classes
from families.case import Case, random

LAYERS, DRAFTS = 12, 2
FULL, SLIDING = "full_attention", "sliding_attention"
KINDS = [FULL, SLIDING, SLIDING, SLIDING] * 3 + [SLIDING, FULL]
# Heads of full layers and of those with a window.
HEADS = {FULL: 10, SLIDING: 14}
# The release's, with other sizes.
TEXT = dict(load("stepfun-ai/Step-3.5-Flash").config)
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
VISION = {
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


CONFIG, MODEL = classes("step3p5", "Named", also="step3p7_vision")


def value(name, tensor, dtype):
    """Norms around 0, as they are stored minus one; selection biases that bfloat16 would round."""
    if name.endswith("router_bias"):
        return 3 + 0.1 * torch.randn(tensor.shape)
    if "norm" in name and tensor.dim() == 1:
        return (0.2 * torch.randn(tensor.shape)).to(dtype)
    return random(name, tensor, dtype)


def multimodal(config):
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


_CASE = Case(lambda: CONFIG(vision=False), value=value, auto=MODEL, edit=lambda config: dict(TEXT))
CASES = {"step3p5": _CASE, "step3p7": replace(_CASE, config=lambda: CONFIG(vision=True), edit=multimodal)}

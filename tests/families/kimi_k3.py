"""Kimi K3, of which no released transformers has a class. Nothing computes its logits."""

from releases.record import load

from families.by_name import LATENT, classes, multimodal, tower
from families.case import Case, random

# Layers counted from 1. The last two have latent attention both, as in the release.
KDA, FULL = [1, 2, 3, 5, 6, 7, 9, 10], [4, 8, 11, 12]
# The release's, with other sizes.
RELEASE = load("moonshotai/Kimi-K3").config
TEXT = {key: one for key, one in RELEASE["text_config"].items() if key != "quantization_config"} | LATENT
TEXT |= {"attn_res_block_size": 5, "num_experts": 12, "num_experts_per_token": 3, "qk_rope_head_dim": 16}
TEXT |= {"routed_expert_hidden_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TEXT["linear_attn_config"] |= {"full_attn_layers": FULL, "kda_layers": KDA, "head_dim": 4, "short_conv_kernel_size": 3}
VISION = RELEASE["vision_config"] | {"init_pos_emb_height": 4, "init_pos_emb_width": 4}
VISION |= {"mm_hidden_size": 32, "qkv_hidden_size": 32, "text_hidden_size": 128, "vt_hidden_size": 32}
VISION |= {"vt_intermediate_size": 48, "vt_num_attention_heads": 2, "vt_num_hidden_layers": 2}


NAME = "KimiK3ForConditionalGeneration"
CONFIG, MODEL = classes("kimi_k3", NAME)


def value(name, tensor, dtype):
    """As `random`. What is behind the 96 heads in `A_log` is 0."""
    result = random(name, tensor, dtype)
    if name.endswith("A_log"):
        result[96:] = 0
    return result


CASES = {
    "kimi_k3": Case(lambda: multimodal(CONFIG, NAME, TEXT, VISION), added=tower("kimi_k3"), value=value, auto=MODEL)
}

"""GLM-5.3-Flash, of which transformers has a class from 5.16 on. Nothing computes its logits."""

from releases.record import load

from families.by_name import LATENT, classes, multimodal, tower
from families.case import Case

KINDS = (["linear_attention"] * 3 + ["deepseek_sparse_attention"]) * 3
# The release's, with other sizes.
RELEASE = load("zai-org/GLM-5.3-Flash-BF16").config
TEXT = RELEASE["text_config"] | LATENT
TEXT |= {"hc_mult": 3, "index_head_dim": 16, "index_n_heads": 4, "index_topk": 12, "layer_types": KINDS}
TEXT |= {"n_routed_experts": 12, "n_shared_experts": 2, "num_experts_per_tok": 3, "pad_token_id": 0}
TEXT |= {"indexer_types": ["full"] * 12, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 10}
TEXT["linear_attn_config"] |= {"head_dim": 18, "num_heads": 6}
TEXT["linear_attn_config"] |= {"full_attn_layers": [3, 7, 11], "kda_layers": [0, 1, 2, 4, 5, 6, 8, 9, 10]}
VISION = RELEASE["vision_config"] | {"depth": 2, "hidden_size": 24, "image_size": 28, "num_heads": 2}
VISION |= {"intermediate_size": 40, "out_hidden_size": 128, "projection_intermediate_size": 40}


NAME = "Glm5NextForConditionalGeneration"
CONFIG, MODEL = classes("glm5_next", NAME)
CASES = {"glm5_next": Case(lambda: multimodal(CONFIG, NAME, TEXT, VISION), added=tower("glm5_next"), auto=MODEL)}

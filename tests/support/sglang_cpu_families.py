"""What SGLang 0.5.16 computes of test models of `families` on the CPU, with torch alone."""

_EXAONE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}
SIZES = {
    # Its class takes the hidden size divided by the heads for a head's size, whatever head_dim says.
    "mixtral": {"num_attention_heads": 4},
    # Its class reads the base of rotary embedding where transformers 5 does not write it, and takes that of K-EXAONE.
    **dict.fromkeys(("exaone_moe", "exaone_moe-groups-tied"), _EXAONE),
}
COMPUTED = (
    *("qwen2-untied", "qwen3-tied", "llama", "mistral", "glm4", "gemma3_text", "qwen2_5_vl", "qwen3_vl-tied"),
    *("qwen3_moe", "glm4_moe", "qwen3_vl_moe", "deepseek_v3", "moonlight", "glm4_moe_lite", "kimi_k2", "mixtral"),
    *("ministral3", "phi3", "hy_v3", "exaone_moe", "exaone_moe-groups-tied", "olmoe"),
)
# Classes whose window is one token longer than the config's, which here says one less for them.
LONGER_WINDOW = ("exaone_moe",)
DAILY = ("deepseek_v3",)

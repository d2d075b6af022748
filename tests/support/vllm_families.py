"""What vLLM 0.26.0 and 0.33.0 make of each test model of `families`."""

from families import HF_CASES

from support.vllm_runs import release

NEWER = (release() or ()) >= (0, 33)  # 0.33, not 0.26
# What vLLM says where it does not build or load a model at all.
SAID = {
    "mimo": "Transformers does not recognize this architecture",  # its config class comes with the release, as code
    "mimo-tied-two-layers": "Transformers does not recognize this architecture",
    "bailing_moe": "Transformers does not recognize this architecture",  # as MiMo's
    "bailing_moe_v2-tied": "Transformers does not recognize this architecture",
    # Neither vLLM nor the transformers that it wants has a class of these.
    "kimi_k3": "Transformers does not recognize this architecture",
    "glm5_next": "Transformers does not recognize this architecture",
    "kimi_k25": "Tried to load weights of size torch.Size([64])to a parameter of size",  # a stub of a vision tower
    "gemma3": "There is no module or parameter named 'vision_tower.embeddings'",  # transformers 5 names it so
    "qwen3_omni_moe_thinker": "Unrecognized configuration class",  # releases hold the thinker inside qwen3_omni_moe
    "step3p7": "Transformers does not recognize this architecture",  # its config class comes with the release
    "qwen3_vl_moe": "'Qwen3VLMoeTextConfig' object has no attribute 'norm_topk_prob'",  # releases have it
}
if not NEWER:
    SAID |= {
        "qwen3_5_text-tied": "'Qwen3_5TextConfig' object has no attribute 'vision_config'",
        "qwen3_5_moe_text": "'Qwen3_5MoeTextConfig' object has no attribute 'vision_config'",
    }
# What vLLM's class does not read of config.json (head_dim), and so leaves out: how many tensors.
LEFT_OUT = dict.fromkeys(("qwen2-tied", "qwen2-untied", "qwen2_moe", "qwen2_moe-dense-between"), 84)
# The class that vLLM makes of a model's multi-token prediction layers.
DRAFTS = {
    "glm4_moe-mtp": "Glm4MoeMTP",
    "deepseek_v3": "DeepSeekMTP",
    "deepseek_v32": "DeepseekV32MTP" if NEWER else "DeepSeekMTP",
    "glm_moe_dsa": "DeepseekV32MTP" if NEWER else "DeepSeekMTP",
    "glm_moe_dsa-shared": "DeepseekV32MTP" if NEWER else "DeepSeekMTP",
    "glm4_moe_lite": "Glm4MoeLiteMTP",
    "hy_v3": "HYV3MTP",
    "nemotron_h-latent": "NemotronHMTP",
    "deepseek_v4": "DeepSeekV4MTP",
    "qwen3_next": "Qwen3NextMTP",
    "qwen3_5": "Qwen3_5MTP",
    "qwen3_5_moe": "Qwen3_5MoeMTP",
}
# What vLLM says where it does not build that class: its config class cuts the kinds of these layers off.
DRAFT_REFUSED = {"step3p5": "IndexError: list index out of range (at vllm/model_executor/models/step3p5.py"}
if NEWER:
    DRAFTS["qwen3_5_moe_text"] = "Qwen3_5MoeMTP"
CLEAN = [name for name in HF_CASES if name not in SAID and name not in LEFT_OUT]

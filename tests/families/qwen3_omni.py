"""Qwen3-Omni, whole and its thinker alone."""

import torch
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeThinkerConfig

from families.case import MOE, SIZES, Case

# As released, `interleaved` beside the sections; a sum of 16 is half of a head.
ROPE = {
    "rope_type": "default",
    "rope_theta": 1000000.0,
    "mrope_section": [6, 5, 5],
    "mrope_interleaved": True,
    "interleaved": True,
}
AUDIO = {
    "d_model": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "num_mel_bins": 8,
    "downsample_hidden_size": 8,
    "output_dim": 128,
    "n_window": 4,
    "n_window_infer": 8,
    "conv_chunksize": 4,
}
VISION = {
    "depth": 2,
    "hidden_size": 24,
    "num_heads": 2,
    "intermediate_size": 40,
    "out_hidden_size": 128,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}


class Thinker:
    """transformers has no automatic class for the thinker."""

    @staticmethod
    def from_config(config, dtype):
        return Qwen3OmniMoeThinkerForConditionalGeneration._from_config(config, dtype=dtype)


def thinker(**more):
    text = SIZES | MOE | {"num_experts": 12, "rope_parameters": dict(ROPE)} | more
    tokens = {"audio_token_id": 349, "image_token_id": 350, "video_token_id": 351}
    return Qwen3OmniMoeThinkerConfig(text_config=text, audio_config=AUDIO, vision_config=VISION, **tokens)


def as_whole(content):
    """The thinker's config inside that of the whole model."""
    inner = {key: value for key, value in content.items() if key != "architectures"}
    # Keys that the class of transformers leaves out, and vLLM reads.
    inner["text_config"] = inner["text_config"] | {"tie_word_embeddings": False}
    inner["vision_config"] = inner["vision_config"] | {"image_size": 16, "apply_vit_abs_pos_embed": True}
    return {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "enable_audio_output": True,
        "thinker_config": inner,
        "talker_config": {"model_type": "qwen3_omni_moe_talker", "text_config": {"num_hidden_layers": 20}},
        "code2wav_config": {"hidden_size": 1024},
    }


def others(model, dtype):
    """A few tensors of the talker, whose layers are numbered as the thinker's, and of the vocoder."""
    shapes = {
        "talker.model.layers.0.mlp.experts.0.gate_proj.weight": (48, 64),
        "talker.model.layers.0.self_attn.q_proj.weight": (96, 64),
        "talker.codec_head.weight": (30, 64),
        "code2wav.decoder.0.conv.bias": (24,),
    }
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


WITNESS = "transformers' thinker, its towers among the carried tensors"
CASES = {
    "qwen3_omni_moe": Case(thinker, added=others, edit=as_whole, auto=Thinker, prefix="thinker.", witness=WITNESS),
    "qwen3_omni_moe_thinker": Case(
        lambda: thinker(norm_topk_prob=False, mlp_only_layers=[2, 7]), auto=Thinker, witness=WITNESS, fused=True
    ),
}

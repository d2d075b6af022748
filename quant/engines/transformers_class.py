"""Configs from which transformers computes another model than engines do, and where each reads the tie flag."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

from ckptkit.converters.config.values import flag, rope_of, sliding_layers
from ckptkit.converters.families import deepseek_v32, minimax_m2
from ckptkit.core.installation import package_release

TIED = "tie_word_embeddings"
_CHUNK = 128  # tokens that transformers' mixer of Nemotron-H computes together, in the releases


@dataclass(frozen=True)
class TieFlag:
    """The place in a multimodal config where each reader finds the tie flag.

    Sources: transformers 5.12 `PreTrainedModel.get_expanded_tied_weights_keys` and 4.57
    `tie_embeddings_and_encoder_decoder`; SGLang 0.5.16's and vLLM 0.26's classes, vLLM's `VllmConfig.with_hf_config`.
    """

    top: tuple[str, ...] = ("transformers", "SGLang", "vLLM")  # readers of the flag at the top
    text: tuple[str, ...] = ()  # readers of the flag in `text_config`
    absent: bool = False  # the default
    older: tuple[str, ...] = ()  # readers of earlier releases, which also look in `text_config`

    def read(self, config: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, bool]:
        """The flag for each reader but the older ones. Raises CkptkitError if a flag is not true or false."""
        at_top, inside = flag(config, TIED, self.absent), flag(text, TIED, self.absent)
        return dict.fromkeys(self.top, at_top) | dict.fromkeys(self.text, inside)


_IN_TEXT_BY_SGLANG = TieFlag(("transformers", "vLLM"), ("SGLang",), absent=True)
_OLDER = ("transformers 4",)
# By `model_type`; another multimodal model has a plain one.
TIES: Mapping[str, TieFlag] = {
    "gemma3": replace(_IN_TEXT_BY_SGLANG, older=_OLDER),
    **dict.fromkeys(("gemma4", "gemma4_unified"), _IN_TEXT_BY_SGLANG),
    # transformers runs the code of the release; vLLM's class never ties.
    "kimi_k25": TieFlag(top=(), text=("transformers", "SGLang")),
    "mistral3": TieFlag(absent=True),
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), TieFlag(older=_OLDER)),
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"), TieFlag(("transformers", "SGLang"), ("vLLM",))
    ),
}
# Settings with which transformers computes the same as engines and Megatron. Nemotron-H's kernels come from a hub, and
# without them it keeps time steps from falling below `time_step_min`.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "nemotron_h": {"use_mamba_kernels": False, "time_step_min": 1e-30, "chunk_size": _CHUNK}
}


def _glm_deviation(config: Mapping[str, Any], tokens: int) -> str | None:
    """transformers 5.12 turns GLM-5's indexer like DeepSeek's: https://github.com/huggingface/transformers/pull/46842."""
    sizes = deepseek_v32.read_dims(config).indexer
    wrong = package_release("transformers")[:2] <= (5, 12)
    if not wrong or sizes is None or not sizes.rope_interleaved or tokens <= sizes.top_k:
        return None
    return f"transformers {version('transformers')} ignores indexer_rope_interleave"


def _minimax_deviation(config: Mapping[str, Any], tokens: int) -> str | None:
    """transformers 5.12 reads the rotary part of a head only in `rope_parameters`."""
    if "partial_rotary_factor" in rope_of(config) or minimax_m2.read_dims(config).rotary_fraction == 1:
        return None
    return "transformers rotates complete heads of this model unless rope_parameters has a partial_rotary_factor"


def _nemotron_deviation(config: Mapping[str, Any], tokens: int) -> str | None:
    """transformers 5.12.1 passes the mixer's state wrongly from one chunk of tokens to the next; 5.17.0 does not."""
    if tokens <= _CHUNK or package_release("transformers") >= (5, 17):
        return None
    return f"transformers before 5.17 computes its Mamba mixer without kernels wrongly beyond {_CHUNK} tokens"


def _olmo_deviation(config: Mapping[str, Any], tokens: int) -> str | None:
    """transformers 5.12.1 also applies YaRN to layers with a window, unlike OLMo 3's report, vLLM and SGLang."""
    if rope_of(config)["rope_type"] == "default" or not sliding_layers(config, 4):
        return None
    return "transformers also scales rotary embedding in sliding-window layers (transformers#45945)"


_DEVIATIONS: Mapping[str, Callable[[Mapping[str, Any], int], str | None]] = {
    "glm_moe_dsa": _glm_deviation,
    "minimax_m2": _minimax_deviation,
    "nemotron_h": _nemotron_deviation,
    "olmo3": _olmo_deviation,
}


def transformers_deviation(config: Mapping[str, Any], tokens: int) -> str | None:
    """The reason why the installed transformers computes another model for prompts of `tokens` tokens, or None."""
    deviation = _DEVIATIONS.get(str(config.get("model_type")))
    return deviation and deviation(config, tokens)

"""Where transformers computes another model than engines and Megatron do, and where each reads the tie flag."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from ckptkit.converters.config.values import flag, rope_of, sliding_layers
from ckptkit.converters.families import deepseek_v32, minimax_m2
from ckptkit.core.installation import package_release

TIED = "tie_word_embeddings"
_CHUNK = 128  # tokens that transformers' mixer of Nemotron-H computes together, in the releases


@dataclass(frozen=True)
class TieFlag:
    """Readers that look at the top of a multimodal config, and those that look in `text_config`; what they take where
    it is `absent`. `older`: readers of releases before these, which look in `text_config` too.

    Sources: transformers 5.12 `PreTrainedModel.get_expanded_tied_weights_keys` and 4.57
    `tie_embeddings_and_encoder_decoder`; SGLang 0.5.16's and vLLM 0.26's classes, vLLM's `VllmConfig.with_hf_config`.
    """

    top: tuple[str, ...] = ("transformers", "SGLang", "vLLM")
    text: tuple[str, ...] = ()
    absent: bool = False
    older: tuple[str, ...] = ()

    def read(self, config: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, bool]:
        """What each reader takes, without the older ones. Raises CkptkitError where a flag is not true or false."""
        at_top, inside = flag(config, TIED, self.absent), flag(text, TIED, self.absent)
        return dict.fromkeys(self.top, at_top) | dict.fromkeys(self.text, inside)


_IN_TEXT_BY_SGLANG = TieFlag(("transformers", "vLLM"), ("SGLang",), absent=True)
_OLDER = ("transformers 4",)
# By `model_type`; another multimodal model has a plain one.
TIES: Mapping[str, TieFlag] = {
    "gemma3": TieFlag(("transformers", "vLLM"), ("SGLang",), absent=True, older=_OLDER),
    **dict.fromkeys(("gemma4", "gemma4_unified"), _IN_TEXT_BY_SGLANG),
    # transformers runs the code that comes with the release; vLLM's class never ties.
    "kimi_k25": TieFlag(top=(), text=("transformers", "SGLang")),
    "mistral3": TieFlag(absent=True),
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), TieFlag(older=_OLDER)),
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"), TieFlag(("transformers", "SGLang"), ("vLLM",))
    ),
}
# Settings with which transformers computes what engines and Megatron do. Nemotron-H's kernels come from a hub, and
# without them it keeps time steps from falling below `time_step_min`.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "nemotron_h": {"use_mamba_kernels": False, "time_step_min": 1e-30, "chunk_size": _CHUNK}
}


def _glm_unlike(config: Mapping[str, Any], tokens: int) -> str | None:
    """Where the indexer of GLM-5 chooses among the tokens, transformers 5.12 turns it as DeepSeek's.

    Corrected after that release: https://github.com/huggingface/transformers/pull/46842
    """
    sizes = deepseek_v32.read_dims(config).indexer
    wrong = package_release("transformers")[:2] <= (5, 12)
    if not wrong or sizes is None or not sizes.rope_interleaved or tokens <= sizes.top_k:
        return None
    return f"transformers {version('transformers')} takes no notice of indexer_rope_interleave"


def _minimax_unlike(config: Mapping[str, Any], tokens: int) -> str | None:
    """transformers 5.12 reads the rotary part of a head in `rope_parameters` alone."""
    if "partial_rotary_factor" in rope_of(config) or minimax_m2.read_dims(config).rotary_fraction == 1:
        return None
    return "transformers turns whole heads of this model unless rope_parameters has a partial_rotary_factor"


def _nemotron_unlike(config: Mapping[str, Any], tokens: int) -> str | None:
    """transformers 5.12 carries the state of its mixer wrongly from one chunk of tokens to the next.

    Run: 5.12.1, and 5.17.0, which does not.
    """
    if tokens <= _CHUNK or package_release("transformers") >= (5, 17):
        return None
    return f"without kernels its Mamba mixer is right for {_CHUNK} tokens at most, before transformers 5.17"


def _olmo_unlike(config: Mapping[str, Any], tokens: int) -> str | None:
    """transformers 5 gives YaRN to the layers with a window too, from the first token on.

    Its own class says that they have none, as OLMo 3's report does; vLLM and SGLang give them none. Run: 5.12.1.
    """
    if rope_of(config)["rope_type"] == "default" or not sliding_layers(config, 4):
        return None
    return "transformers scales rotary embedding in layers with a window too (transformers#45945)"


_UNLIKE: Mapping[str, Callable[[Mapping[str, Any], int], str | None]] = {
    "glm_moe_dsa": _glm_unlike,
    "minimax_m2": _minimax_unlike,
    "nemotron_h": _nemotron_unlike,
    "olmo3": _olmo_unlike,
}


def transformers_deviation(config: Mapping[str, Any], tokens: int) -> str | None:
    """Why transformers, as installed, computes another model from a config, for prompts of so many tokens; or None."""
    unlike = _UNLIKE.get(str(config.get("model_type")))
    return None if unlike is None else unlike(config, tokens)

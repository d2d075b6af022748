"""Kimi K2.5: a Kimi K2 language model under `language_model.`, beside a vision tower and its projector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptkit.core.errors import CkptkitError
from converters.blocks.decoder import ROTARY_FREQUENCIES
from converters.config.dims import ModelDims
from converters.config.tie import TieFlag
from converters.config.values import flag, text_part
from converters.families.deepseek import deepseek_v3
from converters.family import ModelFamily

_TEXT_TYPES = ("kimi_k2", "deepseek_v3")
# Those of Kimi K2.5 and 2.6: with the language model's alone, and with what is beside it.
_IGNORE = deepseek_v3.PUBLISHED_IGNORE | {"re:vision_tower.*", "re:mm_projector.*"}
_RELEASE = replace(
    deepseek_v3.RELEASE,
    root="language_model.model.",
    head="language_model.lm_head",
    nested=True,
    older="language_model.layers.",  # nvidia/Kimi-K2.5-NVFP4; `hf_to_sglang_mapper` and `hf_to_vllm_mapper`
    published_ignore=(deepseek_v3.PUBLISHED_IGNORE, _IGNORE, _IGNORE - {"lm_head"} | {"re:.*lm_head.*"}),
)


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of the language model of a kimi_k25 config.

    Source: the `text_config` of its release, and SGLang's `kimi_k25.py`.
    """
    text = config.get("text_config")
    if not isinstance(text, dict) or text.get("model_type") not in _TEXT_TYPES:
        raise CkptkitError(
            "config.json: text_config of kimi_k25 is not that of a kimi_k2 model", "compare it with the release"
        )
    part, _ = text_part(config)
    tied = flag(text, "tie_word_embeddings", False)
    return replace(deepseek_v3.read_dims(part), tied=tied, root=_RELEASE.root, head=f"{_RELEASE.head}.weight")


FAMILIES = (
    ModelFamily(
        ("kimi_k25",),
        ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
        read_dims,
        deepseek_v3.mappings,
        carried=("vision_tower.", "mm_projector."),
        carried_ends=ROTARY_FREQUENCIES,
        # transformers runs the code that comes with the release; vLLM's class never ties.
        tie=TieFlag(top=(), text=("transformers", "SGLang")),
        release=_RELEASE,
        engines={
            "sglang": replace(
                deepseek_v3.SGLANG,
                root=("language_model.", ""),
                entries=((_RELEASE.older, f"{_RELEASE.root}layers."),),
            )
        },
    ),
)

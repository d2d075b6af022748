"""Where the readers of a multimodal config look for `tie_word_embeddings`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from converters.config.values import flag

KEY = "tie_word_embeddings"


@dataclass(frozen=True)
class TieFlag:
    """Readers that look at the top, and those that look in `text_config`; what they take where it is `absent`.

    `older`: readers of releases before these, which look in `text_config` too.

    Sources: transformers 5.12 `PreTrainedModel.get_expanded_tied_weights_keys` and 4.57
    `tie_embeddings_and_encoder_decoder`; SGLang 0.5.16's and vLLM 0.26's classes, vLLM's `VllmConfig.with_hf_config`.
    """

    top: tuple[str, ...] = ("transformers", "SGLang", "vLLM")
    text: tuple[str, ...] = ()
    absent: bool = False
    older: tuple[str, ...] = ()

    def read(self, config: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, bool]:
        """What each reader takes, without the older ones. Raises CkptkitError where a flag is not true or false."""
        at_top, inside = flag(config, KEY, self.absent), flag(text, KEY, self.absent)
        return dict.fromkeys(self.top, at_top) | dict.fromkeys(self.text, inside)

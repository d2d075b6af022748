"""Facts about releases that transformers' class of a model does not contain, as rows.

`converters.by_class` adds them to what the class contains: fields of `ModelFamily` and of its `Release`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from converters.config.values import rope_of, sliding_layers, text_part
from converters.family import TieFlag


@dataclass(frozen=True)
class Known:
    """Fields of a `model_type` in place of those that follow from its class: of `ModelFamily`, and of `Release`.

    `configs`: of a config those whose classes have, together, all of the tensors; usually the same one.
    """

    family: Mapping[str, Any] = field(default_factory=dict)
    release: Mapping[str, Any] = field(default_factory=dict)
    configs: Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]] = lambda config: (config,)


def _olmo3_unlike_transformers(config: Mapping[str, Any], tokens: int) -> str | None:
    """transformers 5 gives YaRN to the layers with a window too, from the first token on.

    Its own class says that they have none, as OLMo 3's report does; vLLM and SGLang give them none. Run: 5.12.1.
    """
    if rope_of(config)["rope_type"] == "default" or not sliding_layers(config, 4):
        return None
    return "transformers scales rotary embedding in layers with a window too (transformers#45945)"


# Marks a config of Gemma 4 whose tensors have keys and values in layers that use those of another.
_STORED = "_stores_unused_keys"


def _gemma4_with_unused(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with the keys and values of layers that use another's, which readers but vLLM leave aside.

    Releases of E2B and E4B store them; their QAT releases, and whatever transformers saves, do not.
    """
    return {**config, _STORED: True} if text_part(config)[0].get("num_kv_shared_layers") else config


def _gemma4_configs(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The model, and for the keys that nobody uses the same with no layer that shares them."""
    plain = {key: value for key, value in config.items() if key != _STORED}
    yield plain
    if _STORED in config:
        own = {"num_kv_shared_layers": 0, "use_double_wide_mlp": False}
        text = plain.get("text_config")
        yield plain | ({"text_config": {**text, **own}} if isinstance(text, Mapping) else own)


_GEMMA4 = Known(
    {"with_unused": _gemma4_with_unused},
    {"kept": (".per_layer_input_gate", ".per_layer_projection", ".per_layer_model_projection")},
    lambda config: tuple(_gemma4_configs(config)),
)
_GEMMA4_TIE = TieFlag(("transformers", "vLLM"), ("SGLang",), absent=True)
KNOWN: Mapping[str, Known] = {
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), _GEMMA4),
    **dict.fromkeys(("gemma4", "gemma4_unified"), replace(_GEMMA4, family={**_GEMMA4.family, "tie": _GEMMA4_TIE})),
    "olmo3": Known({"unlike_transformers": _olmo3_unlike_transformers}),
}

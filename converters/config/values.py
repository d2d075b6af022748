"""Reads values of an HF config under all spellings of transformers v4 and v5, and rejects invalid ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ckptkit.converters.config.bounds import MAX_SIZE
from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened

_REQUIRED: Any = object()
_MAX_NUMBER = 1e300
NESTED_ROOT = "model.language_model."  # prefix of the language model in a multimodal model


def integer(config: Mapping[str, Any], key: str, default: Any = _REQUIRED) -> int:
    """An integer of the config; absent and null mean `default`. Raises CkptkitError naming the key."""
    value = _value(config, key, default)
    if type(value) is not int:
        raise wrong(key, value, "a whole number")
    if abs(value) > MAX_SIZE:
        raise wrong(key, value, f"at most {MAX_SIZE}")
    return value


def number(config: Mapping[str, Any], key: str, default: Any = _REQUIRED) -> float:
    """A finite number of the config; absent and null mean `default`. Raises CkptkitError naming the key."""
    value = _value(config, key, default)
    if type(value) not in (int, float) or not abs(value) <= _MAX_NUMBER:  # NaN is not
        raise wrong(key, value, "a finite number")
    return float(value)


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """A switch of the config; absent and null mean `default`. Raises CkptkitError naming the key."""
    value = _value(config, key, default)
    if type(value) is not bool:
        raise wrong(key, value, "true or false")
    return value


def require(
    config: Mapping[str, Any], model: str, only: Mapping[str, Any], why: str = "", strict: bool = False
) -> None:
    """Raises CkptkitError for a key with a different value than in `only`, which the model's rules require.

    A tuple lists several allowed values. Absent and null mean the value in `only`; with `strict`, null does not.
    """
    for key, value in only.items():
        allowed = value if isinstance(value, tuple) else (value,)
        actual = config.get(key, allowed[0])
        if actual is None and not strict:
            continue
        if isinstance(value, bool) and not isinstance(actual, bool) and actual is not None:
            raise wrong(key, actual, "true or false")
        if actual not in allowed or isinstance(actual, bool) != isinstance(allowed[0], bool):
            hint = why or f"the releases have {key} {as_json(allowed[0])}"
            raise unsupported(f"{model} with {key} {as_json(actual)}", hint)


def unsupported(what: str, why: str) -> CkptkitError:
    """The error for a config feature without rules, with the reason or the fix."""
    return CkptkitError(f"config.json: {what} is not supported", why, code="unsupported")


def wrong(key: str, value: Any, allowed: str) -> CkptkitError:
    """The error for an invalid value."""
    return CkptkitError(f"config.json: {key} is {shortened(value)}, not {allowed}", "compare it with the release")


def as_json(value: Any) -> str:
    """A value in JSON, shortened."""
    return json.dumps(value) if value is None or isinstance(value, bool) else shortened(value)


def agreed(
    config: Mapping[str, Any], keys: Sequence[str], default: Any = _REQUIRED, read: Callable[..., Any] = integer
) -> Any:
    """A value that engines or releases have under several keys. Raises CkptkitError if two of them differ."""
    values = {key: read(config, key) for key in keys if config.get(key) is not None}
    if len(set(values.values())) > 1:
        message = f"config.json: {' but '.join(f'{key} is {value:g}' for key, value in values.items())}"
        raise CkptkitError(message, "make these keys equal: each engine reads only one")
    return next(iter(values.values())) if values else read(config, keys[0], default)


def kinds_of_layers(config: Mapping[str, Any], key: str, known: Collection[Any]) -> list[Any] | None:
    """The list under a key with one word or number per layer, or None if it is absent or null.

    Raises CkptkitError for a list of another length, and for values not in `known`.
    """
    kinds, layers = config.get(key), integer(config, "num_hidden_layers")
    if kinds is None:
        return None
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or any(kind not in known or isinstance(kind, bool) for kind in kinds)
    ):
        raise wrong(key, kinds, f"a list of {' or '.join(map(str, known))} for {layers} layers")
    return kinds


def agreed_by_layer(config: Mapping[str, Any], spellings: Mapping[str, Mapping[Any, Any]]) -> tuple[Any, ...] | None:
    """The kind of each layer, from lists under one or several keys, or None if all are absent.

    `spellings`: for each key, its words -> kinds. Raises CkptkitError like `kinds_of_layers`, and if two lists differ.
    """
    lists = {}
    for key, words in spellings.items():
        if (kinds := kinds_of_layers(config, key, tuple(words))) is not None:
            lists[key] = tuple(words[kind] for kind in kinds)
    if len(set(lists.values())) > 1:
        message = f"config.json: {' and '.join(lists)} describe different layers"
        raise CkptkitError(message, "make these keys agree: each engine reads only one")
    return next(iter(lists.values()), None)


def places(kinds: Iterable[Any], *selected: Any) -> tuple[int, ...]:
    """The numbers, from 0, of the layers of the selected kinds."""
    return tuple(layer for layer, kind in enumerate(kinds) if kind in selected)


def _value(config: Mapping[str, Any], key: str, default: Any) -> Any:
    value = config.get(key)
    if value is None and default is _REQUIRED:
        hint = f"restore it from the release; a {config.get('model_type', 'rope')} config requires it"
        raise CkptkitError(f"config.json has no {key!r}", hint)
    return default if value is None else value


def class_of(config: Mapping[str, Any]) -> str:
    """The first class in `architectures` of a config.json, or empty."""
    classes = config.get("architectures")
    return classes[0] if isinstance(classes, list) and classes and isinstance(classes[0], str) else ""


def text_part(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The language model's config (`text_config`, or the config of a `…_text` model), and the HF prefix of its names.

    `tie_word_embeddings` is read from the top level only, like in transformers. Raises CkptkitError if a multimodal
    config has no `text_config`.
    """
    if str(config.get("model_type")).endswith("_text"):
        return config, "model."
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise wrong("text_config", text, "an object")
    tied = flag(config, "tie_word_embeddings", False)
    return {**text, "model_type": config.get("model_type"), "tie_word_embeddings": tied}, NESTED_ROOT


def text_config_of(config: Mapping[str, Any], *model_types: str) -> Mapping[str, Any]:
    """The `text_config` of a multimodal config. Raises CkptkitError if it is missing or not of these `model_types`."""
    text = config.get("text_config")
    if not isinstance(text, Mapping) or (model_types and text.get("model_type") not in model_types):
        kinds = f" of {' or '.join(model_types)}" if model_types else ""
        raise CkptkitError(
            f"config.json: {config.get('model_type')} has no text_config{kinds}", "restore it from the release"
        )
    return text


def language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's config: `text_config`, also inside `thinker_config`, or the config. Accepts any config."""
    thinker = config.get("thinker_config")
    inner = thinker if isinstance(thinker, Mapping) else config
    text = inner.get("text_config")
    return text if isinstance(text, Mapping) and text else config


def window_of(config: Mapping[str, Any], absent: int | None = None) -> int | None:
    """The number of tokens that attention sees, including the query's (`sliding_window`), or None for all.

    null and a window as long as the model's context mean all; `absent` is the value for a config without the key.
    Raises CkptkitError naming the key.
    """
    window = config.get("sliding_window", absent)
    if window is None:
        return None
    if type(window) is not int or window < 1:
        raise wrong("sliding_window", window, "a positive whole number")
    return window if window < integer(config, "max_position_embeddings") else None


def sliding_layers(config: Mapping[str, Any], every: int) -> tuple[int, ...]:
    """Layers with a sliding window: from `layer_types`, or if that is absent all but every `every`-th from 1.

    Raises CkptkitError for a list of another length, and for a kind of attention that is neither sliding nor full.
    """
    if every < 1:
        raise wrong("sliding_window_pattern", every, "a positive whole number")
    kinds = kinds_of_layers(config, "layer_types", ("sliding_attention", "full_attention"))
    if kinds is not None:
        return places(kinds, "sliding_attention")
    return tuple(layer for layer in range(integer(config, "num_hidden_layers")) if (layer + 1) % every)


def without_windows(config: Mapping[str, Any]) -> None:
    """Raises CkptkitError if a Qwen config enables sliding windows, which `sliding_window` does not do by itself."""
    if flag(config, "use_sliding_window", False) or "sliding_attention" in (config.get("layer_types") or ()):
        hint = "remove them if you train with shorter contexts than the window; no release has them"
        raise unsupported(f"{config['model_type']} with sliding windows (use_sliding_window, layer_types)", hint)


def rope_of(config: Mapping[str, Any], default_theta: float = 10000.0) -> dict[str, Any]:
    """Rotary settings, from `rope_parameters` (transformers v5) or `rope_theta` and `rope_scaling` (v4).

    `default_theta`: the base for a config without one. Raises CkptkitError if both spellings are present with different
    theta: transformers v4 and v5 would run different models.
    """
    v5, v4 = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    for key, value in (("rope_parameters", v5), ("rope_scaling", v4)):
        if not isinstance(value, dict):
            raise wrong(key, value, "an object")
    theta4, theta5 = config.get("rope_theta"), v5.get("rope_theta")
    if theta4 is not None and theta5 is not None and number(config, "rope_theta") != number(v5, "rope_theta"):
        message = f"config.json: rope_theta is {theta4}, but in rope_parameters it is {theta5}"
        raise CkptkitError(message, "make both equal: transformers v4 reads the first and v5 the second")
    rope = {**v4, **v5}
    rope["rope_theta"] = number(v5, "rope_theta", number(config, "rope_theta", default_theta))
    rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    return rope


def rotary_fraction(config: Mapping[str, Any], head_dim: int) -> float:
    """The rotary part of a head: `rotary_dim` in the releases, `partial_rotary_factor` in transformers v5.

    Raises CkptkitError if they differ. transformers 5.12 ignores `rotary_dim`: it applies rope to complete heads.
    """
    key = "partial_rotary_factor"
    fractions = {number(part, key) for part in (rope_of(config), config) if part.get(key) is not None}
    fractions |= {integer(config, "rotary_dim") / max(head_dim, 1)} if config.get("rotary_dim") is not None else set()
    if len(fractions) > 1:
        raise CkptkitError(
            f"config.json: rotary_dim {config.get('rotary_dim')} (head_dim {head_dim}) and {key} rotate different "
            f"fractions of a head: {sorted(fractions)}",
            "make both equal: SGLang reads the first and transformers v5 the second",
        )
    return fractions.pop() if fractions else 1.0

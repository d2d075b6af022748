"""Reads values of an HF config, under every spelling that transformers v4 and v5 use, and refuses the rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ckptkit.converters.config.bounds import MAX_SIZE
from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened

_REQUIRED: Any = object()
_MAX_NUMBER = 1e300

# What stands before the names of the language model in a multimodal one.
NESTED_ROOT = "model.language_model."


def integer(config: Mapping[str, Any], key: str, default: Any = _REQUIRED) -> int:
    """A whole number of the config; absent and null mean `default`. Raises CkptkitError naming the key."""
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
    """Raises CkptkitError for a key with another value than `only` has for it: the one that a model's rules stand for.

    A tuple is several such values. Absent and null mean the value of `only`; with `strict` null is another value.
    """
    for key, value in only.items():
        known = value if isinstance(value, tuple) else (value,)
        found = config.get(key, known[0])
        if found is None and not strict:
            continue
        if isinstance(value, bool) and not isinstance(found, bool) and found is not None:
            raise wrong(key, found, "true or false")
        if found not in known or isinstance(found, bool) != isinstance(known[0], bool):
            raise unsupported(f"{model} with {key} {as_json(found)}", why or f"the releases have {as_json(known[0])}")


def unsupported(what: str, why: str) -> CkptkitError:
    """The refusal of something in a config that no rule here stands for, with the reason or the next move."""
    return CkptkitError(f"config.json: {what} is not supported", why, code="unsupported")


def wrong(key: str, value: Any, allowed: str) -> CkptkitError:
    """The refusal of a value that no reader can make sense of."""
    return CkptkitError(f"config.json: {key} is {shortened(value)}, not {allowed}", "compare it with the release")


def as_json(value: Any) -> str:
    """A value as config.json spells it, cut short."""
    return json.dumps(value) if value is None or isinstance(value, bool) else shortened(value)


def agreed(
    config: Mapping[str, Any], keys: Sequence[str], default: Any = _REQUIRED, read: Callable[..., Any] = integer
) -> Any:
    """A value that readers or releases know under several keys. Raises CkptkitError where two of them disagree."""
    stated = {key: read(config, key) for key in keys if config.get(key) is not None}
    if len(set(stated.values())) > 1:
        raise CkptkitError(
            f"config.json: {' but '.join(f'{key} is {value:g}' for key, value in stated.items())}",
            "readers look at one or the other; make them equal",
        )
    return next(iter(stated.values())) if stated else read(config, keys[0], default)


def kinds_of_layers(config: Mapping[str, Any], key: str, known: Collection[Any]) -> list[Any] | None:
    """The list of one word or number a layer under a key, or None where it is absent or null.

    Raises CkptkitError for a list of another length, and for what is not among the known.
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
    """What each layer is, by lists under one key or several, each with its own words for it; None without any.

    Raises CkptkitError as `kinds_of_layers`, and where two lists disagree.
    """
    found = {}
    for key, words in spellings.items():
        if (kinds := kinds_of_layers(config, key, tuple(words))) is not None:
            found[key] = tuple(words[kind] for kind in kinds)
    if len(set(found.values())) > 1:
        raise CkptkitError(
            f"config.json: {' and '.join(found)} name different layers",
            "readers look at one or the other; make them agree",
        )
    return next(iter(found.values()), None)


def places(kinds: Iterable[Any], *wanted: Any) -> tuple[int, ...]:
    """The numbers, from 0, of the layers that are of these kinds."""
    return tuple(layer for layer, kind in enumerate(kinds) if kind in wanted)


def _value(config: Mapping[str, Any], key: str, default: Any) -> Any:
    value = config.get(key)
    if value is None and default is _REQUIRED:
        raise CkptkitError(
            f"config.json has no {key!r}",
            f"a {config.get('model_type', 'rope')} config must state it; compare with the release",
        )
    return default if value is None else value


def class_of(config: Mapping[str, Any]) -> str:
    """The class that a config.json states first; empty where it states none."""
    stated = config.get("architectures")
    return stated[0] if isinstance(stated, list) and stated and isinstance(stated[0], str) else ""


def text_part(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The language model's part of a config, and the HF prefix of its names.

    That of a multimodal model, or the config itself.

    Whether embeddings are tied is said at the top, beside `text_config`, where transformers reads it; without it they
    are not, whatever `text_config` says. Raises CkptkitError when a multimodal config has no such part.
    """
    if str(config.get("model_type")).endswith("_text"):
        return config, "model."
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise wrong("text_config", text, "an object")
    tied = flag(config, "tie_word_embeddings", False)
    return {**text, "model_type": config.get("model_type"), "tie_word_embeddings": tied}, NESTED_ROOT


def text_config_of(config: Mapping[str, Any], *model_types: str) -> Mapping[str, Any]:
    """The `text_config` of a multimodal config, which must be of one of these kinds where any are given."""
    text = config.get("text_config")
    if not isinstance(text, Mapping) or (model_types and text.get("model_type") not in model_types):
        kinds = f" of {' or '.join(model_types)}" if model_types else ""
        raise CkptkitError(
            f"config.json: {config.get('model_type')} without a text_config{kinds}", "restore it from the release"
        )
    return text


def language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config says of the language model: its `text_config`, of the thinker where it has one, or the config.

    Checks nothing, so that it can be asked of any config.
    """
    thinker = config.get("thinker_config")
    inner = thinker if isinstance(thinker, Mapping) else config
    text = inner.get("text_config")
    return text if isinstance(text, Mapping) and text else config


def window_of(config: Mapping[str, Any], absent: int | None = None) -> int | None:
    """How many tokens attention sees, the query's own among them (`sliding_window`); None where that is all of them.

    null means all, and so does a window as long as the model's context; `absent` is what a config without the key
    means. Raises CkptkitError naming the key.
    """
    window = config.get("sliding_window", absent)
    if window is None:
        return None
    if type(window) is not int or window < 1:
        raise wrong("sliding_window", window, "a positive whole number")
    return window if window < integer(config, "max_position_embeddings") else None


def sliding_layers(config: Mapping[str, Any], every: int) -> tuple[int, ...]:
    """Layers with a sliding window: those that `layer_types` calls so.

    Where it is absent, all but each `every`-th, counted from 1.

    Raises CkptkitError for a list of another length, and for a kind of attention that is neither sliding nor full.
    """
    if every < 1:
        raise wrong("sliding_window_pattern", every, "a positive whole number")
    kinds = kinds_of_layers(config, "layer_types", ("sliding_attention", "full_attention"))
    if kinds is not None:
        return places(kinds, "sliding_attention")
    return tuple(layer for layer in range(integer(config, "num_hidden_layers")) if (layer + 1) % every)


def without_windows(config: Mapping[str, Any]) -> None:
    """Raises CkptkitError where a Qwen config turns sliding windows on.

    `sliding_window` alone, as in all releases, does not.
    """
    if flag(config, "use_sliding_window", False) or "sliding_attention" in (config.get("layer_types") or ()):
        raise unsupported(
            f"{config['model_type']} with use_sliding_window or such layers in layer_types",
            "no released model uses it; set it to false if you train with contexts shorter than the window",
        )


def rope_of(config: Mapping[str, Any], default_theta: float = 10000.0) -> dict[str, Any]:
    """Rotary settings under either spelling.

    `rope_parameters` (transformers v5) or `rope_theta` and `rope_scaling` (v4).

    `default_theta` is what a config means that states none. Raises CkptkitError when both are there and disagree on
    theta: readers of v4 and v5 would then run different models.
    """
    v5, v4 = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    for key, value in (("rope_parameters", v5), ("rope_scaling", v4)):
        if not isinstance(value, dict):
            raise wrong(key, value, "an object")
    theta4, theta5 = config.get("rope_theta"), v5.get("rope_theta")
    if theta4 is not None and theta5 is not None and number(config, "rope_theta") != number(v5, "rope_theta"):
        raise CkptkitError(
            f"config.json: rope_theta is {theta4} but rope_parameters says {theta5}",
            "transformers v4 reads the first and v5 the second; make them equal",
        )
    rope = {**v4, **v5}
    rope["rope_theta"] = number(v5, "rope_theta", number(config, "rope_theta", default_theta))
    rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    return rope


def rotary_fraction(config: Mapping[str, Any], head_dim: int) -> float:
    """The rotary part of a head: `rotary_dim` in the releases, `partial_rotary_factor` in transformers v5.

    Raises CkptkitError where they disagree.

    transformers 5.12 takes no notice of `rotary_dim`: it runs a release's own config.json with rope over whole heads.
    """
    key = "partial_rotary_factor"
    stated = {number(place, key) for place in (rope_of(config), config) if place.get(key) is not None}
    stated |= {integer(config, "rotary_dim") / max(head_dim, 1)} if config.get("rotary_dim") is not None else set()
    if len(stated) > 1:
        raise CkptkitError(
            f"config.json: rotary_dim is {config.get('rotary_dim')} of {head_dim} but {key} says otherwise: "
            f"{sorted(stated)} of a head",
            "SGLang reads the first and transformers v5 the second; make them equal",
        )
    return stated.pop() if stated else 1.0

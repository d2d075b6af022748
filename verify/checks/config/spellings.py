"""CK704, CK705 and CK731: settings in two places of a config agree; keys that SGLang reads are present."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ckptkit.converters.config.values import flag, language_part
from ckptkit.converters.registry import FAMILIES, family_of
from ckptkit.core.errors import CkptkitError
from ckptkit.quant.engines.registry import engine_class
from ckptkit.quant.engines.transformers_class import TIED, TIES, TieFlag
from ckptkit.verify.checks.config.tokenizer import side_of
from ckptkit.verify.core.check import CannotCheck, Issue, NotApplicable, Subject, check, only_if, warning_if
from ckptkit.verify.core.report import CheckResult
from ckptkit.verify.evidence.expected import raw_config_of

# Endings of the output layer's name in HF and in Megatron.
_HEADS = ("lm_head.weight", "output_layer.weight")
# Settings that a multimodal config may have both at the top and in text_config.
_TWICE = (
    *(TIED, "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_theta", "num_experts_per_tok"),
    *("n_routed_experts", "num_experts", "num_nextn_predict_layers"),
)


def _config(subject: Subject) -> Mapping[str, Any]:
    """The raw config.json; empty if it cannot be read, which CK101 reports."""
    with suppress(CkptkitError):
        return side_of(subject).config
    return {}


def _parts(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The config and its part for the language model, by prefix."""
    text = config.get("text_config")
    return {"": config, **({"text_config.": text} if isinstance(text, Mapping) else {})}


def _spelled_twice(subject: Subject) -> dict[str, Mapping[str, Any]]:
    """Those of `_parts` with rotary settings in both spellings."""
    old = {"rope_theta", "rope_scaling"}
    parts = _parts(_config(subject)).items()
    return {prefix: part for prefix, part in parts if "rope_parameters" in part and old & part.keys()}


_needs_two_spellings = only_if(_spelled_twice, "config.json has its rotary settings in one spelling only")


@check("CK704", preflight=True, applies_to=_needs_two_spellings)
def rope_spellings_agree(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Base, kind, factor and every other rotary setting, of v4 against v5."""
    where = side_of(subject).root / "config.json"
    for prefix, part in _spelled_twice(subject).items():
        for (old, before), (new, after) in _rope_pairs(part):
            result.compared()
            if before != after:
                yield Issue(f"{prefix}{new} = {before}, as in {prefix}{old}", f"{prefix}{new} = {after}", file=where)


def _rope_pairs(holder: Mapping[str, Any]) -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Name and value in v4's spelling and in v5's, for every setting in both."""
    v5 = _mapping(holder.get("rope_parameters"))
    nested = {kind: part for kind, part in v5.items() if isinstance(part, Mapping)}
    if nested:  # Gemma 3 has settings by the kind of layer
        local = _mapping(nested.get("sliding_attention"))
        if "rope_local_base_freq" in holder and "rope_theta" in local:
            yield (
                ("rope_local_base_freq", holder["rope_local_base_freq"]),
                ("rope_parameters.sliding_attention.rope_theta", local["rope_theta"]),
            )
        v5 = _mapping(nested.get("full_attention"))
    v4 = _mapping(holder.get("rope_scaling"))
    yield ("rope_scaling.rope_type", _kind(v4)), ("rope_parameters.rope_type", _kind(v5))
    for key in ("rope_theta", "partial_rotary_factor"):
        if holder.get(key) is not None and v5.get(key) is not None:
            yield (key, holder[key]), (f"rope_parameters.{key}", v5[key])
    for key in sorted((v4.keys() & v5.keys()) - {"type", "rope_type"}):
        yield (f"rope_scaling.{key}", v4[key]), (f"rope_parameters.{key}", v5[key])


def _kind(rope: Mapping[str, Any]) -> Any:
    """The kind of scaling. v4 has a kind for multimodal rotary embedding, v5 has not."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    return "default" if kind == "mrope" else kind


def _mapping(content: Any) -> Mapping[str, Any]:
    return content if isinstance(content, Mapping) else {}


def _has_two_places(subject: Subject) -> None:
    config = _config(subject)
    text = _mapping(config.get("text_config"))
    has_tie = TIED in text or TIED in config
    if not any(key in config and key in text for key in _TWICE) and (not has_tie or _tie_flag(config) is None):
        raise NotApplicable("no setting of the language model is in config.json twice")


def _tie_flag(config: Mapping[str, Any]) -> TieFlag | None:
    """The places where readers look for the tie flag of a known multimodal config, else None."""
    model_type = str(config.get("model_type"))
    family = FAMILIES.get(model_type)
    if family is None:
        return TIES.get(model_type)
    nested = family.release is None or family.release.nested
    return TIES.get(model_type, TieFlag()) if nested and isinstance(config.get("text_config"), Mapping) else None


@check("CK705", preflight=True, applies_to=_has_two_places)
def text_config_agrees(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Tied embeddings, sizes and switches in both places; the tie flag also in one place.

    transformers v5 writes its default tie flag, true, into the text_config of models that it reads as not tied. That
    is right if all readers use the flag at the top.
    """
    config = _config(subject)
    text = _mapping(config.get("text_config"))
    where, tie = side_of(subject).root / "config.json", _tie_flag(config)
    if tie is not None and (TIED in config or TIED in text):
        result.compared()
        try:
            for issue in _tie_issues(tie, config, text, subject, result):
                yield replace(issue, file=where)
        except CkptkitError as error:
            problem = error.message.removeprefix("config.json: ")
            yield Issue(f"{TIED} = true or false", problem, error.hint or "", file=where)
    for key in _TWICE:
        if key in config and key in text and not (key == TIED and tie is not None):
            result.compared()
            is_default = key == TIED and config[key] is False and text[key] is True
            if config[key] != text[key] and not is_default:
                expected, actual = f"{key} = {config[key]}, as at the top", f"text_config.{key} = {text[key]}"
                yield Issue(expected, actual, file=where)


def _has_head(subject: Subject) -> bool:
    """Whether an output layer is stored; false if the names cannot be read, which CK111 reports."""
    with suppress(CkptkitError):
        return any(name.endswith(_HEADS) for name in subject.specs)
    return False


def _tie_issues(
    tie: TieFlag, config: Mapping[str, Any], text: Mapping[str, Any], subject: Subject, result: CheckResult
) -> Iterator[Issue]:
    """Readers that disagree, and a flag that no reader reads."""
    read = tie.read(config, text)
    hint = f"set {TIED} at the top and in text_config, true where the output layer is the embedding, else false"
    readers = {value: ", ".join(reader for reader, taken in read.items() if taken is value) for value in (True, False)}
    flags = {f"{prefix}{TIED}": part[TIED] for prefix, part in _parts(config).items() if part.get(TIED) is not None}
    listed = ", ".join(f"{name} = {value}" for name, value in flags.items())
    if readers[True] and readers[False]:
        actual = f"{listed}: true for {readers[True]}, false for {readers[False]}"
        yield Issue(f"the same {TIED} for every reader", actual, hint)
        return
    value = next(iter(read.values()))
    is_default = value is False and flags.get(TIED) is False  # transformers' default is in text_config
    if not is_default and any(one is not value for one in flags.values()):
        places = " and ".join(f"{prefix}{TIED}" for prefix, used in (("", tie.top), ("text_config.", tie.text)) if used)
        expected = f"{TIED} at the place that is read: {', '.join(read)} read only {places}"
        severity = warning_if(len(flags) < 2 and _has_head(subject))
        yield Issue(expected, f"{listed}, but these readers use {value}", hint, severity=severity)
    elif tie.older and flag(text, TIED, tie.absent) is not value:
        result.note(f"{', '.join(tie.older)} reads text_config.{TIED} as {not value}, other readers read {value}")


def keys_of(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The keys that SGLang's class needs, with values, and those missing. Raises CkptkitError if they are unknown."""
    family_of(config)
    text = language_part(config)
    prefix = "" if text is config else "text_config."
    keys = engine_class("sglang", config).keys({**text, "model_type": config["model_type"]})
    lacking = {f"{prefix}{key}": value for key, value in keys.items() if text.get(key) is None}
    return {f"{prefix}{key}": value for key, value in keys.items()}, lacking


def _sglang_reads_more(subject: Subject) -> None:
    if subject.kind == "megatron" and "sglang" not in subject.against:
        raise NotApplicable("SGLang reads config.json of HF directories only")
    if "sglang" not in subject.against and subject.not_for_sglang:
        raise NotApplicable(subject.not_for_sglang)
    try:
        needed, _ = keys_of(raw_config_of(subject))
    except (CkptkitError, CannotCheck):
        raise NotApplicable("config.json is missing or cannot be used (CK101)") from None
    if not needed:
        raise NotApplicable("transformers writes every key that SGLang reads for this model family")


@check("CK731", preflight=True, applies_to=_sglang_reads_more)
def keys_there(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Each key of the family's table; null counts as missing."""
    needed, lacking = keys_of(raw_config_of(subject))
    result.compared(len(needed))
    if lacking:
        them, where = "it" if len(lacking) == 1 else "them", subject.config_root / "config.json"
        hint = f"add {them}, or take config.json from the release: transformers 5 omits {them} when it saves"
        yield Issue(f"{format_keys(lacking)}, which SGLang's class reads", f"no {', '.join(lacking)}", hint, file=where)


def format_keys(keys: Mapping[str, Any]) -> str:
    """The keys with their values in JSON."""
    return ", ".join(f'"{key}": {json.dumps(value)}' for key, value in keys.items())

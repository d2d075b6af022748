"""CK704, CK705 and CK731: settings that a config states twice agree; keys that SGLang reads are there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckptkit.converters.config.values import flag, language_part
from ckptkit.converters.registry import FAMILIES, family_of
from ckptkit.core.errors import CkptkitError
from ckptkit.quant.engines.registry import engine_class
from ckptkit.quant.engines.transformers_class import TIED, TIES, TieFlag
from ckptkit.verify.checks.config.tokenizer import side_of
from ckptkit.verify.core.check import Tally, check, where
from ckptkit.verify.core.issue import Issue, warning_if
from ckptkit.verify.core.report import Severity
from ckptkit.verify.core.skip import CannotCheck, NotApplicable
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.evidence.expected import raw_config_of

# How the names of an output layer end, in HF and in Megatron.
_HEADS = ("lm_head.weight", "output_layer.weight")
# What a multimodal config may say of its language model both at the top and in text_config.
_TWICE = (
    *(TIED, "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_theta", "num_experts_per_tok"),
    *("n_routed_experts", "num_experts", "num_nextn_predict_layers"),
)


def _config(subject: Subject) -> Mapping[str, Any]:
    """config.json as it stands; empty where it cannot be read, which CK101 reports."""
    with suppress(CkptkitError):
        return side_of(subject).config
    return {}


def _holders(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The config itself and its language model's part."""
    yield "", config
    if isinstance(text := config.get("text_config"), Mapping):
        yield "text_config.", text


def _spelled_twice(subject: Subject) -> list[tuple[str, Mapping[str, Any]]]:
    """Those of `_holders` with rotary settings in both spellings."""
    holders = _holders(_config(subject))
    return [one for one in holders if "rope_parameters" in one[1] and {"rope_theta", "rope_scaling"} & one[1].keys()]


@check(
    "CK704", preflight=True, applies_to=where(_spelled_twice, "config.json states its rotary settings in one spelling")
)
def rope_spellings_agree(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Base, kind, factor and every other rotary setting, of v4 against v5."""
    where = side_of(subject).root / "config.json"
    for prefix, holder in _spelled_twice(subject):
        for (old, before), (new, after) in _rope_pairs(holder):
            tally.compared()
            if before != after:
                expected = f"{prefix}{new} = {before}, as {prefix}{old} says"
                yield Issue(expected, f"{prefix}{new} = {after}", file=where)


def _rope_pairs(holder: Mapping[str, Any]) -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Name and value in v4's spelling beside those in v5's, for all that either spelling states of the other's."""
    v5 = _mapping(holder.get("rope_parameters"))
    nested = {kind: part for kind, part in v5.items() if isinstance(part, Mapping)}
    if nested:  # Gemma 3: settings by the kind of layer
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
    """The kind of scaling. Multimodal rotary embedding was a kind of its own in v4 and is none in v5."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    return "default" if kind == "mrope" else kind


def _mapping(content: Any) -> Mapping[str, Any]:
    return content if isinstance(content, Mapping) else {}


def _stated_in_two_places(subject: Subject) -> None:
    config = _config(subject)
    text = _mapping(config.get("text_config"))
    twice = any(key in config and key in text for key in _TWICE)
    tied = TIED in text or TIED in config
    if not twice and (not tied or _tie_flag(config) is None):
        reason = "config.json has each setting of its language model once, where readers look"
        raise NotApplicable(reason)


def _tie_flag(config: Mapping[str, Any]) -> TieFlag | None:
    """Where readers look for the tie flag of a multimodal config that is known; None for any other."""
    model_type = str(config.get("model_type"))
    family = FAMILIES.get(model_type)
    if family is None:
        return TIES.get(model_type)
    nested = family.release is None or family.release.nested
    return TIES.get(model_type, TieFlag()) if nested and isinstance(config.get("text_config"), Mapping) else None


@check("CK705", preflight=True, applies_to=_stated_in_two_places)
def text_config_agrees(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Tied embeddings, sizes and switches that stand in both places; the tie flag also where it stands in one.

    transformers v5 writes a tie flag of its own default, true, into the text_config of models that it reads as not
    tied: that is not a finding where all readers take the flag of the top.
    """
    config = _config(subject)
    text = _mapping(config.get("text_config"))
    where, tie = side_of(subject).root / "config.json", _tie_flag(config)
    if tie is not None and (TIED in config or TIED in text):
        tally.compared()
        try:
            yield from _tie_issues(tie, config, text, tally, where, warning_if(_has_head(subject)))
        except CkptkitError as error:
            problem = error.message.removeprefix("config.json: ")
            yield Issue(f"{TIED} = true or false", problem, error.hint or "", file=where)
    for key in _TWICE:
        if key in config and key in text and not (key == TIED and tie is not None):
            tally.compared()
            default = key == TIED and config[key] is False and text[key] is True
            if config[key] != text[key] and not default:
                expected, actual = f"{key} = {config[key]}, as at the top", f"text_config.{key} = {text[key]}"
                yield Issue(expected, actual, file=where)


def _has_head(subject: Subject) -> bool:
    """Whether an output layer is stored; false where the names cannot be read, which CK111 reports."""
    with suppress(CkptkitError):
        return any(name.endswith(_HEADS) for name in subject.specs)
    return False


def _tie_issues(
    tie: TieFlag, config: Mapping[str, Any], text: Mapping[str, Any], tally: Tally, where: Path, severity: Severity
) -> Iterator[Issue]:
    """Readers that disagree, and a flag where none of them looks; `severity` is for one that stands there alone."""
    read = tie.read(config, text)
    hint = f"set {TIED} at the top and in text_config, true where the output layer is the embedding, else false"
    who = {value: ", ".join(reader for reader, taken in read.items() if taken is value) for value in (True, False)}
    stated = {f"{prefix}{TIED}": part[TIED] for prefix, part in _holders(config) if part.get(TIED) is not None}
    listed = ", ".join(f"{name} = {value}" for name, value in stated.items())
    if who[True] and who[False]:
        actual = f"{listed}: true to {who[True]}, false to {who[False]}"
        yield Issue(f"one {TIED} for every reader", actual, hint, file=where)
        return
    value = next(iter(read.values()))
    default = value is False and stated.get(TIED) is False  # transformers' own, inside
    if not default and any(one is not value for one in stated.values()):
        places = {"": tie.top, "text_config.": tie.text}
        looked = " and ".join(f"{prefix}{TIED}" for prefix, readers in places.items() if readers)
        expected = f"{TIED} where it is read: {', '.join(read)} look at {looked} alone"
        actual, severity = f"{listed}, so that they take {value}", "error" if len(stated) > 1 else severity
        yield Issue(expected, actual, hint, file=where, severity=severity)
        return
    if tie.older and flag(text, TIED, tie.absent) is not value:
        tally.note(
            f"{', '.join(tie.older)} reads text_config.{TIED}, and so takes {not value} where others take {value}"
        )


def keys_of(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The keys that SGLang's class of the family needs with their values, by full name; and those that are not there.

    Raises CkptkitError as `family_of`, and where the values that they follow from are not there.
    """
    family_of(config)
    text = language_part(config)
    place = "" if text is config else "text_config."
    keys = engine_class("sglang", config).keys({**text, "model_type": config["model_type"]})
    lacking = {f"{place}{key}": value for key, value in keys.items() if text.get(key) is None}
    return {f"{place}{key}": value for key, value in keys.items()}, lacking


def _sglang_reads_more(subject: Subject) -> None:
    if subject.is_megatron and "sglang" not in subject.against:
        raise NotApplicable("SGLang reads the config of an HF directory")
    if "sglang" not in subject.against and subject.not_for_sglang:
        raise NotApplicable(subject.not_for_sglang)
    try:
        needed, _ = keys_of(raw_config_of(subject))
    except (CkptkitError, CannotCheck):
        raise NotApplicable("there is no usable config.json (CK101)") from None
    if not needed:
        raise NotApplicable("transformers writes every key that SGLang reads of this family")


@check("CK731", preflight=True, applies_to=_sglang_reads_more)
def keys_there(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Each key of the family's table; null counts as absent."""
    needed, lacking = keys_of(raw_config_of(subject))
    tally.compared(len(needed))
    if lacking:
        what, where = "it" if len(lacking) == 1 else "them", subject.config_root / "config.json"
        hint = f"add {what}, or take config.json from the release: transformers 5 does not write {what} when it saves"
        yield Issue(f"{in_words(lacking)}, which SGLang's class reads", f"no {', '.join(lacking)}", hint, file=where)


def in_words(keys: Mapping[str, Any]) -> str:
    """The keys with their values as config.json spells them."""
    return ", ".join(f'"{key}": {json.dumps(value)}' for key, value in keys.items())

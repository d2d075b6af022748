"""CK731: keys of config.json that SGLang reads and transformers 5 does not write."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ckptkit.core.errors import CkptkitError
from converters.config.values import language_part
from converters.registry import family_of
from verify.check import Skip, Tally, check
from verify.evidence.expected import stated_config_of
from verify.evidence.subject import Subject
from verify.issue import Issue


def keys_of(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The keys that SGLang's class of the family needs with their values, by full name; and those that are not there.

    Raises CkptkitError as `family_of`, and where the values that they follow from are not there.
    """
    family = family_of(config)
    text = language_part(config)
    place = "" if text is config else "text_config."
    keys = family.engine("sglang").keys({**text, "model_type": config["model_type"]})
    lacking = {f"{place}{key}": value for key, value in keys.items() if text.get(key) is None}
    return {f"{place}{key}": value for key, value in keys.items()}, lacking


def _no_keys(subject: Subject) -> str | None:
    if subject.is_megatron and "sglang" not in subject.against:
        return "SGLang reads the config of an HF directory"
    if "sglang" not in subject.against and (reason := subject.not_for_sglang):
        return reason
    try:
        needed, _ = keys_of(subject.once(stated_config_of))
    except (CkptkitError, Skip):
        return "there is no usable config.json (CK101)"
    return None if needed else "transformers writes every key that SGLang reads of this family"


@check(
    "CK731",
    "config.json has the keys that SGLang reads and transformers 5 leaves out",
    stage="configuration",
    preflight=True,
    rationale="transformers 5 writes the keys that its own class knows. SGLang's class reads others: without them it "
    "stops with an AttributeError, or silently builds another model.",
    fix="Copy the key from the release's config.json; the value that the finding gives is that of this model.",
    unless=_no_keys,
)
def keys_there(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Each key of the family's table; null counts as absent."""
    needed, lacking = keys_of(subject.once(stated_config_of))
    tally.compared(0, len(needed))
    if lacking:
        what, where = "it" if len(lacking) == 1 else "them", subject.config_root / "config.json"
        hint = f"add {what}, or take config.json from the release: transformers 5 does not write {what} when it saves"
        yield Issue(f"{in_words(lacking)}, which SGLang's class reads", f"no {', '.join(lacking)}", hint, file=where)


def in_words(keys: Mapping[str, Any]) -> str:
    """The keys with their values as config.json spells them."""
    return ", ".join(f'"{key}": {json.dumps(value)}' for key, value in keys.items())

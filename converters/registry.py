"""Finds the family of a model by the exact `model_type` of its config."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from importlib import import_module
from types import MappingProxyType
from typing import Any

from ckptkit.converters import families
from ckptkit.converters.by_class import family_by_class
from ckptkit.converters.config.bounds import check_config
from ckptkit.converters.draft import NAMED, is_draft
from ckptkit.converters.family import ModelFamily
from ckptkit.core.errors import CkptkitError, UnknownModelError, UnsupportedError, UsageError
from ckptkit.core.printable import shortened


def _found() -> Iterator[ModelFamily]:
    """The families of every file in the folder of families."""
    for module in pkgutil.iter_modules(families.__path__, f"{families.__name__}."):
        yield from import_module(module.name).FAMILIES


def by_model_type(found: Iterable[ModelFamily]) -> dict[str, ModelFamily]:
    """Families by `model_type`. Raises ValueError where two claim the same."""
    known: dict[str, ModelFamily] = {}
    for family in found:
        for model_type in family.model_types:
            if known.setdefault(model_type, family) is not family:
                raise ValueError(f"two families claim model_type {model_type!r}")
    return known


FAMILIES: Mapping[str, ModelFamily] = MappingProxyType(by_model_type(_found()))


_MAX_NAME = 200  # characters of a class's name

# What a model of another class is, by the name of the class; the first that fits.
_OTHERS = (
    (
        NAMED,
        "a draft model for speculative decoding",
        "`ckptkit verify DRAFT --source TARGET` looks at EAGLE's; give the model that it drafts for",
    ),
    (
        r"(?i).*(classification|reward).*",
        "a classifier or reward model",
        "Megatron's language model has an output layer over the vocabulary in place of its head",
    ),
    (r".*Model", "a model without an output layer", "convert the language model that it was made from"),
)


def find_family(config: Mapping[str, Any]) -> ModelFamily | None:
    """The family of a config's `model_type`, or one made from transformers' class; None where neither is there.

    Raises CkptkitError where transformers refuses the config.
    """
    check_config(config)
    model_type = config.get("model_type")
    return FAMILIES.get(model_type) or family_by_class(config) if isinstance(model_type, str) else None


def family_of(config: Mapping[str, Any]) -> ModelFamily:
    """The family of a config, or one made from transformers' class, which has names of HF alone.

    Raises CkptkitError as `named_family_of` and `find_family`.
    """
    try:
        return named_family_of(config)
    except UnknownModelError:
        if (family := find_family(config)) is None:
            raise
        return family


def named_family_of(config: Mapping[str, Any]) -> ModelFamily:
    """The family that has a config's `model_type`.

    Raises UnknownModelError for an unknown `model_type`, naming the known ones, CkptkitError where there is none, and
    UnsupportedError for a class that is not the family's.
    """
    check_config(config)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        refuse_draft(config)
        stated = isinstance(model_type, str) and model_type != ""
        raise (UnknownModelError if stated else CkptkitError)(
            f"config.json: model_type {shortened(model_type)} is not supported", _nearest(str(model_type))
        )
    _check_architectures(config.get("architectures"), FAMILIES[model_type], model_type)
    return FAMILIES[model_type]


def refuse_draft(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedError for a draft model, of any `model_type`, or none as speculators' have."""
    if is_draft(config):
        what, hint = _OTHERS[0][1:]
        raise UnsupportedError(f"config.json: {config['architectures'][0]} is {what}, which is not supported", hint)


def unwitnessed(config: Mapping[str, Any]) -> str | None:
    """That no released Megatron has loaded this kind of model, and why; None where one has, or it is not known."""
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None or family.unwitnessed is None:
        return None
    return f"no released Megatron has loaded {model_type}: {family.unwitnessed.reason}"


def check_unwitnessed(config: Mapping[str, Any], asked: bool) -> None:
    """Refuses to convert what no released Megatron loads, unless it was asked for and has names in some Megatron.

    Raises UnsupportedError for that, UsageError where it was asked for without need, and as `named_family_of`.
    """
    family, message = named_family_of(config).unwitnessed, unwitnessed(config)
    if family is None or message is None:
        if asked:
            message = f"--unwitnessed: released Megatron loads {config['model_type']}"
            raise UsageError(message, "leave it out")
    elif family.names is None:
        unlisted = named_family_of(config).release is None
        verbs = "inspect, verify and lint" if unlisted else "inspect, verify, lint and quantize"
        raise UnsupportedError(
            f"{message}; its names are not settled upstream, and none are invented here",
            f"{verbs} take the HF checkpoint",
        )
    elif not asked:
        raise UnsupportedError(message, f"--unwitnessed converts by the names of {family.names}, at your own risk")


def _nearest(model_type: str) -> str:
    near = get_close_matches(model_type[:_MAX_NAME], sorted(FAMILIES), 3)
    listed = f"the nearest that are: {', '.join(near)}; " if near else ""
    return f"{listed}docs/families.md has all {len(FAMILIES)}, and docs/architecture.md adds one"


def _check_architectures(stated: Any, family: ModelFamily, model_type: str) -> None:
    """Passes an absent key, and a list with a class of the family in it."""
    names = [stated] if isinstance(stated, str) else stated or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CkptkitError(
            f"config.json: architectures is {shortened(stated)}, not a list of class names",
            "restore it from the release",
        )
    if not names or set(names) & set(family.architectures):
        return
    what, hint = next(
        (words for pattern, *words in _OTHERS if re.fullmatch(pattern, names[0][:_MAX_NAME])),
        ("another model", "compare config.json with the release"),
    )
    known = ", ".join(family.architectures)
    raise UnsupportedError(
        f"config.json: {names[0][:_MAX_NAME]} of model_type {model_type!r} is {what}, which is not supported",
        f"{hint}; supported: {known}",
    )

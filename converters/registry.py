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


def _import_families() -> Iterator[ModelFamily]:
    for module in pkgutil.iter_modules(families.__path__, f"{families.__name__}."):
        yield from import_module(module.name).FAMILIES


def by_model_type(model_families: Iterable[ModelFamily]) -> dict[str, ModelFamily]:
    """Families by `model_type`. Raises ValueError if two families have the same `model_type`."""
    by_type: dict[str, ModelFamily] = {}
    for family in model_families:
        for model_type in family.model_types:
            if by_type.setdefault(model_type, family) is not family:
                raise ValueError(f"two families claim model_type {model_type!r}")
    return by_type


FAMILIES: Mapping[str, ModelFamily] = MappingProxyType(by_model_type(_import_families()))
_MAX_NAME = 200  # characters of a class's name

# Unsupported classes: name pattern, description and hint; the first match counts.
_OTHERS = (
    (
        NAMED,
        "a draft model for speculative decoding",
        "run `ckptkit verify DRAFT --source TARGET` for an EAGLE draft, or pass the target model instead",
    ),
    (
        r"(?i).*(classification|reward).*",
        "a classifier or reward model",
        "convert a language model: Megatron's has an output layer over the vocabulary instead of this head",
    ),
    (r".*Model", "a model without an output layer", "convert a language model with an output layer"),
)


def find_family(config: Mapping[str, Any]) -> ModelFamily | None:
    """The family of a config's `model_type`, or one derived from transformers' class, or None if both are missing.

    Raises CkptkitError if transformers rejects the config.
    """
    check_config(config)
    model_type = config.get("model_type")
    return FAMILIES.get(model_type) or family_by_class(config) if isinstance(model_type, str) else None


def family_of(config: Mapping[str, Any]) -> ModelFamily:
    """The family of a config, or one derived from transformers' class, with HF names only.

    Raises CkptkitError like `named_family_of` and `find_family`.
    """
    try:
        return named_family_of(config)
    except UnknownModelError:
        if (family := find_family(config)) is None:
            raise
        return family


def named_family_of(config: Mapping[str, Any]) -> ModelFamily:
    """The registered family of a config's `model_type`.

    Raises UnknownModelError for an unknown `model_type`, CkptkitError if it is missing, and UnsupportedError for a
    class that the family does not support.
    """
    check_config(config)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        refuse_draft(config)
        has_type = isinstance(model_type, str) and model_type != ""
        raise (UnknownModelError if has_type else CkptkitError)(
            f"config.json: model_type {shortened(model_type)} is not supported", _nearest(str(model_type))
        )
    _check_architectures(config.get("architectures"), FAMILIES[model_type], model_type)
    return FAMILIES[model_type]


def refuse_draft(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedError for a draft model, with any `model_type` or none (like speculators')."""
    if is_draft(config):
        what, hint = _OTHERS[0][1:]
        raise UnsupportedError(f"config.json: {config['architectures'][0]} is {what}, which is not supported", hint)


def unwitnessed(config: Mapping[str, Any]) -> str | None:
    """A message that no released Megatron has loaded this kind of model, or None if one has or the kind is unknown."""
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None or family.unwitnessed is None:
        return None
    return f"no released Megatron has loaded {model_type}: {family.unwitnessed.reason}"


def check_unwitnessed(config: Mapping[str, Any], asked: bool) -> None:
    """Rejects a model that no released Megatron loads, unless the user allowed it and some stack defines its names.

    Raises UnsupportedError for such a model, UsageError if the permission is not needed, and like `named_family_of`.
    """
    family, message = named_family_of(config).unwitnessed, unwitnessed(config)
    if family is None or message is None:
        if asked:
            message = f"--unwitnessed has no effect: released Megatron loads {config['model_type']}"
            raise UsageError(message, "remove --unwitnessed")
    elif family.names is None:
        unlisted = named_family_of(config).release is None
        verbs = "inspect, verify and lint" if unlisted else "inspect, verify, lint and quantize"
        raise UnsupportedError(
            f"{message}; no Megatron names of its tensors are published",
            f"use only {verbs}, on the HF checkpoint",
        )
    elif not asked:
        raise UnsupportedError(message, f"pass --unwitnessed to use the names of {family.names} at your own risk")


def _nearest(model_type: str) -> str:
    near = get_close_matches(model_type[:_MAX_NAME], sorted(FAMILIES), 3)
    listed = f"supported types with a similar name: {', '.join(near)}; " if near else ""
    return f"{listed}docs/families.md lists all {len(FAMILIES)} types; docs/architecture.md explains how to add one"


def _check_architectures(value: Any, family: ModelFamily, model_type: str) -> None:
    names = [value] if isinstance(value, str) else value or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CkptkitError(
            f"config.json: architectures is {shortened(value)}, not a list of class names",
            "restore it from the release",
        )
    if not names or set(names) & set(family.architectures):
        return
    what, hint = next(
        (words for pattern, *words in _OTHERS if re.fullmatch(pattern, names[0][:_MAX_NAME])),
        ("another model", "compare config.json with the release"),
    )
    known = ", ".join(family.architectures)
    message = f"config.json: {names[0][:_MAX_NAME]} of model_type {model_type!r} is {what}, which is not supported"
    raise UnsupportedError(message, f"{hint}; supported: {known}")

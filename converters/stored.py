"""Adjusts a config to a checkpoint's tensor names, where the config is ambiguous or describes another save."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ckptkit.converters.config.values import NESTED_ROOT
from ckptkit.converters.registry import FAMILIES, family_of, unwitnessed
from ckptkit.core.errors import CkptkitError, UnsupportedError

_QUANTIZATION = ("quantization_config", "compression_config")
_MTP_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
# Prefixes of the language model in the families' releases.
_ROOTS = sorted({one.release.root for one in FAMILIES.values() if one.release and one.release.root})
_HEADS = {f"{family.release.head}.weight" for family in FAMILIES.values() if family.release}
_INNER = "model."  # transformers' prefix for language model and vision tower since 4.52
_OUTSIDE_LAYERS = ("embed_tokens.weight", "norm.weight")
_MTP_NORM = ".enorm.weight"  # Megatron's name; HF's if a family has no Megatron names


def adapt_config(config: Mapping[str, Any], names: Collection[str], release: Collection[str] = ()) -> Mapping[str, Any]:
    """The config that matches the stored tensors. `names` are HF's, or Megatron's with the HF names in `release`.

    Removes multi-token prediction layers if none of their tensors is stored: pruned or requantized releases omit them
    but keep config.json. Adds unused tensors if any of them is stored. Otherwise like `nest_text_config`. Raises
    CkptkitError like `family_of` and `ModelFamily.read_dims`.
    """
    config = with_unused(nest_text_config(config, chain(names, release)), names)
    if not lacks_mtp(config, names):
        return config
    none, text = dict.fromkeys(_MTP_COUNTS, 0), config.get("text_config")
    return {**config, "text_config": {**text, **none}} if isinstance(text, Mapping) else {**config, **none}


def nest_text_config(config: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """The multimodal model's config if a `…_text` config comes with its names; any other config is unchanged.

    Raises CkptkitError like `family_of`.
    """
    model_type = family_of(config).language_models.get(config["model_type"])
    if model_type is None or not any(name.startswith(NESTED_ROOT) for name in names):
        return config
    return _nested(config, model_type)


def with_unused(config: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
    """Adds the tensors that no engine uses to the config, if any of them is among these names.

    Raises CkptkitError like `unused_names`.
    """
    stored = any(name in names for name in unused_names(config))
    return family_of(config).with_unused(config) if stored else config


def unused_names(config: Mapping[str, Any]) -> frozenset[str]:
    """Names of tensors that some releases store although no engine uses them, or empty if this config has them.

    Raises CkptkitError like `family_of` and `ModelFamily.read_dims`.
    """
    extended = family_of(config).with_unused(config)
    return frozenset[str]() if extended is config else _expected_names(extended) - _expected_names(config)


def _expected_names(config: Mapping[str, Any]) -> frozenset[str]:
    family = family_of(config)
    dims = family.read_dims(config)
    return frozenset(
        name for rule in family.mappings(dims) for one in rule.hf for name in rule.names_of(one, dims.experts)
    )


@dataclass(frozen=True)
class PrefixMismatch:
    """The config's class reads layers under `expected`, but they are stored under `found`, the prefix of another class.

    `renamed_on_load`: transformers renames them while loading. `towers`: transformers' prefixes of a vision tower that
    the release names differently.
    """

    expected: str
    found: str
    renamed_on_load: bool
    towers: tuple[str, ...] = ()

    def explains(self, name: str, stored: Collection[str], promised: Collection[str]) -> bool:
        """Whether a stored or promised name is explained by the other spelling."""
        if name.startswith(self.towers) or (name in _HEADS and any(head in stored for head in _HEADS)):
            return True
        renamed = f"{self.expected}{name.removeprefix(self.found)}"
        if name.startswith(self.found) and name not in promised and renamed in promised:
            return True
        return name.startswith(self.expected) and f"{self.found}{name.removeprefix(self.expected)}" in stored


def prefix_mismatch(config: Mapping[str, Any], names: Collection[str]) -> PrefixMismatch | None:
    """The mismatch between names and an unmodified config, or None.

    Raises CkptkitError like `family_of` and `ModelFamily.read_dims`.
    """
    family = family_of(config)
    root = family.read_dims(config).root
    if any(root + tensor in names for tensor in _OUTSIDE_LAYERS):
        return None
    for found in _ROOTS:
        if found != root and all(found + tensor in names for tensor in _OUTSIDE_LAYERS):
            renamed = found == NESTED_ROOT and config["model_type"] in family.language_models
            towers = (f"{_INNER}{tower}" for tower in family.towers(config) if found == NESTED_ROOT)
            return PrefixMismatch(root, found, renamed, tuple(towers))
    return None


def refuse_older(config: Mapping[str, Any], names: Collection[str], where: object) -> None:
    """Raises UnsupportedError if all layers have the family's older names, and CkptkitError like `family_of`."""
    release = family_of(config).release
    if not release or not release.older or any(name.startswith(f"{release.root}layers.") for name in names):
        return
    if any(name.startswith(release.older) for name in names):
        raise UnsupportedError(
            f"{where} names its layers {release.older}*, older names that engines rename but ckptkit does not read",
            f"rename the layers to {release.root}layers.* in the files, the index and the list of unquantized modules",
        )


def lacks_mtp(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether the config declares MTP layers but none of these names, HF's or Megatron's, belongs to one."""
    family = family_of(config)
    dims = family.read_dims(config)
    if not dims.mtp_layers:
        return False
    norms = (next(iter(mapping.hf)) for mapping in family.mappings(dims) if mapping.megatron.endswith(_MTP_NORM))
    prefixes = ("mtp.", *(f"{norm.rsplit('.', 2)[0]}." for norm in norms))
    return not any(name.startswith(prefixes) for name in names)


def require_mtp(config: Mapping[str, Any], names: Collection[str], release: Collection[str], where: str) -> None:
    """Raises CkptkitError if these Megatron names lack the release's MTP layers."""
    if lacks_mtp(config, names) and not lacks_mtp(config, release):
        raise CkptkitError(
            f"{where} has no multi-token prediction tensors, but the release has them",
            "if training omits these on purpose (no --mtp-num-layers), pass --hf DIR with the release's config.json, "
            "tokenizer and code, but no weights",
        )


def remarks(config: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """Notes for users of a checkpoint with these names; none of them is an error."""
    dims = family_of(config).read_dims(config)
    notes = [message] if (message := unwitnessed(config)) else []
    if dims.query_scale_from is not None:
        length = f"{dims.query_scale_from:,} tokens"
        notes.append(f"megatron-core computes this model up to {length}: it does not scale queries of later positions")
    if lacks_mtp(config, names):
        count = f"{dims.mtp_layers} multi-token prediction layer{'s' * (dims.mtp_layers > 1)}"
        message = f"config.json declares {count}, but none of their tensors is stored"
        notes.append(f"{message}: the checkpoint is treated as a model that cannot draft tokens")
    return notes


def _nested(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    outer = {key: config[key] for key in ("architectures", "tie_word_embeddings", *_QUANTIZATION) if key in config}
    text = {key: value for key, value in config.items() if key not in _QUANTIZATION}
    return {"model_type": model_type, "text_config": text, **outer}

"""What the names of a checkpoint's tensors say that its config leaves open, or says of another save of the model."""

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
# What stands before the names of a language model's layers in the families' releases.
_ROOTS = sorted({one.release.root for one in FAMILIES.values() if one.release and one.release.root})
_HEADS = {f"{family.release.head}.weight" for family in FAMILIES.values() if family.release}
_INNER = "model."  # what transformers has since 4.52 before the names of a language model and a vision tower
_OUTSIDE_LAYERS = ("embed_tokens.weight", "norm.weight")
_MTP_NORM = ".enorm.weight"  # on Megatron's side; in HF, where a family has no names of Megatron's


def as_stored(config: Mapping[str, Any], names: Collection[str], release: Collection[str] = ()) -> Mapping[str, Any]:
    """The config of the model as these tensors hold it. `names` are HF's, or Megatron's with HF names as in `release`.

    Drops multi-token prediction layers from the config when no tensor of one is stored: pruned or requantized releases
    leave them out and keep config.json. Keeps those that no reader uses in the
    config where any is stored. Otherwise as `as_spelled`. Raises CkptkitError as `family_of` and
    `ModelFamily.read_dims`.
    """
    config = with_unused(as_spelled(config, chain(names, release)), names)
    if not lacks_mtp(config, names):
        return config
    none, text = dict.fromkeys(_MTP_COUNTS, 0), config.get("text_config")
    return {**config, "text_config": {**text, **none}} if isinstance(text, Mapping) else {**config, **none}


def as_spelled(config: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """The multimodal model's config where a `…_text` config comes with its names; any other config as it is.

    Raises CkptkitError as `family_of`.
    """
    whole = family_of(config).language_models.get(config["model_type"])
    return (
        _nested(config, whole) if whole is not None and any(name.startswith(NESTED_ROOT) for name in names) else config
    )


def with_unused(config: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
    """The config with the tensors that no reader uses, where any of them is among these names; else as it is.

    Raises CkptkitError as `unused_names`.
    """
    stored = any(name in names for name in unused_names(config))
    return family_of(config).with_unused(config) if stored else config


def unused_names(config: Mapping[str, Any]) -> frozenset[str]:
    """Names of tensors that some releases of the model store and no reader uses; none where this config has them.

    Raises CkptkitError as `family_of` and `ModelFamily.read_dims`.
    """
    family = family_of(config)
    whole = family.with_unused(config)
    return frozenset[str]() if whole is config else _promised(whole) - _promised(config)


def _promised(config: Mapping[str, Any]) -> frozenset[str]:
    family = family_of(config)
    dims = family.read_dims(config)
    return frozenset(
        name for rule in family.mappings(dims) for one in rule.hf for name in rule.names_of(one, dims.experts)
    )


@dataclass(frozen=True)
class OtherSpelling:
    """The layers that a config's class reads under `expected` are stored under `found`, as another class names them.

    `renamed`: transformers renames them while it loads. `towers`: how its names begin for a vision tower that has
    others in the release.
    """

    expected: str
    found: str
    renamed: bool
    towers: tuple[str, ...] = ()

    def explains(self, name: str, stored: Collection[str], promised: Collection[str]) -> bool:
        """Whether a stored name is a promised one in the other spelling, or a promised name is stored in it."""
        if name.startswith(self.towers) or (name in _HEADS and any(head in stored for head in _HEADS)):
            return True
        other = f"{self.expected}{name.removeprefix(self.found)}"
        if name.startswith(self.found) and name not in promised and other in promised:
            return True
        return name.startswith(self.expected) and f"{self.found}{name.removeprefix(self.expected)}" in stored


def other_spelling(config: Mapping[str, Any], names: Collection[str]) -> OtherSpelling | None:
    """Of a config as its file states it. Raises CkptkitError as `family_of` and `ModelFamily.read_dims`."""
    family = family_of(config)
    root = family.read_dims(config).root
    if any(root + tensor in names for tensor in _OUTSIDE_LAYERS):
        return None
    for found in _ROOTS:
        if found != root and all(found + tensor in names for tensor in _OUTSIDE_LAYERS):
            renamed = found == NESTED_ROOT and config["model_type"] in family.language_models
            towers = (f"{_INNER}{tower}" for tower in family.towers(config) if found == NESTED_ROOT)
            return OtherSpelling(root, found, renamed, tuple(towers))
    return None


def refuse_older(config: Mapping[str, Any], names: Collection[str], where: object) -> None:
    """Raises UnsupportedError where all layers have older names of the family. Raises CkptkitError as `family_of`."""
    release = family_of(config).release
    if not release or not release.older or any(name.startswith(f"{release.root}layers.") for name in names):
        return
    if any(name.startswith(release.older) for name in names):
        raise UnsupportedError(
            f"{where} holds layers under older names, {release.older}*, which engines rename and which are not judged",
            f"rename them to {release.root}layers.* in the files, the index and the list of unquantized modules",
        )


def lacks_mtp(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether the config promises MTP layers and none of these names, HF's or Megatron's, belongs to one."""
    family = family_of(config)
    dims = family.read_dims(config)
    if not dims.mtp_layers:
        return False
    norms = (next(iter(mapping.hf)) for mapping in family.mappings(dims) if mapping.megatron.endswith(_MTP_NORM))
    prefixes = ("mtp.", *(f"{norm.rsplit('.', 2)[0]}." for norm in norms))
    return not any(name.startswith(prefixes) for name in names)


def require_mtp(config: Mapping[str, Any], names: Collection[str], release: Collection[str], where: str) -> None:
    """Raises CkptkitError where these Megatron names lack the MTP layers that the release has."""
    if lacks_mtp(config, names) and not lacks_mtp(config, release):
        raise CkptkitError(
            f"{where} lacks all tensors of multi-token prediction, and the release that it is to become has them",
            "if they are left out on purpose (training without --mtp-num-layers), "
            "name with --hf a directory that has no weights: "
            "config.json, tokenizer and code of the release alone",
        )


def remarks(config: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """What a user should know of a checkpoint with these names that is not wrong."""
    dims = family_of(config).read_dims(config)
    found = [message] if (message := unwitnessed(config)) else []
    if dims.query_scale_from is not None:
        length = f"{dims.query_scale_from:,} tokens"
        found.append(f"megatron-core computes this model up to {length}: beyond, it does not scale queries by position")
    if not lacks_mtp(config, names):
        return found
    count = dims.mtp_layers
    message = (
        f"config.json promises {count} multi-token prediction layer{'s' * (count > 1)}, and no tensor of one is stored"
    )
    return [*found, f"{message}: taken for a model without, which cannot draft for itself"]


def _nested(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    outer = {key: config[key] for key in ("architectures", "tie_word_embeddings", *_QUANTIZATION) if key in config}
    text = {key: value for key, value in config.items() if key not in _QUANTIZATION}
    return {"model_type": model_type, "text_config": text, **outer}

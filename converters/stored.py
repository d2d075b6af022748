"""What the names of a checkpoint's tensors say that its config leaves open, or says of another save of the model."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import Any

from ckptkit.core.errors import CkptkitError
from converters.config.values import NESTED_ROOT
from converters.registry import family_of

_QUANTIZATION = ("quantization_config", "compression_config")
_MTP_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_MTP_NORM = re.compile(r"mtp\.layers\.\d+\.enorm\.weight")


def as_stored(config: Mapping[str, Any], names: Collection[str], release: Collection[str] = ()) -> Mapping[str, Any]:
    """The config of the model as these tensors hold it. `names` are HF's, or Megatron's with HF names as in `release`.

    Drops multi-token prediction layers from the config when no tensor of one is stored: pruned or requantized releases
    leave them out and keep config.json. Otherwise as `as_spelled`. Raises CkptkitError as `family_of` and
    `ModelFamily.read_dims`.
    """
    config = as_spelled(config, chain(names, release))
    return _without_mtp(config) if lacks_mtp(config, names) else config


def as_spelled(config: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """The multimodal model's config where a `…_text` config comes with its names; any other config as it is.

    Raises CkptkitError as `family_of`.
    """
    whole = family_of(config).language_models.get(config["model_type"])
    return (
        _nested(config, whole) if whole is not None and any(name.startswith(NESTED_ROOT) for name in names) else config
    )


def lacks_mtp(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether the config promises MTP layers and none of these names, HF's or Megatron's, belongs to one."""
    family = family_of(config)
    dims = family.read_dims(config)
    if not dims.mtp_layers:
        return False
    norms = (next(iter(mapping.hf)) for mapping in family.mappings(dims) if _MTP_NORM.fullmatch(mapping.megatron))
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
    if not lacks_mtp(config, names):
        return []
    count = family_of(config).read_dims(config).mtp_layers
    said = (
        f"config.json promises {count} multi-token prediction layer{'s' * (count > 1)}, and no tensor of one is stored"
    )
    return [f"{said}: taken for a model without, which cannot draft for itself"]


def _nested(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    outer = {key: config[key] for key in ("tie_word_embeddings", *_QUANTIZATION) if key in config}
    text = {key: value for key, value in config.items() if key not in _QUANTIZATION}
    return {"model_type": model_type, "text_config": text, **outer}


def _without_mtp(config: Mapping[str, Any]) -> dict[str, Any]:
    none = dict.fromkeys(_MTP_COUNTS, 0)
    text = config.get("text_config")
    return {**config, "text_config": {**text, **none}} if isinstance(text, Mapping) else {**config, **none}

"""Reads the two configs of a ModelOpt checkpoint in one form: config.json's own and hf_quant_config.json.

Engines and transformers read the second only where config.json has no quantization_config.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.reader import MODELOPT_CONFIG, read_json
from ckptkit.formats.hf.side_files import quantization_of


def flattened(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The config with a quantization_config: its own, else that of hf_quant_config.json, both in one form.

    ModelOpt's `exclude_modules` of a nested config is called `ignore` there, as every reader takes it.
    """
    content = quantization_of(config)
    if content is None and (path / MODELOPT_CONFIG).exists():
        content = read_json(path / MODELOPT_CONFIG)
    if not isinstance(content, Mapping):
        return dict(config)
    nested = content.get("quantization")
    if isinstance(nested, Mapping):
        listed = nested.get("exclude_modules") or []
        content = {"quant_method": "modelopt", **nested, "ignore": listed}
        content.pop("exclude_modules", None)
    return {**config, "quantization_config": dict(content)}


def differing_configs(path: Path) -> list[str]:
    """What hf_quant_config.json says otherwise than config.json, where both are there.

    Looks at the algorithm, the group size and the list. Empty where one of the two cannot be read, which other checks
    say.
    """
    if not (path / MODELOPT_CONFIG).exists():
        return []
    try:
        first, second = (flattened(one, path) for one in (read_json(path / "config.json"), {}))
    except CkptkitError:
        return []
    ours, theirs = quantization_of(first), quantization_of(second)
    if not isinstance(ours, Mapping) or not isinstance(theirs, Mapping) or ours == theirs:
        return []
    sizes = {size for one in (ours, theirs) if (size := _group_size(one)) is not None}
    same = {
        "the algorithm": str(ours.get("quant_algo")).upper() == str(theirs.get("quant_algo")).upper(),
        "the group size": len(sizes) < 2,
        "the list of modules": _listed(ours) == _listed(theirs),
    }
    return [what for what, equal in same.items() if not equal]


def _listed(content: Mapping[str, Any]) -> set[str]:
    found = content.get("ignore", content.get("exclude_modules"))
    return set(map(str, found)) if isinstance(found, list) else set()


def _group_size(content: Mapping[str, Any]) -> object:
    """The group size that a config states at its top or in its first group; None where it states none."""
    groups = content.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    inner = weights.get("group_size") if isinstance(weights, Mapping) else None
    size = content.get("group_size", inner)
    return size if isinstance(size, int) else None

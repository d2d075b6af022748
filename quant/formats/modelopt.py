"""Reads the two configs of a ModelOpt checkpoint in one form: config.json's own and hf_quant_config.json.

SGLang and vLLM read the second only where config.json has no quantization_config, TensorRT-LLM reads it first, and
transformers never.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from ckptkit.formats.hf.reader import MODELOPT_CONFIG, read_json
from ckptkit.formats.hf.side_files import quantization_of

# The hint for two configs that differ.
TWO_CONFIGS = (
    f"make both files agree, or remove {MODELOPT_CONFIG}: SGLang and vLLM read config.json, TensorRT-LLM the other"
)


def unify_configs(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The config with its quantization_config or that of hf_quant_config.json, with `exclude_modules` as `ignore`."""
    content = quantization_of(config)
    if content is None and (path / MODELOPT_CONFIG).exists():
        content = read_json(path / MODELOPT_CONFIG)
    if not isinstance(content, Mapping):
        return dict(config)
    nested = content.get("quantization")
    if isinstance(nested, Mapping):
        content = {"quant_method": "modelopt", **nested, "ignore": nested.get("exclude_modules") or []}
        content.pop("exclude_modules", None)
    return {**config, "quantization_config": dict(content)}


def differing_configs(path: Path) -> dict[str, str]:
    """A clause for each setting that config.json and hf_quant_config.json declare differently, if both exist.

    Under "file": the reason why hf_quant_config.json cannot be read. Raises CkptkitError if config.json cannot.
    """
    if not (path / MODELOPT_CONFIG).exists():
        return {}
    config = read_json(path / "config.json")
    try:
        first, second = (unify_configs(one, path) for one in (config, {}))
    except CkptkitError as error:
        return {"file": error.message}
    ours, theirs = quantization_of(first), quantization_of(second)
    if not isinstance(ours, Mapping) or not isinstance(theirs, Mapping) or ours == theirs:
        return {}
    if not str(ours.get("quant_method", "modelopt")).startswith("modelopt"):
        return {"quant_method": _both(_is("quant_method", ours), _is("quant_algo", theirs))}
    pairs: dict[str, list[tuple[object, str]]] = {
        "quant_algo": [(_upper(one.get("quant_algo")), _is("quant_algo", one)) for one in (ours, theirs)],
        "group_size": [(size, f"group_size is {size}") for one in (ours, theirs) if (size := _group_size(one))],
        "kv_cache": [_cache(ours, "kv_cache_scheme"), _cache(theirs, "kv_cache_quant_algo")],
    }
    differing = {key: pair for key, pair in pairs.items() if len(pair) == 2 and pair[0][0] != pair[1][0]}
    return {key: _both(pair[0][1], pair[1][1]) for key, pair in differing.items()} | _differing_modules(ours, theirs)


def _both(ours: str, theirs: str) -> str:
    return f"{ours} (config.json) but {theirs} ({MODELOPT_CONFIG})"


def _is(key: str, content: Mapping[str, Any]) -> str:
    return f"{key} is {shortened(content[key])}" if content.get(key) is not None else f"{key} is not set"


def _upper(value: object) -> str:
    return str(value or "").upper()


def _cache(content: Mapping[str, Any], usual: str) -> tuple[str, str]:
    """The cache's format and the setting that declares it. Source: SGLang 0.5.16 `ModelOptFp8Config.from_config`."""
    scheme = content.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        kind, bits = scheme.get("type"), scheme.get("num_bits")
        name = {"float 8": "FP8", "float 4": "NVFP4"}.get(f"{kind} {bits}", f"{kind} {bits}")
        return name, f"kv_cache_scheme is {kind} of {bits} bits"
    key = next((key for key in ("kv_cache_scheme", "kv_cache_quant_algo") if content.get(key) is not None), usual)
    return _upper(content.get(key)).replace("NONE", ""), _is(key, content)


def _differing_modules(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, str]:
    """The list of unquantized modules, and the formats of single modules of mixed precision."""
    found: dict[str, str] = {}
    if (first := _listed(ours)) != (second := _listed(theirs)):
        found["ignore"] = _both(f"ignore has {_extra(first - second)}", f"exclude_modules has {_extra(second - first)}")
    layers, other_layers = ours.get("quantized_layers"), theirs.get("quantized_layers")
    if isinstance(layers, Mapping) and isinstance(other_layers, Mapping) and layers != other_layers:
        module = next(name for name in sorted({*layers, *other_layers}) if layers.get(name) != other_layers.get(name))
        texts = [f"quantized_layers has {shortened(one.get(module))} for {module}" for one in (layers, other_layers)]
        found["quantized_layers"] = _both(*texts)
    return found


def _extra(names: set[str]) -> str:
    return f"{len(names)} additional entries, such as {min(names)!r}" if names else "no additional entry"


def _listed(content: Mapping[str, Any]) -> set[str]:
    entries = content.get("ignore", content.get("exclude_modules"))
    return set(map(str, entries)) if isinstance(entries, list) else set()


def _group_size(content: Mapping[str, Any]) -> int | None:
    """The group size that a config declares at its top or in its first group."""
    groups = content.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    size = content.get("group_size", weights.get("group_size") if isinstance(weights, Mapping) else None)
    return size if isinstance(size, int) else None

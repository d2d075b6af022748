"""Reads what an engine's own registry has, which needs no engine: `sglang.json` and `vllm.json` beside this file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType


@dataclass(frozen=True)
class EngineRegistry:
    """What one release of an engine has for speculative decoding."""

    release: str  # program and version, as findings name it
    drafts: frozenset[str]  # classes of draft models
    of_layers: frozenset[str]  # methods that draft with layers of the served model unless another model is given
    needs_model: frozenset[str]  # methods that never do, and need a model
    of_class: frozenset[str]  # methods whose draft model is of one of `drafts`


@cache
def registries() -> Mapping[str, EngineRegistry]:
    """The registry of each engine, `sglang` and `vllm`."""
    found = {}
    for name in ("sglang", "vllm"):
        content = json.loads(files("converters.engines").joinpath(f"{name}.json").read_text())
        lists = {key: frozenset(value) for key, value in content.items() if key != "release"}
        found[name] = EngineRegistry(content["release"], **lists)
    return MappingProxyType(found)

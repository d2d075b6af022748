"""Finds the facts about an engine's class of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.quant.engines import sglang, vllm
from ckptkit.quant.engines.facts import EngineClass

_CLASSES = {"sglang": sglang.CLASSES, "vllm": vllm.CLASSES}
_PLAIN = EngineClass()


def engine_class(engine: str, config: Mapping[str, Any]) -> EngineClass:
    """The class of `sglang` or `vllm` for the model of a config; a plain one where no row has its `model_type`."""
    return _CLASSES[engine].get(str(config.get("model_type")), _PLAIN)

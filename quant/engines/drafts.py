"""Draft models in engines: their registries (`sglang.json`, `vllm.json`, from `lab/option_names.py`) and classes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from ckptkit.converters.config.values import flag
from ckptkit.converters.draft import HEAD, Draft


@dataclass(frozen=True)
class EngineRegistry:
    """The draft classes and speculative methods of one release of an engine."""

    release: str  # program and version, as findings name it
    drafts: frozenset[str]  # classes of draft models
    of_layers: frozenset[str]  # methods that draft with layers of the served model unless another model is given
    needs_model: frozenset[str]  # methods that always need another model
    of_class: frozenset[str]  # methods with a draft model of one of `drafts`


@cache
def registries() -> Mapping[str, EngineRegistry]:
    """The registry of each engine, `sglang` and `vllm`."""
    registry = {}
    for name in ("sglang", "vllm"):
        content = json.loads(files("ckptkit.quant.engines").joinpath(f"{name}.json").read_text())
        lists = {key: frozenset(value) for key, value in content.items() if key != "release"}
        registry[name] = EngineRegistry(content["release"], **lists)
    return MappingProxyType(registry)


def has_class(engine: str, draft: Draft) -> bool:
    """Whether `sglang` or `vllm` has a draft's class; vLLM uses a special one for configs of speculators."""
    nested = engine == "vllm" and draft.config.get("speculators_model_type") is not None
    return nested or draft.name in registries()[engine].drafts


def has_random_head(draft: Draft, stored: Mapping[str, Any]) -> bool:
    """Whether SGLang 0.5.16 has no value for the output layer: with draft_vocab_size it does not use the target's."""
    if draft.version != 3 or not has_class("sglang", draft) or draft.config.get("draft_vocab_size") is None:
        return False
    return HEAD not in stored and not draft.needs(HEAD) and not flag(draft.config, "tie_word_embeddings", False)


def missing_biases(draft: Draft, stored: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yields expected, actual and hint for biases that are stored or present in an engine's class, but not in both."""
    sglang, release = has_class("sglang", draft), registries()["sglang"].release
    if draft.version != 3 and sglang and "fc.bias" not in stored:
        actual = f"missing: {release} adds random numbers"
        yield "fc.bias, which SGLang's class has", actual, "store a bias of zeros"
    if draft.decoder != "llama" or not any(flag(draft.config, key, False) for key in ("attention_bias", "bias")):
        return
    if "layers.0.self_attn.o_proj.bias" not in stored:
        expected = "o_proj.bias, which engines give a decoder layer with attention_bias or bias true"
        hint = "store a bias of zeros, or remove the key from config.json"
        yield expected, "missing: engines use uninitialized memory", hint
    if draft.version == 3 and sglang:
        actual = f"attention_bias true: {release} drops the biases of q, k and v"
        yield "attention without biases, as SGLang's class has it", actual, "serve the draft with vLLM"

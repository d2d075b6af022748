"""What engines have for speculative decoding: their registries, copied to `sglang.json` and `vllm.json`, and classes.

`lab/option_names.py` writes the files.
"""

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
        content = json.loads(files("ckptkit.quant.engines").joinpath(f"{name}.json").read_text())
        lists = {key: frozenset(value) for key, value in content.items() if key != "release"}
        found[name] = EngineRegistry(content["release"], **lists)
    return MappingProxyType(found)


def has_class(engine: str, draft: Draft) -> bool:
    """Whether `sglang` or `vllm` has a draft's class; vLLM takes one of its own for configs of speculators."""
    nested = engine == "vllm" and draft.config.get("speculators_model_type") is not None
    return nested or draft.name in registries()[engine].drafts


def has_random_head(draft: Draft, stored: Mapping[str, Any]) -> bool:
    """Whether SGLang 0.5.16 has no value for the output layer: it takes the target's by draft_vocab_size alone."""
    if draft.version != 3 or not has_class("sglang", draft) or draft.config.get("draft_vocab_size") is None:
        return False
    return HEAD not in stored and not draft.needs(HEAD) and not flag(draft.config, "tie_word_embeddings", False)


def missing_biases(draft: Draft, stored: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """What engines' classes have beside what is stored, or lack: what should be, what is, and the next move."""
    sglang, release = has_class("sglang", draft), registries()["sglang"].release
    if draft.version != 3 and sglang and "fc.bias" not in stored:
        actual = f"not stored: {release} adds random numbers"
        yield "fc.bias, which SGLang's class has", actual, "store one of zeros"
    if draft.decoder != "llama" or not any(flag(draft.config, key, False) for key in ("attention_bias", "bias")):
        return
    if "layers.0.self_attn.o_proj.bias" not in stored:
        expected = "o_proj.bias, which engines give a decoder layer with attention_bias or bias true"
        hint = "store zeros, or leave the key out of config.json"
        yield expected, "not stored: what memory held stays in it", hint
    if draft.version == 3 and sglang:
        expected, hint = "attention without biases, as SGLang's class has it", "serve it with vLLM"
        yield expected, f"attention_bias true: {release} drops those of q, k and v", hint

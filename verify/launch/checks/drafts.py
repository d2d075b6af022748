"""Whether a draft model that lies there is of a class that the engine drafts with, and fits the model that it serves.

Source: SGLang 0.5.16 `configs/model_config.py` (_config_draft_model), `speculative/eagle_worker_v2.py`,
`standalone_worker_v2.py`; vLLM 0.26 `config/speculative.py`, `transformers_utils/configs/eagle.py`, `speculators`,
`model_executor/models/registry.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError
from converters.config.values import language_part
from converters.draft import FUSION, class_of, is_draft, sizes_of, target_of
from verify.issue import Issue
from verify.launch.options.speculative import Speculation

# SGLang's classes for EAGLE3; for EAGLE those that take states of the target, beside its own layers of many families.
_SGLANG = {
    "EAGLE3": frozenset({"LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"}),
    "EAGLE": frozenset(f"{one}ForCausalLMEagle" for one in ("Llama", "Qwen2", "Mistral", "MistralLarge3")),
}
# vLLM's, which it makes of the stated class by a prefix.
_VLLM = {
    "eagle3": frozenset(
        {
            *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3MiniMaxM2ForCausalLM"),
            *("Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM", "Eagle3Qwen3ForCausalLM"),
            *("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"),
        }
    ),
    "eagle": frozenset(
        {
            *(f"Eagle{one}ForCausalLM" for one in ("Cohere", "Llama", "Llama4", "MiniCPM", "Mistral", "MistralLarge3")),
            "EagleDeepSeekMTPModel",
        }
    ),
    "dflash": frozenset({"DFlashDraftModel", "DFlashLagunaForCausalLM"}),
}
_PREFIX = {"eagle3": "Eagle3", "eagle": "Eagle", "dflash": "DFlash"}
# What vLLM takes a draft for by its path, whatever the method says.
_BY_PATH = re.compile("(?i)eagle-|eagle3|dflash|dspark")


def class_issues(
    found: Speculation, draft: Path, config: Mapping[str, Any], names: Collection[str], layers: bool
) -> Iterator[Issue]:
    """A class that the engine does not draft with.

    `names`: of its tensors; empty where they cannot be told. `layers`: it has multi-token prediction layers. An error
    for a language model, a warning where another release of the engine may know the draft's class.
    """
    method, stated, sglang = found.method, class_of(config), found.server == "sglang"
    nested = config.get("speculators_model_type") is not None
    if sglang and nested and config.get("model_type") is None and method in (*_SGLANG, "NEXTN", "DFLASH", "DSPARK"):
        actual = "config.json of speculators, without model_type: SGLang 0.5.16 stops"
        hint = "serve it with vLLM, or convert it for SGLang"
        yield Issue(f"a draft model for {method}", actual, hint, file=draft, severity="warning")
    known = _SGLANG.get("EAGLE" if method == "NEXTN" else method) if sglang else _VLLM.get(method)
    if known is None or not stated or nested or _of_its_family(found, config, layers):
        return
    sought = _sought(found, stated)
    if names and not is_draft(config) and {FUSION, f"model.{FUSION}"}.isdisjoint(names):
        actual = f"{stated}, a language model, whose files hold no {FUSION}"
        hint = f"give a model that was trained for it, or name {'STANDALONE' if sglang else 'draft_model'}"
        yield Issue(f"a draft model for {method}", actual, hint, file=draft)
    elif sought not in known:
        actual = f"{stated}: {'SGLang 0.5.16' if sglang else 'vLLM 0.26'} drafts with no class {sought}"
        hint = f"state the class of the engine in config.json, as {min(known)}, if it is one"
        yield Issue(f"a draft model for {method}", actual, hint, file=draft, severity="warning")


def _of_its_family(found: Speculation, config: Mapping[str, Any], layers: bool) -> bool:
    """Whether the engine may replace the stated class by one of the layers of its family."""
    if found.server == "vllm":
        return layers or str(config.get("model_type")).startswith(("deepseek", "glm_moe_dsa"))
    named = re.fullmatch("(?i).*(nextn|mtp|assistant).*", class_of(config)[:200]) is not None
    return found.method != "EAGLE3" and (layers or named)


def _sought(found: Speculation, stated: str) -> str:
    """The class that the engine looks for."""
    prefix = _PREFIX[found.method] if found.server == "vllm" else ""
    as_it_is = stated.startswith(prefix) or (prefix != "Eagle" and stated.endswith(prefix))
    return stated if as_it_is else prefix + stated


def size_issues(
    found: Speculation, draft: Path, config: Mapping[str, Any], target: Mapping[str, Any]
) -> Iterator[Issue]:
    """Another width than the states of the target have; another vocabulary. Nothing for sizes that are not stated."""
    try:
        own, other = sizes_of(config), target_of(target)
        vocabulary = _vocabulary(config)
        wide = own.version and own.target_hidden != other.hidden
    except CkptkitError:
        return
    if wide:
        expected = f"a draft model for states of width {other.hidden}, as the served model has them"
        yield Issue(expected, f"{own.target_hidden}", "give the draft that was trained for this model", file=draft)
    if vocabulary is None or vocabulary == other.vocabulary or found.mixed:
        return
    expected, actual = f"a draft model with vocab_size {other.vocabulary}, as the served model", f"{vocabulary}"
    engine = {"STANDALONE": "SGLang", "draft_model": "vLLM"}.get(found.method)
    if own.version:
        hint = "tokens of another tokenizer are not accepted, or lie beyond the embedding: check the draft's target"
        yield Issue(expected, actual, hint, file=draft, severity="warning")
    elif engine and not is_draft(config) and not _BY_PATH.search(str(draft)):
        yield Issue(expected, actual, f"{engine} stops: give a draft of the same tokenizer", file=draft)


def _vocabulary(config: Mapping[str, Any]) -> int | None:
    inner = config.get("transformer_layer_config")
    places = [config, *([inner] if isinstance(inner, dict) else []), language_part(config)]
    return next((one["vocab_size"] for one in places if type(one.get("vocab_size")) is int), None)


def token_issues(found: Speculation, config: Mapping[str, Any] | None) -> Iterator[Issue]:
    """No number of tokens for vLLM, which takes it from `n_predict` of a draft model alone."""
    if found.server != "vllm" or found.tokens or found.method == "suffix":
        return
    expected, actual = "num_speculative_tokens", f"{found.method}, at {found.place}, without it"
    hint = "stops: say how many tokens to draft"
    if found.draft is None:
        yield Issue(expected, actual, f"vLLM {hint}")
        return
    if config is None or found.method not in (*_PREFIX, "draft_model", "mtp"):
        return
    if found.method == "mtp" or config.get("speculators_config") is not None:
        yield Issue(expected, actual, f"vLLM 0.26 {hint}", severity="warning")  # a later one may look there
    elif config.get("n_predict") is None and not _BY_PATH.search(str(found.draft)):
        yield Issue(expected, actual, f"vLLM {hint}")

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
from converters.config.values import class_of, language_part
from converters.draft import FUSION, is_draft, sizes_of, target_of
from verify.issue import Issue
from verify.launch.options.speculative import Speculation

# SGLang's classes for EAGLE3, and those that read states of the target for EAGLE, beside a family's own layers.
_EAGLE3 = frozenset({"LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"})
_SGLANG = {
    "EAGLE3": _EAGLE3,
    "EAGLE": _EAGLE3 | {f"{one}ForCausalLMEagle" for one in ("Llama", "Qwen2", "Mistral", "MistralLarge3")},
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
# Before that, vLLM replaces the class of these model types, also where the stated one is of a draft.
_REPLACED = dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm_moe_dsa"), "DeepSeekMTPModel")
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
    if known is None or not stated or nested or _of_its_family(found, config, names, layers):
        return
    sought = _sought(found, stated, config.get("model_type"))
    if names and not is_draft(config) and {FUSION, f"model.{FUSION}"}.isdisjoint(names):
        actual = f"{stated}, a language model, whose files hold no {FUSION}"
        hint = f"give a model that was trained for it, or name {'STANDALONE' if sglang else 'draft_model'}"
        yield Issue(f"a draft model for {method}", actual, hint, file=draft)
    elif sought not in known:
        actual = f"{stated}: {'SGLang 0.5.16' if sglang else 'vLLM 0.26'} has no draft class {sought}"
        named = f"{stated}Eagle{'3' if '3' in method else ''}"  # as drafts are that were trained for SGLang
        hint = f"state {named} in config.json" if named in known else "is there a release of the engine that has it?"
        if stated in known:
            hint = "state model_type kimi_k2 in config.json, of which vLLM keeps the class"
        yield Issue(f"a draft model for {method}", actual, hint, file=draft, severity="warning")


def _of_its_family(found: Speculation, config: Mapping[str, Any], names: Collection[str], layers: bool) -> bool:
    """Whether the engine may take another class for the stated one, of the layers of its family."""
    kind = str(config.get("model_type"))
    if found.server == "vllm":
        return kind == "deepseek_v4" or (layers and (kind not in _REPLACED or found.method == "eagle"))
    named = re.fullmatch("(?i).*(nextn|mtp|assistant).*", class_of(config)[:200]) is not None
    return found.method != "EAGLE3" and (layers or named or not (names or is_draft(config)))


def _sought(found: Speculation, stated: str, kind: object) -> str:
    """The class that the engine looks for."""
    if found.server == "sglang":
        return stated
    prefix, stated = _PREFIX[found.method], _REPLACED.get(str(kind), stated)
    as_it_is = stated.startswith(prefix) or (prefix != "Eagle" and stated.endswith(prefix))
    return stated if as_it_is else prefix + stated


def size_issues(
    found: Speculation, draft: Path, config: Mapping[str, Any], target: Mapping[str, Any]
) -> Iterator[Issue]:
    """Another width than the states of the target have; another vocabulary. Nothing for sizes that are not stated."""
    try:
        own, other = sizes_of(config), target_of(target)
        wide = own.version and own.target_hidden != other.hidden
    except CkptkitError:
        return
    if wide:
        expected = f"a draft model for states of width {other.hidden}, as the served model has them"
        yield Issue(expected, f"{own.target_hidden}", "give the draft that was trained for this model", file=draft)
    vocabulary = (own.config if own.version else language_part(config)).get("vocab_size")
    if type(vocabulary) is not int or vocabulary == other.vocabulary or found.mixed:
        return
    expected, actual = f"a draft model with vocab_size {other.vocabulary}, as the served model", f"{vocabulary}"
    engine = {"STANDALONE": "SGLang", "draft_model": "vLLM"}.get(found.method)
    if own.version:
        hint = "tokens of another tokenizer are not accepted, or lie beyond the embedding: check the draft's target"
        yield Issue(expected, actual, hint, file=draft, severity="warning")
    elif engine and not is_draft(config) and not _BY_PATH.search(str(draft)):
        yield Issue(expected, actual, f"{engine} stops: give a draft of the same tokenizer", file=draft)


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
    by_itself = found.method == "draft_model" and (is_draft(config) or _BY_PATH.search(str(found.draft)))
    if found.method == "mtp" or config.get("speculators_config") is not None:
        yield Issue(expected, actual, f"vLLM 0.26 {hint}", severity="warning")  # a later one may look there
    elif config.get("n_predict") is None and not by_itself:
        yield Issue(expected, actual, f"vLLM {hint}")

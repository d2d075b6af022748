"""Speculative decoding in a launch: options of SGLang and vLLM, and settings that other stacks pass on to them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckptkit.verify.launch.arguments import Server, server_of
from ckptkit.verify.launch.options.arguments import Arguments
from ckptkit.verify.launch.words import Word

if TYPE_CHECKING:
    from ckptkit.verify.launch.settings.config import Config


@dataclass(frozen=True)
class Speculation:
    """How an engine drafts tokens."""

    server: Server
    method: str  # the engine's name for it
    asked_by: str  # the option that requests it
    draft: str | None = None  # the draft model
    known: bool = True  # False if the method, the draft, or its existence is unknown
    tokens: bool = True  # whether the number of tokens is set, for vLLM
    mixed: bool = False  # whether the draft may have another vocabulary


def speculation_from_options(arguments: Arguments, words: Sequence[Word]) -> Speculation | None:
    """The speculation of slime, miles or vime, or None if the engine does not speculate or that is unknown."""
    if server_of(words) == "vllm":
        try:
            content = json.loads(arguments.value("vllm_speculative_config") or "")
        except (ValueError, RecursionError):
            return None
        return _from_mapping(content, arguments.cite("vllm_speculative_config")) if isinstance(content, dict) else None
    method = arguments.value("sglang_speculative_algorithm")
    if not method:
        return None
    draft, option = "sglang_speculative_draft_model_path", arguments.cite("sglang_speculative_algorithm")
    return Speculation("sglang", method.upper(), option, arguments.value(draft), known=arguments.get(draft).known)


def _from_mapping(content: Mapping[str, Any], asked_by: str) -> Speculation:
    """vLLM's `--speculative-config`; the draft model decides the default method, as in vLLM `config/speculative.py`."""
    model, method = content.get("model"), content.get("method")
    if method is None:
        method = "ngram" if model in ("ngram", "[ngram]") else "draft_model"
    tokens, mixed = content.get("num_speculative_tokens") is not None, bool(content.get("use_heterogeneous_vocab"))
    draft = None if model is None else str(model)
    return Speculation("vllm", str(method).lower(), asked_by, draft, tokens=tokens, mixed=mixed)


def speculation_from_settings(settings: Config, prefix: str, server: str | None) -> Speculation | None:
    """The mapping `speculative_config` that verl, NeMo-RL and ROLL pass on to vLLM, or None for another server."""
    if server != "vllm":
        return None
    settings = settings.silent_copy()
    names = ("method", "model", "num_speculative_tokens", "use_heterogeneous_vocab")
    values = {name: settings.get(f"{prefix}.speculative_config.{name}") for name in names}
    content = {name: setting.value for name, setting in values.items() if setting.word}
    if not content or content.get("num_speculative_tokens") == "0":
        return None
    speculation = _from_mapping(content, settings.cite(f"{prefix}.speculative_config.{next(iter(content))}"))
    tokens = speculation.tokens or not values["num_speculative_tokens"].known
    return replace(speculation, known=values["method"].known and values["model"].known, tokens=tokens)

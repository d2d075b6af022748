"""What a launch says of speculative decoding: options of SGLang and vLLM, and what other stacks hand on to these."""

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
    """How an engine drafts: `method` as it calls it, `draft` the model that it drafts with where one is given.

    `known`: False where the method, the draft, or whether there is one, is not known. `tokens`: vLLM is told how many
    tokens to draft. `mixed`: the draft may have another vocabulary. `asked_by`: the option that
    asks for it.
    """

    server: Server
    method: str
    asked_by: str
    draft: str | None = None
    known: bool = True
    tokens: bool = True
    mixed: bool = False


def speculation_from_options(given: Arguments, words: Sequence[Word]) -> Speculation | None:
    """What the options of slime, miles or vime say; None where the engine does not speculate, or that is not known."""
    if server_of(words) == "vllm":
        try:
            content = json.loads(given.value("vllm_speculative_config") or "")
        except (ValueError, RecursionError):
            return None
        return _from_mapping(content, given.cite("vllm_speculative_config")) if isinstance(content, dict) else None
    method = given.value("sglang_speculative_algorithm")
    if not method:
        return None
    path = "sglang_speculative_draft_model_path"
    return Speculation(
        "sglang",
        method.upper(),
        given.cite("sglang_speculative_algorithm"),
        given.value(path),
        known=given.get(path).known,
    )


def _from_mapping(content: Mapping[str, Any], asked_by: str) -> Speculation:
    """vLLM's `--speculative-config`, whose draft model decides the method where none is given.

    Source: vLLM `config/speculative.py`.
    """
    model, method = content.get("model"), content.get("method")
    if method is None:
        method = "ngram" if model in ("ngram", "[ngram]") else "draft_model"
    tokens, mixed = content.get("num_speculative_tokens") is not None, bool(content.get("use_heterogeneous_vocab"))
    draft = None if model is None else str(model)
    return Speculation("vllm", str(method).lower(), asked_by, draft, tokens=tokens, mixed=mixed)


def speculation_from_settings(settings: Config, prefix: str, server: str | None) -> Speculation | None:
    """The mapping `speculative_config` that verl, NeMo-RL and ROLL hand on to vLLM; None for another server."""
    if server != "vllm":
        return None
    settings = settings.silent_copy()
    names = ("method", "model", "num_speculative_tokens", "use_heterogeneous_vocab")
    found = {name: settings.get(f"{prefix}.speculative_config.{name}") for name in names}
    given = {name: one.value for name, one in found.items() if one.word}
    if not given or given.get("num_speculative_tokens") == "0":
        return None
    speculation = _from_mapping(given, settings.cite(next(f"{prefix}.speculative_config.{name}" for name in given)))
    tokens = speculation.tokens or not found["num_speculative_tokens"].known
    return replace(speculation, known=found["method"].known and found["model"].known, tokens=tokens)

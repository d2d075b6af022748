"""Reports about names of tensors that are another writer's: prefixes, wrappers, adapters."""

from __future__ import annotations

from collections.abc import Callable

from mutations.edits import rename

from reports.files import VERIFY, on_checkpoint
from reports.report import Change, Report


def renamed(new_name: Callable[[str], str]) -> Change:
    """Every tensor has another name."""
    return on_checkpoint(lambda path: rename(path, new_name))


def _lora(name: str) -> str:
    """A name as a model under an adapter saves it."""
    module = any(part in name for part in ("_proj.weight", "down_proj"))
    return "base_model.model." + (name.replace(".weight", ".base_layer.weight") if module else name)


REPORTS = (
    Report(
        "verl#4761",
        "2026-01",
        "The HF directory that was to hold the merged model holds an unmerged one: `base_model.model.` before every "
        "name, `base_layer` in those of adapted modules.",
        VERIFY,
        "qwen2-untied/hf",
        "CK104",
        ("base_model.model.",),
        renamed(_lora),
    ),
    Report(
        "prime-rl#2640",
        "2026-05",
        "A training framework saves Qwen3.5 under a prefix that it nests twice more; the engine skips every name.",
        VERIFY,
        "qwen3_5/hf",
        "CK104",
        ("model.language_model.language_model.language_model.", "inside their names"),
        renamed(
            lambda name: name.replace("model.language_model.", "model.language_model.language_model.language_model.")
        ),
    ),
    Report(
        "llm-compressor#2752",
        "2026-05",
        "Qwen3.5 quantized as a text model: packed names with the wrapper's `language_model.`; the engine drops each.",
        f"{VERIFY} --strict",
        "qwen3_5_text-tied-tiles/int4",
        "CK104",
        ("model.language_model.*", "the multimodal class"),
        renamed(lambda name: name.replace("model.", "model.language_model.", 1)),
    ),
    Report(
        "vllm#50355",
        "2026-07",
        "Text-only checkpoints of Qwen3.5 whose names still have the wrapper's `language_model.`, under the config of "
        "the text model.",
        f"{VERIFY} --strict",
        "qwen3_5_text-tied/hf",
        "CK104",
        ("model.language_model.*", "the multimodal class"),
        renamed(lambda name: name.replace("model.", "model.language_model.", 1)),
    ),
)

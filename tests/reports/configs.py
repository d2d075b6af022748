"""Reports about config.json and side files: settings that readers take differently, or that are not the weights'."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mutations.edits import edit_common, edit_config, edit_json

from reports.files import on_checkpoint, without_tensors
from reports.report import SOURCE, Change, Report

VERIFY = "ckptkit verify CKPT"
AGAINST = "ckptkit verify CKPT --source RELEASE"


def config(change: Callable[[dict[str, Any]], object]) -> Change:
    """config.json is changed in place."""
    return lambda work: edit_json(work / "CKPT" / "config.json", change)


def settings(**values: Any) -> Change:
    """config.json says something else."""
    return on_checkpoint(lambda path: edit_config(path, **values))


def _tied_below(content: dict[str, Any]) -> None:
    """The flag stands in text_config alone."""
    content.pop("tie_word_embeddings", None)
    content["text_config"]["tie_word_embeddings"] = True


def _tied(work: Path) -> None:
    """The model without an output layer of its own, and the flag at the top too."""
    without_tensors("lm_head.weight")(work)
    config(lambda content: (content.update(tie_word_embeddings=True), _tied_below(content | {})))(work)


def _untied(content: dict[str, Any]) -> None:
    content["tie_word_embeddings"] = False
    content["text_config"]["tie_word_embeddings"] = False


def _two_spellings(content: dict[str, Any]) -> None:
    """As a trainer on one release of transformers and a config of another leave it: two bases."""
    content["rope_theta"] = 10000.0


def _trained_with(work: Path) -> None:
    """A base that is not a class's default, in checkpoint and release."""
    edit_json(work / "CKPT" / "config.json", lambda content: content["rope_parameters"].update(rope_theta=500000.0))
    (work / SOURCE).unlink()
    shutil.copytree(work / "CKPT", work / SOURCE)


def _no_rope(content: dict[str, Any]) -> None:
    for key in ("rope_theta", "rope_scaling", "rope_parameters"):
        content.pop(key, None)


def _layer_too_many(content: dict[str, Any]) -> None:
    content["layer_types"] = [*content["layer_types"], content["layer_types"][-1]]


def _other_eos(path: Path) -> None:
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))


def _same_eos(work: Path) -> None:
    (work / "CKPT" / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))


def _other_arguments(path: Path) -> None:
    edit_common(path, lambda content: setattr(content["args"], "rotary_base", 1000000))


def _end_of_turns(work: Path) -> None:
    """A release whose turns end with a token of their own, by tokenizer and generation_config."""
    path = work / "CKPT"
    edit_json(path / "tokenizer_config.json", lambda content: content.update({"eos_token": "w7"}))
    template = "{% for message in messages %}<bos>{{ message['content'] }}w7{% endfor %}\n"
    (path / "chat_template.jinja").write_text(template)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 7]}))
    (work / SOURCE).unlink()
    shutil.copytree(path, work / SOURCE)


def _end_of_texts(path: Path) -> None:
    edit_json(path / "tokenizer_config.json", lambda content: content.update({"eos_token": "<eos>"}))
    (path / "generation_config.json").unlink()


REPORTS = (
    Report(
        "Megatron-Bridge#4413",
        "2026-06",
        "Gemma 4's conversion loses what its class does not take for granted, here the softcap of its logits.",
        AGAINST,
        "gemma4_text/hf",
        "CK702",
        ("final_logit_softcapping = 30.0", "final_logit_softcapping = None"),
        config(lambda content: content.pop("final_logit_softcapping")),
    ),
    Report(
        "Megatron-Bridge#5994",
        "2026-09",
        "An export writes config.json anew from the trainer's settings: max_position_embeddings is the length of its "
        "sequences, 8192 of 1048576.",
        AGAINST,
        "glm_moe_dsa/hf",
        "CK702",
        ("max_position_embeddings = 32",),
        settings(max_position_embeddings=32),
    ),
    Report(
        "transformers#43429",
        "2026-01",
        "The tied flag stands in text_config alone; the class reads the top, so the output layer is random.",
        VERIFY,
        "qwen3_vl-tied/hf",
        "CK705",
        ("tie_word_embeddings",),
        config(_tied_below),
    ),
    Report(
        "transformers#45857",
        "2026-08",
        "The same for Qwen2.5-VL and others after the classes no longer lift the flag from text_config.",
        VERIFY,
        "qwen2_5_vl/hf",
        "CK705",
        ("tie_word_embeddings",),
        config(_tied_below),
        _tied,
    ),
    Report(
        "transformers#42612",
        "2025-12",
        "transformers ties by the flag and overwrites an output layer that it has just loaded, with other values.",
        VERIFY,
        "llama/hf",
        "CK211",
        ("lm_head.weight",),
        settings(tie_word_embeddings=True),
    ),
    Report(
        "Qwen3-VL-Embedding#89",
        "2026-06",
        "config.json says that embeddings are not tied, and no file has an output layer.",
        VERIFY,
        "qwen3_vl-tied/hf",
        "CK104",
        ("lm_head.weight",),
        config(_untied),
    ),
    Report(
        "vllm#51665",
        "2026-08",
        "A tied flag beside an output layer of its own values: the engine goes by the flag and discards the layer.",
        VERIFY,
        "qwen2-untied/hf",
        "CK211",
        ("lm_head.weight",),
        settings(tie_word_embeddings=True),
    ),
    Report(
        "vllm#42624",
        "2026-05",
        "rope_parameters of transformers 5 and a rope_theta of 10000 that version 4 put beside it: two readers, two "
        "bases.",
        VERIFY,
        "qwen2-untied/hf",
        "CK704",
        ("10000",),
        config(_two_spellings),
        _trained_with,
    ),
    Report(
        "MarinFold#198",
        "2026-08",
        "A published config has neither rope_theta nor rope_scaling, so that every reader takes the base of its class.",
        AGAINST,
        "qwen2-untied/hf",
        "CK702",
        ("rope",),
        config(_no_rope),
        _trained_with,
    ),
    Report(
        "Model-Optimizer#1693",
        "2026-06",
        "An export writes layer_types with more entries than the model has layers.",
        VERIFY,
        "qwen3_5_text-tied/hf",
        "CK101",
        ("layer_types",),
        config(_layer_too_many),
    ),
    Report(
        "Megatron-Bridge#5946",
        "2026-09",
        "An MTP layer that is used twice is exported as num_nextn_predict_layers 2; one is stored.",
        VERIFY,
        "glm4_moe/hf",
        "CK104",
        ("model.layers.13.",),
        settings(num_nextn_predict_layers=2),
    ),
    Report(
        "Megatron-Bridge#5528",
        "2026-08",
        "An export without MTP weights keeps the number of MTP layers in text_config.",
        AGAINST,
        "qwen3_5_moe/hf",
        "CK202",
        ("mtp.",),
        without_tensors("mtp."),
    ),
    Report(
        "sglang#26745",
        "2026-05",
        "Training kept the language model alone: the config builds a vision tower, no tensor of it is stored, and its "
        "memory gives NaN.",
        VERIFY,
        "qwen3_5/hf",
        "CK730",
        ("visual",),
        without_tensors("model.visual."),
    ),
    Report(
        "slime#1059",
        "2025-12",
        "The conversion does not hold the model script against config.json: weights with another rotary base train "
        "without an error.",
        VERIFY,
        "qwen3_moe/megatron",
        "CK701",
        ("rotary_base",),
        on_checkpoint(_other_arguments),
    ),
    Report(
        "mlx-vlm#2112",
        "2026-08",
        "generation_config.json lists another end token than the one with which the model ends its turn: generation "
        "never stops.",
        VERIFY,
        "qwen2-untied/hf",
        "CK707",
        ("generation_config.json",),
        on_checkpoint(_other_eos),
        _same_eos,
    ),
    Report(
        "unsloth#5386",
        "2026-05",
        "A merge of Gemma 4 makes `<eos>` the tokenizer's end, which was the token that ends a turn: vLLM generates to "
        "the length limit.",
        f"{AGAINST} --strict",
        "gemma4/hf",
        "CK707",
        ("'w7', which the chat template writes", "ends at 3"),
        on_checkpoint(_end_of_texts),
        _end_of_turns,
        AGAINST,
    ),
    Report(
        "granite-switch#126",
        "2026-09",
        "config.json has dtype bfloat16 and torch_dtype null, which one engine took for float32.",
        VERIFY,
        "qwen2-untied/hf",
        prepare=settings(torch_dtype=None),
        verdict="sound",
        reason="transformers 5 reads dtype; which release an engine has is in no file",
    ),
)

"""Reports about config.json and side files: settings that readers take differently, or that are not the weights'."""

import json

from mutations.edits import edit_common, edit_json
from mutations.hf_files import without_rope

from reports.changes import as_release, config, on_checkpoint, settings, without_tensors
from reports.report import Case

AGAINST = "ckptkit verify CKPT --source RELEASE"


def _tied_below(content):
    content.pop("tie_word_embeddings", None)
    content["text_config"]["tie_word_embeddings"] = True


def _tied(work):
    """The model without an output layer of its own, and the flag at the top too."""
    without_tensors("lm_head.weight")(work)
    config(lambda content: (content.update(tie_word_embeddings=True), _tied_below(content | {})))(work)


def _untied(content):
    content["tie_word_embeddings"] = False
    content["text_config"]["tie_word_embeddings"] = False


def _trained_with(work):
    """A base that is not a class's default, in checkpoint and release."""
    edit_json(work / "CKPT" / "config.json", lambda content: content["rope_parameters"].update(rope_theta=500000.0))
    as_release(work)


def _layer_too_many(content):
    content["layer_types"] = [*content["layer_types"], content["layer_types"][-1]]


def _eos(token):
    return lambda work: (work / "CKPT" / "generation_config.json").write_text(json.dumps({"eos_token_id": token}))


def _end_of_turns(work):
    """A release whose turns end with a token of their own, by tokenizer and generation_config."""
    path = work / "CKPT"
    edit_json(path / "tokenizer_config.json", lambda content: content.update({"eos_token": "w7"}))
    template = "{% for message in messages %}<bos>{{ message['content'] }}w7{% endfor %}\n"
    (path / "chat_template.jinja").write_text(template)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 7]}))
    as_release(work)


def _end_of_texts(path):
    edit_json(path / "tokenizer_config.json", lambda content: content.update({"eos_token": "<eos>"}))
    (path / "generation_config.json").unlink()


CASES = {
    "Megatron-Bridge#4413": Case(
        "gemma4_text/hf",
        ("final_logit_softcapping = 30.0", "final_logit_softcapping = None"),
        config(lambda content: content.pop("final_logit_softcapping")),
    ),
    "Megatron-Bridge#5994": Case(
        "glm_moe_dsa/hf", ("max_position_embeddings = 32",), settings(max_position_embeddings=32)
    ),
    "transformers#43429": Case("qwen3_vl-tied/hf", ("tie_word_embeddings",), config(_tied_below)),
    "transformers#45857": Case("qwen2_5_vl/hf", ("tie_word_embeddings",), config(_tied_below), _tied),
    "transformers#42612": Case("llama/hf", ("lm_head.weight",), settings(tie_word_embeddings=True)),
    "Qwen3-VL-Embedding#89": Case("qwen3_vl-tied/hf", ("lm_head.weight",), config(_untied)),
    "vllm#51665": Case("qwen2-untied/hf", ("lm_head.weight",), settings(tie_word_embeddings=True)),
    "vllm#42624": Case("qwen2-untied/hf", ("10000",), settings(rope_theta=10000.0), _trained_with),
    "MarinFold#198": Case(
        "qwen2-untied/hf", ("rope",), on_checkpoint(lambda path: without_rope(path, "")), _trained_with
    ),
    "Model-Optimizer#1693": Case("qwen3_5_text-tied/hf", ("layer_types",), config(_layer_too_many)),
    "Megatron-Bridge#5946": Case("glm4_moe/hf", ("model.layers.13.",), settings(num_nextn_predict_layers=2)),
    "Megatron-Bridge#5528": Case("qwen3_5_moe/hf", ("mtp.",), without_tensors("mtp.")),
    "sglang#26745": Case("qwen3_5/hf", ("visual",), without_tensors("model.visual.")),
    "slime#1059": Case(
        "qwen3_moe/megatron",
        ("rotary_base",),
        on_checkpoint(lambda path: edit_common(path, lambda content: setattr(content["args"], "rotary_base", 1000000))),
    ),
    "mlx-vlm#2112": Case("qwen2-untied/hf", ("generation_config.json",), _eos(0), _eos(3)),
    "unsloth#5386": Case(
        "gemma4/hf",
        ("eos_token_id is missing but [3, 7] in the source",),
        on_checkpoint(_end_of_texts),
        _end_of_turns,
        AGAINST,
    ),
    "granite-switch#126": Case("qwen2-untied/hf", prepare=settings(torch_dtype=None)),
}

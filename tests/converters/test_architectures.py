"""`architectures` is read: a draft model, a classifier or an encoder is not a language model of its `model_type`."""

import pytest
import transformers.models.auto.modeling_auto as auto
from mutations.edits import edit_config
from support.messages import refusal
from transformers import CONFIG_MAPPING

from ckptkit.app.api import convert
from ckptkit.converters.registry import FAMILIES, family_of
from ckptkit.core.errors import UnsupportedError, UsageError
from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.run import verify

DRAFT = "draft model"
# What a class is, its `model_type`, and classes in `architectures`.
NOT_LANGUAGE_MODELS = [
    (DRAFT, "llama", ["LlamaForCausalLMEagle3", "LlamaForCausalLMEagle", "Eagle3LlamaForCausalLM", "MedusaModel"]),
    (DRAFT, "qwen2", ["Qwen2ForCausalLMEagle"]),
    (DRAFT, "deepseek_v3", ["DeepseekV3ForCausalLMNextN"]),
    (DRAFT, "qwen3_next", ["Qwen3NextForCausalLMMTP"]),
    (DRAFT, "mimo", ["MiMoMTP"]),
    ("reward model", "llama", ["LlamaForSequenceClassification"]),
    ("reward model", "qwen2", ["Qwen2ForRewardModel", "Qwen2ForProcessRewardModel"]),
    ("without an output layer", "llama", ["LlamaBidirectionalModel"]),
    ("without an output layer", "mistral", ["MistralModel"]),
    ("another model", "llama", ["LlavaLlamaForCausalLM"]),
    ("another model", "deepseek_v3", ["DeepseekV32ForCausalLM"]),
]
# Of published config.json files of which transformers has no class, or another; and files that name none.
TAKEN = [
    ("llama", ["LLaMAForCausalLM"]),  # the first conversions
    ("kimi_k2", ["DeepseekV3ForCausalLM"]),  # Kimi-K2-Instruct and -Thinking
    ("qwen3_5_moe_text", ["Qwen3_5MoeForCausalLM"]),  # the text of Qwen3.5-35B-A3B
    *(("llama", nothing) for nothing in (None, [], "LlamaForCausalLM")),
]


def test_every_class_that_transformers_generates_text_with_is_supported():
    """The names that `save_pretrained` writes, for every `model_type` that transformers knows."""
    names = [auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES]
    missing = [
        (model_type, mapping[model_type])
        for model_type in FAMILIES.keys() & CONFIG_MAPPING.keys()
        for mapping in names
        if model_type in mapping and mapping[model_type] not in FAMILIES[model_type].architectures
    ]
    assert missing == []


def test_what_is_no_language_model_is_refused_by_what_it_is():
    for what, model_type, architectures in NOT_LANGUAGE_MODELS:
        for one in architectures:
            with pytest.raises(UnsupportedError, match=f"{one}.*model_type '{model_type}'.*{what}"):
                family_of({"model_type": model_type, "architectures": [one]})


def test_a_config_is_taken_by_its_model_type_and_a_class_of_it_or_none():
    for model_type, stated in TAKEN:
        assert family_of({"model_type": model_type, "architectures": stated}) is FAMILIES[model_type]
    assert family_of({"model_type": "llama"}) is FAMILIES["llama"]


@pytest.mark.parametrize("stated", [{"LlamaForCausalLM": 1}, [7]])
def test_architectures_that_are_no_list_of_names_are_refused(stated):
    refusal("architectures", family_of, {"model_type": "llama", "architectures": stated})


def test_a_draft_is_not_taken_for_its_base(releases, copy_of, tmp_path):
    """Tensors that a llama-like config promises, under the class of a draft model."""
    eagle, name = copy_of(releases("qwen2-tied")), "Qwen2ForCausalLMEagle3"
    edit_config(eagle, architectures=[name])
    refusal(f"{name} of model_type 'qwen2'.*{DRAFT}", convert, eagle, tmp_path / "megatron")
    assert not (tmp_path / "megatron").exists()
    for report in (verify(eagle), preflight(hf_checkpoint=eagle)):
        assert (report.status, report.findings) == ("inconclusive", [])
    assert name in verify(eagle).reasons[0]
    with pytest.raises(UsageError, match="--source"):
        verify(eagle, against=frozenset({"sglang"}))

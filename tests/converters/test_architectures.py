"""`architectures` is read: a draft model, a classifier or an encoder is not a language model of its `model_type`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers.models.auto.modeling_auto as auto
from mutations.edits import edit_config
from transformers import CONFIG_MAPPING

from ckptkit.app.api import convert
from ckptkit.converters.registry import FAMILIES, family_of
from ckptkit.core.errors import CkptkitError, UnsupportedError, UsageError
from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.run import verify

# `model_type` and `architectures` of published config.json files that transformers has no class of, or another.
PUBLISHED = {
    "the first LLaMA conversions": ("llama", "LLaMAForCausalLM"),
    "Kimi-K2-Instruct, -Thinking": ("kimi_k2", "DeepseekV3ForCausalLM"),
    "text of Qwen3.5-35B-A3B": ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
}
DRAFT, HEAD, BARE, OTHER = ("draft model", "reward model", "without an output layer", "another model")
NOT_LANGUAGE_MODELS = [
    ("llama", "LlamaForCausalLMEagle3", DRAFT),
    ("llama", "LlamaForCausalLMEagle", DRAFT),
    ("llama", "Eagle3LlamaForCausalLM", DRAFT),
    ("qwen2", "Qwen2ForCausalLMEagle", DRAFT),
    ("deepseek_v3", "DeepseekV3ForCausalLMNextN", DRAFT),
    ("qwen3_next", "Qwen3NextForCausalLMMTP", DRAFT),
    ("mimo", "MiMoMTP", DRAFT),
    ("llama", "MedusaModel", DRAFT),
    ("llama", "LlamaForSequenceClassification", HEAD),
    ("qwen2", "Qwen2ForRewardModel", HEAD),
    ("qwen2", "Qwen2ForProcessRewardModel", HEAD),
    ("qwen3", "Qwen3ForSequenceClassification", HEAD),
    ("llama", "LlamaBidirectionalModel", BARE),
    ("mistral", "MistralModel", BARE),
    ("llama", "LlavaLlamaForCausalLM", OTHER),
    ("deepseek_v3", "DeepseekV32ForCausalLM", OTHER),
]


@pytest.mark.parametrize(("model_type", "architecture"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_architectures_are_supported(model_type: str, architecture: str) -> None:
    assert family_of({"model_type": model_type, "architectures": [architecture]}) is FAMILIES[model_type]


def test_every_class_that_transformers_generates_text_with_is_supported() -> None:
    """The names that `save_pretrained` writes, for every `model_type` that transformers knows."""
    names = [auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES]
    missing = [
        (model_type, mapping[model_type])
        for model_type in FAMILIES.keys() & CONFIG_MAPPING.keys()
        for mapping in names
        if model_type in mapping and mapping[model_type] not in FAMILIES[model_type].architectures
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("model_type", "architecture", "what"), NOT_LANGUAGE_MODELS, ids=[name for _, name, _ in NOT_LANGUAGE_MODELS]
)
def test_what_is_no_language_model_is_refused_by_what_it_is(model_type: str, architecture: str, what: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{architecture}.*model_type '{model_type}'.*{what}"):
        family_of({"model_type": model_type, "architectures": [architecture]})


@pytest.mark.parametrize(
    "stated", [{}, {"architectures": None}, {"architectures": []}, {"architectures": "LlamaForCausalLM"}]
)
def test_a_config_that_names_no_class_is_taken_by_its_model_type(stated: dict[str, Any]) -> None:
    assert family_of({"model_type": "llama"} | stated) is FAMILIES["llama"]


@pytest.mark.parametrize("stated", [{"LlamaForCausalLM": 1}, [7], 7])
def test_architectures_that_are_no_list_of_names_are_refused(stated: Any) -> None:
    with pytest.raises(CkptkitError, match="architectures"):
        family_of({"model_type": "llama", "architectures": stated})


@pytest.fixture
def eagle(releases: Callable[[str], Path], copy_of: Callable[[Path], Path]) -> Path:
    """Tensors that a llama-like config promises, under the class of a draft model."""
    path = copy_of(releases("qwen2-tied"))
    edit_config(path, architectures=["Qwen2ForCausalLMEagle3"])
    return path


def test_convert_refuses_a_draft(eagle: Path, tmp_path: Path) -> None:
    with pytest.raises(CkptkitError, match=f"Qwen2ForCausalLMEagle3 of model_type 'qwen2'.*{DRAFT}"):
        convert(eagle, tmp_path / "megatron")
    assert not (tmp_path / "megatron").exists()


def test_verify_of_a_draft_that_is_not_read_is_inconclusive(eagle: Path) -> None:
    report = verify(eagle)
    assert (report.status, report.findings) == ("inconclusive", [])
    assert "Qwen2ForCausalLMEagle3" in report.reasons[0]
    with pytest.raises(UsageError, match="--source"):
        verify(eagle, against=frozenset({"sglang"}))


def test_preflight_of_a_draft_is_inconclusive(eagle: Path) -> None:
    report = preflight(hf_checkpoint=eagle)
    assert (report.status, report.findings) == ("inconclusive", [])

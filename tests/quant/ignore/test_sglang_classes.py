"""Names that SGLang's own classes look up, and what they declare as fused, for every model with INT4 support."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import pytest
from families import HF_CASES
from families.table import config_of
from support import sglang_layers
from support.installed import release

from ckptkit.converters.hf_names import FUSED
from ckptkit.converters.registry import FAMILIES
from ckptkit.quant.engines.registry import engine_class
from ckptkit.quant.formats.groups import RUN_BY_TRANSFORMERS
from ckptkit.quant.ignore.names import matrices_named, names_of_layer
from ckptkit.quant.ignore.tree import class_tree

pytestmark = pytest.mark.sglang

CLASSES = {
    model_type: known
    for model_type, family in FAMILIES.items()
    if family.release and not (known := engine_class("sglang", {"model_type": model_type})).fp8_only
}
# Fused layers that each class takes apart, as it declares them itself in `packed_modules_mapping`.
PACKED = {model_type: {name: FUSED[name] for name in known.fused} for model_type, known in CLASSES.items()}
# Classes that want a GPU: only what they declare is compared.
DECLARED = {
    "deepseek_v32": ("deepseek_v2", "DeepseekV32ForCausalLM"),
    "glm_moe_dsa": ("glm4_moe", "GlmMoeDsaForCausalLM"),
    "kimi_k25": ("kimi_k25", "KimiK25ForConditionalGeneration"),
    "qwen3_next": ("qwen3_next", "Qwen3NextForCausalLM"),
    "qwen3_5": ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    "qwen3_5_moe": ("qwen3_5", "Qwen3_5MoeForConditionalGeneration"),
    "qwen3_5_text": ("qwen3_5", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe_text": ("qwen3_5", "Qwen3_5MoeForCausalLM"),
}
# Models without a class of their own, which SGLang runs as transformers builds them.
BY_TRANSFORMERS = RUN_BY_TRANSFORMERS.keys() & FAMILIES.keys()
WITHOUT_INT4 = {"bailing_moe", "bailing_moe_v2", "deepseek_v4", "gpt_oss"}
WITHOUT_INT4 |= {"glm5_next", "kimi_k3", "qwen3_omni_moe", "qwen3_omni_moe_thinker"}
# SGLang without remote code knows the classes of these, but not the config.
KNOWN_AS = {"mimo": "qwen2", "kimi_k2": "deepseek_v3"}


def config(case: str) -> dict[str, Any]:
    return config_of(HF_CASES[case])


def _built() -> dict[str, str]:
    """The first test model of each other type, with the class that SGLang builds for it without a GPU."""
    found: dict[str, str] = {}
    for case in HF_CASES:
        model_type = config(case)["model_type"]
        if model_type in CLASSES.keys() - DECLARED.keys() - BY_TRANSFORMERS:
            found.setdefault(model_type, case)
    return {case: FAMILIES[model_type].architectures[0] for model_type, case in found.items()}


BUILT = _built()

# SGLang 0.5.23 also asks about the output layer, which it quantizes where a target names it; ours are a class.
OUTPUT_LAYER = {"lm_head"} if release("sglang") >= (0, 5, 23) else set()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, Any]]:
    from sglang.srt.models.registry import ModelRegistry

    lost = sorted(set(BUILT.values()) - ModelRegistry.models.keys())
    assert not lost, f"SGLang has no class {lost}: add the model_type to RUN_BY_TRANSFORMERS of quant/formats/groups.py"
    configs = {}
    for case, architecture in BUILT.items():
        content = config(case) | {"architectures": [architecture]}
        content["model_type"] = KNOWN_AS.get(content["model_type"], content["model_type"])
        # A key that only the releases have.
        configs[case] = content | ({"first_k_dense_replace": 1} if case == "glm4_moe_lite" else {})
    return sglang_layers.looked_up(configs, tmp_path_factory.mktemp("sglang"))


@pytest.mark.parametrize("case", list(BUILT))
def test_names_that_the_class_looks_up(built: Mapping[str, dict[str, Any]], case: str) -> None:
    """If no list entry names a fused layer, mapped layers are split after the look-up recorded here."""
    content = config(case)
    tree = class_tree(content)
    expected = set()
    for matrix in matrices_named((f"{name}.weight" for name in [*tree.linears, *tree.others]), tree, content):
        expected.update(names_of_layer(matrix.sglang, {}) if matrix.sglang else ())
    outside = FAMILIES[content["model_type"]].carried or ("\0",)
    found = {name for name in built[case]["names"] if not name.startswith(outside)} - OUTPUT_LAYER
    assert found == expected


@pytest.mark.parametrize("case", list(BUILT))
def test_what_a_built_class_declares(built: Mapping[str, dict[str, Any]], case: str) -> None:
    declared = {fused: tuple(shards) for fused, shards in built[case]["packed_modules_mapping"].items()}
    # Granite's declares layers that stand for themselves.
    declared = {fused: shards for fused, shards in declared.items() if shards != (fused,)}
    assert declared == PACKED[config(case)["model_type"]]
    assert built[case]["class"] == BUILT[case]


@pytest.mark.parametrize("case", list(BUILT))
def test_vision_towers_that_the_class_looks_up(built: Mapping[str, dict[str, Any]], case: str) -> None:
    content = config(case)
    outside = FAMILIES[content["model_type"]].carried or ("\0",)
    asked = {name for name in built[case]["names"] if name.startswith(outside)}
    assert bool(asked) is (CLASSES[content["model_type"]].outside is not None)
    tree = class_tree(content)
    if not tree.whole:  # Gemma 4: see below
        return
    named = (f"{name}.weight" for name in tree.spelled if name.startswith(outside))
    assert asked <= {matrix.sglang for matrix in matrices_named(named, tree, content)}


def test_the_vision_tower_of_gemma_is_looked_up(built: Mapping[str, dict[str, Any]]) -> None:
    names = {
        "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight",
        "vision_tower.vision_model.encoder.layers.0.self_attn.out_proj.weight",
    }
    layers = {matrix.sglang for matrix in matrices_named(names, class_tree(config("gemma3")), config("gemma3"))}
    assert layers <= set(built["gemma3"]["names"])


@pytest.mark.parametrize("model_type", list(DECLARED))
def test_what_the_other_classes_declare(model_type: str) -> None:
    module, name = DECLARED[model_type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cls = getattr(import_module(f"sglang.srt.models.{module}"), name)
    known = PACKED[model_type]
    declared = {fused: tuple(shards) for fused, shards in getattr(cls, "packed_modules_mapping", {}).items()}
    if "fused_qkv_a_proj_with_mqa" in known:
        # Each instance adds it, as test_what_a_built_class_declares shows on DeepSeek V3.
        declared |= {"fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa")}
    assert declared == known


@pytest.mark.parametrize("model_type", sorted(CLASSES.keys() - BY_TRANSFORMERS))
def test_entries_as_the_class_rewrites_them(model_type: str) -> None:
    classes = {config(case)["model_type"]: name for case, name in BUILT.items()} | {
        key: name for key, (_, name) in DECLARED.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.models.registry import ModelRegistry

        known = ModelRegistry.models.get(classes[model_type])
    mapper = getattr(known, "hf_to_sglang_mapper", None)
    entries = [
        "lm_head",
        "lm_head.x",
        "model.embed_tokens",
        "model.language_model.layers.0.mlp",
        "model.visual.merger",
        "re:model.x",
        "language_model.layers.1",
    ]
    assert [CLASSES[model_type].entry(entry) for entry in entries] == (
        mapper.apply_list(entries) if mapper else entries
    )


def test_models_without_a_class_are_those_of_sglangs_registry() -> None:
    """Of classes by another name than the release's, that of the release counts: SGLang has one for each but these."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.models.registry import ModelRegistry
        from sglang.srt.models.transformers import TransformersBase

    named = {model_type: FAMILIES[model_type].architectures for model_type in CLASSES}
    without = {key for key, several in named.items() if not ModelRegistry.models.keys() & set(several)}
    assert without == BY_TRANSFORMERS
    assert {key: FAMILIES[key].architectures for key in without} == {
        key: (RUN_BY_TRANSFORMERS[key],) for key in BY_TRANSFORMERS
    }
    assert not ModelRegistry.models.keys() & set(RUN_BY_TRANSFORMERS.values())
    targets = ("Linear", "re:.*proj$", "model.layers.0.self_attn.q_proj")
    rewritten = TransformersBase.hf_to_sglang_mapper.apply_dict(dict.fromkeys(targets, 1))
    assert list(rewritten) == ["model.Linear", "model.re:.*proj$", "model.layers.0.self_attn.q_proj"]


def test_every_model_that_is_converted_is_known() -> None:
    assert CLASSES.keys() == FAMILIES.keys() - WITHOUT_INT4
    built = {config(case)["model_type"] for case in BUILT}
    assert built | DECLARED.keys() | BY_TRANSFORMERS == CLASSES.keys()
    assert len(BUILT) >= 18


# The draft class of each family with draft layers, and the module that it stands in.
DRAFTS = {
    "glm4_moe": ("glm4_moe_nextn", "Glm4MoeForCausalLMNextN"),
    "glm4_moe_lite": ("glm4_moe_lite_nextn", "Glm4MoeLiteForCausalLMNextN"),
    "deepseek_v3": ("deepseek_nextn", "DeepseekV3ForCausalLMNextN"),
    "hy_v3": ("hunyuan_v3_nextn", "HYV3ForCausalLMNextN"),
    "exaone_moe": ("exaone_moe_mtp", "ExaoneMoEForCausalLMMTP"),
    "mimo": ("mimo_mtp", "MiMoMTP"),
    "qwen3_5": ("qwen3_5_mtp", "Qwen3_5ForCausalLMMTP"),
    "qwen3_5_moe": ("qwen3_5_mtp", "Qwen3_5ForCausalLMMTP"),
    "qwen3_next": ("qwen3_next_mtp", "Qwen3NextForCausalLMMTP"),
}


@pytest.mark.parametrize("model_type", DRAFTS)
def test_what_a_draft_class_declares(model_type: str) -> None:
    """As the class of the model, or nothing at all."""
    module, name = DRAFTS[model_type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cls = getattr(import_module(f"sglang.srt.models.{module}"), name)
    declared = {fused: tuple(shards) for fused, shards in getattr(cls, "packed_modules_mapping", {}).items()}
    own = PACKED[model_type]
    if "fused_qkv_a_proj_with_mqa" in own:
        declared |= {"fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa")}  # by the model, loaded first
    case = next(
        case for case in HF_CASES if config(case)["model_type"] == model_type and class_tree(config(case)).drafts
    )
    (draft, *_) = class_tree(config(case)).drafts
    # SGLang 0.5.23 declares Qwen3.5's, of which a list that is right for 0.5.16 says nothing wrong.
    assert declared == (own if draft.unfuses or release("sglang") >= (0, 5, 23) else {})

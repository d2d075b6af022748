"""Names that SGLang's own classes look up, and what they declare as fused, for every model with INT4 support."""

import warnings
from functools import cache
from importlib import import_module

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


@cache
def models_of_sglang(module):
    """A module of SGLang's models. Importing it warns about what a machine without a GPU lacks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(f"sglang.srt.models.{module}")


def config(case):
    return config_of(HF_CASES[case])


def _built():
    """The first test model of each other type, with the class that SGLang builds for it without a GPU."""
    found = {}
    for case in HF_CASES:
        model_type = config(case)["model_type"]
        if model_type in CLASSES.keys() - DECLARED.keys() - BY_TRANSFORMERS:
            found.setdefault(model_type, case)
    return {case: FAMILIES[model_type].architectures[0] for model_type, case in found.items()}


BUILT = _built()

# SGLang 0.5.23 also asks about the output layer, which it quantizes where a target names it; ours are a class.
OUTPUT_LAYER = {"lm_head"} if release("sglang") >= (0, 5, 23) else set()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    lost = sorted(set(BUILT.values()) - models_of_sglang("registry").ModelRegistry.models.keys())
    assert not lost, f"SGLang has no class {lost}: add the model_type to RUN_BY_TRANSFORMERS of quant/formats/groups.py"
    configs = {}
    for case, architecture in BUILT.items():
        content = config(case) | {"architectures": [architecture]}
        content["model_type"] = KNOWN_AS.get(content["model_type"], content["model_type"])
        # A key that only the releases have.
        configs[case] = content | ({"first_k_dense_replace": 1} if case == "glm4_moe_lite" else {})
    return sglang_layers.looked_up(configs, tmp_path_factory.mktemp("sglang"))


@pytest.mark.parametrize("case", list(BUILT))
def test_a_built_class_looks_up_and_declares_what_is_known_of_it(built, case):
    """If no list entry names a fused layer, mapped layers are split after the look-up recorded here."""
    content = config(case)
    tree, known = class_tree(content), CLASSES[content["model_type"]]
    expected = set()
    for matrix in matrices_named((f"{name}.weight" for name in [*tree.linears, *tree.others]), tree, content):
        expected.update(names_of_layer(matrix.sglang, {}) if matrix.sglang else ())
    outside = FAMILIES[content["model_type"]].passthrough or ("\0",)
    asked = {name for name in built[case]["names"] if name.startswith(outside)}
    assert set(built[case]["names"]) - asked - OUTPUT_LAYER == expected
    assert bool(asked) is (known.outside is not None)
    if tree.whole:  # not of Gemma 3, for which see below
        named = (f"{name}.weight" for name in tree.linear_names if name.startswith(outside))
        assert asked <= {matrix.sglang for matrix in matrices_named(named, tree, content)}
    declared = {fused: tuple(shards) for fused, shards in built[case]["packed_modules_mapping"].items()}
    # Granite's declares layers that stand for themselves.
    declared = {fused: shards for fused, shards in declared.items() if shards != (fused,)}
    assert declared == PACKED[content["model_type"]]
    assert built[case]["class"] == BUILT[case]


def test_the_vision_tower_of_gemma_is_looked_up(built):
    root = "vision_tower.vision_model.encoder.layers.0.self_attn"
    names = {f"{root}.q_proj.weight", f"{root}.out_proj.weight"}
    layers = {matrix.sglang for matrix in matrices_named(names, class_tree(config("gemma3")), config("gemma3"))}
    assert layers <= set(built["gemma3"]["names"])


def declared_by(module, name, known):
    """What a class declares, and what each instance adds, as shown above on DeepSeek V3."""
    cls = getattr(models_of_sglang(module), name)
    declared = {fused: tuple(shards) for fused, shards in getattr(cls, "packed_modules_mapping", {}).items()}
    latent = {"fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa")}
    return declared | (latent if latent.keys() <= known.keys() else {})


@pytest.mark.parametrize("model_type", list(DECLARED))
def test_what_the_other_classes_declare(model_type):
    assert declared_by(*DECLARED[model_type], PACKED[model_type]) == PACKED[model_type]


def test_entries_as_the_classes_rewrite_them():
    known = models_of_sglang("registry").ModelRegistry.models
    classes = {config(case)["model_type"]: name for case, name in BUILT.items()}
    classes |= {model_type: name for model_type, (_, name) in DECLARED.items()}
    entries = ["lm_head", "lm_head.x", "model.embed_tokens", "model.language_model.layers.0.mlp"]
    entries += ["model.visual.merger", "re:model.x", "language_model.layers.1"]
    for model_type in CLASSES.keys() - BY_TRANSFORMERS:
        mapper = getattr(known.get(classes[model_type]), "hf_to_sglang_mapper", None)
        expected = mapper.apply_list(entries) if mapper else entries
        assert [CLASSES[model_type].entry(entry) for entry in entries] == expected, model_type


def test_models_without_a_class_are_those_of_sglangs_registry():
    """Of classes by another name than the release's, that of the release counts: SGLang has one for each but these."""
    known = models_of_sglang("registry").ModelRegistry.models.keys()
    named = {model_type: FAMILIES[model_type].architectures for model_type in CLASSES}
    without = {key for key, several in named.items() if not known & set(several)}
    assert without == BY_TRANSFORMERS
    assert all(FAMILIES[key].architectures == (RUN_BY_TRANSFORMERS[key],) for key in without)
    assert not known & set(RUN_BY_TRANSFORMERS.values())
    targets = ("Linear", "re:.*proj$", "model.layers.0.self_attn.q_proj")
    rewritten = models_of_sglang("transformers").TransformersBase.hf_to_sglang_mapper.apply_dict(
        dict.fromkeys(targets, 1)
    )
    assert list(rewritten) == ["model.Linear", "model.re:.*proj$", "model.layers.0.self_attn.q_proj"]


def test_every_model_that_is_converted_is_known():
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
def test_what_a_draft_class_declares(model_type):
    """As the class of the model, or nothing at all."""
    own = PACKED[model_type]
    declared = declared_by(*DRAFTS[model_type], own)
    case = next(
        case for case in HF_CASES if config(case)["model_type"] == model_type and class_tree(config(case)).drafts
    )
    (draft, *_) = class_tree(config(case)).drafts
    # SGLang 0.5.23 declares Qwen3.5's, of which a list that is right for 0.5.16 says nothing wrong.
    assert declared == (own if draft.unfuses or release("sglang") >= (0, 5, 23) else {})

"""Which modules and stored weights are Linear layers: families against transformers' classes and compressed-tensors."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from families import HF_CASES, deepseek_v4
from families.table import config_of
from safetensors.torch import load_file
from support.messages import refusal, text_with
from support.nightly import daily
from support.published import quantization
from torch import nn
from transformers import AutoModelForCausalLM

from ckptkit.converters.by_class import built_from, family_from
from ckptkit.converters.class_in_transformers import build, describe
from ckptkit.converters.hf_names import name_in_layer
from ckptkit.converters.registry import FAMILIES
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec
from ckptkit.quant.ignore.names import matrices_named, matrices_of
from ckptkit.quant.ignore.reading import read_all
from ckptkit.quant.ignore.tree import class_tree, config_for_class, family_tree, release_of

ROOT = Path(__file__).parents[3]
CONFIGS = {name: config_of(case) for name, case in HF_CASES.items()}
RELEASES = {name: release for name, config in CONFIGS.items() if (release := FAMILIES[config["model_type"]].release)}
PACKABLE = [name for name, release in RELEASES.items() if not release.own_tree]
OWN = [name for name in RELEASES if name not in PACKABLE]


def of_family(config):
    return family_tree(FAMILIES[config["model_type"]], release_of(config), config)


# Answers each line, a config, with the description of its class.
DESCRIBE = """
import json, sys
from ckptkit.converters.class_in_transformers import build, describe
out, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    print(json.dumps(describe(build(json.loads(line)))), file=out, flush=True)
"""


@pytest.fixture(scope="module")
def described():
    """`describe` of the class of a config: in this process, which has torch already, or in one other for all of them.

    SGLang registers configs of its own with transformers, and another test may have imported it.
    """
    if "sglang" not in sys.modules:
        yield lambda content: describe(build(content))
        return
    command = [sys.executable, "-W", "ignore", "-c", DESCRIBE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:

        def ask(content):
            print(json.dumps(content), file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()


def of_transformers(config, described):
    """As `class_tree` has it of a config that the family refuses."""
    release = release_of(config)
    content = config_for_class(release, config)
    asked = family_from((built_from(described(content)),), content["model_type"])
    drafts = release.drafts(release.text(config), release.root)
    return replace(family_tree(asked, asked.release, config), drafts=drafts, kept_endings=release.kept)


# Modules that transformers spells otherwise than the release, in either direction.
OTHERWISE = {"hy_v3": "shared_experts", "nemotron_h": "mlp", "nemotron_h-latent": "mlp", "gemma3": "vision_model"}


COMPARED = [name for name in PACKABLE if name != "kimi_k25"]  # of which transformers has no class
# The first test model of each type.
FIRST = {CONFIGS[name]["model_type"]: name for name in reversed(COMPARED)}.values()


@pytest.mark.parametrize("name", daily(COMPARED, FIRST))
def test_family_names_the_modules_of_transformers_classes(name, described):
    found, expected = of_family(CONFIGS[name]), of_transformers(CONFIGS[name], described)
    if "nemotron" in name:  # transformers saves `backbone.embedding`, and its own release has `backbone.embeddings`
        others = {one.replace("embedding", "embeddings"): kind for one, kind in expected.others.items()}
        expected = replace(expected, others=others)
    if not found.whole:  # the family does not know the tower
        expected = replace(expected, whole=False, linear_names=expected.linear_names & found.linear_names)
    only = found.linear_names - expected.linear_names
    assert all(f".{OTHERWISE[name]}." in one for one in only)
    assert replace(found, linear_names=frozenset(), outside=()) == replace(
        expected, linear_names=frozenset(), outside=()
    )
    assert set(found.outside) == set(expected.outside)
    assert list(found.others.items()) == list(expected.others.items())  # the order of default `ignore` entries


# By hand: modules that no scheme packs, with a word of the reason, and INT4 ones, of models whose modules transformers
# does not have.
STEP_PACKED = [f"3.self_attn.{name}_proj" for name in "qkvo"]
STEP_PACKED += [f"{module}.{name}_proj" for module in ("2.mlp", "3.share_expert") for name in ("gate", "up", "down")]
STEP = {
    "model.embed_tokens": "Embedding",
    "model.layers.3.moe.gate": "Router",
    "model.layers.3.moe.up_proj": "Experts",
    "model.layers.3.self_attn.g_proj": "release",
    "model.layers.12.eh_proj": "draft",
    "model.layers.13.self_attn.q_proj": "draft",
    "lm_head": "output",
    **dict.fromkeys((f"model.layers.{name}" for name in STEP_PACKED), None),
}
COMPRESSOR = [f"{place}compressor.{name}" for place in ("", "indexer.") for name in ("wkv", "wgate")]
V4_PACKED = [f"attn.{name}" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "indexer.wq_b")]
V4_PACKED += [f"ffn.{module}.{name}" for module in ("experts.11", "shared_experts") for name in ("w1", "w2", "w3")]
REASONS = {
    "deepseek_v4": {
        "embed": "Embedding",
        "layers.2.ffn.gate": "Router",
        "head": "output",
        "mtp.0.e_proj": "draft",
        "mtp.0.attn.wq_a": "draft",
        "layers.2.ffn.gate.tid2eid": "module",
        **dict.fromkeys((f"layers.2.attn.{name}" for name in (*COMPRESSOR, "indexer.weights_proj")), "release"),
        **dict.fromkeys((f"layers.2.{name}" for name in V4_PACKED), None),
    },
    "step3p5": STEP,
    "step3p7": STEP | {"vision_model.transformer.resblocks.0.mlp.c_fc": "outside"},
}


@pytest.mark.parametrize("name", OWN)
def test_modules_that_transformers_does_not_have_are_known_by_the_rules(name):
    tree = of_family(CONFIGS[name])
    found = {module: tree.reason_to_keep(module) for module in REASONS[name]}
    assert found == {module: why and text_with(why) for module, why in REASONS[name].items()}
    allowed = {name_in_layer(module) for module, why in REASONS[name].items() if why is None}
    assert {name_in_layer(module) for module in tree.packable} == allowed
    odd = {"hidden_size": "x"}
    text = {"text_config": CONFIGS[name]["text_config"] | odd} if "text_config" in CONFIGS[name] else odd
    with pytest.raises(CkptkitError, match="hidden_size"):  # and transformers is not asked
        class_tree(CONFIGS[name] | text)


def test_deepseek_v4_names_every_linear_layer_of_transformers_class():
    """Under the release's names, which the test model has been renamed to by hand; experts are one module there."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(HF_CASES["deepseek_v4"].config())
    modules = (name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head")
    expected = {deepseek_v4.released(f"{name}.weight").removesuffix(".weight") for name in modules}
    found = of_family(CONFIGS["deepseek_v4"]).linears
    assert {name for name in found if ".experts." not in name} - {"head"} == expected


VISION = {
    "gemma3": [{}, {"num_hidden_layers": 3}, {"vision_use_head": False}],
    "qwen3_5": [{}, {"depth": 3}],
    "qwen3_vl-tied": [{}, {"depth": 3, "deepstack_visual_indexes": [0]}, {"deepstack_visual_indexes": []}],
}


@pytest.mark.parametrize(("name", "vision"), [(name, vision) for name, several in VISION.items() for vision in several])
def test_family_names_the_vision_tower_of_transformers_class(name, vision, described):
    config = CONFIGS[name] | {"vision_config": vision}
    found = of_family(config)
    differ = found.linear_names ^ of_transformers(config, described).linear_names
    assert found.whole
    assert all("vision_tower.vision_model." in one for one in differ)  # which transformers had up to 4.57


def test_config_that_the_family_does_not_convert_is_asked_of_transformers():
    config = CONFIGS["qwen3-untied"] | {"attention_bias": True}
    refusal("attention_bias true", of_family, config)
    assert class_tree(config) == class_tree(CONFIGS["qwen3-untied"])


def test_an_unknown_model_type_has_no_class_tree():
    for config in ({"model_type": "no_such_model"}, CONFIGS["gpt_oss"]):
        refusal(f"model_type '{config['model_type']}'", class_tree, config)


def test_modules_of_a_family_are_told_without_torch(tmp_path):
    (tmp_path / "configs.json").write_text(json.dumps([CONFIGS[name] for name in PACKABLE]))
    code = (
        "import json, sys; from ckptkit.quant.ignore.tree import class_tree\n"
        "trees = [class_tree(config) for config in json.load(open(sys.argv[1]))]\n"
        "print(len(trees), sorted({'torch', 'transformers', 'compressed_tensors'} & sys.modules.keys()))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "configs.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"{len(PACKABLE)} []\n"


# Models with towers, and layers of other kinds than attention. Not where the release names tensors otherwise.
_OTHER_LAYERS = ("linear_conv_kernel_dim", "mamba_num_heads", "mamba_n_heads")
NAMES = [
    name
    for name, config in CONFIGS.items()
    if (release := FAMILIES[config["model_type"]].release) is not None
    and not release.own_tree
    and (release.nested or any(key in config for key in _OTHER_LAYERS))
    and config["model_type"] != "kimi_k25"  # transformers has no class for the whole model
]


def marked(name, path):
    """Each tensor that transformers saves, and whether compressed-tensors quantizes the module that it is of."""
    case = HF_CASES[name]
    scheme = {key: value for key, value in quantization([]).items() if key != "quantization_status"}
    with torch.device("meta"):
        classes = case.auto.from_config(case.config(), dtype=torch.float32)
    apply_quantization_config(classes, QuantizationConfig.model_validate(scheme))
    taken = {key for key, module in classes.named_modules() if getattr(module, "quantization_scheme", None) is not None}
    assert taken
    model = case.auto.from_config(case.config(), dtype=torch.float32)
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.zero_()
    for key, module in model.named_modules():
        if key in taken:
            assert isinstance(module, nn.Linear)
            module.weight.data.fill_(1)
    model.save_pretrained(path, save_original_format=True)
    found = {}
    for file in path.glob("*.safetensors"):
        for key, tensor in load_file(file).items():
            stored = case.renamed.get(key, key)
            found[stored] = (TensorSpec(stored, tuple(tensor.shape), "bfloat16"), bool(tensor.float().min() == 1))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_linear_layers_are_those_of_compressed_tensors(tmp_path, name):
    """By shapes (`verify`, `quantize`) and by names alone (`lint`); a tied head shares the embedding's values."""
    stored, tree = marked(name, tmp_path), class_tree(CONFIGS[name])
    specs = {key: spec for key, (spec, _) in stored.items()}
    for matrices in (matrices_of(specs, tree, CONFIGS[name]), matrices_named(specs, tree, CONFIGS[name])):
        looked_at = [one for one in matrices if not one.expert and not one.module.endswith(("lm_head", "embed_tokens"))]
        differ = {one.tensor for one in looked_at if one.linear is not stored[one.tensor][1]}
        assert differ == set()
        judged = {one.tensor for one in matrices}
        assert {key for key, (_, is_linear) in stored.items() if is_linear and key not in judged} == set()


READERS = ("compressed-tensors", "transformers", "vLLM 0.26", "vLLM 0.33", "SGLang 0.5.16", "SGLang 0.5.23")


@pytest.mark.parametrize(
    ("name", "module", "shape", "linear"),
    [
        ("kimi_k25", "vision_tower.patch_embed.proj", (32, 3, 14, 14), False),
        ("kimi_k25", "vision_tower.patch_embed.pos_emb", (4, 4, 32), False),
        ("kimi_k25", "vision_tower.encoder.blocks.0.wqkv", (96, 32), True),
        ("kimi_k25", "mm_projector.proj.0", (64, 64), True),
        ("step3p7", "vision_model.conv1", (24, 3, 14, 14), False),
    ],
)
def test_modules_of_towers_one_by_one(name, module, shape, linear):
    config, spec = CONFIGS[name], TensorSpec(f"{module}.weight", shape, "bfloat16")
    tree = class_tree(config)
    (found,) = matrices_of({spec.name: spec}, tree, config)
    (by_name,) = matrices_named([spec.name], tree, config)
    assert found.linear is by_name.linear is linear
    answers = {reader: one.answers[0] for reader, one in read_all(READERS, [found], [], config).items()}
    assert linear is (answers["compressed-tensors"] == "packs")
    assert linear or set(answers.values()) == {"keeps"}


def test_norms_are_no_matrices_by_name():
    config = CONFIGS["qwen3_5"]
    names = ["patch_ln1", "ln_q", "ln", "norm2", "final_layernorm", "post_ln_2", "lin_proj", "pin_proj"]
    found = matrices_named([f"model.visual.{name}.weight" for name in names], class_tree(config), config)
    assert [one.module for one in found] == ["model.visual.lin_proj", "model.visual.pin_proj"]


def test_modules_of_a_tower_that_config_json_does_not_have_are_judged_by_their_names(described):
    config = {key: value for key, value in CONFIGS["qwen3_5"].items() if key != "vision_config"}
    tree, root = class_tree(config), "model.visual."
    assert of_family(config) == of_transformers(config, described)
    assert not tree.whole
    names = ["patch_embed.proj", "pos_embed", "blocks.7.attn.qkv", "merger.linear_fc1"]
    found = matrices_named([f"{root}{name}.weight" for name in names], tree, config)
    assert [one.linear for one in found] == [False, False, True, True]

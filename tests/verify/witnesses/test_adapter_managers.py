"""What engines' own LoRA managers hold of an adapter is what its reading here says, and they refuse what CK137 says."""

import json

import pytest
import torch
from safetensors.torch import load_file
from support import adapters
from support.forking import run_in_engine
from support.vllm_answers import ask

from ckptkit.converters.adapter import Adapter
from ckptkit.converters.registry import FAMILIES
from ckptkit.formats.hf.adapter import AdapterFiles
from ckptkit.quant.engines.registry import engine_class
from ckptkit.verify.evidence.plain import plain

pytestmark = pytest.mark.timeout(900)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MADE = {
    "dense": {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]},
    "rslora": {"target_modules": ATTENTION, "use_rslora": True},
    "q and v": {"target_modules": ["q_proj", "v_proj"]},
    "gate alone": {"target_modules": ["gate_proj"]},
    "saved": {"target_modules": ["o_proj"], "modules_to_save": ["lm_head"]},
    "q alone": {"target_modules": ["q_proj"]},
    "k and v": {"target_modules": ["k_proj", "v_proj"]},
    "up alone": {"target_modules": ["up_proj"]},
    "two ranks": {"target_modules": [*ATTENTION, "down_proj"], "rank_pattern": {"down_proj": 6}},
    "dora": {"target_modules": ATTENTION, "use_dora": True},
}
# What each manager says of those that it does not load.
REFUSED = {
    "sglang": {
        "q alone": "'base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight'",
        "k and v": "Cannot find target module name for base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight",
        "up alone": "Cannot find target module name for base_model.model.model.layers.0.mlp.up_proj.lora_A.weight",
        "two ranks": "does not match weight shape torch.Size([6, 288])",
        "dora": "doesn't support DoRA",
    },
    "vllm": {"saved": "only supports modules_to_save being None", "dora": "does not yet support DoRA"},
}
# By how much an engine's own scale is off: 8 / 4 in place of 8 / sqrt(4), and of 8 / 6.
LACKS = {("rslora", "sglang", ""): 2.0, ("two ranks", "vllm", "down_proj"): 2 / 3}
PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
ENGINES = [
    pytest.param("sglang", marks=pytest.mark.sglang),
    pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.nightly]),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("adapters")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapters, "KINDS", {name: ("qwen3-untied", options) for name, options in MADE.items()})
        for name in MADE:
            adapters.made(name, path / name)
    return path


@pytest.fixture(scope="module", params=ENGINES)
def engine(request):
    return str(request.param)


@pytest.fixture(scope="module")
def loads(engine, root):
    """By adapter what is added to each weight by its HF name, or the manager's refusal."""
    jobs = [[str(root / name / part) for part in ("base", "adapter", f"held.{engine}")] for name in MADE]
    file, log = root / f"{engine}.json", root / f"{engine}.log"
    file.write_text(json.dumps(jobs))
    assert run_in_engine(engine, log, "support.adapter_managers", engine, file), log.read_text()[-3000:]
    return {name: held(root / name / f"held.{engine}") for name in MADE}


def held(path):
    if (refused := path.with_name(f"{path.name}.refused")).exists():
        return refused.read_text()
    found = {}
    for name, delta in load_file(path).items():
        module, _, part = name.partition(":")
        parent, _, leaf = module.rpartition(".")
        if bool(delta.any()):
            found[f"{parent}.{PARTS.get(leaf, (leaf,))[int(part)]}.weight"] = delta
    return found


@pytest.mark.parametrize("name", MADE)
def test_managers_hold_what_is_read(name, root, loads, engine):
    """Every pair that is read here, at the place and scale that it is read with, but for scales that CK135 warns of.

    A whole tensor (`modules_to_save`) is in none of SGLang's buffers, and nothing says so.
    """
    found = loads[name]
    if (words := REFUSED[engine].get(name)) is not None:
        assert isinstance(found, str)
        assert words in found
        return
    assert not isinstance(found, str), found
    adapter = Adapter(AdapterFiles(root / name / "adapter"), plain(root / name / "base"), name)
    deltas = {
        pair.targets.specs[0].name: pair.delta(*adapter.files.read([pair.a.name, pair.b.name]).values())
        for pair in adapter.pairs
    }
    assert found.keys() == deltas.keys()
    for weight, delta in deltas.items():
        lacks = LACKS.get((name, engine, weight.split(".")[-2]), LACKS.get((name, engine, ""), 1.0))
        torch.testing.assert_close(found[weight] * lacks, delta, rtol=1e-5, atol=1e-6)


@pytest.mark.vllm
def test_vllms_wrappers_find_layers_of_adapters_of_text_where_the_families_say_so(tmp_path):
    """CK137 goes by `adapters_of_text`: a layer that is not below `language_model.` is in no such class."""
    finds_text = {
        family.architectures[0]: engine_class("vllm", {"model_type": family.model_types[0]}).adapters_of_text
        for family in FAMILIES.values()
        if family.release and family.release.nested and family.architectures[0].endswith("ForConditionalGeneration")
    }
    assert {name.removesuffix("ForConditionalGeneration") for name, finds in finds_text.items() if not finds} == {
        *("Gemma3", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5")
    }
    # Not asked: their adapters are of classes that no transformers has, or vLLM 0.26 has no class.
    asked = sorted(finds_text.keys() - {"KimiK25ForConditionalGeneration", "MiniMaxM3SparseForConditionalGeneration"})
    found = ask("adapters", [(name,) for name in asked], tmp_path)
    assert [one.startswith("language_model.") for one in found] == [finds_text[name] for name in asked]

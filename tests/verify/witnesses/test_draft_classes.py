"""Both engines' own classes load the draft models that tests call sound, and do with them what findings say."""

import json
from pathlib import Path

import pytest
import torch
from families import HF_CASES, case
from support.drafts import KINDS, made_draft, save_draft, tensors_of
from support.forking import run_in_engine

from ckptkit.converters.draft import draft_of
from ckptkit.quant.engines.drafts import has_class

pytestmark = pytest.mark.timeout(900)
ODD = {
    "EAGLE without a bias": ("EAGLE", {}, ("fc.bias",), ()),
    "EAGLE, bias true": ("EAGLE", {"bias": True}, (), ()),
    "EAGLE3 with biases of attention": ("SpecForge", {"attention_bias": True}, (), "qkv"),
}
EMBEDDING = "model.embed_tokens.weight"  # which engines then share
LAYER = "model.layers.0."
# Parameters that hold nothing of the draft model, where it is no copy of the target's embedding or output layer.
UNWRITTEN = {
    "sglang": {
        "EAGLE without a bias": {"model.fc.bias"},
        "EAGLE, bias true": {f"{LAYER}self_attn.qkv_proj.bias", f"{LAYER}self_attn.o_proj.bias"},
        "EAGLE3 with biases of attention": {f"{LAYER}self_attn.o_proj.bias"},
    },
    "vllm": {"EAGLE3 with biases of attention": {f"{LAYER}self_attn.o_proj.bias"}},
}
# What an engine says of a draft model that it has no class of.
REFUSED = {"sglang": ("not a registered model", "Unrecognized"), "vllm": ("are not supported for now",)}
ENGINES = [pytest.param(one, marks=getattr(pytest.mark, one)) for one in REFUSED]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("drafts")
    case.save("qwen3-untied", HF_CASES["qwen3-untied"], path / "target", torch.bfloat16)
    for kind in KINDS:
        made_draft(kind, path / kind)
    for name, (kind, config, left_out, biases) in ODD.items():
        tensors = {one: tensor for one, tensor in tensors_of(kind).items() if one not in left_out}
        tensors |= {f"midlayer.self_attn.{one}_proj.bias": torch.ones(64 if one == "q" else 32) for one in biases}
        save_draft(path / name, tensors, KINDS[kind][0] | config)
    return path


@pytest.fixture(scope="module", params=ENGINES)
def engine(request):
    return str(request.param)


@pytest.fixture(scope="module")
def loads(engine, root):
    output, log = root / f"{engine}.json", root / f"{engine}.log"
    drafts = [root / name for name in (*KINDS, *ODD)]
    assert run_in_engine(engine, log, "support.draft_classes", engine, root / "target", output, *drafts), (
        log.read_text()
    )
    return {Path(path).name: seen for path, seen in json.loads(output.read_text()).items()}


@pytest.mark.parametrize("name", KINDS)
def test_classes_hold_what_is_called_sound(name, engine, loads):
    tensors, seen = tensors_of(name), loads[name]
    if not has_class(engine, draft_of(KINDS[name][0])):
        assert any(words in seen["refused"] for words in REFUSED[engine])
        return
    shared = {"lm_head.weight", EMBEDDING} if "EAGLE" in name and "3" not in name else {EMBEDDING}
    shared |= {"draft_id_to_target_id"} if "d2t" not in tensors else set()  # zeros, until they were poisoned
    assert set(seen["unwritten"]) <= shared
    assert seen["wrong"] == []
    tables = {"t2d"} if engine == "vllm" else {"t2d", "d2t"}
    assert {one for one, places in seen["places"].items() if not places} == tables & tensors.keys()
    if "d2t" in tensors:
        assert seen["tokens"] == (tensors["d2t"] + torch.arange(64)).tolist()


@pytest.mark.parametrize(
    ("engine", "name"),
    [pytest.param(one, name, marks=getattr(pytest.mark, one)) for one in UNWRITTEN for name in UNWRITTEN[one]],
    indirect=["engine"],
)
def test_what_warnings_say_is_left_unwritten(name, engine, loads):
    """Of the biases that SGLang drops, vLLM reads all."""
    shared = {EMBEDDING, "lm_head.weight"} if engine == "sglang" else {EMBEDDING}
    assert set(loads[name]["unwritten"]) - shared == UNWRITTEN[engine][name]
    dropped = [one for one, places in loads[name]["places"].items() if not places and one.endswith("bias")]
    biases = ODD[name][3] if engine == "sglang" else ()
    assert dropped == sorted(f"midlayer.self_attn.{one}_proj.bias" for one in biases)

"""Both engines' own classes load the draft models that tests call sound, and do with them what findings say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from families import HF_CASES, case
from support.drafts import KINDS, made_draft, save_draft, tensors_of
from support.forking import run_in_engine

from converters.draft import draft_of

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
Loads = Mapping[str, dict[str, Any]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drafts")
    case.save("qwen3-untied", HF_CASES["qwen3-untied"], path / "target", torch.bfloat16)
    for kind in KINDS:
        made_draft(kind, path / kind)
    for name, (kind, config, left_out, biases) in ODD.items():
        tensors = {one: tensor for one, tensor in tensors_of(kind).items() if one not in left_out}
        tensors |= {f"midlayer.self_attn.{one}_proj.bias": torch.ones(64 if one == "q" else 32) for one in biases}
        save_draft(path / name, tensors, KINDS[kind][0] | config)
    return path


def loaded(engine: str, root: Path) -> Loads:
    """What each draft model came to, by its name."""
    output, drafts = root / f"{engine}.json", [root / name for name in (*KINDS, *ODD)]
    log = root / f"{engine}.log"
    words = (engine, root / "target", output, *drafts)
    assert run_in_engine(engine, log, "support.draft_classes", *words), log.read_text()[-3000:]
    return {Path(path).name: seen for path, seen in json.loads(output.read_text()).items()}


@pytest.fixture(scope="module")
def in_sglang(root: Path) -> Loads:
    return loaded("sglang", root)


@pytest.fixture(scope="module")
def in_vllm(root: Path) -> Loads:
    return loaded("vllm", root)


def held(name: str, seen: Mapping[str, Any], engine: str) -> None:
    """Every tensor stands in the class, bit for bit; the tables give the tokens that they were made of."""
    tensors = tensors_of(name)
    shared = {"lm_head.weight", EMBEDDING} if "EAGLE" in name and "3" not in name else {EMBEDDING}
    shared |= {"draft_id_to_target_id"} if "d2t" not in tensors else set()  # zeros, until they were poisoned
    assert set(seen["unwritten"]) <= shared
    assert seen["wrong"] == []
    tables = {"t2d"} if engine == "vllm" else {"t2d", "d2t"}
    assert {one for one, places in seen["places"].items() if not places} == tables & tensors.keys()
    if "d2t" in tensors:
        assert seen["tokens"] == (tensors["d2t"] + torch.arange(64)).tolist()


@pytest.mark.sglang
@pytest.mark.parametrize("name", KINDS)
def test_sglangs_classes_hold_what_is_called_sound(name: str, in_sglang: Loads) -> None:
    if not draft_of(KINDS[name][0]).has_class("sglang"):
        assert "not a registered model" in in_sglang[name]["refused"] or "Unrecognized" in in_sglang[name]["refused"]
        return
    held(name, in_sglang[name], "sglang")


@pytest.mark.vllm
@pytest.mark.parametrize("name", KINDS)
def test_vllms_classes_hold_what_is_called_sound(name: str, in_vllm: Loads) -> None:
    if not draft_of(KINDS[name][0]).has_class("vllm"):
        assert "are not supported for now" in in_vllm[name]["refused"]
        return
    held(name, in_vllm[name], "vllm")


@pytest.mark.sglang
@pytest.mark.parametrize("name", ODD)
def test_sglang_leaves_unwritten_what_warnings_say(name: str, in_sglang: Loads) -> None:
    left = set(in_sglang[name]["unwritten"]) - {EMBEDDING, "lm_head.weight"}
    assert left == UNWRITTEN["sglang"][name]
    dropped = [one for one, places in in_sglang[name]["places"].items() if not places and one.endswith("bias")]
    assert dropped == sorted(f"midlayer.self_attn.{one}_proj.bias" for one in ODD[name][3])


@pytest.mark.vllm
def test_vllm_leaves_unwritten_what_warnings_say(in_vllm: Loads) -> None:
    name = "EAGLE3 with biases of attention"
    assert set(in_vllm[name]["unwritten"]) - {EMBEDDING} == UNWRITTEN["vllm"][name]
    assert all(places for one, places in in_vllm[name]["places"].items() if one.endswith("bias"))

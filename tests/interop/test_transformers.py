"""transformers loads what `convert` and `quantize` write: it knows every key and initializes nothing itself."""

import json
import logging

import pytest
import torch
import transformers
from families import CASES
from families.case import save

import ckptkit

# Keys of the multi-token prediction layers, for which transformers has no modules, begin so.
MTP = ("model.layers.12.", "mtp.", "model.layers.20.")


def load(path, caplog):
    """Loads the model by the class that config.json names; returns the loading report, and under `logged` the log."""
    config = json.loads((path / "config.json").read_text())
    kind = getattr(transformers, config["architectures"][0])
    with caplog.at_level(logging.WARNING, "transformers"):
        transformers.utils.logging.enable_propagation()
        model, info = kind.from_pretrained(path, output_loading_info=True, dtype=torch.bfloat16)
        transformers.utils.logging.disable_propagation()
    assert not any(parameter.is_meta for parameter in model.parameters())
    return dict(info) | {"logged": [record.getMessage() for record in caplog.records if record.levelno >= 30]}


def judge(info):
    unexpected = [name for name in info["unexpected_keys"] if not name.startswith(MTP)]
    return sorted([*info["missing_keys"], *map(str, info["mismatched_keys"]), *unexpected])


@pytest.mark.parametrize(("name", "written"), [("glm4_moe-mtp", "back"), ("llama", "int4"), ("qwen2-tied", "int4")])
def test_transformers_loads_what_is_written_with_every_key(name, written, tmp_path, caplog):
    """That an export of every family has the names and bits of its release is in `test_stored.py`."""
    save(name, CASES[name], tmp_path / "release", torch.bfloat16)
    if written == "int4":
        ckptkit.quantize(tmp_path / "release", tmp_path / "int4", ckptkit_scheme())
    else:
        ckptkit.convert(tmp_path / "release", tmp_path / "megatron")
        ckptkit.convert(tmp_path / "megatron", tmp_path / "back")
    info = load(tmp_path / written, caplog)
    assert judge(info) == []
    assert [line for line in info["logged"] if "newly initialized" in line or "MISSING" in line] == []


def test_transformers_initializes_int4_experts_anew(tmp_path, caplog):
    # It looks for fused experts, and takes a group of targets `["Linear"]`, as llm-compressor writes it, for none of
    # theirs.
    save("qwen3_moe", CASES["qwen3_moe"], tmp_path / "release", torch.bfloat16)
    ckptkit.quantize(tmp_path / "release", tmp_path / "int4", ckptkit_scheme())
    missing = {
        f"model.layers.{layer}.mlp.experts.{part}" for layer in range(12) for part in ("down_proj", "gate_up_proj")
    }
    assert set(load(tmp_path / "int4", caplog)["missing_keys"]) == missing
    found = ckptkit.verify(tmp_path / "int4", readers=["transformers"]).findings
    assert {finding.code for finding in found} == {"CK302"}


def ckptkit_scheme():
    from ckptkit.quant.schemes.w4a16 import int4_scheme

    return int4_scheme(group_size=32)

"""Releases without the MTP layers that config.json promises; Qwen3.5's language model under the whole model's names."""

import filecmp
import json
import shutil

import pytest
import torch
from families import CASES
from families.case import save
from families.mtp import small, with_tensors
from mutations import edits
from support import models
from support.messages import text_with
from support.nightly import daily
from transformers import AutoModelForCausalLM

from ckptkit.app.api import convert, model_arguments, quantize
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.run import verify

# Groups of 32 do not divide the 72 columns of the shared expert in the test model.
IGNORE = (r"re:.*\.shared_expert\.down_proj(\.weight)?$",)
# Every family with MTP layers: the three spellings, and Qwen3.5's inside a larger model.
NAMES = (
    *("glm4_moe-mtp", "deepseek_v3", "glm4_moe_lite", "mimo", "mimo-tied-two-layers", "qwen3_next", "qwen3_5"),
    "qwen3_5_moe",
)


def without_mtp(name, path):
    mtp = ("mtp.", "model.mtp_layers.", "model.layers.12.")
    save(name, with_tensors(CASES[name], lambda key: not key.startswith(mtp)), path, torch.bfloat16)
    return path


@pytest.fixture(scope="module", params=daily(NAMES, ("glm4_moe-mtp", "mimo-tied-two-layers")))
def pruned(request, tmp_path_factory):
    return without_mtp(request.param, tmp_path_factory.mktemp("pruned") / "release")


def passes(report, *warnings):
    assert [(finding.code, finding.severity) for finding in report.findings] == [(code, "warning") for code in warnings]
    assert report.status == "passed"


def is_noted(notes):
    return any(note == text_with("multi-token stored") for note in notes)


def passes_with_note(report, *warnings):
    passes(report, *warnings)
    assert is_noted(report.facts["notes"])


def test_a_release_without_its_mtp_layer_goes_to_megatron_and_back(pruned, tmp_path):
    passes_with_note(verify(pruned))
    passes_with_note(preflight(hf_checkpoint=pruned))
    assert is_noted(convert(pruned, tmp_path / "megatron").notes)
    for source in (None, pruned):
        passes_with_note(verify(tmp_path / "megatron", source=source))
    convert(tmp_path / "megatron", tmp_path / "back")
    files = sorted(file.name for file in pruned.glob("*.safetensors"))
    assert filecmp.cmpfiles(pruned, tmp_path / "back", files, shallow=False) == (files, [], [])


def test_only_a_launch_that_trains_mtp_layers_needs_them(tmp_path):
    """Arguments do not ask for a layer that nothing is stored of. A lone config.json is taken at its word."""
    pruned, megatron = without_mtp("glm4_moe-mtp", tmp_path / "pruned"), tmp_path / "megatron"
    convert(pruned, megatron)
    assert [model_arguments(path)["mtp_num_layers"] for path in (pruned, megatron)] == [None, None]
    (tmp_path / "lone").mkdir()
    shutil.copy(pruned / "config.json", tmp_path / "lone")
    assert model_arguments(tmp_path / "lone")["mtp_num_layers"] == 1
    passes(preflight(hf_checkpoint=pruned, ref_load=megatron))
    report = preflight(hf_checkpoint=pruned, ref_load=megatron, arguments=["--mtp-num-layers", "1"])
    assert any(one.code == "CK104" and "mtp.layers.0." in (one.tensor or "") for one in report.findings)


@pytest.fixture(scope="module", params=daily([False, True], [False]), ids=["one by one", "fused"])
def reap(request, tmp_path_factory):
    """Qwen3.5's language model as REAP publishes it: names under `model.language_model.`, MTP promised and absent."""
    path = tmp_path_factory.mktemp("reap") / "release"
    case = with_tensors(CASES["qwen3_5_moe_text"], lambda key: False)
    save("qwen3_5_moe_text", case, path, torch.bfloat16, fused=request.param)
    edits.rename(path, lambda name: name.replace("model.", "model.language_model.", 1))
    return path


def test_the_language_model_under_those_names_goes_to_megatron_and_back(reap, tmp_path):
    """transformers is the independent truth; SGLang does not rename them, of which a warning tells."""
    _, info = AutoModelForCausalLM.from_pretrained(reap, output_loading_info=True)
    assert [set(info[f"{what}_keys"]) for what in ("missing", "unexpected", "mismatched")] == [set()] * 3
    passes_with_note(verify(reap), "CK104")
    passes_with_note(preflight(hf_checkpoint=reap), "CK104")
    convert(reap, tmp_path / "megatron")
    passes(verify(tmp_path / "megatron", source=reap))
    convert(tmp_path / "megatron", tmp_path / "back")
    files = sorted(file.name for file in [*reap.glob("*.safetensors"), reap / "config.json"])
    assert filecmp.cmpfiles(reap, tmp_path / "back", files, shallow=False) == (files, [], [])


def test_the_language_model_under_those_names_is_quantized_as_any_other(reap, tmp_path):
    """The experts are packed; they are not to be ignored because their names are not those of a text config alone."""
    quantize(reap, tmp_path / "int4", QuantScheme(32, "qmax7", IGNORE))
    packed = [name for name in models.tensors(tmp_path / "int4") if name.endswith(".weight_packed")]
    expert = "model.language_model.layers.{}.mlp.experts.{}.gate_proj.weight_packed"
    assert {expert.format(layer, number) for layer in range(12) for number in range(12)} <= set(packed)
    assert not any("embed_tokens" in name or name.endswith(".mlp.gate.weight_packed") for name in packed)
    passes(verify(tmp_path / "int4", source=reap), "CK104")
    assert json.loads((tmp_path / "int4" / "config.json").read_text())["model_type"] == "qwen3_5_moe_text"


# Multi-token prediction layers in `verify`: counted and compared like the others.


GLM = small(CASES["glm4_moe-mtp"], 3)


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    root = tmp_path_factory.mktemp("glm")
    save("mtp", GLM, root / "hf", torch.bfloat16)
    convert(root / "hf", root / "megatron")
    return root


def test_mtp_layers_are_counted_in_tensors_per_layer(glm):
    """58: 52 of an MoE layer, 4 around it and two copies. 39: the 35 that Megatron has of an MoE layer, and 4."""
    for path, dense, moe, mtp in (("hf", 14, 52, "3: 58"), ("megatron", 9, 35, "0: 39")):
        report = verify(glm / path, source=glm / "hf")
        assert report.findings == []
        assert report.facts["tensors per layer"] == [
            f"dense layers {{0..1}}: {dense} tensors each",
            f"MoE layers 2: {moe} tensors each",
            f"MTP layers {mtp} tensors each",
        ]

"""Releases without the MTP layers that config.json promises; Qwen3.5's language model under the whole model's names."""

from __future__ import annotations

import filecmp
import json
import shutil
from pathlib import Path

import pytest
import torch
from families import CASES
from families.case import save
from families.mtp import small, with_tensors
from safetensors.torch import load_file, save_file
from support import models
from transformers import AutoModelForCausalLM

from ckptkit.app.api import convert, model_arguments, quantize
from ckptkit.formats.hf.reader import INDEX
from quant.formats.scheme import QuantScheme
from quant.lint.lint import lint
from verify.launch.preflight import preflight
from verify.report import Report
from verify.run import verify

# Groups of 32 do not divide the 72 columns of the shared expert in the test model.
IGNORE = (r"re:.*\.shared_expert\.down_proj(\.weight)?$",)
NOTE = "and no tensor of one is stored: taken for a model without"
# Every family with MTP layers: the three spellings, and Qwen3.5's inside a larger model.
NAMES = [
    "glm4_moe-mtp",
    "deepseek_v3",
    "glm4_moe_lite",
    "mimo",
    "mimo-tied-two-layers",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
]


def without_mtp(name: str, path: Path) -> Path:
    """The release less its MTP layers, config.json as it was."""
    mtp = ("mtp.", "model.mtp_layers.", "model.layers.12.")
    save(name, with_tensors(CASES[name], lambda key: not key.startswith(mtp)), path, torch.bfloat16)
    return path


@pytest.fixture(scope="module", params=NAMES)
def pruned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return without_mtp(request.param, tmp_path_factory.mktemp("pruned") / "release")


def passes(report: Report) -> None:
    assert [str(finding) for finding in report.findings] == []
    assert report.status == "passed"


def noted(report: Report) -> bool:
    return any(NOTE in note for note in report.facts.get("notes", []))


def test_a_release_without_its_mtp_layer_passes_with_a_note(pruned: Path) -> None:
    for report in (verify(pruned), preflight(hf_checkpoint=pruned)):
        passes(report)
        assert noted(report)


def test_a_release_without_its_mtp_layer_goes_to_megatron_and_back(pruned: Path, tmp_path: Path) -> None:
    assert [NOTE in note for note in convert(pruned, tmp_path / "megatron").notes] == [True]
    for report in (verify(tmp_path / "megatron"), verify(tmp_path / "megatron", source=pruned)):
        passes(report)
        assert noted(report)
    convert(tmp_path / "megatron", tmp_path / "back")
    files = sorted(file.name for file in pruned.glob("*.safetensors"))
    assert filecmp.cmpfiles(pruned, tmp_path / "back", files, shallow=False) == (files, [], [])


def test_megatron_arguments_do_not_ask_for_a_layer_that_nothing_is_stored_of(tmp_path: Path) -> None:
    """A launch with --mtp-num-layers would want it. A lone config.json is taken at its word."""
    pruned = without_mtp("glm4_moe-mtp", tmp_path / "pruned")
    convert(pruned, tmp_path / "megatron")
    assert [model_arguments(path)["mtp_num_layers"] for path in (pruned, tmp_path / "megatron")] == [None, None]
    (tmp_path / "lone").mkdir()
    shutil.copy(pruned / "config.json", tmp_path / "lone")
    assert model_arguments(tmp_path / "lone")["mtp_num_layers"] == 1


def test_a_launch_that_trains_mtp_layers_needs_them(tmp_path: Path) -> None:
    pruned = without_mtp("glm4_moe-mtp", tmp_path / "pruned")
    convert(pruned, tmp_path / "megatron")
    passes(preflight(hf_checkpoint=pruned, ref_load=tmp_path / "megatron"))
    report = preflight(hf_checkpoint=pruned, ref_load=tmp_path / "megatron", arguments=["--mtp-num-layers", "1"])
    assert [
        finding for finding in report.findings if finding.code == "CK104" and "mtp.layers.0." in (finding.tensor or "")
    ]


def test_an_int4_release_without_its_mtp_layer_passes(tmp_path: Path) -> None:
    pruned = without_mtp("glm4_moe-mtp", tmp_path / "pruned")
    assert [NOTE in note for note in quantize(pruned, tmp_path / "int4", QuantScheme(32, "qmax7")).notes] == [True]
    report = verify(tmp_path / "int4", source=pruned)
    passes(report)
    assert noted(report)
    assert lint(tmp_path / "int4").findings == ()


@pytest.fixture(scope="module", params=[False, True], ids=["one by one", "fused"])
def reap(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3.5's language model as REAP publishes it: names under `model.language_model.`, MTP promised and absent."""
    path = tmp_path_factory.mktemp("reap") / "release"
    case = with_tensors(CASES["qwen3_5_moe_text"], lambda key: False)
    save("qwen3_5_moe_text", case, path, torch.bfloat16, fused=request.param)
    for file in path.glob("*.safetensors"):
        content = {
            name.replace("model.", "model.language_model.", 1): tensor for name, tensor in load_file(file).items()
        }
        save_file(content, file, metadata={"format": "pt"})
    index = json.loads((path / INDEX).read_text())
    index["weight_map"] = {
        name.replace("model.", "model.language_model.", 1): file for name, file in index["weight_map"].items()
    }
    (path / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return path


def test_transformers_loads_the_language_model_under_those_names(reap: Path) -> None:
    """The independent truth: nothing missing, nothing unexpected."""
    _, info = AutoModelForCausalLM.from_pretrained(reap, output_loading_info=True)
    assert (set(info["missing_keys"]), set(info["unexpected_keys"]), set(info["mismatched_keys"])) == (
        set(),
        set(),
        set(),
    )


def test_the_language_model_under_those_names_passes(reap: Path) -> None:
    for report in (verify(reap), preflight(hf_checkpoint=reap)):
        passes_but_for_the_names(report)
        assert noted(report)


def passes_but_for_the_names(report: Report) -> None:
    """SGLang does not rename them, and of that a warning tells (test_multimodal.py)."""
    assert [(finding.code, finding.severity) for finding in report.findings] == [("CK104", "warning")]
    assert report.findings[0].actual.startswith("model.language_model.*")
    assert report.status == "passed"


def test_the_language_model_under_those_names_goes_to_megatron_and_back(reap: Path, tmp_path: Path) -> None:
    convert(reap, tmp_path / "megatron")
    passes(verify(tmp_path / "megatron", source=reap))
    convert(tmp_path / "megatron", tmp_path / "back")
    files = sorted(file.name for file in [*reap.glob("*.safetensors"), reap / "config.json"])
    assert filecmp.cmpfiles(reap, tmp_path / "back", files, shallow=False) == (files, [], [])


def test_the_language_model_under_those_names_is_quantized_as_any_other(reap: Path, tmp_path: Path) -> None:
    """The experts are packed; they are not to be ignored because their names are not those of a text config alone."""
    quantize(reap, tmp_path / "int4", QuantScheme(32, "qmax7", IGNORE))
    packed = [name for name in models.tensors(tmp_path / "int4") if name.endswith(".weight_packed")]
    experts = {
        f"model.language_model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight_packed"
        for layer in range(12)
        for expert in range(12)
    }
    assert experts <= set(packed)
    assert not any("embed_tokens" in name or name.endswith(".mlp.gate.weight_packed") for name in packed)
    passes_but_for_the_names(verify(tmp_path / "int4", source=reap))
    assert json.loads((tmp_path / "int4" / "config.json").read_text())["model_type"] == "qwen3_5_moe_text"


@pytest.mark.usefixtures("served")
def test_real_megatron_loads_it_as_a_model_without_the_layer(tmp_path: Path) -> None:
    case = with_tensors(small(CASES["glm4_moe-mtp"], 3), lambda key: False)
    save("mtp", case, tmp_path / "release", torch.bfloat16)
    convert(tmp_path / "release", tmp_path / "megatron")
    passes(verify(tmp_path / "megatron", source=tmp_path / "release", against=frozenset({"megatron"})))

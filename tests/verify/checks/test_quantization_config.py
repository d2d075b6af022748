"""CK302 and CK202: a `quantization_config` that contradicts the packed weights, or that readers take differently."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
from mutations.edits import edit_config, edit_index
from safetensors.torch import save_file
from support.fixture_types import CopyOf, OnlyFinding, PathOf
from support.messages import text_with
from support.quantized import one_target, widen

from ckptkit.app.api import quantize
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.quant.ignore.lint import lint
from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.run import verify


@pytest.fixture(scope="module")
def int4(releases: PathOf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """qwen2-untied in INT4, group size 32. Each test sets the config that it needs."""
    path = tmp_path_factory.mktemp("int4") / "qwen2"
    quantize(releases("qwen2-untied"), path, QuantScheme(32, "qmax7"))
    return path


@pytest.fixture
def with_config(int4: Path) -> Any:
    """`with_config(change)`: the checkpoint with its quantization_config changed in place or replaced by the result."""
    before = (int4 / "config.json").read_text()

    def changed(change: Callable[[dict[str, Any]], Any]) -> Path:
        edit_config(int4, quantization_config=change(json.loads(before)["quantization_config"]))
        return int4

    yield changed
    (int4 / "config.json").write_text(before)


def set_in(*keys: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    def change(content: dict[str, Any]) -> Any:
        place = content
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
        return content

    return change


WEIGHTS = ("config_groups", "group_0", "weights")


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        "int4",
        False,
        {"quant_method": "fp8"},
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"W4A16": ["Linear"]}},
    ],
)
def test_quantization_config_without_packed_weights_is_an_error(
    value: Any, with_config: Any, only: OnlyFinding
) -> None:
    finding = only(verify(with_config(lambda _: value)))
    assert (finding.code, finding.severity) == ("CK302", "error")
    assert finding.expected == text_with("quantization_config")


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("config_groups",), {}),
        (("config_groups",), []),
        (WEIGHTS, None),
        ((*WEIGHTS, "type"), "float"),
        ((*WEIGHTS, "num_bits"), "four"),
        ((*WEIGHTS, "strategy"), "channel"),
        (("quant_method",), "gptq"),
        (("quant_method",), None),
        (("format",), None),
        (("format",), "float-quantized"),
        (("config_groups", "group_0", "targets"), []),
        (
            ("config_groups", "group_0", "input_activations"),
            {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
        ),
        (("ignore",), 7),
        (("ignore",), ["lm_head", "re:(["]),
    ],
)
def test_scheme_that_readers_refuse_is_found(keys: tuple[str, ...], value: Any, with_config: Any) -> None:
    report = verify(with_config(set_in(*keys, value=value)))
    said = [(finding.code, finding.expected) for finding in report.findings if finding.severity == "error"]
    assert ("CK302", text_with("quantization_config")) in said
    assert {code for code, _ in said} <= {"CK302", "CK303"}


def test_a_scheme_for_the_key_value_cache_is_not_a_fault(with_config: Any) -> None:
    """SGLang and vLLM read it apart from the weights; a static one needs stored scales."""
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": True}
    report = verify(with_config(set_in("kv_cache_scheme", value=scheme)))
    assert (report.status, [one.code for one in report.findings]) == ("passed", [])


def test_a_quantized_cache_alone_leaves_plain_weights(
    releases: PathOf, fresh: PathOf, edit_json: Callable[..., None]
) -> None:
    """As compressed-tensors writes it, beside plain weights and the scales of the cache."""
    path = fresh("qwen2-untied")
    cache = QuantizationArgs(num_bits=8, type="float", strategy="tensor", dynamic=False)
    stated = QuantizationConfig(config_groups={}, kv_cache_scheme=cache, ignore=["lm_head"], format="dense")
    edit_json(path / "config.json", quantization_config=stated.model_dump(mode="json"))
    assert [(one.code, one.severity) for one in verify(path).findings] == [("CK303", "error")]
    scales = {f"model.layers.{layer}.self_attn.{part}_scale": torch.ones(1) for layer in range(12) for part in "kv"}
    save_file(scales, path / "scales.safetensors", metadata={"format": "pt"})
    edit_index(path, lambda weight_map: weight_map.update(dict.fromkeys(scales, "scales.safetensors")))
    report = verify(path, source=releases("qwen2-untied"))
    assert (report.status, [one.code for one in report.findings]) == ("passed", ["CK106"])


@pytest.mark.parametrize(("reader", "severity"), [("vllm", "error"), ("sglang", "warning")])
def test_activation_order_beside_one_scale_a_row_is_refused_by_older_readers(
    reader: str, severity: str, releases: PathOf, tmp_path: Path
) -> None:
    """compressed-tensors 0.15.0.1, which vLLM 0.19 to 0.22 require, refuses it; 0.16.0 to 0.20.0 take it."""
    quantize(releases("qwen2-untied"), tmp_path / "rows", QuantScheme(None, "minmax"))
    assert verify(tmp_path / "rows").findings == []
    content = json.loads((tmp_path / "rows" / "config.json").read_text())["quantization_config"]
    edit_config(tmp_path / "rows", quantization_config=set_in(*WEIGHTS, "actorder", value="static")(content))
    (finding,) = verify(tmp_path / "rows", readers=(reader,)).findings
    assert (finding.code, finding.severity) == ("CK302", severity)
    assert "up to 0.15" in finding.actual
    assert [one.severity for one in lint(tmp_path / "rows", readers=(reader,)).findings] == (
        ["error"] if reader == "vllm" else []
    )
    assert [one.kind for one in lint(tmp_path / "rows").findings] == ["refused"]


def test_quantization_config_of_null_counts_as_absent(with_config: Any, fresh: PathOf) -> None:
    assert {finding.code for finding in verify(with_config(lambda _: None)).findings} == {"CK104"}
    plain = fresh("qwen2-tied")
    edit_config(plain, quantization_config=None)
    assert verify(plain).findings == []


def test_asymmetric_scheme_on_a_symmetric_grid_is_not_judged(with_config: Any) -> None:
    report = verify(with_config(set_in(*WEIGHTS, "symmetric", value=False)))
    # Its zero points are missing, which CK104 says.
    assert {(finding.code, (finding.tensor or "").rpartition(".")[2]) for finding in report.findings} == {
        ("CK104", "weight_zero_point")
    }
    result = next(check for check in report.checks if check.code == "CK302")
    assert (result.status, "the qmax7 grid is symmetric" in (result.reason or "")) == ("skipped", True)


def test_two_widths_are_judged_and_two_groups_for_linear_are_found(
    int4: Path, releases: PathOf, copy_of: CopyOf, edit_json: Callable[..., None]
) -> None:
    """INT8 beside INT4, each under targets of its own, is valid; of two groups for Linear readers keep the last."""
    path = copy_of(int4)
    widen(path, releases("qwen2-untied"), ".down_proj")
    report = verify(path, source=releases("qwen2-untied"))
    assert (report.status, report.findings) == ("passed", [])
    result = next(one for one in report.checks if one.code == "CK305")
    assert (result.status, result.tensors_compared) == ("passed", 84)
    assert not lint(path, readers=("vllm",)).findings
    content = json.loads((path / "config.json").read_text())["quantization_config"]
    one_target(content)
    edit_json(path / "config.json", quantization_config=content)
    report = verify(path)
    assert (report.status, {one.code for one in report.findings}) == ("failed", {"CK303"})
    assert {str(one.tensor).split(".")[-2] for one in report.findings} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")
    }
    assert all("config.json says 8 bits" in one.hint for one in report.findings)


def test_packed_weights_that_cannot_be_dequantized_are_not_the_sources(with_config: Any, releases: PathOf) -> None:
    path = with_config(set_in(*WEIGHTS, "type", value="float"))
    found = [finding for finding in verify(path, source=releases("qwen2-untied")).findings if finding.code == "CK202"]
    assert {finding.tensor for finding in found} >= {
        "model.layers.{0..11}.self_attn.o_proj.weight",
        "model.layers.{0..11}.self_attn.o_proj.weight_packed",
    }


@pytest.mark.parametrize(
    ("entry", "readers"),
    [
        # SGLang takes a plain entry for a part of the name (later a dotted ending), others for the whole name.
        ("o_proj", ["SGLang 0.5.16", "SGLang 0.5.23"]),
        # slime takes any prefix of a parameter's name, the others none.
        ("model.layers.3.self_attn.o_pr", ["SGLang 0.5.16", "slime"]),
    ],
)
def test_an_ignore_list_that_readers_take_differently(entry: str, readers: list[str], with_config: Any) -> None:
    """One finding a reader: an error for an engine, a warning for slime's quantizer."""

    found = verify(with_config(lambda content: content | {"ignore": [*content["ignore"], entry]})).findings
    assert {finding.code for finding in found} == {"CK302"}
    assert all("ignore list" in finding.expected for finding in found)
    assert [finding.actual.split(" would ")[0] for finding in found] == readers
    assert [finding.severity for finding in found] == [
        "warning" if reader == "slime" else "error" for reader in readers
    ]
    assert all(entry in finding.hint for finding in found)


def test_a_list_that_only_slime_reads_differently_is_a_warning(with_config: Any, only: OnlyFinding) -> None:
    # As llm-compressor writes it: embeddings are not Linear, so engines need no entry; slime packs what no entry names.
    report = verify(with_config(set_in("ignore", value=["lm_head"])))
    finding = only(report)
    assert (finding.code, finding.severity, report.status) == ("CK302", "warning", "passed")
    assert "slime would pack model.embed_tokens.weight" in finding.actual


def test_method_that_is_not_known_beside_plain_weights_is_inconclusive(fresh: PathOf) -> None:
    """No name and no dtype tells what an engine would make of it, so nothing of the checkpoint has been proved."""
    path = fresh("qwen2-untied")
    edit_config(path, quantization_config={"quant_method": "exl9"})
    report = verify(path)
    assert report.status == "inconclusive"
    assert any("quantization method 'exl9' is not supported" in reason for reason in report.reasons)


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
ROWS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}


@pytest.mark.parametrize(
    ("announced", "words"),
    [
        (FP8, "FP8 float8_e4m3fn 32 32 config.json"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "FP8 float8_e4m3fn"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "quantization_status": "compressed",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": ROWS}},
                "ignore": ["lm_head"],
            },
            "FP8 float8_e4m3fn",
        ),
        ({"quant_method": "mxfp4"}, "MXFP4 (4-bit floats"),
        (FP8 | {"modules_to_not_convert": ["model"]}, None),  # every Linear layer
    ],
)
def test_plain_weights_under_a_config_of_quantized_ones_are_one_finding(
    announced: dict[str, Any], words: str | None, fresh: PathOf
) -> None:
    path = fresh("qwen2-untied")
    edit_config(path, quantization_config=announced)
    found = [(one.code, one.severity) for one in verify(path).findings]
    assert found == ([("CK302", "error")] if words else [])
    launched = preflight(hf_checkpoint=path, arguments=["--rollout-batch-size", "8"]).findings
    assert [one.severity for one in launched if one.code == "CK302"] == (["error"] if words else [])
    # A job that quantizes what it sends to the engine replaces them before the first rollout.
    launched = preflight(hf_checkpoint=path, ref_load=path, arguments=["--rollout-batch-size", "8"]).findings
    assert [one.severity for one in launched if one.code == "CK302"] == (["warning"] if words else [])
    assert all(words is not None and one.expected == text_with(words) for one in verify(path).findings)

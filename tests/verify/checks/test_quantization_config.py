"""CK302 and CK202: a `quantization_config` that contradicts the packed weights, or that readers take differently."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
from mutations.edits import edit_config, replace
from support.fixture_types import CopyOf, OnlyFinding, PathOf, RunAlone
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
        "int4",
        False,
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
        (WEIGHTS, None),
        ((*WEIGHTS, "type"), "float"),
        (("quant_method",), None),
        (("format",), None),
        (("config_groups", "group_0", "targets"), []),
        (("config_groups", "group_0", "input_activations"), {"num_bits": 8, "strategy": "token", "dynamic": True}),
        (("ignore",), 7),
        (("ignore",), ["lm_head", "re:(["]),
    ],
)
def test_scheme_that_readers_refuse_is_found(keys: tuple[str, ...], value: Any, with_config: Any) -> None:
    """Another method, format, width or strategy is a mutation (tests/mutations/int4.py)."""
    report = verify(with_config(set_in(*keys, value=value)))
    said = [(finding.code, finding.expected) for finding in report.findings if finding.severity == "error"]
    assert ("CK302", text_with("quantization_config")) in said
    assert {code for code, _ in said} <= {"CK302", "CK303"}


def test_a_quantized_cache_alone_leaves_plain_weights(releases: PathOf, fresh: PathOf) -> None:
    """As compressed-tensors writes it, beside plain weights and the scales of the cache."""
    path = fresh("qwen2-untied")
    cache = QuantizationArgs(num_bits=8, type="float", strategy="tensor", dynamic=False)
    stated = QuantizationConfig(config_groups={}, kv_cache_scheme=cache, ignore=["lm_head"], format="dense")
    edit_config(path, quantization_config=stated.model_dump(mode="json"))
    assert [(one.code, one.severity) for one in verify(path).findings] == [("CK303", "error")]
    scales = (f"model.layers.{layer}.self_attn.{part}_scale" for layer in range(12) for part in "kv")
    replace(path, {name: torch.ones(1) for name in scales})
    report = verify(path, source=releases("qwen2-untied"))
    assert (report.status, report.findings) == ("passed", [])


def test_activation_order_beside_one_scale_a_row_is_refused_by_older_readers(releases: PathOf, tmp_path: Path) -> None:
    """compressed-tensors 0.15.0.1, which vLLM 0.19 to 0.22 require, refuses it; 0.16.0 to 0.20.0 take it."""
    path = tmp_path / "rows"
    quantize(releases("qwen2-untied"), path, QuantScheme(None, "minmax"))
    assert verify(path).findings == []
    content = json.loads((path / "config.json").read_text())["quantization_config"]
    edit_config(path, quantization_config=set_in(*WEIGHTS, "actorder", value="static")(content))
    assert [one.kind for one in lint(path).findings] == ["refused"]
    for reader, severity in (("vllm", "error"), ("sglang", "warning")):
        (finding,) = verify(path, readers=(reader,)).findings
        assert (finding.code, finding.severity, finding.actual) == ("CK302", severity, text_with("0.15"))
        assert [one.severity for one in lint(path, readers=(reader,)).findings] == ["error"] * (reader == "vllm")


def test_quantization_config_of_null_counts_as_absent(with_config: Any, fresh: PathOf) -> None:
    assert {finding.code for finding in verify(with_config(lambda _: None)).findings} == {"CK104"}
    plain = fresh("qwen2-tied")
    edit_config(plain, quantization_config=None)
    assert verify(plain).findings == []


def test_asymmetric_scheme_on_a_symmetric_grid_is_not_judged(with_config: Any, alone: RunAlone) -> None:
    result, found = alone("CK302", with_config(set_in(*WEIGHTS, "symmetric", value=False)))
    assert result is not None
    assert (result.status, found) == ("skipped", [])


def test_two_widths_are_judged_and_two_groups_for_linear_are_found(
    int4: Path, releases: PathOf, copy_of: CopyOf
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
    edit_config(path, quantization_config=content)
    report = verify(path)
    assert (report.status, {one.code for one in report.findings}) == ("failed", {"CK303"})
    narrow = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}
    assert {str(one.tensor).split(".")[-2] for one in report.findings} == narrow


def test_packed_weights_that_cannot_be_dequantized_are_not_the_sources(with_config: Any, releases: PathOf) -> None:
    path = with_config(set_in(*WEIGHTS, "type", value="float"))
    found = {one.tensor for one in verify(path, source=releases("qwen2-untied")).findings if one.code == "CK202"}
    output = "model.layers.{0..11}.self_attn.o_proj.weight"
    assert found >= {output, f"{output}_packed"}


@pytest.mark.parametrize(
    ("ignore", "readers"),
    [
        # SGLang takes a plain entry for a part of the name (later a dotted ending), others for the whole name.
        (["o_proj"], {"SGLang 0.5.16": "error", "SGLang 0.5.23": "error"}),
        # slime takes any prefix of a parameter's name, the others none.
        (["model.layers.3.self_attn.o_pr"], {"SGLang 0.5.16": "error", "slime": "warning"}),
        # Embeddings are not Linear, so engines need no entry; slime packs what no entry names.
        (None, {"slime": "warning"}),
    ],
)
def test_an_ignore_list_that_readers_take_differently(
    ignore: list[str] | None, readers: dict[str, str], with_config: Any
) -> None:
    """One finding a reader: an error for an engine, a warning for slime's quantizer."""
    path = with_config(lambda old: old | {"ignore": ["lm_head"] if ignore is None else [*old["ignore"], *ignore]})
    found = verify(path).findings
    assert {finding.code for finding in found} == {"CK302"}
    assert {finding.actual.split(" would ")[0]: finding.severity for finding in found} == readers
    assert all((ignore or ["embed_tokens"])[0] in finding.hint + finding.actual for finding in found)


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
    ],
)
def test_plain_weights_under_a_config_of_quantized_ones_are_one_finding(
    announced: dict[str, Any], words: str, fresh: PathOf, only: OnlyFinding
) -> None:
    path = fresh("qwen2-untied")
    edit_config(path, quantization_config=announced)
    finding = only(verify(path))
    assert (finding.code, finding.severity, finding.expected) == ("CK302", "error", text_with(words))
    # A job that quantizes what it sends to the engine replaces them before the first rollout.
    for load, severity in ((None, "error"), (path, "warning")):
        launched = preflight(hf_checkpoint=path, ref_load=load, arguments=["--rollout-batch-size", "8"]).findings
        assert [one.severity for one in launched if one.code == "CK302"] == [severity]


@pytest.mark.parametrize(
    ("announced", "status"),
    [
        (FP8 | {"modules_to_not_convert": ["model"]}, "passed"),  # every Linear layer
        ({"quant_method": "exl9"}, "inconclusive"),  # nothing tells what an engine would make of it
    ],
)
def test_plain_weights_under_a_config_that_quantizes_none_of_them(
    announced: dict[str, Any], status: str, fresh: PathOf
) -> None:
    path = fresh("qwen2-untied")
    edit_config(path, quantization_config=announced)
    report = verify(path)
    assert (report.status, report.findings) == (status, [])
    assert any("'exl9'" in reason for reason in report.reasons) is (status == "inconclusive")

"""CK302 and CK709: `ignore` lists, and a quantization_config that its weights or readers contradict."""

import json

import pytest
import torch
from click.testing import CliRunner
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
from mutations.edits import edit_config, edit_quantization, replace
from support.launch_scripts import arguments_of
from support.messages import text_with

from ckptkit.app.api import quantize
from ckptkit.app.cli import cli
from ckptkit.core.errors import CkptkitError
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.quant.ignore.lint import lint
from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.run import verify

WEIGHTS = ("config_groups", "group_0", "weights")
FLAG, GROUP = "OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "OPEN_TRAINING_INT4_GROUP_SIZE"


def by_reader(found):
    return {finding.actual.partition(" would ")[0]: finding.severity for finding in found}


def found(report, code):
    return [finding for finding in report.findings if finding.code == code]


# CK709 and CK307 in a launch: what training rounds to, and what the engine's ranks can share.


@pytest.fixture(scope="module")
def int4(releases, tmp_path_factory):
    path = tmp_path_factory.mktemp("int4") / "qwen2"
    quantize(releases("qwen2-untied"), path, QuantScheme(32, "qmax7"))
    return path


@pytest.fixture(scope="module")
def experts(releases, tmp_path_factory):
    """qwen3_moe with its routed experts in INT4, as an engine that is updated online must have them. Read only."""
    path = tmp_path_factory.mktemp("int4") / "qwen3_moe"
    quantize(releases("qwen3_moe"), path, QuantScheme(32, "qmax7", (r"re:.*\.self_attn\..*",)))
    return path


@pytest.fixture
def without_router(experts, copy_of):
    """The same weights beside a list that names the router as a module: who packs by parameter names packs it."""
    listed = json.loads((experts / "config.json").read_text())["quantization_config"]["ignore"]
    kept = [entry for entry in listed if "gate(" not in entry]
    return edit_quantization(copy_of(experts), ("ignore",), [*kept, "re:.*mlp.gate$"])


def test_launch_that_quantizes_by_a_list_without_the_router_fails(without_router):
    report = preflight(hf_checkpoint=without_router, arguments=[f"{FLAG}=1", f"{GROUP}=32"])
    (finding,) = found(report, "CK302")
    assert (report.status, by_reader([finding])) == ("failed", {"slime": "error"})
    assert finding.actual == text_with("mlp.gate.weight re:.*mlp.gate$")
    assert "embed_tokens" not in finding.actual
    assert finding.hint == text_with(r"replace 're:.*mlp.gate$' 're:.*mlp.gate(\.weight)?$'")


def test_verify_reader_on_the_command_line_decides(without_router):
    assert CliRunner().invoke(cli, ["verify", str(without_router)]).exit_code == 1
    chosen = CliRunner().invoke(cli, ["verify", str(without_router), "--reader", "sglang", "--json"])
    assert (chosen.exit_code, json.loads(chosen.stdout)["status"]) == (0, "passed")


def test_launch_whose_engine_cannot_take_updates_fails(int4):
    """SGLang repacks INT4 Linear layers once, for good. Without a trainer nothing is updated."""
    report = preflight(hf_checkpoint=int4, arguments=[f"{FLAG}=1", f"{GROUP}=32"])
    (finding,) = found(report, "CK715")
    assert report.status == "failed"
    assert finding.actual == text_with("SGLang INT4 Linear")
    assert "--ignore" in finding.hint
    assert "CK715" not in [check.code for check in preflight(hf_checkpoint=int4).checks]


def test_variables_are_read_in_json_however_it_is_quoted_and_override_the_environment():
    escaped = f'{{\\"{FLAG}\\": \\"1\\", \\"{GROUP}\\": \\"32\\"}}'
    for text in (json.dumps({"env_vars": {FLAG: "1", GROUP: "32"}}), escaped):
        options = arguments_of(["--runtime-env-json", text])
        assert (options.qat, options.qat_group) == (True, 32)
    options = arguments_of([f"{GROUP}=64"], {FLAG: "0", GROUP: "32", "HOME": "1"})
    assert (options.qat, options.qat_group) == (False, 64)
    with pytest.raises(CkptkitError, match=GROUP):
        arguments_of([f"{GROUP}=many"])


def test_launch_that_rounds_as_the_engine_serves_is_silent(experts):
    report = preflight(hf_checkpoint=experts, arguments=[f"{FLAG}=1", f"{GROUP}=32"])
    compared = {check.code: check.tensors_compared for check in report.checks}
    assert (compared["CK709"], compared["CK715"] > 12 * 3) == (5, True)
    assert (report.status, report.findings) == ("passed", [])


@pytest.mark.parametrize("arguments", [[], [f"{FLAG}=0", f"{GROUP}=128"]])
def test_launch_without_rounding_is_not_checked(arguments, int4):
    report = preflight(hf_checkpoint=int4, arguments=arguments)
    assert "CK709" not in [check.code for check in report.checks]
    assert report.findings == []


@pytest.mark.parametrize(
    ("key", "value", "expected"), [("symmetric", False, True), ("num_bits", 8, 4), ("strategy", "channel", "group")]
)
def test_engine_with_another_scheme_is_found(key, value, expected, int4, copy_of):
    path = edit_quantization(copy_of(int4), (*WEIGHTS, key), value)
    (finding,) = found(preflight(hf_checkpoint=path, arguments=[f"{FLAG}=1"]), "CK709")
    assert (finding.expected, finding.actual) == (f"{key} = {expected}, as training rounds", f"{key} = {value}")


def test_an_engine_of_bf16_or_without_a_config(releases, tmp_path):
    (finding,) = found(preflight(hf_checkpoint=releases("qwen2-untied"), arguments=[f"{FLAG}=1"]), "CK709")
    assert finding.actual == text_with("BF16")
    report = preflight(hf_checkpoint=tmp_path, arguments=[f"{FLAG}=1"])
    assert next(check for check in report.checks if check.code == "CK709").status == "skipped"
    assert [finding.code for finding in report.findings] == ["CK714"]


def test_engine_ranks_that_cut_through_a_tile(int4):
    """down_proj has 288 columns: 144 on each of two ranks, and a Marlin tile is 128 wide. Attention may have fewer."""
    arguments = ["--rollout-num-gpus-per-engine", "2"]
    findings = found(preflight(hf_checkpoint=int4, tp=2, arguments=arguments), "CK307")
    assert all(one.expected == text_with("INT4 2 ranks") for one in findings)
    assert [one.tensor for one in findings if "144 columns" in one.actual] == [
        "model.layers.{0..11}.mlp.down_proj.weight"
    ]
    fewer = ["--sglang-enable-dp-attention", "--sglang-dp-size", "2"]
    report = preflight(hf_checkpoint=int4, arguments=[*arguments, *fewer])
    assert (report.status, found(report, "CK307")) == ("inconclusive", [])
    assert report.reasons[0].startswith("CK307: --sglang-enable-dp-attention")


@pytest.mark.parametrize(("mode", "severities"), [("raw", {"error"}), ("bridge", set())])
def test_miles_in_mode_bridge_packs_what_is_stored_packed(mode, severities, without_router):
    """Source: miles `update_weight/hf_weight_iterator_bridge.py`, which reads the packed names of --hf-checkpoint."""
    arguments = ["--megatron-to-hf-mode", mode]
    report = preflight(hf_checkpoint=without_router, ref_load=without_router, arguments=arguments)
    assert {finding.severity for finding in found(report, "CK302")} == severities
    assert "CK302" in {check.code for check in report.checks if check.status == ("failed" if severities else "passed")}


# CK302 and CK202: a `quantization_config` that contradicts the packed weights, or that readers refuse.


@pytest.mark.parametrize(
    "value",
    [
        {},
        "int4",
        False,
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"W4A16": ["Linear"]}},
    ],
)
def test_quantization_config_without_packed_weights_is_an_error(value, int4, copy_of, only):
    finding = only(verify(edit_config(copy_of(int4), quantization_config=value)))
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
def test_scheme_that_readers_refuse_is_found(keys, value, int4, copy_of):
    """Another method, format, width or strategy is a mutation (tests/mutations/int4.py)."""
    report = verify(edit_quantization(copy_of(int4), keys, value))
    said = [(finding.code, finding.expected) for finding in report.findings if finding.severity == "error"]
    assert ("CK302", text_with("quantization_config")) in said
    assert {code for code, _ in said} <= {"CK302", "CK303"}


def test_a_quantized_cache_alone_leaves_plain_weights(releases, fresh):
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


def test_activation_order_beside_one_scale_a_row_is_refused_by_older_readers(releases, tmp_path):
    """compressed-tensors 0.15.0.1, which vLLM 0.19 to 0.22 require, refuses it; 0.16.0 to 0.20.0 take it."""
    path = tmp_path / "rows"
    quantize(releases("qwen2-untied"), path, QuantScheme(None, "minmax"))
    assert verify(path).findings == []
    edit_quantization(path, (*WEIGHTS, "actorder"), "static")
    assert [one.kind for one in lint(path).findings] == ["refused"]
    for reader, severity in (("vllm", "error"), ("sglang", "warning")):
        (finding,) = verify(path, readers=(reader,)).findings
        assert (finding.code, finding.severity, finding.actual) == ("CK302", severity, text_with("0.15"))
        assert [one.severity for one in lint(path, readers=(reader,)).findings] == ["error"] * (reader == "vllm")


def test_quantization_config_of_null_counts_as_absent(int4, copy_of, fresh):
    path = edit_config(copy_of(int4), quantization_config=None)
    assert {finding.code for finding in verify(path).findings} == {"CK104"}
    plain = fresh("qwen2-tied")
    edit_config(plain, quantization_config=None)
    assert verify(plain).findings == []


def test_asymmetric_scheme_on_a_symmetric_grid_is_not_judged(int4, copy_of, alone):
    result, found = alone("CK302", edit_quantization(copy_of(int4), (*WEIGHTS, "symmetric"), False))
    assert (result.status, found) == ("skipped", [])


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
def test_an_ignore_list_that_readers_take_differently(ignore, readers, int4, copy_of):
    listed = json.loads((int4 / "config.json").read_text())["quantization_config"]["ignore"]
    path = edit_quantization(copy_of(int4), ("ignore",), ["lm_head"] if ignore is None else [*listed, *ignore])
    found = verify(path).findings
    assert {finding.code for finding in found} == {"CK302"}
    assert by_reader(found) == readers
    assert all((ignore or ["embed_tokens"])[0] in finding.hint + finding.actual for finding in found)
    linted = [one for one in lint(path).findings if one.kind in ("exposed", "disagreement")]
    assert {reader: one.severity for one in linted for reader in one.readers} == readers


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
def test_plain_weights_under_a_config_of_quantized_ones_are_one_finding(announced, words, fresh, only):
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
def test_plain_weights_under_a_config_that_quantizes_none_of_them(announced, status, fresh):
    path = fresh("qwen2-untied")
    edit_config(path, quantization_config=announced)
    report = verify(path)
    assert (report.status, report.findings) == (status, [])
    assert any("'exl9'" in reason for reason in report.reasons) is (status == "inconclusive")

"""CK709 and CK307 in a launch: what training rounds to, and what the engine's ranks can share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.fixture_types import CopyOf, PathOf
from support.launch_words import arguments_of

from ckptkit.app.api import quantize
from ckptkit.app.cli import cli
from ckptkit.core.errors import CkptkitError
from quant.formats.scheme import QuantScheme
from verify.launch.preflight import preflight
from verify.report import Finding, Report

FLAG, GROUP = "OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "OPEN_TRAINING_INT4_GROUP_SIZE"


@pytest.fixture(scope="module")
def int4(releases: PathOf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """qwen2-untied in INT4, group size 32. Read only."""
    path = tmp_path_factory.mktemp("int4") / "qwen2"
    quantize(releases("qwen2-untied"), path, QuantScheme(32, "qmax7"))
    return path


@pytest.fixture(scope="module")
def experts(releases: PathOf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """qwen3_moe with its routed experts in INT4, as an engine that is updated online must have them. Read only."""
    path = tmp_path_factory.mktemp("int4") / "qwen3_moe"
    quantize(releases("qwen3_moe"), path, QuantScheme(32, "qmax7", (r"re:.*\.self_attn\..*",)))
    return path


@pytest.fixture
def without_router(experts: Path, copy_of: CopyOf) -> Path:
    """The same weights beside a list that names the router as a module: who packs by parameter names packs it."""
    path = copy_of(experts)
    config = json.loads((path / "config.json").read_text())
    kept = [entry for entry in config["quantization_config"]["ignore"] if "gate(" not in entry]
    config["quantization_config"]["ignore"] = [*kept, "re:.*mlp.gate$"]
    (path / "config.json").write_text(json.dumps(config))
    return path


def routers(report: Report) -> set[tuple[str, str]]:
    """Reader and severity of the findings of CK302, all of which must be about routers alone."""
    findings = found(report, "CK302")
    assert all("mlp.gate.weight" in finding.actual and "embed_tokens" not in finding.actual for finding in findings)
    return {(finding.actual.partition(" would ")[0], finding.severity) for finding in findings}


def test_launch_that_quantizes_by_a_list_without_the_router_fails(without_router: Path) -> None:
    report = preflight(hf_checkpoint=without_router, arguments=[f"{FLAG}=1", f"{GROUP}=32"])
    assert report.status == "failed"
    assert routers(report) == {("slime", "error")}
    (finding,) = found(report, "CK302")
    assert "because of how it reads 're:.*mlp.gate$'" in finding.actual
    assert finding.hint == r"instead of 're:.*mlp.gate$' pass 're:.*mlp.gate(\.weight)?$'"


def test_verify_reader_on_the_command_line_decides(without_router: Path) -> None:
    assert CliRunner().invoke(cli, ["verify", str(without_router)]).exit_code == 1
    chosen = CliRunner().invoke(cli, ["verify", str(without_router), "--reader", "sglang", "--json"])
    assert (chosen.exit_code, json.loads(chosen.stdout)["status"]) == (0, "passed")


def test_launch_whose_engine_cannot_take_updates_fails(int4: Path) -> None:
    """SGLang repacks INT4 Linear layers once, for good."""
    report = preflight(hf_checkpoint=int4, arguments=[f"{FLAG}=1", f"{GROUP}=32"])
    (finding,) = found(report, "CK715")
    assert report.status == "failed"
    assert finding.actual.startswith("SGLang cannot take INT4 Linear layers a second time")
    assert "--ignore" in finding.hint


def test_launch_without_a_trainer_updates_nothing(int4: Path) -> None:
    assert "CK715" not in [check.code for check in preflight(hf_checkpoint=int4).checks]


def found(report: Report, code: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.code == code]


@pytest.mark.parametrize(
    "words",
    [
        [f"{FLAG}=1", f"{GROUP}=32"],
        ["--runtime-env-json", json.dumps({"env_vars": {FLAG: "1", GROUP: "32"}})],
        [f'--runtime-env-json={{\\"{FLAG}\\": \\"1\\", \\"{GROUP}\\": \\"32\\"}}'],
    ],
)
def test_variables_are_read_wherever_a_launch_has_them(words: list[str]) -> None:
    options = arguments_of(["--rollout-num-gpus-per-engine", "8", *words])
    assert (options.qat, options.qat_group, options.engine) == (True, 32, 8)


def test_launch_arguments_override_the_environment() -> None:
    options = arguments_of([f"{GROUP}=64"], {FLAG: "0", GROUP: "32", "HOME": "1"})
    assert (options.qat, options.qat_group) == (False, 64)


def test_a_group_size_that_is_no_number() -> None:
    with pytest.raises(CkptkitError, match=GROUP):
        arguments_of([f"{GROUP}=many"])


def test_launch_that_rounds_as_the_engine_serves_is_silent(experts: Path) -> None:
    report = preflight(hf_checkpoint=experts, arguments=[f"{FLAG}=1", f"{GROUP}=32"])
    compared = {check.code: check.tensors_compared for check in report.checks}
    assert (compared["CK709"], compared["CK715"] > 12 * 3) == (5, True)
    assert (report.status, report.findings) == ("passed", [])


@pytest.mark.parametrize("arguments", [[], [f"{FLAG}=0", f"{GROUP}=128"]])
def test_launch_without_rounding_is_not_checked(arguments: list[str], int4: Path) -> None:
    report = preflight(hf_checkpoint=int4, arguments=arguments)
    assert "CK709" not in [check.code for check in report.checks]
    assert report.findings == []


def test_launch_with_another_group_size_is_found(int4: Path) -> None:
    (finding,) = found(preflight(hf_checkpoint=int4, arguments=[f"{FLAG}=1", f"{GROUP}=128"]), "CK709")
    assert (finding.expected, finding.actual) == ("group_size = 128, as training rounds", "group_size = 32")
    assert GROUP in finding.hint


def test_group_size_in_the_environment_is_read(int4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FLAG, "1")
    monkeypatch.setenv(GROUP, "64")
    (finding,) = found(preflight(hf_checkpoint=int4), "CK709")
    assert finding.expected == "group_size = 64, as training rounds"


@pytest.mark.parametrize(
    ("key", "value", "expected"), [("symmetric", False, True), ("num_bits", 8, 4), ("strategy", "channel", "group")]
)
def test_engine_with_another_scheme_is_found(key: str, value: Any, expected: Any, int4: Path, copy_of: CopyOf) -> None:
    path = copy_of(int4)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"][key] = value
    (path / "config.json").write_text(json.dumps(config))
    (finding,) = found(preflight(hf_checkpoint=path, arguments=[f"{FLAG}=1"]), "CK709")
    assert (finding.expected, finding.actual) == (f"{key} = {expected}, as training rounds", f"{key} = {value}")


def test_an_engine_that_serves_bf16(releases: PathOf) -> None:
    (finding,) = found(preflight(hf_checkpoint=releases("qwen2-untied"), arguments=[f"{FLAG}=1"]), "CK709")
    assert "serves BF16" in finding.actual


def test_an_engine_without_a_config_is_for_other_checks(tmp_path: Path) -> None:
    report = preflight(hf_checkpoint=tmp_path, arguments=[f"{FLAG}=1"])
    assert next(check for check in report.checks if check.code == "CK709").status == "skipped"
    assert [finding.code for finding in report.findings] == ["CK714"]


def test_engine_ranks_that_cut_through_a_tile(int4: Path) -> None:
    """down_proj has 288 columns: 144 on each of two ranks, and a Marlin tile is 128 wide."""
    report = preflight(hf_checkpoint=int4, tp=2, arguments=["--rollout-num-gpus-per-engine", "2"])
    (finding,) = found(report, "CK307")
    assert finding.expected == "INT4 weights that 2 ranks can share"
    assert "144 columns" in finding.actual


@pytest.mark.usefixtures("kernel_tiles")
def test_layers_that_no_kernel_runs_are_found_in_a_launch_of_one_rank(int4: Path) -> None:
    report = preflight(hf_checkpoint=int4, tp=2)
    (finding,) = found(report, "CK307")
    assert (finding.expected, finding.severity) == ("INT4 weights that a kernel of SGLang can run", "error")
    assert "288 columns" in finding.actual


def test_attention_cut_over_fewer_ranks_is_not_judged(int4: Path) -> None:
    report = preflight(
        hf_checkpoint=int4,
        arguments=["--rollout-num-gpus-per-engine", "2", "--sglang-enable-dp-attention", "--sglang-dp-size", "2"],
    )
    assert (report.status, found(report, "CK307")) == ("inconclusive", [])
    assert "CK307: --sglang-enable-dp-attention cuts attention over fewer ranks" in report.reasons[0]

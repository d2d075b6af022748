"""CK302 on published `ignore` lists: an error where SGLang would load wrongly, a warning where only others would."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from families import CASES, case
from support import quantized
from support.fixture_types import CopyOf, PathOf
from support.launch_scripts import arguments_of
from support.messages import text_with

from ckptkit.app.api import quantize
from ckptkit.app.cli import cli
from ckptkit.core.errors import CkptkitError
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.quant.ignore.lint import lint
from ckptkit.verify.core.report import Finding, Report
from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.run import verify

K26_LIST = [
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    "re:.*lm_head.*",
    "re:vision_tower.*",
    "re:mm_projector.*",
]
# Kimi K2.5 names its output layer as Kimi K2 did, which has no language_model before it.
K25_LIST = ["lm_head", *(entry for entry in K26_LIST if "lm_head" not in entry)]

# Routed experts alone are packed: of 12 layers all but the first have 12 with 3 matrices each.
PACKED = 11 * 12 * 3


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kimi K2.5 with routed experts in INT4, as compressed-tensors packs them; each test writes its own list."""
    root = tmp_path_factory.mktemp("published")
    case.save("kimi_k25", CASES["kimi_k25"], root / "plain", torch.bfloat16)
    pack = quantized.int4(symmetric=True, strategy="group", group_size=32)
    quantized.write(root / "plain", root / "int4", lambda name: ".mlp.experts." in name, pack, lambda config: config)
    return root / "int4"


@pytest.fixture
def judged(release: Path) -> Callable[..., tuple[str, list[Finding]]]:
    """`judged(ignore, readers=...)`: the status of the release with this list, and its findings, all of CK302."""
    before = json.loads((release / "config.json").read_text())

    def judge(ignore: Sequence[str], **how: tuple[str, ...] | None) -> tuple[str, list[Finding]]:
        said = quantized.compressed_config("pack-quantized", strategy="group", group_size=32) | {"ignore": list(ignore)}
        config = {key: value for key, value in before.items() if key != "quantization_config"}
        (release / "config.json").write_text(
            json.dumps(config | {"text_config": before["text_config"] | {"quantization_config": said}})
        )
        report = verify(release, **how)  # type: ignore[arg-type]
        assert {finding.code for finding in report.findings} == {"CK302"}
        assert next(check.tensors_compared for check in report.checks if check.code == "CK302") >= PACKED
        return report.status, list(report.findings)

    return judge


def by_reader(found: Sequence[Finding]) -> dict[str, str]:
    """Severity by reader."""
    return {finding.actual.partition(" would ")[0]: finding.severity for finding in found}


def test_kimi_k25_is_spelled_for_engines(judged: Callable[..., tuple[str, list[Finding]]]) -> None:
    """Engines know the output layer by its class; readers of names find no `lm_head` under language_model."""
    status, found = judged(K25_LIST)
    assert status == "passed"
    assert by_reader(found) == dict.fromkeys(("compressed-tensors", "transformers", "slime"), "warning")
    assert found[0].actual == text_with("language_model.lm_head.weight")
    for finding in found:
        assert "'language_model.lm_head'" in finding.hint
        assert finding.file is not None
        assert finding.file.endswith("config.json")


def test_with_the_portable_spelling_only_slime_is_left(judged: Callable[..., tuple[str, list[Finding]]]) -> None:
    """It packs embedding and routers by name, which no entry of either list names. Only the first list is published."""
    for ignore, severity in ((K26_LIST, "warning"), ([*K25_LIST, "language_model.lm_head"], "error")):
        status, (finding,) = judged(ignore)
        assert status == {"warning": "passed", "error": "failed"}[severity]
        assert by_reader([finding]) == {"slime": severity}
        assert "language_model.model.embed_tokens.weight" in finding.actual


def test_published_list_fails_a_launch_that_quantizes_by_it(
    judged: Callable[..., tuple[str, list[Finding]]], release: Path
) -> None:
    """slime packs what no entry names, routers among it; an engine alone finds everything as it looks for it."""
    judged(K26_LIST)
    alone = preflight(hf_checkpoint=release)
    assert by_reader([finding for finding in alone.findings if finding.code == "CK302"]) == {"slime": "warning"}
    trained = preflight(hf_checkpoint=release, arguments=["OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1"])
    assert by_reader([finding for finding in trained.findings if finding.code == "CK302"]) == {"slime": "error"}
    assert trained.status == "failed"


def test_a_reader_that_is_asked_for_must_find_what_it_looks_for(
    judged: Callable[..., tuple[str, list[Finding]]],
) -> None:
    status, found = judged(K25_LIST, readers=("sglang", "transformers"))
    assert status == "failed"
    assert by_reader(found) == {"compressed-tensors": "error", "transformers": "error", "slime": "warning"}


def test_what_sglang_would_load_wrongly_is_an_error(judged: Callable[..., tuple[str, list[Finding]]]) -> None:
    """SGLang 0.5.16 takes a plain entry for a part of a name: experts of layers 1, 10 and 11 would be unpacked."""
    status, found = judged([*K26_LIST, "model.layers.1"])
    assert status == "failed"
    assert by_reader(found)["SGLang 0.5.16"] == "error"
    (wrong,) = [finding for finding in found if finding.actual.startswith("SGLang")]
    assert "leave unpacked" in wrong.actual
    assert "'model.layers.1'" in wrong.hint


def test_what_no_reader_looks_for_as_it_is_names_the_tensors(judged: Callable[..., tuple[str, list[Finding]]]) -> None:
    status, found = judged([entry for entry in K26_LIST if "shared_experts" not in entry])
    assert status == "failed"
    wrong = [finding for finding in found if finding.tensor]
    assert {finding.tensor for finding in wrong} == {
        f"language_model.model.layers.{{1..11}}.mlp.shared_experts.{name}_proj.weight"
        for name in ("gate", "up", "down")
    }
    assert {(finding.expected, finding.actual, finding.count) for finding in wrong} == {
        ("packed as INT4, by config.json", "unquantized", 11)
    }


@pytest.mark.parametrize("readers", [None, ("sglang",), ("transformers",), ("sglang", "slime")])
@pytest.mark.parametrize(
    "ignore", [K25_LIST, K26_LIST, [*K25_LIST, "language_model.lm_head"], [*K26_LIST, "model.layers.1"]]
)
def test_lint_and_verify_give_one_severity(
    judged: Callable[..., tuple[str, list[Finding]]], release: Path, ignore: list[str], readers: tuple[str, ...] | None
) -> None:
    """Of the same list for the same reader; lint says nothing of readers that were not asked for."""
    _, found = judged(ignore, readers=readers)
    linted = [
        (reader, one.severity)
        for one in lint(release, readers=readers).findings
        if one.kind in ("exposed", "disagreement")
        for reader in one.readers
    ]
    verified = {reader: severity for several, severity in by_reader(found).items() for reader in several.split(" and ")}
    assert dict(linted) == {
        reader: severity for reader, severity in verified.items() if readers is None or severity == "error"
    }


# CK709 and CK307 in a launch: what training rounds to, and what the engine's ranks can share.


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
    assert "re:.*mlp.gate$" in finding.actual
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
    assert finding.actual == text_with("SGLang INT4 Linear")
    assert "--ignore" in finding.hint


def test_launch_without_a_trainer_updates_nothing(int4: Path) -> None:
    assert "CK715" not in [check.code for check in preflight(hf_checkpoint=int4).checks]


def found(report: Report, code: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.code == code]


def test_variables_are_read_in_json_however_it_is_quoted() -> None:
    escaped = f'{{\\"{FLAG}\\": \\"1\\", \\"{GROUP}\\": \\"32\\"}}'
    for text in (json.dumps({"env_vars": {FLAG: "1", GROUP: "32"}}), escaped):
        options = arguments_of(["--runtime-env-json", text])
        assert (options.qat, options.qat_group) == (True, 32)


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


def test_attention_cut_over_fewer_ranks_is_not_judged(int4: Path) -> None:
    report = preflight(
        hf_checkpoint=int4,
        arguments=["--rollout-num-gpus-per-engine", "2", "--sglang-enable-dp-attention", "--sglang-dp-size", "2"],
    )
    assert (report.status, found(report, "CK307")) == ("inconclusive", [])
    assert "CK307: --sglang-enable-dp-attention" in report.reasons[0]


def test_miles_in_mode_bridge_packs_what_is_stored_packed(without_router: Path) -> None:
    """Source: miles `update_weight/hf_weight_iterator_bridge.py`, which reads the packed names of --hf-checkpoint."""
    given = ["--megatron-to-hf-mode", "raw"]
    raw = preflight(hf_checkpoint=without_router, ref_load=without_router, arguments=given)
    assert {finding.severity for finding in found(raw, "CK302")} == {"error"}
    given = ["--megatron-to-hf-mode", "bridge"]
    bridge = preflight(hf_checkpoint=without_router, ref_load=without_router, arguments=given)
    assert found(bridge, "CK302") == []
    assert "CK302" in {check.code for check in bridge.checks if check.status == "passed"}

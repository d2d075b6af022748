"""CK302 on published `ignore` lists: an error where SGLang would load wrongly, a warning where only others would."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from families import CASES, case
from support import quantized

from quant.lint.lint import lint
from verify.launch.preflight import preflight
from verify.report import Finding
from verify.run import verify

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
    assert found[0].actual == "compressed-tensors would pack language_model.lm_head.weight because no entry covers it"
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

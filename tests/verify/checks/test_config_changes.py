"""CK702: whatever describes the model in config.json is compared with the source's; how it is stored may differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.fixture_types import PathOf

from verify.check import Tally
from verify.checks.config.config import UNKNOWN, class_default, configs_match
from verify.evidence.subject import Subject
from verify.reports.headline import headline
from verify.run import verify

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))


def change(path: Path, **changes: Any) -> Path:
    """Sets keys of config.json; Ellipsis removes one."""
    content = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))
    return path


@pytest.mark.parametrize(
    ("changes", "expected", "actual", "severity"),
    [
        ({"attention_dropout": 0.5}, "attention_dropout = 0.0", "attention_dropout = 0.5", "error"),
        ({"max_window_layers": 5}, "max_window_layers = 28", "max_window_layers = 5", "error"),
        ({"eos_token_id": [3, 5]}, "eos_token_id = 3", "eos_token_id = [3, 5]", "error"),
        ({"made_up": 7}, "made_up = not there", "made_up = 7", "warning"),
        ({"initializer_range": 0.1}, "initializer_range = 0.02", "initializer_range = 0.1", "error"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-06", "rms_norm_eps = 1e-05", "error"),
        ({"max_position_embeddings": 512}, "max_position_embeddings = 256", "max_position_embeddings = 512", "error"),
    ],
)
def test_a_key_that_changed(
    changes: dict[str, Any], expected: str, actual: str, severity: str, releases: PathOf, fresh: PathOf
) -> None:
    found = verify(change(fresh("qwen2-tied"), **changes), source=releases("qwen2-tied")).findings
    assert {(finding.code, finding.severity) for finding in found} == {("CK702", severity)}
    # One finding a key of the file, also where two Megatron arguments follow from it.
    assert [(finding.expected, finding.actual) for finding in found] == [(expected, actual)]


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("hidden_act", ..., []),  # the value of the class
        ("made_up", 7, [("warning", "text_config.made_up = not there", "text_config.made_up = 7")]),
        ("head_dim", 64, [("error", "text_config.head_dim = 32", "text_config.head_dim = 64")]),
    ],
)
def test_a_key_of_text_config_is_compared_by_itself(
    key: str, value: Any, found: list[tuple[str, str, str]], releases: PathOf, fresh: PathOf
) -> None:
    path = fresh("qwen3_5")
    text = json.loads((path / "config.json").read_text())["text_config"] | {key: value}
    change(path, text_config={name: one for name, one in text.items() if one is not ...})
    report = verify(path, source=releases("qwen3_5"))
    assert [(one.severity, one.expected, one.actual) for one in report.findings if one.code == "CK702"] == found


def test_a_softcap_that_the_class_does_not_have_is_an_error_where_it_is_lost() -> None:
    config = {"model_type": "gemma4", "text_config": {"model_type": "gemma4_text"}}
    assert class_default(config, ("text_config", "final_logit_softcapping"), 30.0) is None
    assert class_default(config, ("text_config", "head_dim"), 32) == 256
    assert class_default(config, ("text_config", "num_global_key_value_heads"), 2) is UNKNOWN  # made of others
    assert class_default({"model_type": "none"}, ("head_dim",), 32) is UNKNOWN


@pytest.mark.parametrize(
    ("name", "changes", "expected", "actual"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 2}, "num_experts_per_tok = 3", "num_experts_per_tok = 2"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob = True", "norm_topk_prob = False"),
        ("glm4_moe", {"routed_scaling_factor": 1.5}, "routed_scaling_factor = 2.5", "routed_scaling_factor = 1.5"),
        # The source says it the other way.
        ("qwen2-tied", {"rope_parameters": ..., "rope_theta": 500000.0}, "rope_theta = 10000", "rope_theta = 500000.0"),
        ("qwen2-tied", {"rope_parameters": ..., "rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-06", "rms_norm_eps = 1e-05"),
    ],
)
def test_a_change_is_named_as_the_file_spells_it(
    name: str, changes: dict[str, Any], expected: str, actual: str, releases: PathOf, fresh: PathOf
) -> None:
    found = verify(change(fresh(name), **changes), source=releases(name)).findings
    assert [(finding.expected, finding.actual) for finding in found if finding.code == "CK702"] == [(expected, actual)]


def test_the_source_is_another_model_is_one_finding_and_not_one_a_key(releases: PathOf) -> None:
    report = verify(releases("qwen2-tied"), source=releases("glm4_moe"))
    first, *others = [one for one in report.findings if one.cause is None and one.severity == "error"]
    assert (first.code, others) == ("CK702", [])
    assert headline(report).startswith("config.json: another model than the source: qwen2 (")
    assert " instead of glm4_moe (12 layers, hidden size " in headline(report)
    assert {one.code for one in report.findings if one.cause == "CK702-1"} == {"CK202"}


def test_a_change_inside_a_multimodal_config_is_named_there(tmp_path: Path) -> None:
    config = {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "num_hidden_layers": 6,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 256,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "sliding_window": 32,
        },
    }
    for folder, base in (("here", 10000.0), ("source", 1000000.0)):
        (tmp_path / folder).mkdir()
        write_json(
            tmp_path / folder / "config.json", config | {"text_config": config["text_config"] | {"rope_theta": base}}
        )  # type: ignore[operator]
    (finding,) = configs_match(Subject(tmp_path / "here", tmp_path / "source"), Tally())
    assert (finding.expected, finding.actual) == (
        "text_config.rope_theta = 1000000.0",
        "text_config.rope_theta = 10000.0",
    )


@pytest.mark.parametrize("spelling", ["v4", "v5"])
def test_rotary_scaling_that_was_removed(spelling: str, tmp_path: Path, fresh: PathOf) -> None:
    path = fresh("qwen2-tied")
    theta = json.loads((path / "config.json").read_text())["rope_parameters"]["rope_theta"]
    source = Path(str(path) + "-source")
    path.rename(source)
    if spelling == "v5":
        change(source, rope_parameters={**YARN, "rope_theta": theta})
    else:
        change(source, rope_parameters=..., rope_theta=theta, rope_scaling={"type": "yarn", **YARN})
    found = verify(fresh("qwen2-tied"), source=source).findings
    assert [(finding.code, finding.severity, finding.expected, finding.actual) for finding in found] == [
        ("CK702", "error", "rotary factor = 4.0", "rotary factor = None"),
        (
            "CK702",
            "error",
            "rotary original_max_position_embeddings = 64",
            "rotary original_max_position_embeddings = None",
        ),
        ("CK702", "error", "rotary rope_type = yarn", "rotary rope_type = default"),
    ]


def test_the_other_spelling_and_storage_are_no_change(releases: PathOf, fresh: PathOf) -> None:
    path = fresh("glm4_moe")
    rope = json.loads((path / "config.json").read_text())["rope_parameters"]
    change(
        path,
        rope_parameters=...,
        rope_theta=rope["rope_theta"],
        partial_rotary_factor=rope["partial_rotary_factor"],
        dtype=...,
        torch_dtype="bfloat16",
        transformers_version="4.54.0",
        use_cache=False,
        architectures=["Glm4MoeForCausalLM", "Other"],
        _name_or_path="/somewhere",
    )
    assert verify(path, source=releases("glm4_moe")).findings == []

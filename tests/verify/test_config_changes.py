"""CK702: whatever describes the model in config.json is compared with the source's; how it is stored may differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verify.report import Finding, Report
from verify.run import verify

Make = Callable[..., Path]
Copy = Callable[[Path], Path]
Only = Callable[[Report], Finding]

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


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
        ({"hidden_act": ...}, "hidden_act = silu", "hidden_act = None", "warning"),
        ({"rms_norm_eps": 1e-5}, "norm_epsilon = 1e-06", "norm_epsilon = 1e-05", "error"),
        ({"max_position_embeddings": 512}, None, None, "error"),
    ],
)
def test_a_key_that_changed(changes: dict[str, Any], expected: str | None, actual: str | None, severity: str, releases: Make, copy_of: Copy) -> None:
    found = verify(change(copy_of(releases("qwen2-tied")), **changes), source=releases("qwen2-tied")).findings
    assert {(finding.code, finding.severity) for finding in found} == {("CK702", severity)}
    if expected is None:
        # One key, two Megatron arguments that follow from it, and no third finding for the key itself.
        assert [finding.expected for finding in found] == ["max_position_embeddings = 256", "seq_length = 256"]
    else:
        assert [(finding.expected, finding.actual) for finding in found] == [(expected, actual)]


@pytest.mark.parametrize("spelling", ["v4", "v5"])
def test_rotary_scaling_that_was_removed(spelling: str, releases: Make, tmp_path: Path, copy_of: Copy) -> None:
    path = copy_of(releases("qwen2-tied"))
    theta = json.loads((path / "config.json").read_text())["rope_parameters"]["rope_theta"]
    source = Path(str(path) + "-source")
    path.rename(source)
    if spelling == "v5":
        change(source, rope_parameters={**YARN, "rope_theta": theta})
    else:
        change(source, rope_parameters=..., rope_theta=theta, rope_scaling={"type": "yarn", **YARN})
    found = verify(copy_of(releases("qwen2-tied")), source=source).findings
    assert [(finding.code, finding.severity, finding.expected, finding.actual) for finding in found] == [
        ("CK702", "error", "rotary factor = 4.0", "rotary factor = None"),
        ("CK702", "error", "rotary original_max_position_embeddings = 64", "rotary original_max_position_embeddings = None"),
        ("CK702", "error", "rotary rope_type = yarn", "rotary rope_type = default"),
    ]


def test_the_other_spelling_and_storage_are_no_change(releases: Make, copy_of: Copy) -> None:
    path = copy_of(releases("glm4_moe"))
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

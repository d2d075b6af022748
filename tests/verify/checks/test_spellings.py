"""CK704 and CK705: what a config states twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fixture_types import CopyOf, PathOf, RunAlone

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def edited(path: Path, **changes: Any) -> Path:
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))
    return path


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_theta": 1000000, "rope_scaling": None, "rope_parameters": {"rope_theta": 1e6}},
        {
            "rope_theta": 1e6,
            "rope_scaling": {"type": "yarn", "factor": 4},
            "rope_parameters": {**YARN, "rope_theta": 1e6},
        },
        {
            "rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 3]},
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 2, 3]},
        },
        {
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
        },
    ],
)
def test_spellings_that_agree(rope: dict[str, Any], releases: PathOf, copy_of: CopyOf, alone: RunAlone) -> None:
    result, found = alone("CK704", edited(copy_of(releases("qwen2-tied")), **rope))
    assert found == []
    assert result is not None
    assert result.status == "passed"


@pytest.mark.parametrize(
    ("rope", "expected", "actual"),
    [
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
            "rope_parameters.rope_theta = 10000.0, as rope_theta says",
            "rope_parameters.rope_theta = 1000000.0",
        ),
        (
            {"rope_theta": 1e6, "rope_parameters": {**YARN, "rope_theta": 1e6}},
            "rope_parameters.rope_type = default, as rope_scaling.rope_type says",
            "rope_parameters.rope_type = yarn",
        ),
        (
            {"rope_scaling": {**YARN, "factor": 8.0}, "rope_parameters": YARN},
            "rope_parameters.factor = 8.0, as rope_scaling.factor says",
            "rope_parameters.factor = 4.0",
        ),
        (
            {"rope_theta": 1e6, "partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 1.0}},
            "rope_parameters.partial_rotary_factor = 0.5, as partial_rotary_factor says",
            "rope_parameters.partial_rotary_factor = 1.0",
        ),
        (
            {
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e5,
                "rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_theta": 1e4}},
            },
            "rope_parameters.sliding_attention.rope_theta = 100000.0, as rope_local_base_freq says",
            "rope_parameters.sliding_attention.rope_theta = 10000.0",
        ),
    ],
)
def test_spellings_that_differ(
    rope: dict[str, Any], expected: str, actual: str, releases: PathOf, copy_of: CopyOf, alone: RunAlone
) -> None:
    path = edited(copy_of(releases("qwen2-tied")), **rope)
    _, (finding,) = alone("CK704", path)
    assert (finding.expected, finding.actual, finding.file) == (expected, actual, str(path / "config.json"))


@pytest.mark.parametrize("rope", [{"rope_parameters": YARN}, {"rope_theta": 1e6, "rope_parameters": "absent"}])
def test_config_with_one_spelling_is_not_compared(
    rope: dict[str, Any], releases: PathOf, copy_of: CopyOf, alone: RunAlone
) -> None:
    assert alone("CK704", edited(copy_of(releases("qwen2-tied")), **rope)) == (None, [])


def test_spellings_inside_text_config_and_beside_megatron_are_compared(
    converted: PathOf, copy_of: CopyOf, alone: RunAlone
) -> None:
    path = copy_of(converted("qwen2-tied"))
    edited(path / "hf", text_config={"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}})
    _, (finding,) = alone("CK704", path)
    assert finding.actual == "text_config.rope_parameters.rope_theta = 6.0"
    assert finding.file == str(path / "hf" / "config.json")


@pytest.mark.parametrize(
    ("key", "top", "inside"),
    [("tie_word_embeddings", True, False), ("vocab_size", 352, 360), ("rms_norm_eps", 1e-6, 1e-5)],
)
def test_a_text_config_that_contradicts_the_top(
    key: str, top: Any, inside: Any, releases: PathOf, copy_of: CopyOf, alone: RunAlone
) -> None:
    path = edited(copy_of(releases("qwen2-tied")), **{key: top, "text_config": {key: inside}})
    _, (finding,) = alone("CK705", path)
    assert (finding.expected, finding.actual) == (f"{key} = {top}, as at the top", f"text_config.{key} = {inside}")
    assert alone("CK705", edited(path, text_config={key: top}))[1] == []


def test_the_tie_flag_that_transformers_adds_by_default(releases: PathOf, copy_of: CopyOf, alone: RunAlone) -> None:
    path = edited(
        copy_of(releases("qwen2-untied")), tie_word_embeddings=False, text_config={"tie_word_embeddings": True}
    )
    assert alone("CK705", path)[1] == []


@pytest.mark.parametrize("text", ["absent", None, {}, {"hidden_size": 128, "model_type": "x"}])
def test_config_that_states_a_value_once_is_not_compared(
    text: Any, releases: PathOf, copy_of: CopyOf, alone: RunAlone
) -> None:
    assert alone("CK705", edited(copy_of(releases("qwen2-tied")), hidden_size="absent", text_config=text)) == (None, [])

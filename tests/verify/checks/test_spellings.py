"""CK704 and CK705: what a config states twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CASES, case
from mutations import edits
from safetensors.torch import load_file, save_file
from support.fixture_types import PathOf, RunAlone
from support.messages import text_with
from transformers import AutoConfig, AutoModelForImageTextToText

from ckptkit.app.api import convert
from ckptkit.core.errors import CkptkitError
from ckptkit.quant.engines.transformers_class import TIES, TieFlag
from ckptkit.verify.run import verify

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def edited(path: Path, **changes: Any) -> Path:
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))
    return path


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1000000, "rope_scaling": None, "rope_parameters": {"rope_theta": 1e6}},
        {"rope_scaling": {"type": "yarn", "factor": 4}, "rope_parameters": YARN},
        {"rope_scaling": {"type": "mrope", "factor": 2}, "rope_parameters": {"rope_type": "default", "factor": 2}},
        {
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
        },
    ],
)
def test_spellings_that_agree(rope: dict[str, Any], fresh: PathOf, passes: Callable[..., None]) -> None:
    passes("CK704", edited(fresh("qwen2-tied"), **rope))


PARTIAL = {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 1.0}}
LOCAL = {"full_attention": {}, "sliding_attention": {"rope_theta": 1e4}}


@pytest.mark.parametrize(
    ("rope", "key", "before", "after"),
    [
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta", "10000.0", "1000000.0"),
        ({"rope_theta": 1e6, "rope_parameters": {**YARN, "rope_theta": 1e6}}, "rope_type", "default", "yarn"),
        ({"rope_scaling": {**YARN, "factor": 8.0}, "rope_parameters": YARN}, "factor", "8.0", "4.0"),
        ({"rope_theta": 1e6, **PARTIAL}, "partial_rotary_factor", "0.5", "1.0"),
        (
            {"rope_theta": 1e6, "rope_local_base_freq": 1e5, "rope_parameters": LOCAL},
            *("sliding_attention.rope_theta", "100000.0", "10000.0"),
        ),
    ],
)
def test_spellings_that_differ(
    rope: dict[str, Any], key: str, before: str, after: str, fresh: PathOf, alone: RunAlone
) -> None:
    path = edited(fresh("qwen2-tied"), **rope)
    _, (finding,) = alone("CK704", path)
    assert finding.expected.startswith(f"rope_parameters.{key} = {before}, as ")
    assert (finding.actual, finding.file) == (f"rope_parameters.{key} = {after}", str(path / "config.json"))


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("CK704", {"rope_parameters": YARN}),
        ("CK704", {"rope_theta": 1e6, "rope_parameters": "absent"}),
        ("CK705", {"hidden_size": "absent", "text_config": None}),
        ("CK705", {"hidden_size": "absent", "text_config": {"hidden_size": 128, "model_type": "x"}}),
    ],
)
def test_config_that_states_a_value_once_is_not_compared(
    code: str, changes: dict[str, Any], fresh: PathOf, alone: RunAlone
) -> None:
    assert alone(code, edited(fresh("qwen2-tied"), **changes)) == (None, [])


def test_spellings_inside_text_config_and_beside_megatron_are_compared(fresh_megatron: PathOf, alone: RunAlone) -> None:
    path = fresh_megatron("qwen2-tied")
    edited(path / "hf", text_config={"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}})
    _, (finding,) = alone("CK704", path)
    assert finding.actual == "text_config.rope_parameters.rope_theta = 6.0"
    assert finding.file == str(path / "hf" / "config.json")


@pytest.mark.parametrize(
    ("key", "top", "inside"),
    [("tie_word_embeddings", True, False), ("vocab_size", 352, 360), ("rms_norm_eps", 1e-6, 1e-5)],
)
def test_a_text_config_that_contradicts_the_top(
    key: str, top: Any, inside: Any, fresh: PathOf, alone: RunAlone
) -> None:
    path = edited(fresh("qwen2-tied"), **{key: top, "text_config": {key: inside}})
    _, (finding,) = alone("CK705", path)
    assert (finding.expected, finding.actual) == (text_with(f"{key} = {top}"), f"text_config.{key} = {inside}")
    assert alone("CK705", edited(path, text_config={key: top}))[1] == []


def test_the_tie_flag_that_transformers_adds_by_default(fresh: PathOf, alone: RunAlone) -> None:
    path = edited(fresh("qwen2-untied"), tie_word_embeddings=False, text_config={"tie_word_embeddings": True})
    assert alone("CK705", path)[1] == []


# Each multimodal family: a config class of transformers, and which readers look in text_config.
FAMILIES_WITH_TEXT = {
    "qwen2_5_vl": set(),
    "qwen3_vl": set(),
    "qwen3_vl_moe": set(),
    "qwen3_5": {"vLLM"},
    "qwen3_5_moe": {"vLLM"},
    "gemma3": {"SGLang"},
}
FLAGS = tuple(product((None, True, False), repeat=2))


def flagged(path: Path, config: dict[str, Any], top: Any, inside: Any) -> Path:
    """config.json with the tie flag at these places; None: not there."""
    for part, value in ((config, top), (config.get("text_config", config), inside)):
        part.pop("tie_word_embeddings", None)
        part.update({} if value is None else {"tie_word_embeddings": value})
    (path / "config.json").write_text(json.dumps(config, default=str))
    return path


def tied(name: str, path: Path, top: Any, inside: Any) -> Path:
    """A test model without an output layer of its own, with the tie flag at these places."""
    case.save(name, CASES[name], path, torch.bfloat16)
    for file in path.glob("*.safetensors"):
        kept = {key: value for key, value in load_file(file).items() if not key.endswith("lm_head.weight")}
        save_file(kept, file, metadata={"format": "pt"})
    return flagged(path, json.loads((path / "config.json").read_text()), top, inside)


@pytest.mark.parametrize("model_type", FAMILIES_WITH_TEXT)
def test_the_tie_flag_is_read_where_transformers_reads_it(model_type: str, tmp_path: Path) -> None:
    tie = TIES.get(model_type, TieFlag())
    assert set(tie.text) == FAMILIES_WITH_TEXT[model_type]
    for flags in FLAGS:
        config = AutoConfig.for_model(model_type).to_dict()
        truth = AutoConfig.from_pretrained(flagged(tmp_path, config, *flags)).tie_word_embeddings
        assert tie.read(config, config["text_config"])["transformers"] is truth, flags


@pytest.mark.parametrize(
    ("name", "top", "inside", "actual"),
    [
        ("qwen3_vl-tied", None, True, "text_config.tie_word_embeddings = True False"),
        ("kimi_k25", True, None, "tie_word_embeddings = True False"),
        ("qwen3_5", None, True, "text_config.tie_word_embeddings = True: vLLM transformers, SGLang"),
        ("qwen3_5", True, None, "tie_word_embeddings = True: transformers, SGLang, vLLM"),
        ("gemma3", False, True, "= False, text_config.tie_word_embeddings = True: SGLang, transformers, vLLM"),
        ("gemma3", None, False, "text_config.tie_word_embeddings = False: transformers, vLLM, SGLang"),
        ("qwen3_vl-tied", True, "yes", "tie_word_embeddings 'yes'"),
    ],
)
def test_a_tie_flag_where_not_every_reader_looks(
    name: str, top: Any, inside: Any, actual: str, tmp_path: Path, alone: RunAlone
) -> None:
    """No output layer is stored, so whoever takes false leaves it random."""
    path = tied(name, tmp_path / "model", top, inside)
    (finding,) = alone("CK705", path)[1]
    assert (finding.severity, finding.file) == ("error", str(path / "config.json"))
    assert finding.actual == text_with(actual)


@pytest.mark.parametrize(
    ("name", "top", "inside"),
    [
        ("qwen3_vl-tied", True, None),
        ("qwen3_vl_moe", False, True),  # as transformers 5 writes it
        ("qwen3_5", True, True),
        ("gemma3", None, True),
        ("kimi_k25", None, True),
    ],
)
def test_a_tie_flag_where_every_reader_looks(
    name: str, top: bool | None, inside: bool | None, tmp_path: Path, passes: Callable[..., None]
) -> None:
    passes("CK705", tied(name, tmp_path / "model", top, inside))


def test_what_transformers_makes_of_a_flag_in_text_config_alone(tmp_path: Path, alone: RunAlone) -> None:
    """It leaves the output layer random, and `verify` says so; with the flag at the top it does not."""
    sound = tied("qwen3_vl-tied", tmp_path / "sound", True, None)
    report = verify(sound)
    assert report.findings == []
    assert report.facts["notes"][0] == text_with("transformers 4 text_config.tie_word_embeddings")
    path = tied("qwen3_vl-tied", tmp_path / "model", None, True)
    for checkpoint, missing in ((sound, set()), (path, {"lm_head.weight"})):
        _, info = AutoModelForImageTextToText.from_pretrained(checkpoint, output_loading_info=True)
        assert set(info["missing_keys"]) == missing
    assert {(one.code, one.tensor) for one in verify(path).findings} == {("CK104", "lm_head.weight"), ("CK705", None)}
    with pytest.raises(CkptkitError, match=r"1.*lm_head\.weight"):
        convert(path, tmp_path / "megatron")
    # Where the output layer is stored it is only a warning.
    edits.replace(path, {"lm_head.weight": edits.tensor(path, "model.language_model.embed_tokens.weight")})
    (finding,) = alone("CK705", path)[1]
    assert finding.severity == "warning"

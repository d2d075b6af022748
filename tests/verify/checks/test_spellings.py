"""CK704, CK705 and CK211: what a config states twice, and tied models that store the output layer too."""

import filecmp
import json
from itertools import product

import pytest
import torch
from families import CASES, case
from mutations import edits
from safetensors.torch import load_file, save_file
from support import models
from support.messages import text_with
from support.nightly import daily
from support.tied import NAMES, one_bit_off, with_head
from transformers import AutoConfig, AutoModelForImageTextToText

from ckptkit.app.api import convert
from ckptkit.core.errors import CkptkitError
from ckptkit.quant.engines.transformers_class import TIES, TieFlag
from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.run import verify

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


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
def test_spellings_that_agree(rope, fresh, passes):
    passes("CK704", edits.edit_config(fresh("qwen2-tied"), **rope))


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
def test_spellings_that_differ(rope, key, before, after, fresh, alone):
    path = edits.edit_config(fresh("qwen2-tied"), **rope)
    _, (finding,) = alone("CK704", path)
    assert finding.expected.startswith(f"rope_parameters.{key} = {before}, as ")
    assert (finding.actual, finding.file) == (f"rope_parameters.{key} = {after}", str(path / "config.json"))


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("CK704", {"rope_parameters": YARN}),
        ("CK704", {"rope_theta": 1e6, "rope_parameters": ...}),
        ("CK705", {"hidden_size": ..., "text_config": None}),
        ("CK705", {"hidden_size": ..., "text_config": {"hidden_size": 128, "model_type": "x"}}),
    ],
)
def test_config_that_states_a_value_once_is_not_compared(code, changes, fresh, alone):
    assert alone(code, edits.edit_config(fresh("qwen2-tied"), **changes)) == (None, [])


@pytest.mark.parametrize(
    ("key", "top", "inside"),
    [("tie_word_embeddings", True, False), ("vocab_size", 352, 360), ("rms_norm_eps", 1e-6, 1e-5)],
)
def test_a_text_config_that_contradicts_the_top(key, top, inside, fresh, alone):
    path = edits.edit_config(fresh("qwen2-tied"), **{key: top, "text_config": {key: inside}})
    _, (finding,) = alone("CK705", path)
    assert (finding.expected, finding.actual) == (text_with(f"{key} = {top}"), f"text_config.{key} = {inside}")
    assert alone("CK705", edits.edit_config(path, text_config={key: top}))[1] == []


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


def flagged(path, config, top, inside):
    for part, value in ((config, top), (config.get("text_config", config), inside)):
        part.pop("tie_word_embeddings", None)
        part.update({} if value is None else {"tie_word_embeddings": value})
    (path / "config.json").write_text(json.dumps(config, default=str))
    return path


def tied(name, path, top, inside):
    case.save(name, CASES[name], path, torch.bfloat16)
    for file in path.glob("*.safetensors"):
        kept = {key: value for key, value in load_file(file).items() if not key.endswith("lm_head.weight")}
        save_file(kept, file, metadata={"format": "pt"})
    return flagged(path, json.loads((path / "config.json").read_text()), top, inside)


@pytest.mark.parametrize("model_type", FAMILIES_WITH_TEXT)
def test_the_tie_flag_is_read_where_transformers_reads_it(model_type, tmp_path):
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
def test_a_tie_flag_where_not_every_reader_looks(name, top, inside, actual, tmp_path, alone):
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
def test_a_tie_flag_where_every_reader_looks(name, top, inside, tmp_path, passes):
    passes("CK705", tied(name, tmp_path / "model", top, inside))


def test_what_transformers_makes_of_a_flag_in_text_config_alone(tmp_path, alone):
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


# Tied models that ship the output layer all the same: sound where it repeats the embedding, wrong where not.


HEAD, EMBEDDING = NAMES["qwen2-tied"]


@pytest.fixture(
    scope="module", params=daily(sorted(NAMES), ("qwen2-tied", "mimo-tied-two-layers", "gemma3", "qwen3_vl-tied"))
)
def shipped(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("tied")
    case.save(request.param, CASES[request.param], root / "plain", torch.bfloat16)
    return request.param, with_head(root / "plain", root / "shipped", request.param)


def has_note(report, head=HEAD, embedding=EMBEDDING):
    notes = report.facts.get("notes", [])
    return any(note == text_with(f"{head} tie_word_embeddings {embedding}") for note in notes)


def is_sound(report):
    assert [str(finding) for finding in report.findings] == []
    assert report.status == "passed"


def test_a_head_that_repeats_the_embedding_passes_and_comes_back_from_megatron(shipped, tmp_path):
    """The same files, byte for byte. Either side may lack the head."""
    name, path = shipped
    report = verify(path)
    is_sound(report)
    assert has_note(report, *NAMES[name])
    assert [check.status for check in report.checks if check.code == "CK211"] == ["passed"]
    is_sound(verify(path, source=path.parent / "plain"))
    is_sound(verify(path.parent / "plain", source=path))
    convert(path, tmp_path / "megatron")
    is_sound(verify(tmp_path / "megatron", source=path))
    convert(tmp_path / "megatron", tmp_path / "back")
    files = sorted(file.name for file in path.glob("*.safetensors"))
    assert filecmp.cmpfiles(path, tmp_path / "back", files, shallow=False) == (files, [], [])
    assert NAMES[name][0] in models.tensors(tmp_path / "back")


@pytest.fixture
def stale(releases, tmp_path):
    release = releases("qwen2-tied")
    return with_head(release, tmp_path / "stale", "qwen2-tied", one_bit_off(models.tensors(release)[EMBEDDING]))


def test_a_head_that_differs_is_an_error(stale, releases, tmp_path, only):
    """Only of values: preflight, which reads headers, has a note. A model without it has lost it."""
    finding = only(verify(stale))
    assert (finding.code, finding.severity, finding.tensor) == ("CK211", "error", HEAD)
    assert EMBEDDING in finding.expected
    assert "tie_word_embeddings" in finding.hint
    report = preflight(hf_checkpoint=stale)
    assert HEAD not in [one.tensor for one in report.findings]
    assert has_note(report)
    finding = only(verify(releases("qwen2-tied"), source=stale))
    assert (finding.code, finding.tensor) == ("CK202", HEAD)
    with pytest.raises(CkptkitError, match=f"{HEAD}.*{EMBEDDING}") as refused:
        convert(stale, tmp_path / "megatron")
    assert "tie_word_embeddings" in str(refused.value.hint)
    assert not (tmp_path / "megatron").exists()


def test_a_head_of_another_dtype_or_shape_is_an_error(releases, tmp_path):
    embedding = models.tensors(releases("qwen2-tied"))[EMBEDDING]
    path = with_head(releases("qwen2-tied"), tmp_path / "wide", "qwen2-tied", embedding.float())
    assert "CK211" in [finding.code for finding in verify(path).findings]
    path = with_head(releases("qwen2-tied"), tmp_path / "shorter", "qwen2-tied", embedding[:340].contiguous())
    for report in (verify(path), preflight(hf_checkpoint=path)):
        assert ("CK105", HEAD) in [(finding.code, finding.tensor) for finding in report.findings]


@pytest.mark.sglang
@pytest.mark.usefixtures("served_sglang")
@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3_moe"])
def test_sglang_loads_a_tied_model_with_its_head(fresh, name):
    """SGLang 0.5.16 drops the head of qwen2, whose class ties, and loads that of qwen3_moe."""
    path = fresh(name)
    edits.replace(path, {HEAD: models.tensors(path)[EMBEDDING].clone()})
    edits.edit_config(path, tie_word_embeddings=True)
    report = verify(path, against=frozenset({"sglang"}))
    is_sound(report)
    statuses = {check.code: check.status for check in report.checks}
    assert [statuses[code] for code in ("CK501", "CK502", "CK503", "CK504")] == ["passed"] * 4

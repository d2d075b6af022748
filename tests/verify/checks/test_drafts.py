"""What `verify` says of EAGLE draft models: nothing of sound ones, as trainers save them; each fault by its code."""

import json

import pytest
import torch
from mutations.edits import edit_config
from support import models
from support.drafts import KINDS, TOKENS, made_draft, save_draft, tensors_of
from support.messages import text_with

from ckptkit.app.api import convert, inspect, quantize
from ckptkit.converters.draft import is_draft
from ckptkit.core.errors import UnsupportedError, UsageError
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.verify.run import verify


@pytest.fixture
def target(releases):
    return releases("qwen3-untied")


@pytest.mark.parametrize("kind", KINDS)
def test_a_sound_draft_model_has_no_error(kind, target, tmp_path):
    path = made_draft(kind, tmp_path / "draft")
    report = verify(path, source=target)
    # The embedding of a sound copy is the target's; these are random.
    assert [one.actual for one in report.findings if "embed_tokens" not in str(one.tensor)] == []
    assert (report.status, report.asked, report.not_asked) == ("passed", ["draft model"], [])
    if kind == "speculators":  # an engine without its class
        assert report.facts["notes"] == [text_with("SGLang 0.5.16 Eagle3Speculator")]
    assert verify(path).status == "passed"


def test_a_copy_of_the_targets_embedding_is_compared(target, tmp_path):
    embedding = models.tensors(target)["model.embed_tokens.weight"]
    config, sound = KINDS["AngelSlim"][0], tensors_of("AngelSlim") | {"embed_tokens.weight": embedding}
    assert verify(save_draft(tmp_path / "sound", sound, config), source=target).findings == []
    other = sound | {"embed_tokens.weight": embedding + 1}
    (found,) = verify(save_draft(tmp_path / "other", other, config), source=target).findings
    assert (found.code, found.severity, found.tensor) == ("CK144", "warning", "embed_tokens.weight")


def drop(*names):
    def change(tensors):
        for name in names:
            del tensors[name]

    return change


def put(name, value):
    return lambda tensors: tensors.update({name: value(tensors)})


def with_biases(tensors):
    tensors |= {f"midlayer.self_attn.{one}_proj.bias": torch.ones(64 if one == "q" else 32) for one in "qkv"}


def never_filled(tensors):
    """As SpecForge's class makes the tables."""
    tensors["d2t"], tensors["t2d"] = torch.zeros(64, dtype=torch.int64), torch.ones(TOKENS, dtype=torch.bool)


def first_tokens(tensors):
    tensors |= {"d2t": torch.zeros(64, dtype=torch.int64), "t2d": torch.arange(TOKENS) < 64}


UP, LAST = "midlayer.mlp.up_proj.weight", torch.tensor([-1])
# What is changed in SpecForge's, the check, and words of its finding.
FAULTS = {
    "a projection is missing": (drop("midlayer.self_attn.k_proj.weight"), "CK141", "no shard"),
    "the output layer is missing": (drop("lm_head.weight"), "CK141", "no shard"),
    "the table is missing": (drop("d2t"), "CK141", "no shard"),
    "two states of three": (put("fc.weight", lambda one: one["fc.weight"][:, :256]), "CK141", "[128, 256]"),
    # As a class that wraps the decoder calls it.
    "a name of another class": (put("model.norm.weight", lambda one: one.pop("norm.weight")), "CK141", "name"),
    "tokens in place of differences": (put("d2t", lambda one: one["d2t"] + torch.arange(64)), "CK142", "outside"),
    "tables that were never filled": (never_filled, "CK142", f"{TOKENS} true"),
    "a table of another run": (put("t2d", lambda one: one["t2d"].roll(1)), "CK142", "wrong"),
    "a token beyond the vocabulary": (put("d2t", lambda one: one["d2t"].index_fill(0, LAST, TOKENS)), "CK142", "1"),
    "not a number": (put(UP, lambda one: one[UP].index_fill(1, LAST, float("nan"))), "CK143", "NaN"),
    "a config of another vocabulary": (drop(), "CK141", "64", {"draft_vocab_size": 96}),
    "a config of other states": (
        *(drop(), "CK144", "11"),
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 11]}},
    ),
    "an output layer of zeros": (put("lm_head.weight", lambda one: one["lm_head.weight"] * 0), "CK143", "zero"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault, target, tmp_path):
    change, code, words, *config = FAULTS[fault]
    tensors = tensors_of("SpecForge")
    change(tensors)
    path = save_draft(tmp_path / "draft", tensors, KINDS["SpecForge"][0])
    edit_config(path, **dict(*config))
    report = verify(path, source=target)
    assert {one.code for one in report.findings} == {code}
    assert any(one.actual == text_with(words) for one in report.findings)
    assert report.status == "failed"


@pytest.mark.parametrize(
    ("kind", "change", "config", "code", "words"),
    [
        # `tests/verify/witnesses/test_draft_classes.py` shows that engines do so.
        ("EAGLE", drop("fc.bias"), {}, "CK141", ["SGLang 0.5.16"]),
        ("EAGLE", drop(), {"bias": True}, "CK141", ["memory"]),
        ("SpecForge", with_biases, {"attention_bias": True}, "CK141", ["memory", "attention_bias"]),
        ("ModelOpt", put("d2t", lambda one: torch.zeros(64, dtype=torch.int64)), {}, "CK142", ["64"]),
        ("SpecForge", first_tokens, {}, "CK142", ["64"]),
    ],
)
def test_what_may_be_meant_so_is_a_warning(kind, change, config, code, words, tmp_path):
    tensors = tensors_of(kind)
    change(tensors)
    found = verify(save_draft(tmp_path / "draft", tensors, KINDS[kind][0] | config)).findings
    assert {(one.code, one.severity) for one in found} == {(code, "warning")}
    assert [one.actual for one in found] == [text_with(one) for one in words]


def test_a_draft_of_another_target_is_found(fresh, tmp_path):
    other = fresh("gemma3_text")
    edit_config(other, hidden_size=64, vocab_size=99)
    found = verify(made_draft("SpecForge", tmp_path / "draft"), source=other).findings
    assert [(one.code, one.expected, one.actual) for one in found] == [
        ("CK144", text_with("64"), "hidden_size = 128"),
        ("CK144", text_with("99"), "vocab_size = 352"),
    ]


def test_a_draft_model_as_the_target_is_inconclusive(tmp_path):
    report = verify(made_draft("ModelOpt", tmp_path / "draft"), source=made_draft("speculators", tmp_path / "other"))
    assert (report.status, report.findings, len(report.reasons)) == ("inconclusive", [], 1)
    assert "CK144" in report.reasons[0]


OTHER_CLASSES = (
    *("Eagle3CohereForCausalLM", "DFlashDraftModel", "Qwen3DSparkModel", "PEagleDraftModel", "MedusaModel"),
    *("MistralForCausalLMEagle", "DeepseekV3ForCausalLMNextN", "EagleSpeculator", "MiMoV2MTP"),
)
# What config.json has of drafts that are not read, and what the reason names.
NOT_READ = [
    *(({"architectures": [name]}, name) for name in OTHER_CLASSES),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
    ({"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step"),
    ({"architectures": ["Eagle3Speculator"], "transformer_layer_config": {"model_type": "gpt_oss"}}, "gpt_oss"),
]


def test_drafts_that_are_not_read_are_named_and_not_judged(tmp_path):
    path = made_draft("SpecForge", tmp_path / "draft")
    for config, named in NOT_READ:
        (path / "config.json").write_text(json.dumps(KINDS["SpecForge"][0] | config))
        report = verify(path)
        assert (report.status, report.findings) == ("inconclusive", []), config
        assert any(named in reason for reason in report.reasons), config
        if named in OTHER_CLASSES:
            assert inspect(path)["draft"] == text_with(f"config.json {named}")


def test_tensors_of_latent_attention_are_looked_at(tmp_path):
    tensors = tensors_of("latent attention")
    del tensors["midlayer.self_attn.kv_b_proj.weight"]
    tensors["midlayer.self_attn.q_a_proj.weight"] = torch.ones(48, 128).bfloat16()  # of states alone
    found = verify(save_draft(tmp_path / "draft", tensors, KINDS["latent attention"][0])).findings
    said = {(one.code, one.tensor, one.actual) for one in found}
    assert said == {
        ("CK141", "layers.0.self_attn.kv_b_proj.weight", "in no shard"),
        ("CK141", "midlayer.self_attn.q_a_proj.weight", "shape [48, 128]"),
    }


def test_a_vision_model_called_eagle_is_no_draft():
    assert not is_draft({"architectures": ["Eagle2_5_VLForConditionalGeneration"]})
    assert not is_draft({"architectures": []})


def test_inspect_says_what_it_is_and_for_which_target(tmp_path):
    facts = inspect(made_draft("ModelOpt", tmp_path / "draft"))
    assert facts["draft"] == text_with("EAGLE3 64")
    assert facts["target"] == {"hidden_size": 128, "vocab_size": 352, "states": 3, "layers": "1, 5, 8"}
    assert inspect(made_draft("SpecForge", tmp_path / "other"))["target"]["layers"] == text_with("default")


def test_other_verbs_and_options_refuse_it(tmp_path):
    path = made_draft("speculators", tmp_path / "draft")
    with pytest.raises(UnsupportedError, match="decoding"):
        convert(path, tmp_path / "out")
    with pytest.raises(UnsupportedError, match="decoding"):
        quantize(path, tmp_path / "out", QuantScheme(32, "qmax7"))
    with pytest.raises(UsageError, match="--source"):
        verify(path, against=frozenset({"sglang"}))


def test_files_that_cannot_be_read_are_a_finding(tmp_path):
    path = made_draft("SpecForge", tmp_path / "draft")
    (path / "model.safetensors").write_bytes(b"\x08")
    (found,) = verify(path).findings
    assert found.code == "CK141"

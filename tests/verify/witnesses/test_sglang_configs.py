"""What real SGLang makes of configs that say less than it reads, or more than is stored."""

import json

import pytest
from support import models
from support.installed import release as installed
from support.messages import text_with
from support.sglang_runs import Case, refusal, reported, written

from ckptkit.verify.checks.config.spellings import keys_of
from ckptkit.verify.checks.witnesses.loading import why_refused
from ckptkit.verify.witnesses.sglang.facts import SGLANG

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]
# Keys without which SGLang stops, and those without which it builds another model: what it then leaves out.
STOPS = {
    "deepseek_v3": ("topk_method", "scoring_func", "moe_layer_freq"),
    "glm4_moe_lite": ("first_k_dense_replace",),
    "gpt_oss": ("swiglu_limit",),
    "minimax_m2": ("scoring_func",),
    "qwen3_next": ("full_attention_interval",),
    "qwen3_5": ("text_config.full_attention_interval",),
}
LEAVES_OUT = {"use_qk_norm": "self_attn.q_norm.weight", "use_routing_bias": "e_score_correction_bias"}
_TOWERS = ("model.visual.", "vision_tower.", "multi_modal_projector.")


def tie_inside(config):
    config["text_config"]["tie_word_embeddings"] = config.pop("tie_word_embeddings")


def tower_elsewhere(config):
    """The architecture of a multimodal model over the config of the language model alone, as a REAP release has it."""
    text = config.pop("text_config")
    kept = {key: config[key] for key in ("architectures", "tie_word_embeddings") if key in config}
    config.clear()
    config.update(text | kept | {"model_type": "qwen3_5_text"})


def without(*keys):
    def change(config):
        for key in keys:
            *outer, last = key.split(".")
            inner = config
            for name in outer:
                inner = inner[name]
            del inner[last]

    return change


@pytest.fixture(scope="module")
def cases(releases, tmp_path_factory):
    root = tmp_path_factory.mktemp("configs")
    keys = [(name, key) for name, names in STOPS.items() for key in names] + [("minimax_m2", key) for key in LEAVES_OUT]
    made = {
        **{f"{name} {key}": (name, without(key)) for name, key in keys},
        "tie inside": ("qwen3_vl-tied", tie_inside),
        "tie at the top": ("qwen3_vl-tied", None),
        "no tower": ("qwen3_vl-tied", None),
        "text under a multimodal class": ("qwen3_5", tower_elsewhere),
        "no tower of Gemma": ("gemma3", None),
        "shared indexers": ("glm_moe_dsa-shared", without("indexer_types")),
        "shared indexers in transformers' words": (
            "glm_moe_dsa-shared",
            without("index_topk_freq", "index_skip_topk_offset"),
        ),
    }
    cases = {}
    for label, (name, change) in made.items():
        release = releases(name)
        tensors, config = models.tensors(release), json.loads((release / "config.json").read_text())
        if label.startswith("no tower"):
            tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(_TOWERS)}
        if change:
            change(config)
        path = written(root, label, release, tensors)
        (path / "config.json").write_text(json.dumps(config))
        cases[label] = Case(path)
    return cases


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in STOPS.items() for key in keys])
def test_sglang_stops_without_a_key_and_the_hint_names_it(name, key, runs, cases):
    if key == "swiglu_limit" and installed("sglang") >= (0, 5, 23):
        pytest.skip("SGLang 0.5.23 has a default for it")
    said = refusal(runs[f"{name} {key}"])
    assert f"{key.rpartition('.')[2]}" in said
    config = json.loads((cases[f"{name} {key}"].checkpoint / "config.json").read_text())
    _, lacking = keys_of(config)
    assert set(lacking) == {key}
    assert f'add "{key}": ' in why_refused(SGLANG, said, lacking)


@pytest.mark.parametrize("key", LEAVES_OUT)
def test_sglang_silently_builds_another_model_without_a_key(key, runs):
    report = reported(runs[f"minimax_m2 {key}"])
    assert any(one.tensor.endswith(LEAVES_OUT[key]) for one in report.dropped)


def test_a_layer_that_shares_an_indexer_needs_none_of_its_own(runs):
    """SGLang builds one in every layer. 0.5.16 takes no notice of transformers' words, and runs what nothing wrote."""
    assert reported(runs["shared indexers"]).unwritten == ()
    unheard = reported(runs["shared indexers in transformers' words"])
    layers = {int(one.param.split(".")[2]) for one in unheard.unwritten}
    assert layers == (set() if installed("sglang") >= (0, 5, 23) else {3, 4, 5, 7, 8, 9, 11})


def test_sglang_looks_for_the_tie_flag_at_the_top(runs):
    assert {one.tensor for one in reported(runs["tie inside"]).unwritten} == {"lm_head.weight"}
    assert reported(runs["tie at the top"]).unwritten == ()


@pytest.mark.parametrize("label", ["no tower", "no tower of Gemma"])
def test_sglang_builds_a_vision_tower_that_is_not_stored(label, runs):
    """And loads without an error: its parameters keep what memory held."""
    report = reported(runs[label])
    assert len(report.unwritten) > 20
    assert all(one.tensor.startswith(("visual.", "vision_tower.", "multi_modal")) for one in report.unwritten)


def test_a_multimodal_class_over_a_config_of_text_alone_is_refused(runs):
    """`verify` warns of it (CK104): its layers are named as the multimodal class has them."""
    assert "vision_config" in refusal(runs["text under a multimodal class"])


def test_the_hint_for_a_key_that_no_table_has():
    said = "AttributeError: 'NewConfig' object has no attribute 'new_key'"
    assert why_refused(SGLANG, said, {}) == text_with("SGLang new_key config.json")
    assert why_refused(SGLANG, "KeyError: 'x'", {"new_key": 1}).startswith("compare config.json with the release")

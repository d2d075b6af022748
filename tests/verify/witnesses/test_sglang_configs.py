"""What real SGLang makes of configs that say less than it reads, or more than is stored."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CASES, case
from safetensors.torch import save_file
from support import models
from support.installed import release
from support.messages import text_with
from support.sglang_runs import Case, Cases, Runs, refusal, reported

from ckptkit.verify.checks.config.spellings import keys_of
from ckptkit.verify.checks.witnesses.loading import why_refused
from ckptkit.verify.witnesses.sglang.facts import SGLANG

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]
Config = dict[str, Any]
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


def without(*path: str) -> Callable[[Config], None]:
    """Takes a key out of a config, and the key alone."""

    def change(config: Config) -> None:
        *outer, key = path
        for name in outer:
            config = config[name]
        del config[key]

    return change


def tie_inside(config: Config) -> None:
    config["text_config"]["tie_word_embeddings"] = config.pop("tie_word_embeddings")


def tower_elsewhere(config: Config) -> None:
    """The architecture of a multimodal model over the config of the language model alone, as a REAP release has it."""
    text = config.pop("text_config")
    kept = {key: config[key] for key in ("architectures", "tie_word_embeddings") if key in config}
    config.clear()
    config.update(text | kept | {"model_type": "qwen3_5_text"})


def made(root: Path, name: str, change: Callable[[Config], None] | None = None, lost: tuple[str, ...] = ()) -> Path:
    """A test model with another config, or without the tensors whose names begin so."""
    path = root / f"{name} {len(list(root.iterdir()))}"
    if not (root / name).exists():
        case.save(name, CASES[name], root / name, torch.bfloat16)
    shutil.copytree(root / name, path)
    config = json.loads((path / "config.json").read_text())
    if change:
        change(config)
    (path / "config.json").write_text(json.dumps(config))
    if lost:
        kept = {key: value for key, value in models.tensors(path).items() if not key.startswith(lost)}
        for file in (*path.glob("*.safetensors"), path / "model.safetensors.index.json"):
            file.unlink()
        save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    return path


def shares_in_its_words(config: Config) -> None:
    del config["indexer_types"]


def shares_in_transformers_words(config: Config) -> None:
    del config["index_topk_freq"], config["index_skip_topk_offset"]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    root = tmp_path_factory.mktemp("configs")
    keys = {f"{name} {key}": (name, key) for name, names in STOPS.items() for key in names}
    keys |= {f"minimax_m2 {key}": ("minimax_m2", key) for key in LEAVES_OUT}
    found = {label: made(root, name, without(*key.split("."))) for label, (name, key) in keys.items()}
    found |= {
        "tie inside": made(root, "qwen3_vl-tied", tie_inside),
        "tie at the top": made(root, "qwen3_vl-tied"),
        "no tower": made(root, "qwen3_vl-tied", lost=_TOWERS),
        "text under a multimodal class": made(root, "qwen3_5", tower_elsewhere),
        "no tower of Gemma": made(root, "gemma3", lost=_TOWERS),
        "shared indexers": made(root, "glm_moe_dsa-shared", shares_in_its_words),
        "shared indexers in transformers' words": made(root, "glm_moe_dsa-shared", shares_in_transformers_words),
    }
    return {label: Case(path) for label, path in found.items()}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in STOPS.items() for key in keys])
def test_sglang_stops_without_a_key_and_the_hint_names_it(name: str, key: str, runs: Runs, cases: Cases) -> None:
    if key == "swiglu_limit" and release("sglang") >= (0, 5, 23):
        pytest.skip("SGLang 0.5.23 has a default for it")
    said = refusal(runs[f"{name} {key}"])
    assert f"{key.rpartition('.')[2]}" in said
    config = json.loads((Path(cases[f"{name} {key}"].checkpoint) / "config.json").read_text())
    _, lacking = keys_of(config)
    assert set(lacking) == {key}
    assert f'add "{key}": ' in why_refused(SGLANG, said, lacking)


@pytest.mark.parametrize("key", LEAVES_OUT)
def test_sglang_silently_builds_another_model_without_a_key(key: str, runs: Runs) -> None:
    report = reported(runs[f"minimax_m2 {key}"])
    assert any(one.tensor.endswith(LEAVES_OUT[key]) for one in report.dropped)


def test_a_layer_that_shares_an_indexer_needs_none_of_its_own(runs: Runs) -> None:
    """SGLang builds one in every layer. 0.5.16 takes no notice of transformers' words, and runs what nothing wrote."""
    said, unheard = runs["shared indexers"].report, runs["shared indexers in transformers' words"].report
    assert said is not None
    assert said.unwritten == ()
    assert unheard is not None
    layers = {int(one.param.split(".")[2]) for one in unheard.unwritten}
    assert layers == (set() if release("sglang") >= (0, 5, 23) else {3, 4, 5, 7, 8, 9, 11})


def test_sglang_looks_for_the_tie_flag_at_the_top(runs: Runs) -> None:
    inside, top = runs["tie inside"].report, runs["tie at the top"].report
    assert inside is not None
    assert top is not None
    assert {one.tensor for one in inside.unwritten} == {"lm_head.weight"}
    assert top.unwritten == ()


@pytest.mark.parametrize("label", ["no tower", "no tower of Gemma"])
def test_sglang_builds_a_vision_tower_that_is_not_stored(label: str, runs: Runs) -> None:
    """And loads without an error: its parameters keep what memory held."""
    report = reported(runs[label])
    assert len(report.unwritten) > 20
    assert all(one.tensor.startswith(("visual.", "vision_tower.", "multi_modal")) for one in report.unwritten)


def test_a_multimodal_class_over_a_config_of_text_alone_is_refused(runs: Runs) -> None:
    """`verify` warns of it (CK104): its layers are named as the multimodal class has them."""
    assert "vision_config" in refusal(runs["text under a multimodal class"])


def test_the_hint_for_a_key_that_no_table_has() -> None:
    said = "AttributeError: 'NewConfig' object has no attribute 'new_key'"
    assert why_refused(SGLANG, said, {}) == text_with("SGLang new_key config.json")
    assert why_refused(SGLANG, "KeyError: 'x'", {"new_key": 1}).startswith("compare config.json with the release")

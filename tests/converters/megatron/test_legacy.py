"""Megatron's legacy format: what real megatron-core models saved rank by rank becomes their release again."""

import re

import pytest
import torch
from families import CASES
from families.case import save
from support import models
from support.installed import require_megatron
from support.legacy_states import loaded, rank_files, rewrite
from support.megatron_saves import SAVES, Save, save_with_megatron
from support.messages import refusal
from support.nightly import collected, daily

from ckptkit.app.api import convert, inspect
from ckptkit.converters.megatron.parallel import ParallelSizes
from ckptkit.converters.planner import rules_of
from ckptkit.formats.detect import locate
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.run import verify

LABELS = [label for label, (_, how) in SAVES.items() if "legacy" in how]


@pytest.mark.parametrize("label", daily(LABELS, LABELS[1::3]))
def test_legacy_save_comes_back_bit_for_bit(saved, releases, tmp_path, label, monkeypatch):
    release = releases(SAVES[label][0])
    # Nothing in the files may be run, and no file may be read as a whole.
    monkeypatch.setattr(torch, "load", None)
    written = convert(saved / label, tmp_path / "back", hf=release)
    assert models.unequal(release, tmp_path / "back") == []
    assert written.tensors == len(models.tensors(release))
    iteration = locate(saved / label).path
    assert convert(iteration, tmp_path / "again", hf=release, dry_run=True).tensors == written.tensors


def test_legacy_saves_are_of_the_kinds_they_are_named_for(saved):
    """Otherwise the test above would read the same layout again and again."""
    names = {label: list(rank_files(saved / label)) for label in LABELS}
    assert names == {
        "legacy": ["mp_rank_00"],
        "legacy, two chunks a stage": ["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"],
        "legacy, embedding and loss": ["mp_rank_00_000", "mp_rank_00_001"],
        # Each tensor parallel rank has experts of its own.
        "legacy, experts": ["mp_rank_00_000_000", "mp_rank_00_001_000", "mp_rank_01_000_001", "mp_rank_01_001_001"],
        "legacy, experts cut": ["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"],
        "legacy, layout": ["mp_rank_00_000_000", "mp_rank_00_000_001", "mp_rank_00_001_000", "mp_rank_00_001_001"],
    }

    expert = "decoder.layers.6.mlp.experts.local_experts.5.linear_fc1.weight"
    shapes = {
        label: loaded(rank_files(saved / label)[name])["model"][expert].shape
        for label, name in (("legacy, experts", "mp_rank_01_001_001"), ("legacy, experts cut", "mp_rank_01_001"))
    }
    assert shapes == {"legacy, experts": (192, 128), "legacy, experts cut": (96, 128)}


def as_transformer_engine(state):
    """The names of the same parameters in the modules of the Transformer Engine spec."""
    model = state["model"]
    for name in list(model):
        new = re.sub(r"local_experts\.(\d+)\.(linear_fc[12])\.(weight)$", r"\2.\3\1", name)
        new = new.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
        if new.replace("pre_mlp_layernorm", "mlp.linear_fc1") in model:
            new = new.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
        if new != name:
            model[new] = model.pop(name)
    model["decoder.layers.0.self_attention.linear_qkv._extra_state"] = torch.empty(0, dtype=torch.uint8)


def test_names_of_transformer_engines_modules(saved, copy_of, releases, tmp_path):
    root = copy_of(saved / "legacy, experts")
    rewrite(root, as_transformer_engine)
    names = loaded(rank_files(root)["mp_rank_00_000_000"])["model"]
    assert "decoder.layers.4.mlp.experts.linear_fc2.weight5" in names
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in names
    convert(root, tmp_path / "back", hf=releases("glm4_moe"))
    assert models.unequal(releases("glm4_moe"), tmp_path / "back") == []


def test_the_export_is_verified_against_the_files_that_it_came_from(saved, releases, copy_of, tmp_path):
    root, release = copy_of(saved / "legacy, two chunks a stage"), releases("qwen2-tied")
    convert(root, tmp_path / "back", hf=release)
    report = verify(tmp_path / "back", source=root, hf=release)
    assert report.findings == []
    assert report.to_json()["counts"]["tensors_compared"] > 2 * len(models.tensors(release))

    def change(state):
        state["model1"]["decoder.layers.2.mlp.linear_fc2.weight"][0, 0] += 1

    rewrite(root, change, "mp_rank_01_001")
    (finding,) = verify(tmp_path / "back", source=root, hf=release).findings
    assert (finding.code, finding.tensor) == ("CK202", "model.layers.11.mlp.down_proj.weight")


def test_verify_and_preflight_of_legacy_save_name_the_next_move(saved, releases):
    root = saved / "legacy"
    for path in (root, root / "release"):
        assert "--source" in str(refusal("legacy format", verify, path, hf=releases("qwen2-tied")).hint)
    (finding,) = preflight(ref_load=root, hf_checkpoint=releases("qwen2-tied")).findings
    assert (finding.code, finding.severity) == ("CK111", "warning")
    (finding,) = preflight(ref_load=root / "release").findings
    assert (finding.code, f"--ref-load {root}" in finding.hint) == ("CK712", True)


def test_inspect_of_legacy_save_reports_format_ranks_and_names(saved, releases):
    facts = inspect(saved / "legacy, experts", hf=releases("glm4_moe"))
    assert facts["format"] == "Megatron legacy torch (mp_rank_*)"
    assert facts["ranks"] == "4 files of TP2 PP2 EP2 ETP1"
    assert facts["args"]["decoder_first_pipeline_num_layers"] == 5
    assert any(
        line.startswith("decoder.layers.{2..11}.mlp.experts.experts.{0..11}.linear_fc1.weight [")
        and line.endswith(" x120")
        for line in facts["names"]
    )
    # The vocabulary as Megatron padded it.
    assert "embedding.word_embeddings.weight [512,128] bf16" in facts["names"]


# What is special about each: multi-token prediction behind a pipeline, with the embedding on both stages; latent
# attention, sparse attention; linear attention in parts, with an output gate; biases and sinks; norms over all heads,
# of 1 + weight, after layers.
HOW = {
    "glm4_moe-mtp": ParallelSizes(pp=2, layout="Et*7|t*5mL"),
    "mimo": ParallelSizes(pp=2),
    "deepseek_v3": ParallelSizes(tp=2, etp=2),
    "glm_moe_dsa": ParallelSizes(tp=2, ep=2),
    "qwen3_next": ParallelSizes(tp=2, ep=2),
    "gpt_oss": ParallelSizes(tp=2, ep=2),
    "minimax_m2": ParallelSizes(tp=2, ep=2),
    "gemma3_text": ParallelSizes(tp=2),
    "glm4": ParallelSizes(tp=2),
}


@pytest.fixture(scope="module")
def root(request, tmp_path_factory):
    """`NAME/release`, `NAME/megatron` and what real Megatron saved of it in `NAME/saved`."""
    require_megatron()
    root = tmp_path_factory.mktemp("legacy")
    saves = []
    for name, sizes in ((name, HOW[name]) for name in sorted(collected(request, "name"))):
        (root / name).mkdir()
        save(name, CASES[name], root / name / "release", torch.bfloat16)
        convert(root / name / "release", root / name / "megatron")
        config = HfCheckpoint(root / name / "release").config
        saves.append(Save(config, root / name / "megatron" / "release", root / name / "saved", sizes, legacy=True))
    save_with_megatron(saves, world=2)
    return root


@pytest.mark.parametrize("name", daily(HOW, ("glm4_moe-mtp",)))
def test_legacy_save_comes_back_as_the_release(root, tmp_path, name):
    release = root / name / "release"
    assert len(list((root / name / "saved").rglob("model_optim_rng.pt"))) == 2
    convert(root / name / "saved", tmp_path / "back", hf=release)
    before, after = models.tensors(release), models.tensors(tmp_path / "back")
    # Megatron holds these in bfloat16 less one, and has rounded them.
    rounded = {hf for rule in rules_of(HfCheckpoint(release).config) if rule.mapping.upcast for hf in rule.hf}
    assert models.unequal(before, after, rounded) == []
    for hf in rounded:
        assert after[hf].dtype == before[hf].dtype
        assert torch.allclose(after[hf], before[hf], rtol=0, atol=1 / 128), hf

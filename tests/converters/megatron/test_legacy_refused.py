"""Legacy checkpoints that are incomplete, damaged, mixed or of another model: refused, with file and tensor."""

import shutil

import pytest
import torch
from mutations.edits import edit_config
from support.legacy_states import FILE, loaded, rank_files, rewrite
from support.megatron_saves import SAVES
from support.messages import refusal, text_with

from ckptkit.app.api import convert
from ckptkit.converters.megatron.legacy import LegacyCheckpoint
from ckptkit.core.errors import CkptkitError


@pytest.mark.parametrize(
    ("label", "key", "rank"),
    [
        ("legacy, experts", "model decoder.layers.3.self_attention.q_layernorm.weight", "mp_rank_01_000_001"),
        ("legacy, experts cut", "model decoder.layers.6.mlp.router.expert_bias", "mp_rank_01_001"),
        ("legacy, two chunks a stage", "model1 output_layer.weight", "mp_rank_01_001"),
    ],
)
def test_copies_that_disagree(saved, copy_of, releases, tmp_path, label, key, rank):
    root, (chunk, name) = copy_of(saved / label), key.split()

    def change(state):
        state[chunk][name].flatten()[7] += 1

    rewrite(root, change, rank)
    refusal(f"{rank}/{FILE}.*{name}", convert, root, tmp_path / "back", hf=releases(SAVES[label][0]))
    assert not (tmp_path / "back").exists()


def argument(name, value):
    return lambda state: setattr(state["args"], name, value)


def entry(name, value):
    return lambda state: state.update({name: value})


def tensor(name, value):
    return lambda state: state["model"].update({name: value})


def without(name):
    return lambda state: state["model"].pop(name)


PROJ, LAST = "decoder.layers.4.self_attention.linear_proj.weight", "mp_rank_01_001_001"
LAST_STAGE = ["mp_rank_00_001_000", LAST]
NEXT_LAYER = "decoder.layers.7.self_attention.linear_proj.weight"


@pytest.mark.parametrize(
    ("change", "ranks", "said"),
    [
        (entry("iteration", 20), [LAST], f"{LAST}/{FILE} was saved with iteration 20, mp_rank_00_000_000 with 10"),
        (argument("tensor_model_parallel_size", 4), [LAST], f"{LAST}/{FILE} TP4 PP2 EP2 ETP1, TP2 PP2 EP2 ETP1"),
        (argument("num_layers", 24), [LAST], "num_layers 24"),
        (argument("num_layers", 24), [], "24, expert_model_parallel_size 2; config.json has 12 layers and 12 experts"),
        (argument("tensor_model_parallel_size", 1), [], "mp_rank_01_000_001 TP1 PP2 EP2 ETP1"),
        (argument("tensor_model_parallel_size", 4), [], "lacks mp_rank_02_000_EEE, mp_rank_03_000_EEE"),
        (argument("expert_tensor_parallel_size", 2), [], "lacks mp_rank_TT_000_000, mp_rank_TT_000_001"),
        (argument("expert_tensor_parallel_size", 4), [], "different"),
        (argument("moe_extended_tp", True), [], "--moe-extended-tp"),
        (argument("pipeline_model_parallel_size", "2"), [], "pipeline_model_parallel_size is '2'"),
        (argument("decoder_first_pipeline_num_layers", 6), [], "6 layers"),
        (argument("decoder_first_pipeline_num_layers", 13), [], "-1"),
        (argument("tensor_model_parallel_size", 10**12), [], "tensor_model_parallel_size is 1000000000000"),
        (argument("virtual_pipeline_model_parallel_size", 5), [], "5 chunks"),
        (argument("pipeline_model_parallel_layout", "Et*5|t*7L"), [], "arguments"),
        (entry("checkpoint_version", 2.0), [], "checkpoint_version 2.0 is not supported"),
        (entry("args", None), [], "arguments"),
        (entry("model1", {}), [LAST], "model, model1"),
        (entry("model", None), [LAST], "contains model"),
        (entry("model", {"language_model": {"encoder": {}}}), [], "language_model"),
        (tensor("decoder.layers.3.mlp.experts.weight1", torch.ones(2)), [], "rank GroupedMLP"),
        (tensor(PROJ, None), [LAST], f"{PROJ} is NoneType, plain tensor"),
        (tensor(PROJ, torch.ones(128, 161, dtype=torch.bfloat16)), [LAST], "[128 160]"),
        (tensor(PROJ, torch.ones(128, 160)), [LAST], "config.json [128 160] bfloat16"),
        (tensor("decoder.adapter.weight", torch.ones(2)), [LAST], "decoder.adapter.weight"),
        (tensor(NEXT_LAYER, torch.ones(128, 160, dtype=torch.bfloat16)), [LAST], "7 layers"),
        (tensor("decoder.layers.1.mlp.experts.local_experts.6.linear_fc1.weight", torch.ones(2)), [LAST], "rank 6"),
        (without(PROJ), [LAST], "lacks 1"),
        (without("decoder.final_layernorm.weight"), LAST_STAGE, "config decoder.final_layernorm.weight"),
    ],
)
def test_legacy_save_with_a_defect_is_refused_by_name(saved, copy_of, releases, tmp_path, change, ranks, said):
    root = copy_of(saved / "legacy, experts")
    rewrite(root, change, *ranks)
    error = refusal("", convert, root, tmp_path / "back", hf=releases("glm4_moe"))
    assert error.message == text_with(said)
    assert error.hint


def test_files_that_are_missing_or_damaged(saved, copy_of, releases, tmp_path):
    root, hf = copy_of(saved / "legacy, experts"), releases("glm4_moe")
    path = rank_files(root)["mp_rank_01_001_001"]
    content = path.read_bytes()
    weight = content.index(loaded(path)["model"][PROJ][5].view(torch.uint8).numpy().tobytes())

    def refused():
        return refusal("", convert, root, tmp_path / "back", hf=hf).message

    path.write_bytes(content[: len(content) // 2])
    assert f"{path} at byte 0" in refused()
    flipped = bytearray(content)
    flipped[weight] ^= 1
    path.write_bytes(flipped)
    assert refused() == text_with(f"{path} 0")
    torch.save(loaded_bytes(content, tmp_path), path, _use_new_zipfile_serialization=False)
    assert refused() == text_with(f"{path} 1.6")
    path.unlink()
    assert f"{path}: No such file" in refused()
    path.parent.rmdir()
    assert refused().endswith("lacks mp_rank_01_001_EEE, mp_rank_TT_001_001")
    shutil.rmtree(root / "iter_0000010" / "mp_rank_00_001_000")
    assert refused().endswith("lacks mp_rank_00_001_EEE, mp_rank_01_001_EEE, mp_rank_TT_001_000, mp_rank_TT_001_001")


def loaded_bytes(content, scratch):
    (scratch / "content.pt").write_bytes(content)
    return loaded(scratch / "content.pt")


def test_legacy_save_without_its_config_is_refused(saved, copy_of, releases, tmp_path):
    refusal("HF.*stored", convert, saved / "legacy", tmp_path / "back")
    with pytest.raises(CkptkitError, match="was saved with num_layers 12"):
        hf = copy_of(releases("qwen2-tied"))
        edit_config(hf, num_hidden_layers=13)
        _ = LegacyCheckpoint(saved / "legacy" / "release", hf=hf).specs

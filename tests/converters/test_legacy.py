"""Megatron's legacy format: what real megatron-core models saved rank by rank is exported to the model that it came from."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from megatron_saves import SAVES

from ckptkit.api import convert, inspect
from ckptkit.errors import CkptkitError
from ckptkit.formats import locate
from converters.legacy import LegacyCheckpoint
from verify.preflight import preflight
from verify.run import verify

Paths = Callable[..., Path]
State = dict[str, Any]

LABELS = [label for label, (_, how) in SAVES.items() if "legacy" in how]
FILE = "model_optim_rng.pt"


def rank_files(root: Path) -> dict[str, Path]:
    return {path.parent.name: path for path in sorted(root.rglob(FILE))}


def loaded(path: Path) -> State:
    return dict(torch.load(path, weights_only=False))


def same(left: Path, right: Path) -> bool:
    before, after = models.tensors(left), models.tensors(right)
    return before.keys() == after.keys() and all(after[name].dtype == tensor.dtype and torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("label", LABELS)
def test_it_comes_back_bit_for_bit(saved: Path, releases: Paths, tmp_path: Path, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    release = releases(SAVES[label][0])
    # Nothing in the files may be run, and no file may be read as a whole.
    monkeypatch.setattr(torch, "load", None)
    written = convert(saved / label, tmp_path / "back", hf=release)
    assert same(release, tmp_path / "back")
    assert written.tensors == len(models.tensors(release))
    iteration = locate(saved / label).path
    assert convert(iteration, tmp_path / "again", hf=release, dry_run=True).tensors == written.tensors


def test_the_saves_are_of_the_kinds_that_they_claim_to_be(saved: Path) -> None:
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

    def layers(label: str, name: str) -> list[int]:
        """How many layers each model chunk of a rank has."""
        state = loaded(rank_files(saved / label)[name])
        chunks = [state[key] for key in sorted(state) if re.fullmatch(r"model\d*", key)]
        return [len({key.split(".")[2] for key in chunk if key.startswith("decoder.layers.")}) for chunk in chunks]

    assert layers("legacy", "mp_rank_00") == [12]
    assert [layers("legacy, two chunks a stage", f"mp_rank_01_00{stage}") for stage in (0, 1)] == [[3, 3], [3, 3]]
    assert [layers("legacy, embedding and loss", f"mp_rank_00_00{stage}") for stage in (0, 1)] == [[6], [6]]
    assert [layers("legacy, experts", f"mp_rank_01_00{stage}_001") for stage in (0, 1)] == [[5], [7]]
    assert [layers("legacy, layout", f"mp_rank_00_00{stage}_000") for stage in (0, 1)] == [[0, 1], [5, 6]]
    last = loaded(rank_files(saved / "legacy, two chunks a stage")["mp_rank_01_001"])["model1"]
    assert torch.equal(
        last["output_layer.weight"], loaded(rank_files(saved / "legacy, two chunks a stage")["mp_rank_01_000"])["model0"]["embedding.word_embeddings.weight"]
    )
    assert any(key.endswith("_extra_state") for key in last)
    expert = "decoder.layers.6.mlp.experts.local_experts.5.linear_fc1.weight"
    shapes = {
        label: loaded(rank_files(saved / label)[name])["model"][expert].shape
        for label, name in (("legacy, experts", "mp_rank_01_001_001"), ("legacy, experts cut", "mp_rank_01_001"))
    }
    assert shapes == {"legacy, experts": (192, 128), "legacy, experts cut": (96, 128)}
    assert loaded(rank_files(saved / "legacy, experts")["mp_rank_01_001_001"])["optimizer"]["optimizer"]["state"]


def rewrite(root: Path, change: Callable[[State], None], *names: str) -> None:
    """Changes what these ranks (all without names) saved."""
    for name, path in rank_files(root).items():
        if not names or name in names:
            state = loaded(path)
            change(state)
            torch.save(state, path)


def as_transformer_engine(state: State) -> None:
    """The names of the same parameters in the modules of the Transformer Engine spec."""
    model = state["model"]
    for name in list(model):
        new = re.sub(r"local_experts\.(\d+)\.(linear_fc[12])\.(weight)$", r"\2.\3\1", name)
        new = new.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
        if new.endswith("pre_mlp_layernorm.weight") and new.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.weight") in model:
            new = new.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
        if new != name:
            model[new] = model.pop(name)
    model["decoder.layers.0.self_attention.linear_qkv._extra_state"] = torch.empty(0, dtype=torch.uint8)


def test_names_of_transformer_engines_modules(saved: Path, copy_of: Paths, releases: Paths, tmp_path: Path) -> None:
    root = copy_of(saved / "legacy, experts")
    rewrite(root, as_transformer_engine)
    names = loaded(rank_files(root)["mp_rank_00_000_000"])["model"]
    assert "decoder.layers.4.mlp.experts.linear_fc2.weight5" in names
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in names
    convert(root, tmp_path / "back", hf=releases("glm4_moe"))
    assert same(releases("glm4_moe"), tmp_path / "back")


def test_the_export_is_verified_against_the_files_that_it_came_from(saved: Path, releases: Paths, copy_of: Paths, tmp_path: Path) -> None:
    root, release = copy_of(saved / "legacy, two chunks a stage"), releases("qwen2-tied")
    convert(root, tmp_path / "back", hf=release)
    report = verify(tmp_path / "back", source=root, hf=release)
    assert report.findings == []
    assert report.to_json()["counts"]["tensors_compared"] > 2 * len(models.tensors(release))

    def change(state: State) -> None:
        state["model1"]["decoder.layers.2.mlp.linear_fc2.weight"][0, 0] += 1

    rewrite(root, change, "mp_rank_01_001")
    (finding,) = verify(tmp_path / "back", source=root, hf=release).findings
    assert (finding.code, finding.tensor) == ("CK202", "model.layers.11.mlp.down_proj.weight")


def test_verify_and_preflight_say_that_they_cannot_look_into_it(saved: Path, releases: Paths) -> None:
    root = saved / "legacy"
    for path in (root, root / "release"):
        with pytest.raises(CkptkitError, match="legacy format") as error:
            verify(path, hf=releases("qwen2-tied"))
        assert "--source" in str(error.value.hint)
    (finding,) = preflight(ref_load=root, hf_checkpoint=releases("qwen2-tied")).findings
    assert (finding.code, finding.severity) == ("CK111", "warning")


def test_inspect(saved: Path, releases: Paths) -> None:
    facts = inspect(saved / "legacy, experts", hf=releases("glm4_moe"))
    assert facts["format"] == "Megatron legacy torch (mp_rank_*)"
    assert facts["ranks"] == "4 files of TP2 PP2 EP2 ETP1"
    assert facts["args"]["decoder_first_pipeline_num_layers"] == 5
    assert "decoder.layers.{2..11}.mlp.experts.experts.{0..11}.linear_fc1.weight " in facts["names"]
    # The vocabulary as Megatron padded it.
    assert "embedding.word_embeddings.weight [512, 128] bfloat16" in facts["names"]


def norm(state: State) -> None:
    state["model"]["decoder.layers.3.self_attention.q_layernorm.weight"][7] += 0.5


def router(state: State) -> None:
    state["model"]["decoder.layers.6.mlp.router.expert_bias"][11] += 1


def copy_of_the_embedding(state: State) -> None:
    state["model1"]["output_layer.weight"][3, 4] += 1


@pytest.mark.parametrize(
    ("label", "change", "rank", "said"),
    [
        ("legacy, experts", norm, "mp_rank_01_000_001", "mp_rank_01_000_001/{FILE}: decoder.layers.3.self_attention.q_layernorm.weight differs from"),
        ("legacy, experts cut", router, "mp_rank_01_001", "mp_rank_01_001/{FILE}: decoder.layers.6.mlp.router.expert_bias differs from"),
        ("legacy, two chunks a stage", copy_of_the_embedding, "mp_rank_01_001", "mp_rank_01_001/{FILE}: output_layer.weight differs from"),
    ],
)
def test_copies_that_disagree(saved: Path, copy_of: Paths, releases: Paths, tmp_path: Path, label: str, change: Any, rank: str, said: str) -> None:
    root = copy_of(saved / label)
    rewrite(root, change, rank)
    with pytest.raises(CkptkitError) as error:
        convert(root, tmp_path / "back", hf=releases(SAVES[label][0]))
    assert said.format(FILE=FILE) in error.value.message
    assert not (tmp_path / "back").exists()


def argument(name: str, value: Any) -> Callable[[State], None]:
    def change(state: State) -> None:
        setattr(state["args"], name, value)

    return change


def entry(name: str, value: Any) -> Callable[[State], None]:
    def change(state: State) -> None:
        state[name] = value

    return change


def tensor(name: str, value: Any) -> Callable[[State], None]:
    def change(state: State) -> None:
        state["model"][name] = value

    return change


def without(name: str) -> Callable[[State], None]:
    def change(state: State) -> None:
        del state["model"][name]

    return change


PROJ, LAST = "decoder.layers.4.self_attention.linear_proj.weight", "mp_rank_01_001_001"
LAST_STAGE = ["mp_rank_00_001_000", LAST]
NEXT_LAYER = "decoder.layers.7.self_attention.linear_proj.weight"


@pytest.mark.parametrize(
    ("change", "ranks", "said"),
    [
        (entry("iteration", 20), [LAST], f"{LAST}/{FILE} was saved with iteration 20, mp_rank_00_000_000 with 10"),
        (
            argument("tensor_model_parallel_size", 4),
            [LAST],
            f"{LAST}/{FILE} was saved with parallel sizes TP4 PP2 EP2 ETP1, mp_rank_00_000_000 with TP2 PP2 EP2 ETP1",
        ),
        (argument("num_layers", 24), [LAST], "num_layers 24"),
        (argument("num_layers", 24), [], "was saved with num_layers 24, expert_model_parallel_size 2; config.json has 12 layers and 12 experts"),
        (argument("tensor_model_parallel_size", 1), [], "mp_rank_01_000_001 is no rank of TP1 PP2 EP2 ETP1"),
        (argument("tensor_model_parallel_size", 4), [], "lacks mp_rank_02_000_EEE, mp_rank_03_000_EEE"),
        (argument("expert_tensor_parallel_size", 2), [], "lacks mp_rank_TT_000_000, mp_rank_TT_000_001"),
        (argument("expert_tensor_parallel_size", 4), [], "ranks of different expert shards have one file name"),
        (argument("moe_extended_tp", True), [], "--moe-extended-tp"),
        (argument("pipeline_model_parallel_size", "2"), [], "pipeline_model_parallel_size is '2'"),
        (argument("decoder_first_pipeline_num_layers", 6), [], "does not hold the 6 layers"),
        (argument("decoder_first_pipeline_num_layers", 13), [], "-1 layers do not divide"),
        (argument("virtual_pipeline_model_parallel_size", 1), [], None),
        (argument("pipeline_model_parallel_layout", "Et*5|t*7L"), [], "together with other pipeline arguments"),
        (entry("checkpoint_version", 2.0), [], "checkpoint_version 2.0 is not supported"),
        (entry("args", None), [], "holds no training arguments"),
        (entry("model1", {}), [LAST], "holds model, model1"),
        (entry("model", None), [LAST], "holds model"),
        (entry("model", {"language_model": {"encoder": {}}}), [], "language_model is a dict of its own: a model from before megatron-core"),
        (tensor("decoder.layers.3.mlp.experts.weight1", torch.ones(2)), [], "holds all experts of a rank (GroupedMLP)"),
        (tensor(PROJ, None), [LAST], f"{PROJ} is NoneType, no plain tensor"),
        (tensor(PROJ, torch.ones(128, 161, dtype=torch.bfloat16)), [LAST], "[128, 161] torch.bfloat16; config.json and the training arguments say [128, 160]"),
        (tensor(PROJ, torch.ones(128, 160)), [LAST], "[128, 160] torch.float32; config.json and the training arguments say [128, 160] torch.bfloat16"),
        (tensor("decoder.adapter.weight", torch.ones(2)), [LAST], "decoder.adapter.weight"),
        (tensor(NEXT_LAYER, torch.ones(128, 160, dtype=torch.bfloat16)), [LAST], "does not hold the 7 layers"),
        (tensor("decoder.layers.1.mlp.experts.local_experts.6.linear_fc1.weight", torch.ones(2)), [LAST], "the rank has only 6 experts"),
        (without(PROJ), [LAST], "decoder.layers.9.self_attention.linear_proj.weight lacks the part of tensor parallel rank 1"),
        (without("decoder.final_layernorm.weight"), LAST_STAGE, "lacks 1 tensor(s) that its config promises: decoder.final_layernorm.weight"),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    saved: Path, copy_of: Paths, releases: Paths, tmp_path: Path, change: Any, ranks: list[str], said: str | None
) -> None:
    root = copy_of(saved / "legacy, experts")
    rewrite(root, change, *ranks)
    if said is None:
        convert(root, tmp_path / "back", hf=releases("glm4_moe"))
        return
    with pytest.raises(CkptkitError) as error:
        convert(root, tmp_path / "back", hf=releases("glm4_moe"))
    assert said in error.value.message
    assert error.value.hint


def test_files_that_are_missing_or_damaged(saved: Path, copy_of: Paths, releases: Paths, tmp_path: Path) -> None:
    root, hf = copy_of(saved / "legacy, experts"), releases("glm4_moe")
    path = rank_files(root)["mp_rank_01_001_001"]
    content = path.read_bytes()
    weight = content.index(loaded(path)["model"][PROJ][5].view(torch.uint8).numpy().tobytes())

    def refused() -> str:
        with pytest.raises(CkptkitError) as error:
            convert(root, tmp_path / "back", hf=hf)
        return error.value.message

    path.write_bytes(content[: len(content) // 2])
    assert f"{path} at byte 0" in refused()
    flipped = bytearray(content)
    flipped[weight] ^= 1
    path.write_bytes(flipped)
    assert f"{path} at byte 0: its bytes do not match their checksum" in refused()
    torch.save(loaded_bytes(content, tmp_path), path, _use_new_zipfile_serialization=False)
    assert f"{path} is in the format that torch wrote before 1.6" in refused()
    path.unlink()
    assert f"{path}: No such file" in refused()
    path.parent.rmdir()
    assert refused().endswith("lacks mp_rank_01_001_EEE, mp_rank_TT_001_001")
    shutil.rmtree(root / "iter_0000010" / "mp_rank_00_001_000")
    assert refused().endswith("lacks mp_rank_00_001_EEE, mp_rank_01_001_EEE, mp_rank_TT_001_000, mp_rank_TT_001_001")


def loaded_bytes(content: bytes, scratch: Path) -> State:
    (scratch / "content.pt").write_bytes(content)
    return loaded(scratch / "content.pt")


def test_the_config_must_be_named(saved: Path, releases: Paths, tmp_path: Path) -> None:
    with pytest.raises(CkptkitError, match="the HF config of this model is not stored beside it"):
        convert(saved / "legacy", tmp_path / "back")
    with pytest.raises(CkptkitError, match="was saved with num_layers 12"):
        hf = tmp_path / "hf"
        shutil.copytree(releases("qwen2-tied"), hf)
        (hf / "config.json").write_text((hf / "config.json").read_text().replace('"num_hidden_layers": 12', '"num_hidden_layers": 13'))
        _ = LegacyCheckpoint(saved / "legacy" / "release", hf=hf).specs

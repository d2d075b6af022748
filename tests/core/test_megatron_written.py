"""Checkpoints that megatron-core itself saved, on two tensor parallel ranks, are read and come back as the release's bytes.

megatron-core up to 0.18 writes `common.pt`, from 0.19 a `common_state` object: run on both to see both.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import models
import pytest
import torch
from megatron_runs import Save, save_with_megatron

from ckptkit.api import convert
from ckptkit.safetensors_io import HfCheckpoint
from ckptkit.torch_dist_reader import TorchDistCheckpoint
from verify.check_megatron import all_layers, right_slices, strict_load
from verify.checks import Tally
from verify.subject import Subject

pytest.importorskip("megatron.core")

# What is saved: the release, and how.
SAVES = {
    "dense, layers stacked": ("qwen2-untied", False, False),
    "tied, layers stacked": ("qwen2-tied", False, False),
    "one key a layer": ("glm4_moe", False, False),
    "layers and experts stacked": ("qwen3_moe", True, False),
    "one key an expert": ("qwen3_moe", False, True),
}


@pytest.fixture(scope="module")
def saved(releases: Callable[[str], Path], converted: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    save_with_megatron(
        [
            Save(HfCheckpoint(releases(name)).config, converted(name) / "release", root / label, stacked, singleton)
            for label, (name, stacked, singleton) in SAVES.items()
        ],
        tp=2,
    )
    return root


@pytest.mark.parametrize("label", SAVES)
def test_it_comes_back_bit_for_bit(saved: Path, releases: Callable[[str], Path], tmp_path: Path, label: str) -> None:
    release = releases(SAVES[label][0])
    convert(saved / label, tmp_path / "back", hf=release)
    before, after = models.tensors(release), models.tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name], tensor), name


def test_the_saves_are_of_the_kinds_that_they_claim_to_be(saved: Path) -> None:
    """Otherwise the test above would read the same layout five times."""
    stored = {label: TorchDistCheckpoint(saved / label / "iter_0000010").metadata for label in SAVES}
    dense = stored["dense, layers stacked"].tensors
    assert dense["decoder.layers.mlp.linear_fc1.weight"].shape == (12, 576, 128)
    # gate and up of two ranks in twelve layers
    assert len(dense["decoder.layers.mlp.linear_fc1.weight"].chunks) == 12 * 2 * 2
    assert dense["output_layer.weight"].shape == (512, 128)
    assert "output_layer.weight" not in stored["tied, layers stacked"].tensors
    assert stored["one key a layer"].tensors["decoder.layers.7.mlp.experts.experts.linear_fc1.weight"].shape == (12, 192, 128)
    assert stored["layers and experts stacked"].tensors["decoder.layers.mlp.experts.experts.linear_fc1.weight"].shape == (12, 12, 192, 128)
    assert all("optimizer.state.exp_avg.decoder.weight" in metadata.tensors for metadata in stored.values())
    assert all("rng_state/shard_0.1_1.2" in metadata.objects for metadata in stored.values())


def test_common_state_is_read_wherever_it_is(saved: Path) -> None:
    checkpoint = TorchDistCheckpoint(saved / "one key a layer" / "iter_0000010")
    in_a_file = (checkpoint.path / "common.pt").exists()
    assert in_a_file != any(key.startswith("common_state") for key in checkpoint.metadata.objects)
    assert checkpoint.common["iteration"] == 10
    assert checkpoint.args["num_layers"] == 12
    assert checkpoint.args["moe_layer_freq"] == [0, 0] + [1] * 10


def test_the_witness_accepts_what_a_training_run_saves_beside_the_weights(saved: Path, releases: Callable[[str], Path]) -> None:
    """Stacked layers, a padded vocabulary, optimizer state and random states are no findings."""
    release = releases("qwen2-untied")
    subject = Subject(saved / "dense, layers stacked", release, hf_path=release)
    assert [finding for check in (strict_load, right_slices, all_layers) for finding in check(subject, Tally())] == []

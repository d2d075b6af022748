"""Distributed checkpoints that torch itself wrote are named, and never called torch_dist saves that were cut short."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fixture_types import CopyOf, PathOf
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint import save as dcp_save

from ckptkit.app.api import convert
from ckptkit.app.inspection import inspect
from ckptkit.core.errors import UnsupportedError
from verify.launch.preflight import preflight
from verify.run import verify

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")

HF = {"model.embed_tokens.weight": torch.ones(8, 4), "model.layers.0.mlp.up_proj.weight": torch.ones(8, 4)}


def of_megatron_lm(prefix: str, rng_state: object, model: str) -> dict[str, Any]:
    """As Megatron-LM's `generate_state_dict` puts it together, with what `preprocess_fsdp_dtensor_state_dict` makes.

    Written by hand from that source: Megatron-FSDP runs on GPUs only.
    """
    weights = {
        f"{prefix}embedding.word_embeddings.weight": torch.ones(8, 4),
        f"{prefix}decoder.layers.0.mlp.linear_fc1.weight_w": torch.ones(8, 4),
        f"{prefix}decoder.layers.0.mlp.linear_fc1.weight_v": torch.ones(8, 4),
    }
    return {
        "args": Namespace(num_layers=1, hidden_size=4),
        "checkpoint_version": 3.0,
        "iteration": 5,
        model: weights,
        "optimizer": {"state": {name: {"exp_avg": tensor} for name, tensor in weights.items()}},
        "opt_param_scheduler": {"max_lr": 1e-6},
        "rng_state": rng_state,
    }


# What is saved, and what it must be called.
SAVED: dict[str, tuple[dict[str, Any], str]] = {
    "fsdp_dtensor in pipeline chunks": (
        of_megatron_lm("module.", {"(0, 0)": [{"random_rng_state": (3, (1, 2), None)}]}, "model0"),
        "is a checkpoint of Megatron-FSDP in pipeline chunks",
    ),
    "with arguments": (
        {"args": Namespace(epochs=3), "checkpoint_version": 1.0, "model": HF},
        "is a checkpoint of torch.distributed.checkpoint (DCP)",
    ),
    "nested": ({"model": HF, "optimizer": {"step": 3}}, "is a checkpoint of torch.distributed.checkpoint (DCP)"),
    "flat": (HF, "is a checkpoint of torch.distributed.checkpoint (DCP)"),
    "of a Megatron model": (
        {"embedding.word_embeddings.weight": torch.ones(8, 4), "decoder.layers.0.mlp.linear_fc2.weight": torch.ones(4)},
        "is a checkpoint of torch.distributed.checkpoint (DCP)",
    ),
}


@pytest.fixture(params=sorted(SAVED))
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A root with a tracker as Megatron-LM leaves it; its iteration was written by torch itself."""
    content, name = SAVED[request.param]
    root = tmp_path / "saved"
    dcp_save(content, storage_writer=FileSystemWriter(root / "iter_0000005"), no_dist=True)
    (root / "latest_checkpointed_iteration.txt").write_text("5")
    assert sorted(file.name for file in (root / "iter_0000005").iterdir()) == [".metadata", "__0_0.distcp"]
    return root, name


@pytest.mark.parametrize("below", ["", "iter_0000005"])
def test_every_verb_names_the_format_and_keeps_it(saved: tuple[Path, str], below: str, tmp_path: Path) -> None:
    root, name = saved
    verbs: list[Callable[[Path], object]] = [inspect, verify, lambda path: convert(path, tmp_path / "out")]
    for verb in verbs:
        with pytest.raises(UnsupportedError) as refused:
            verb(root / below)
        assert f"{root / 'iter_0000005'} {name}" in refused.value.message
        assert "which ckptkit does not read" in refused.value.message
        assert "keep this directory" in str(refused.value.hint)
        assert "cut short" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_preflight_does_not_judge_it(saved: tuple[Path, str], releases: PathOf) -> None:
    root, name = saved
    report = preflight(hf_checkpoint=releases("qwen2-tied"), load=root)
    assert [str(one) for one in report.findings if one.code.startswith("CK1")] == []
    assert report.status == "inconclusive"
    assert any(name in reason and "cut short" not in reason for reason in report.reasons)


def test_other_planners_of_torch_are_told_by_names(tmp_path: Path) -> None:
    writer, planner = FileSystemWriter(tmp_path / "flat"), DefaultSavePlanner(flatten_state_dict=False)
    dcp_save(HF, storage_writer=writer, planner=planner, no_dist=True)
    with pytest.raises(UnsupportedError, match="distributed.checkpoint"):
        verify(tmp_path / "flat")


def test_a_source_of_this_kind_is_named(saved: tuple[Path, str], releases: PathOf) -> None:
    root, name = saved
    report = verify(releases("qwen2-tied"), source=root)
    assert (report.status, report.errors) == ("inconclusive", 0)
    assert any(name in reason for reason in report.reasons)


@pytest.mark.parametrize("lost", [["common.pt"], ["metadata.json"], ["common.pt", "metadata.json"]])
def test_torch_dist_without_its_common_state_is_still_found(
    lost: list[str], converted: PathOf, copy_of: CopyOf
) -> None:
    path = copy_of(converted("qwen2-tied"))
    for file in lost:
        (path / "release" / file).unlink()
    report = verify(path)
    assert report.status == "failed"
    assert {one.code for one in report.findings} == {"CK111"}
    assert all(any(file in one.actual for one in report.findings) for file in lost)

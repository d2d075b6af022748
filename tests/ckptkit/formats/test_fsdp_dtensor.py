"""Megatron-FSDP's checkpoints are read and exported; test_megatron_versions has what Megatron's converter makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import models
from support.fixture_types import PathOf
from support.fsdp_saves import save_fsdp

from ckptkit.app.api import convert
from ckptkit.app.inspection import inspect
from ckptkit.core.errors import DamagedError
from ckptkit.formats.torch_dist.fsdp_dtensor import torch_dist_key
from ckptkit.formats.torch_dist.reader import read_metadata
from verify.run import verify


@pytest.fixture
def saved(converted: PathOf, tmp_path: Path) -> Path:
    """Experts, dense layers and float32 biases."""
    save_fsdp(converted("glm4_moe") / "release", tmp_path / "saved")
    return tmp_path / "saved"


def test_it_is_read_verified_and_exported_bit_for_bit(saved: Path, releases: PathOf, tmp_path: Path) -> None:
    release = releases("glm4_moe")
    facts = inspect(saved, hf=release)
    assert facts["format"] == "Megatron fsdp_dtensor"
    assert set(facts["training state"]["optimizer"]["state"]) == {"exp_avg", "exp_avg_sq"}
    report = verify(saved, source=release)
    assert report.findings == []
    checks = {one.code: one.status for one in report.checks}
    assert (checks["CK104"], checks["CK121"], checks["CK202"], checks["CK213"], checks["CK701"]) == ("passed",) * 5
    convert(saved, tmp_path / "back", hf=release)
    before, after = models.tensors(release), models.tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_tensor_under_two_spellings_is_damage(converted: PathOf, tmp_path: Path) -> None:
    """Expert 3 as grouped experts name it, and as experts one by one do."""
    twice = "decoder.layers.5.mlp.experts.local_experts.3.linear_fc2.weight"
    save_fsdp(converted("glm4_moe") / "release", tmp_path / "saved", {f"module.{twice}": torch.zeros(2, 3)})
    with pytest.raises(DamagedError, match=r"holds 'decoder\.layers\.5\.mlp\.experts\.experts\.3\.\S+' twice"):
        read_metadata(tmp_path / "saved" / "iter_0000005")


LAYER, MTP, STATE = "decoder.layers.1.", "mtp.layers.0.", "optimizer.state."


@pytest.mark.parametrize(
    ("key", "torch_dist"),
    [
        (f"model.module.{MTP}mtp_model_layer.mlp.linear_fc2.weight", f"{MTP}transformer_layer.mlp.linear_fc2.weight"),
        (f"model.module.{MTP}mtp_model_layer.layers.1.mlp.x", f"{MTP}mtp_model_layer.layers.1.mlp.x"),
        (
            f"model.module.{LAYER}mlp.experts.local_experts.7.linear_fc1.weight_v",
            f"{LAYER}mlp.experts.experts.7.linear_fc1.weight_v",
        ),
        (
            f"{STATE}module.module.module.{LAYER}mlp.experts.linear_fc1.weight3_w.exp_avg",
            f"{STATE}exp_avg.{LAYER}mlp.experts.experts.3.linear_fc1.weight_w",
        ),
        (f"model.module.{LAYER}self_attention.in_proj.weight.query", f"{LAYER}self_attention.in_proj.weight.query"),
        ("rng_state.(0, 0)", "rng_state.(0, 0)"),
    ],
)
def test_keys_get_the_names_of_torch_dist(key: str, torch_dist: str) -> None:
    assert torch_dist_key(key) == torch_dist

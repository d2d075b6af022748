"""Checkpoints of FSDP runs are read and exported: Megatron-FSDP's, and those with torch's FSDP2.

test_megatron_versions has what Megatron's converter makes of the first; the second are saved by megatron-core's own
wrapper and optimizer, on four ranks.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import pytest
import torch
from support import models
from support.fixture_types import CopyOf, PathOf
from support.fsdp_saves import save_fsdp

from ckptkit.app.api import convert
from ckptkit.app.inspection import inspect
from ckptkit.core.errors import DamagedError
from ckptkit.formats.torch_dist.plain_dcp import torch_dist_keys
from ckptkit.formats.torch_dist.reader import read_metadata
from verify.run import verify


@pytest.fixture
def of_megatron_fsdp(converted: PathOf, tmp_path: Path) -> Path:
    """Experts, dense layers and float32 biases."""
    save_fsdp(converted("glm4_moe") / "release", tmp_path / "saved")
    return tmp_path / "saved"


def check_whole(path: Path, release: Path, back: Path) -> None:
    """It is verified, its optimizer too, and comes back bit for bit."""
    report = verify(path, source=release)
    assert report.findings == []
    checks = {one.code: one.status for one in report.checks}
    assert (checks["CK104"], checks["CK121"], checks["CK202"], checks["CK213"], checks["CK701"]) == ("passed",) * 5
    convert(path, back, hf=release)
    before, after = models.tensors(release), models.tensors(back)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_megatron_fsdp_is_read_verified_and_exported(of_megatron_fsdp: Path, releases: PathOf, tmp_path: Path) -> None:
    facts = inspect(of_megatron_fsdp, hf=releases("glm4_moe"))
    assert facts["format"] == "Megatron fsdp_dtensor"
    assert set(facts["training state"]["optimizer"]["state"]) == {"exp_avg", "exp_avg_sq"}
    check_whole(of_megatron_fsdp, releases("glm4_moe"), tmp_path / "back")


def test_what_megatron_saves_with_fsdp2_is_read_verified_and_exported(
    saved: Path, releases: PathOf, tmp_path: Path
) -> None:
    """The local spec's norms get the names of torch_dist, and the optimizer has numbers for names."""
    raw = pickle.loads((saved / "FSDP2" / "iter_0000010" / ".metadata").read_bytes()).state_dict_metadata
    assert "model.decoder.layers.3.mlp.experts.local_experts.11.linear_fc1.weight" in raw
    assert "model.decoder.layers.1.pre_mlp_layernorm.weight" in raw
    assert len(raw["model.decoder.layers.1.mlp.linear_fc1.weight"].chunks) == 4
    facts = inspect(saved / "FSDP2", hf=releases("glm4_moe-mtp"))
    assert facts["format"] == "Megatron torch_dcp"
    optimizer = facts["training state"]["optimizer"]
    assert optimizer["format"] == "by number"
    assert len(set(optimizer["parameters"].values())) == 1
    check_whole(saved / "FSDP2", releases("glm4_moe-mtp"), tmp_path / "back")


def test_an_optimizer_of_another_step_is_found_without_names(saved: Path, releases: PathOf, copy_of: CopyOf) -> None:
    """Numbers are not held against names, but the numbers of masters must round to those of weights."""
    path = copy_of(saved / "FSDP2")
    info = pickle.loads((path / "iter_0000010" / ".metadata").read_bytes()).storage_data
    place = next(one for key, one in info.items() if key.fqn == "optimizer.fp32_from_fp16_params.0.3")
    file = path / "iter_0000010" / place.relative_path
    content = file.read_bytes()
    piece = io.BytesIO(content[place.offset : place.offset + place.length])
    written = io.BytesIO()
    torch.save(torch.load(piece).fill_(7.5), written)
    assert len(written.getvalue()) == place.length
    file.write_bytes(content[: place.offset] + written.getvalue() + content[place.offset + place.length :])
    report = verify(path, source=releases("glm4_moe-mtp"))
    assert [one.code for one in report.findings] == ["CK214"]


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
        (
            f"model.{MTP}mtp_model_layer.mlp.experts.local_experts.3.linear_fc2.weight",
            f"{MTP}transformer_layer.mlp.experts.experts.3.linear_fc2.weight",
        ),
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
        (f"model.{LAYER}mlp.experts.linear_fc2.weight11", f"{LAYER}mlp.experts.experts.11.linear_fc2.weight"),
        ("optimizer.optimizer.state.3.exp_avg", "optimizer.optimizer.state.3.exp_avg"),
    ],
)
def test_keys_get_the_names_of_torch_dist(key: str, torch_dist: str) -> None:
    assert torch_dist_keys([key]) == {key: torch_dist}


def test_norms_of_the_local_spec_are_named_with_the_layer_after_them() -> None:
    """Latent attention and experts have norms of their own in every spec."""
    norms = [f"model.{LAYER}{name}.weight" for name in ("input_layernorm", "pre_mlp_layernorm")]
    linears = [f"model.{LAYER}{name}.weight" for name in ("self_attention.linear_qkv", "mlp.linear_fc1")]
    found = torch_dist_keys([*norms, *linears])
    assert [found[norm] for norm in norms] == [
        f"{LAYER}self_attention.linear_qkv.layer_norm_weight",
        f"{LAYER}mlp.linear_fc1.layer_norm_weight",
    ]
    others = [f"model.{LAYER}{name}.weight" for name in ("self_attention.linear_kv_up_proj", "mlp.router")]
    found = torch_dist_keys([*norms, *others])
    assert [found[norm] for norm in norms] == [f"{LAYER}input_layernorm.weight", f"{LAYER}pre_mlp_layernorm.weight"]

"""Distributed checkpoints that torch itself wrote: those of FSDP runs are read and exported, others are named.

test_megatron_versions has what Megatron's converter makes of Megatron-FSDP's; those with torch's FSDP2 are saved by
megatron-core's own wrapper and optimizer, on four ranks.
"""

import io
import pickle
from argparse import Namespace
from itertools import product

import pytest
import torch
from support import models
from support.fsdp_saves import save_fsdp
from support.messages import text_with
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint import save as dcp_save

from ckptkit.app.api import convert
from ckptkit.app.inspection import inspect
from ckptkit.core.errors import DamagedError, UnsupportedError
from ckptkit.formats.torch_dist.plain_dcp import torch_dist_keys
from ckptkit.formats.torch_dist.reader import read_metadata
from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.run import verify

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")

HF = {"model.embed_tokens.weight": torch.ones(8, 4), "model.layers.0.mlp.up_proj.weight": torch.ones(8, 4)}


def of_megatron_lm(prefix, rng_state, model):
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
SAVED = {
    "fsdp_dtensor in pipeline chunks": (
        of_megatron_lm("module.", {"(0, 0)": [{"random_rng_state": (3, (1, 2), None)}]}, "model0"),
        "Megatron-FSDP",
    ),
    "with arguments": (
        {"args": Namespace(epochs=3), "checkpoint_version": 1.0, "model": HF},
        "torch.distributed.checkpoint DCP",
    ),
    "nested": ({"model": HF, "optimizer": {"step": 3}}, "torch.distributed.checkpoint DCP"),
    "flat": (HF, "torch.distributed.checkpoint DCP"),
    "of a Megatron model": (
        {"embedding.word_embeddings.weight": torch.ones(8, 4), "decoder.layers.0.mlp.linear_fc2.weight": torch.ones(4)},
        "torch.distributed.checkpoint DCP",
    ),
}


@pytest.fixture(params=sorted(SAVED))
def by_torch(request, tmp_path):
    """A root with a tracker as Megatron-LM leaves it; its iteration was written by torch itself."""
    content, name = SAVED[request.param]
    root = tmp_path / "saved"
    dcp_save(content, storage_writer=FileSystemWriter(root / "iter_0000005"), no_dist=True)
    (root / "latest_checkpointed_iteration.txt").write_text("5")
    assert sorted(file.name for file in (root / "iter_0000005").iterdir()) == [".metadata", "__0_0.distcp"]
    return root, name


def test_every_verb_names_the_format_and_keeps_it(by_torch, releases, tmp_path):
    root, name = by_torch
    verbs = [inspect, verify, lambda path: convert(path, tmp_path / "out")]
    for verb, path in product(verbs, (root, root / "iter_0000005")):
        with pytest.raises(UnsupportedError) as refused:
            verb(path)
        assert refused.value.message == text_with(f"{root / 'iter_0000005'} {name}")
        assert "keep this directory" in str(refused.value.hint)
        assert "cut short" not in str(refused.value)
    assert not (tmp_path / "out").exists()
    for report in (
        preflight(hf_checkpoint=releases("qwen2-tied"), load=root),
        verify(releases("qwen2-tied"), source=root),
    ):
        assert [str(one) for one in report.findings if one.code.startswith("CK1")] == []
        assert (report.status, report.errors) == ("inconclusive", 0)
        assert any(text_with(name) == reason and "cut short" not in reason for reason in report.reasons)


def test_other_planners_of_torch_are_told_by_names(tmp_path):
    writer, planner = FileSystemWriter(tmp_path / "flat"), DefaultSavePlanner(flatten_state_dict=False)
    dcp_save(HF, storage_writer=writer, planner=planner, no_dist=True)
    with pytest.raises(UnsupportedError, match="distributed.checkpoint"):
        verify(tmp_path / "flat")


def test_torch_dist_without_its_common_state_is_still_found(converted, copy_of):
    path = copy_of(converted("qwen2-tied"))
    for file in ("common.pt", "metadata.json"):
        (path / "release" / file).unlink()
        report = verify(path)
        assert report.status == "failed"
        assert {one.code for one in report.findings} == {"CK111"}
        assert any(file in one.actual for one in report.findings)


def check_whole(path, release, back):
    """It is verified, its optimizer too, and comes back bit for bit."""
    report = verify(path, source=release)
    assert report.findings == []
    checks = {one.code: one.status for one in report.checks}
    assert (checks["CK104"], checks["CK121"], checks["CK202"], checks["CK213"], checks["CK701"]) == ("passed",) * 5
    convert(path, back, hf=release)
    assert models.unequal(back, release) == []


def test_megatron_fsdp_is_read_verified_and_exported(converted, releases, tmp_path):
    save_fsdp(converted("glm4_moe") / "release", tmp_path / "saved")
    facts = inspect(tmp_path / "saved", hf=releases("glm4_moe"))
    assert facts["format"] == "Megatron fsdp_dtensor"
    assert set(facts["training state"]["optimizer"]["state"]) == {"exp_avg", "exp_avg_sq"}
    check_whole(tmp_path / "saved", releases("glm4_moe"), tmp_path / "back")


def test_what_megatron_saves_with_fsdp2_is_read_verified_and_exported(saved, releases, tmp_path):
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


def test_an_optimizer_of_another_step_is_found_without_names(saved, releases, copy_of):
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
    assert [one.code for one in verify(path, source=releases("glm4_moe-mtp")).findings] == ["CK214"]


def test_a_tensor_under_two_spellings_is_damage(converted, tmp_path):
    """Expert 3 as grouped experts name it, and as experts one by one do."""
    twice = "decoder.layers.5.mlp.experts.local_experts.3.linear_fc2.weight"
    save_fsdp(converted("glm4_moe") / "release", tmp_path / "saved", {f"module.{twice}": torch.zeros(2, 3)})
    with pytest.raises(DamagedError, match=r"contains 'decoder\.layers\.5\.mlp\.experts\.experts\.3\.\S+' twice"):
        read_metadata(tmp_path / "saved" / "iter_0000005")


LAYER, MTP, STATE = "decoder.layers.1.", "mtp.layers.0.", "optimizer.state."


def test_keys_get_the_names_of_torch_dist():
    experts = f"{LAYER}mlp.experts"
    names = {
        f"model.module.{MTP}mtp_model_layer.mlp.linear_fc2.weight": f"{MTP}transformer_layer.mlp.linear_fc2.weight",
        f"model.{MTP}mtp_model_layer.mlp.experts.local_experts.3.linear_fc2.weight": (
            f"{MTP}transformer_layer.mlp.experts.experts.3.linear_fc2.weight"
        ),
        f"model.module.{MTP}mtp_model_layer.layers.1.mlp.x": f"{MTP}mtp_model_layer.layers.1.mlp.x",
        f"model.module.{experts}.local_experts.7.linear_fc1.weight_v": f"{experts}.experts.7.linear_fc1.weight_v",
        f"{STATE}module.module.module.{experts}.linear_fc1.weight3_w.exp_avg": (
            f"{STATE}exp_avg.{experts}.experts.3.linear_fc1.weight_w"
        ),
        f"model.module.{LAYER}self_attention.in_proj.weight.query": f"{LAYER}self_attention.in_proj.weight.query",
        "rng_state.(0, 0)": "rng_state.(0, 0)",
        f"model.{experts}.linear_fc2.weight11": f"{experts}.experts.11.linear_fc2.weight",
        "optimizer.optimizer.state.3.exp_avg": "optimizer.optimizer.state.3.exp_avg",
    }
    assert {key: torch_dist_keys([key]) for key in names} == {key: {key: name} for key, name in names.items()}


def test_norms_of_the_local_spec_are_named_with_the_layer_after_them():
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

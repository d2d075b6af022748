"""Checkpoints that megatron-core itself saved, at all kinds of parallel sizes, come back as the release's bytes.

megatron-core up to 0.18 writes `common.pt`, from 0.19 a `common_state` object: run on both to see both.
"""

import pickle

import pytest
from support import models
from support.megatron_saves import SAVES
from support.messages import text_with
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from ckptkit.app.api import convert
from ckptkit.app.inspection import inspect
from ckptkit.formats.torch_dist.foreign_names import refuse_foreign_names
from ckptkit.formats.torch_dist.reader import NOT_WEIGHTS, TorchDistCheckpoint
from ckptkit.verify.checks.witnesses.megatron import all_layers, right_slices, strict_load
from ckptkit.verify.core.check import CheckResult
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.launch.preflight import preflight

LABELS = [label for label, (_, how) in SAVES.items() if "legacy" not in how and "fsdp2" not in how]


def opened(root):
    return TorchDistCheckpoint(next(path for path in (root / "release", root / "iter_0000010") if path.exists()))


@pytest.mark.parametrize("label", LABELS)
def test_it_comes_back_bit_for_bit_without_what_training_saves_beside(saved, releases, tmp_path, label):
    name, how = SAVES[label]
    convert(saved / label, tmp_path / "back", hf=releases(name))
    assert models.unequal(tmp_path / "back", releases(name)) == []
    checkpoint = opened(saved / label)
    keys, objects = checkpoint.metadata.tensors, checkpoint.metadata.objects
    by_bucket = how.get("optimizer") == "dp_reshardable"
    beginning = "distributed.dp_group_idx_0.gbuf_idx_0." if by_bucket else "state.exp_avg.decoder.layers."
    assert any(NOT_WEIGHTS.fullmatch(key) and f"optimizer.{beginning}" in key for key in keys)
    assert {"rng_state/shard_0.1_1.4", "rerun_state_machine_state/shard_3_4"} <= objects.keys()
    assert not [name for name in checkpoint.specs if "optimizer" in name or "state" in name]
    refuse_foreign_names(checkpoint.path)  # lets it through to Megatron's own unpickling


def test_the_saves_are_of_the_kinds_that_they_claim_to_be(saved):
    """Otherwise the test above would read the same layout again and again."""
    stored = {label: opened(saved / label).metadata.tensors for label in LABELS}
    fc1, experts = "decoder.layers.mlp.linear_fc1.weight", "mlp.experts.experts"
    dense, tied = stored["dense, layers stacked"], stored["tied, two chunks a stage"]
    assert dense[fc1].shape == tied[fc1].shape == (12, 576, 128)
    assert len(dense[fc1].chunks) == 12 * 2 * 2  # gate and up of two ranks in twelve layers
    assert dense["output_layer.weight"].shape == (512, 128)
    assert "output_layer.weight" not in tied
    fc2 = f"decoder.layers.7.{experts}.linear_fc2.weight"
    assert stored["one key a layer"][fc2].shape == (12, 128, 96)
    assert {chunk.sizes for chunk in stored["one key a layer"][fc2].chunks} == {(1, 128, 96)}
    assert {chunk.sizes for chunk in stored["one key a layer, uneven"][fc2].chunks} == {(1, 128, 48)}
    stacked = stored["layers and experts stacked"][f"decoder.layers.{experts}.linear_fc1.weight"]
    assert stacked.shape == (12, 12, 192, 128)
    one = stored["one key an expert"][f"decoder.layers.7.{experts}.11.linear_fc1.weight_w"]
    assert one.shape == (96, 128)


def test_keys_under_a_wrapper_are_read_without_it(saved):
    root = saved / "under NeMo's wrapper"
    raw = pickle.loads((root / "iter_0000010" / ".metadata").read_bytes()).state_dict_metadata
    assert "module.decoder.layers.mlp.linear_fc1.weight" in raw
    assert "optimizer.state.exp_avg.module.decoder.layers.mlp.linear_fc1.weight" in raw
    stored = opened(root).metadata
    assert stored.layout == "NeMo"
    assert {key.replace("module.", "") for key in raw} == set(stored.keys)


@pytest.mark.xfail(
    _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT.__reduce_ex__(2)[0] is getattr,
    reason="Megatron does not load the arguments that it saves itself under this Python, 3.11.2",
    strict=True,
)
@pytest.mark.usefixtures("served")
def test_the_witness_accepts_what_a_training_run_saves_beside_the_weights(saved, releases):
    release = releases("qwen2-untied")
    subject = Subject(saved / "dense, layers stacked", release, hf_path=release)
    assert [
        finding for check in (strict_load, right_slices, all_layers) for finding in check(subject, CheckResult("", ""))
    ] == []


def test_inspect_says_what_a_distributed_optimizer_saved(saved, releases):
    """Sizes by hand: each state has one float32 number a parameter, and two ranks' padding in a bucket."""

    def optimizer(label):
        state = inspect(saved / label, hf=releases(SAVES[label][0]))["training state"]
        assert str(state["summary"]) == text_with("scheduler")
        assert state["scheduler"] == {"max_lr": 1e-4}
        return state["optimizer"]

    dense = optimizer("dense, optimizer by bucket")
    assert (dense["format"], "chained" in dense) == ("dp_reshardable", False)
    assert {"exp_avg", "exp_avg_sq", "param"} <= set(dense["state"])
    assert optimizer("experts, optimizer by bucket")["chained"] == ["chained_0", "chained_1"]
    by_parameter = optimizer("experts, optimizer by parameter")
    assert by_parameter["format"] == "fully_reshardable"
    assert set(by_parameter["state"]) == {"exp_avg", "exp_avg_sq", "param"}
    assert len(set(by_parameter["parameters"].values())) == 1
    # 10 layers of 12 experts, each 3 matrices of 96 x 128, three numbers of 4 bytes for a parameter.
    assert by_parameter["bytes of experts"] == 10 * 12 * 3 * 96 * 128 * 3 * 4
    report = preflight(load=saved / "experts, optimizer by bucket")
    assert report.findings == []
    (line,) = report.facts["training state"]
    assert line.startswith("optimizer (dp_reshardable) ")
    assert line == text_with("convert")

"""torch's own distributed checkpoint reader reads what we write, and our reader what torch and we write."""

import io
import json
import pickle
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from support import models
from support.messages import refusal, text_with
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import ckptkit
from ckptkit.app.api import convert
from ckptkit.app.cli import cli
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint, tiling_problem
from ckptkit.formats.torch_save.unpickle import Machine


def test_what_megatron_expects_beside_the_tensors(converted):
    root = converted("glm4_moe")
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "release"
    common = torch.load(root / "release/common.pt", weights_only=False)
    assert common["checkpoint_version"] == 3.0
    assert common["content_metadata"] == {"non_homogeneous_layers": True, "singleton_local_shards": False}
    assert common["args"].num_layers == 12
    assert common["args"].moe_layer_freq == [0, 0] + [1] * 10
    assert json.loads((root / "release/metadata.json").read_text())["sharded_backend"] == "torch_dist"
    with (root / "release/.metadata").open("rb") as file:
        keys = pickle.load(file).state_dict_metadata.keys()
    for key in (
        "decoder.layers.0.self_attention.linear_qkv._extra_state/shard_0_1",
        "decoder.layers.0.self_attention.core_attention._extra_state/shard_0_1",
        "decoder.layers.0.mlp.linear_fc2._extra_state/shard_0_1",
        "decoder.layers.5.mlp.experts.experts.linear_fc1._extra_state/shard_11_12",
        "decoder.layers.5.mlp.shared_experts.linear_fc1._extra_state/shard_0_1",
        "decoder.final_layernorm._extra_state/shard_0_1",
    ):
        assert key in keys


def test_objects_of_norms_that_go_by_two_names(converted):
    """With Transformer Engine, compressed queries, keys and values have norm modules only around sparse attention."""
    with (converted("deepseek_v32") / "release/.metadata").open("rb") as file:
        keys = pickle.load(file).state_dict_metadata.keys()
    for layer in ("decoder.layers.0", "decoder.layers.11", "mtp.layers.0.transformer_layer"):
        for module in ("linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm"):
            assert f"{layer}.self_attention.{module}._extra_state/shard_0_1" in keys


FC2, NORM, PROJ = "layers.3.mlp.experts.experts.linear_fc2", "final_layernorm", "layers.0.self_attention.linear_proj"


def two_at_one_place(chunks):
    chunks[1] = ChunkStorageMetadata(chunks[0].offsets, chunks[0].sizes)


def drop_places(metadata, key):
    metadata.storage_data = {index: info for index, info in metadata.storage_data.items() if index.fqn != key}


def mixed_layouts(metadata):
    """The same tensor under a stacked key and under one key a layer."""
    key, stacked_key = f"decoder.{PROJ}.weight", "decoder.layers.self_attention.linear_proj.weight"
    entry = metadata.state_dict_metadata[key]
    size, chunk = torch.Size([1, *entry.size]), entry.chunks[0]
    stacked = ChunkStorageMetadata(torch.Size([0, *chunk.offsets]), torch.Size([1, *chunk.sizes]))
    metadata.state_dict_metadata[stacked_key] = replace(entry, size=size, chunks=[stacked])
    (place,) = [info for index, info in metadata.storage_data.items() if index.fqn == key]
    metadata.storage_data[MetadataIndex(stacked_key, stacked.offsets, 0)] = place


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.state_dict_metadata[f"decoder.{FC2}.weight"].chunks.pop(), "12288.*147456"),
        (lambda table: two_at_one_place(table.state_dict_metadata[f"decoder.{FC2}.weight"].chunks), "chunks overlap"),
        (lambda table: drop_places(table, f"decoder.{NORM}.weight"), f"decoder.{NORM}.weight"),
        (lambda table: vars(next(iter(table.storage_data.values()))).update(relative_path="../../secret"), "directory"),
        (mixed_layouts, f"both contain decoder.{PROJ}.weight"),
    ],
    ids=["a chunk is missing", "chunks overlap", "no place", "a path outside", "two layouts"],
)
def test_incomplete_metadata_is_refused(converted, copy_of, change, message):
    path = copy_of(converted("qwen3_moe")) / "release"
    models.edit_metadata(path, change)
    refusal(message, TorchDistCheckpoint, path)


def test_tiling():
    for boxes, problem in (
        ([((0, 0), (4, 6))], None),
        ([((0, 0), (4, 3)), ((0, 3), (4, 3))], None),
        ([((0, 0), (4, 3)), ((0, 3), (3, 3))], "3 24 chunk"),
        ([((0, 0), (4, 3)), ((0, 2), (4, 3))], "[0 0]"),
        # as many elements as the tensor has, but one row twice and one never
        ([((0, 0), (2, 6)), ((1, 0), (2, 6))], "[0 0]"),
        ([((0, 0), (5, 6))], "outside"),
        ([], "24 24 chunk"),
    ):
        assert tiling_problem((4, 6), boxes) == (None if problem is None else text_with(problem)), boxes


@pytest.mark.parametrize("file", [".metadata", "common.pt"])
def test_a_lack_of_memory_names_the_file_that_was_read(file, converted, monkeypatch):
    run = Machine.run

    def lacking(machine):
        if (b"fqn" in machine._content) == (file == ".metadata"):
            raise MemoryError
        return run(machine)

    monkeypatch.setattr(Machine, "run", lacking)
    with pytest.raises(CkptkitError, match="available") as error:
        _ = TorchDistCheckpoint(converted("qwen2-tied") / "release").args
    assert f"release/{file}" in error.value.message
    assert error.value.hint


LAYER = "decoder.layers.self_attention."
LEFT_OUT = [
    f"{LAYER}linear_qkv.weight_quantizer._amax",
    f"{LAYER}linear_proj.weight_quantizer.0._amax",
    f"{LAYER}linear_proj.weight_quantizer.1.2._amax",
    f"{LAYER}linear_proj.weight_quantizer._global_amax",
    f"{LAYER}core_attention.q_bmm_quantizer._amax",
    "decoder.layers.3.mlp.linear_fc2.input_quantizer._amax",
    "output_layer.input_quantizer._amax",
]
# What the weights mean nothing without, and names that only look alike.
REFUSED = [
    f"{LAYER}linear_qkv.input_quantizer._pre_quant_scale",
    f"{LAYER}linear_qkv.weight_quantizer._scale",
    f"{LAYER}linear_qkv.weight_quantizer._amax.more",
    f"{LAYER}linear_qkv._amax",
    f"{LAYER}linear_qkv.weight_quantizer_amax",
]


def add(path, *keys):
    root, buffer = path / "release", io.BytesIO()
    torch.save(torch.ones(12, 1), buffer)
    size, place = torch.Size((12, 1)), torch.Size((0, 0))
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), size, [ChunkStorageMetadata(place, size)])
    nbytes = len(buffer.getvalue())

    def change(metadata):
        for number, key in enumerate(keys):
            metadata.state_dict_metadata[key] = entry
            stored = _StorageInfo("__9_0.distcp", number * nbytes, nbytes)
            metadata.storage_data[MetadataIndex(key, place, 0)] = stored

    models.edit_metadata(root, change)
    (root / "__9_0.distcp").write_bytes(buffer.getvalue() * len(keys))
    (path / "ckptkit.json").unlink(missing_ok=True)


def test_calibration_is_left_out_and_named(converted, releases, copy_of, tmp_path):
    path, source = copy_of(converted("qwen2-tied")), releases("qwen2-tied")
    before = set(TorchDistCheckpoint(path / "release").specs)
    add(path, *LEFT_OUT)
    assert set(TorchDistCheckpoint(path / "release").specs) == before
    result = CliRunner().invoke(cli, ["convert", str(path), str(tmp_path / "back")])
    assert result.exit_code == 0
    assert f"{len(LEFT_OUT)} tensors of ModelOpt's calibration" in result.stderr
    assert models.unequal(tmp_path / "back", source) == []
    assert list(ckptkit.verify(path, source=source).findings) == []
    facts = ckptkit.inspect(path)["training state"]["ModelOpt's calibration (_amax of its quantizers)"]
    assert facts == {"tensors": len(LEFT_OUT), "bytes": 48 * len(LEFT_OUT)}


@pytest.mark.parametrize("key", REFUSED)
def test_what_weights_need_is_not_left_out(converted, copy_of, tmp_path, key):
    path = copy_of(converted("qwen2-tied"))
    add(path, key, LEFT_OUT[0])
    assert LEFT_OUT[0] not in refusal("rule", convert, path, tmp_path / "back").message
    assert not (tmp_path / "back").exists()

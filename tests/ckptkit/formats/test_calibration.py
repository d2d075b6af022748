"""ModelOpt's quantizers in a torch_dist checkpoint: its calibration is left out by name, all else is still refused."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.fixture_types import CopyOf, PathOf
from support.models import tensors
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
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint

LAYER = "decoder.layers.self_attention."
LEFT_OUT = [
    f"{LAYER}linear_qkv.weight_quantizer._amax",
    f"{LAYER}linear_qkv.input_quantizer._amax",
    f"{LAYER}linear_proj.output_quantizer._amax",
    f"{LAYER}linear_proj.weight_quantizer.0._amax",
    f"{LAYER}linear_proj.weight_quantizer.1.2._amax",
    f"{LAYER}linear_proj.weight_quantizer._global_amax",
    f"{LAYER}core_attention.q_bmm_quantizer._amax",
    f"{LAYER}core_attention.k_bmm_quantizer._bias_value",
    "decoder.layers.mlp.linear_fc1.weight_quantizer._amax",
    "decoder.layers.3.mlp.linear_fc2.input_quantizer._amax",
    "decoder.layers.mlp.experts.experts.linear_fc1.weight_quantizer._amax",
    "output_layer.input_quantizer._amax",
]
# What the weights mean nothing without, and names that only look alike.
REFUSED = [
    f"{LAYER}linear_qkv.input_quantizer._pre_quant_scale",
    f"{LAYER}linear_qkv.weight_quantizer._scale",
    f"{LAYER}linear_qkv.weight_quantizer._double_scale",
    f"{LAYER}linear_qkv.weight_quantizer._svdquant_lora_a",
    f"{LAYER}linear_qkv.weight_quantizer._amax.more",
    f"{LAYER}linear_qkv._amax",
    f"{LAYER}linear_qkv.weight_quantizer_amax",
    f"{LAYER}linear_qkv.quantizer.x._amax",
]


def add(path: Path, *keys: str) -> None:
    """Adds small tensors to a torch_dist checkpoint, as torch stores them."""
    root = path / "release"
    metadata = pickle.loads((root / ".metadata").read_bytes())
    data = b""
    for key in keys:
        buffer = io.BytesIO()
        torch.save(torch.ones(12, 1), buffer)
        size, place = torch.Size((12, 1)), torch.Size((0, 0))
        metadata.state_dict_metadata[key] = TensorStorageMetadata(
            properties=TensorProperties(dtype=torch.float32), size=size, chunks=[ChunkStorageMetadata(place, size)]
        )
        index = MetadataIndex(key, place, 0)
        metadata.storage_data[index] = _StorageInfo("__9_0.distcp", len(data), len(buffer.getvalue()))
        data += buffer.getvalue()
    (root / "__9_0.distcp").write_bytes(data)
    (root / ".metadata").write_bytes(pickle.dumps(metadata))
    (path / "ckptkit.json").unlink(missing_ok=True)


def test_calibration_is_left_out_and_named(
    converted: PathOf, releases: PathOf, copy_of: CopyOf, tmp_path: Path
) -> None:
    path, source = copy_of(converted("qwen2-tied")), releases("qwen2-tied")
    add(path, *LEFT_OUT)
    assert set(TorchDistCheckpoint(path / "release").specs) == set(
        TorchDistCheckpoint(converted("qwen2-tied") / "release").specs
    )
    result = CliRunner().invoke(cli, ["convert", str(path), str(tmp_path / "back")])
    assert result.exit_code == 0
    assert f"{len(LEFT_OUT)} tensors of ModelOpt's calibration" in result.stderr
    before, after = tensors(source), tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    report = ckptkit.verify(path, source=source)
    assert list(report.findings) == []
    facts = ckptkit.inspect(path)["training state"]
    assert facts["ModelOpt's calibration (_amax of its quantizers)"] == {
        "tensors": len(LEFT_OUT),
        "bytes": 48 * len(LEFT_OUT),
    }


@pytest.mark.parametrize("key", REFUSED)
def test_what_weights_need_is_not_left_out(converted: PathOf, copy_of: CopyOf, tmp_path: Path, key: str) -> None:
    path = copy_of(converted("qwen2-tied"))
    add(path, key, LEFT_OUT[0])
    with pytest.raises(CkptkitError, match="no rule of this model family knows") as refused:
        convert(path, tmp_path / "back")
    assert LEFT_OUT[0] not in refused.value.message
    assert not (tmp_path / "back").exists()

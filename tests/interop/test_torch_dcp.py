"""torch's own `torch.distributed.checkpoint`, without Megatron: what it reads of the torch_dist that ckptkit writes."""

import pytest
import torch
from support import models
from support.megatron_runs import in_megatron
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import ckptkit
from interop.releases import release


@pytest.fixture(scope="module", params=["qwen2-untied", "qwen3_moe"])
def converted(request, tmp_path_factory):
    """ckptkit's torch_dist of a model, and what the rules say of it, which real Megatron's forward pass has proven."""
    root = tmp_path_factory.mktemp("dcp")
    ckptkit.convert(release(request.param, root / "hf"), root / "megatron")
    wanted = in_megatron(root / "hf")
    # The norm before experts has a name for each of two specs.
    norms = {name: one for name, one in wanted.items() if "pre_mlp_layernorm" in name}
    alias = {name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"): one for name, one in norms.items()}
    return root / "megatron" / "release", wanted | alias


def by_expert(tensors):
    """Experts, which share a key in torch_dist, under names of their own."""
    found = {}
    for key, tensor in tensors.items():
        before, together, after = key.partition(".experts.experts.")
        parts = {f"{before}.experts.experts.{n}.{after}": one for n, one in enumerate(tensor)} if together else {}
        found |= parts or {key: tensor}
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # that is meant
def test_load_reads_every_tensor_bit_for_bit(converted):
    path, wanted = converted
    entries = FileSystemReader(path).read_metadata().state_dict_metadata
    found = {
        key: torch.full(entry.size, float("nan"), dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(found, checkpoint_id=path, no_dist=True)
    assert models.unequal(by_expert(found), wanted) == []


def test_dcp_to_torch_save_writes_every_tensor_bit_for_bit(converted, tmp_path):
    path, wanted = converted
    dcp_to_torch_save(path, tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=False)
    tensors = {key: value for key, value in saved.items() if isinstance(value, Tensor)}
    assert models.unequal(by_expert(tensors), wanted) == []

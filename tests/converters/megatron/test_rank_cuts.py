"""Chunks end where tensor-parallel ranks cut: what a rank reads, what Megatron loads, and the bytes on the way back."""

import pytest
import torch
from releases.record import load
from support import models
from support.nightly import daily
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ckptkit.app.api import convert
from ckptkit.app.plan import make_plan
from ckptkit.app.run_options import RunOptions
from ckptkit.converters.megatron import rank_cuts
from ckptkit.converters.open import open_checkpoint
from ckptkit.converters.planner import rules_of
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.formats.torch_dist.writer import TorchDistFiles
from ckptkit.formats.torch_save import blob
from ckptkit.storage import read as raw
from ckptkit.transfer import copy as copying
from ckptkit.verify.checks.witnesses.megatron import all_layers, right_slices, strict_load
from ckptkit.verify.core.check import CheckResult
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.options import VerifyOptions


@pytest.fixture
def in_chunks(releases, tmp_path, monkeypatch):
    """`in_chunks(name)`: the Megatron checkpoint of a model, whose small tensors are cut as large ones are."""

    def make(name):
        monkeypatch.setattr(rank_cuts, "_SMALLEST", 1)
        convert(releases(name), tmp_path / name)
        return tmp_path / name

    return make


def read_by(metadata, key, boxes):
    """Elements of all chunks that a rank with these boxes reads, by torch's own plan of the load."""
    entry = metadata.state_dict_metadata[key]
    asked = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
    items = create_read_items_for_chunk_list(key, entry, asked)
    return sum(
        chunk.sizes.numel()
        for chunk in entry.chunks
        if any(item.storage_index.offset == chunk.offsets for item in items)
    )


def test_a_rank_of_two_reads_its_part_and_no_more(in_chunks):
    """glm4_moe: 10 heads in 2 groups of head_dim 32, hidden size 128, ffn 288, ffn of the shared expert 96."""
    metadata = FileSystemReader(in_chunks("glm4_moe") / "release").read_metadata()
    shared = "decoder.layers.5.mlp.shared_experts"
    for rank in range(2):
        parts = {
            "decoder.layers.0.self_attention.linear_qkv.weight": [((224 * rank, 0), (224, 128))],
            "decoder.layers.0.self_attention.linear_qkv.bias": [((224 * rank,), (224,))],
            f"{shared}.linear_fc1.weight": [((48 * rank, 0), (48, 128)), ((96 + 48 * rank, 0), (48, 128))],
            f"{shared}.linear_fc2.weight": [((0, 48 * rank), (128, 48))],
        }
        for key, boxes in parts.items():
            own = sum(torch.Size(sizes).numel() for _, sizes in boxes)
            assert read_by(metadata, key, boxes) == own
            assert metadata.state_dict_metadata[key].size.numel() == 2 * own
    # The vocabulary's 352 rows are padded to 512 for two ranks: the second holds the last 96.
    assert read_by(metadata, "output_layer.weight", [((0, 0), (256, 128))]) == 256 * 128
    assert read_by(metadata, "output_layer.weight", [((256, 0), (96, 128))]) == 96 * 128


def test_rank_reads_only_its_part_of_keys_by_kind_of_row(in_chunks):
    """Qwen3-Next's in_proj: each kind of row is a key, which ranks share."""
    path = in_chunks("qwen3_next") / "release"
    metadata = FileSystemReader(path).read_metadata()
    keys = [key for key in metadata.state_dict_metadata if ".layers.0.self_attention.in_proj.weight." in key]
    assert len(keys) == 6
    for key in keys:
        rows, columns = metadata.state_dict_metadata[key].size
        for rank in range(2):
            assert read_by(metadata, key, [((rows // 2 * rank, 0), (rows // 2, columns))]) == rows // 2 * columns


def test_small_tensors_and_what_every_rank_holds_are_whole(converted, in_chunks):
    small = TorchDistCheckpoint(converted("glm4_moe") / "release").metadata.tensors
    assert {len(stored.chunks) for key, stored in small.items() if ".experts.experts." not in key} == {1}
    cut = TorchDistCheckpoint(in_chunks("glm4_moe") / "release").metadata.tensors
    whole = {
        key.partition(".layers.5.")[2] for key, stored in cut.items() if ".layers.5." in key and len(stored.chunks) == 1
    }
    assert whole == {
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
        "pre_mlp_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight",  # its other name
        "mlp.router.weight",
        "mlp.router.expert_bias",
    }
    # One chunk an expert, however large.
    assert len(cut["decoder.layers.5.mlp.experts.experts.linear_fc1.weight"].chunks) == 12


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("name", daily(("glm4_moe", "qwen3_next", "deepseek_v3"), ("glm4_moe",)))
def test_megatron_loads_chunks(in_chunks, releases, name):
    path = in_chunks(name)
    cut = [
        stored
        for key, stored in TorchDistCheckpoint(path / "release").metadata.tensors.items()
        if len(stored.chunks) > 1 and ".experts." not in key
    ]
    assert len(cut) > 30
    subject = Subject(path, releases(name), options=VerifyOptions(tp=2))
    assert [
        finding for check in (strict_load, right_slices, all_layers) for finding in check(subject, CheckResult("", ""))
    ] == []


@pytest.fixture
def streamed(monkeypatch):
    """Calling this sends tensors that stay as they are through a small buffer. Returns the extents that are read."""

    def start():
        read, found = raw.FileExtent.read, list[raw.FileExtent]()

        def watched(self, reader, start, nbytes):
            found.append(self)
            return read(self, reader, start, nbytes)

        monkeypatch.setattr(copying, "BATCH", 0)
        monkeypatch.setattr(raw, "BUFFER", 8192)
        monkeypatch.setattr(blob, "AT_ONCE", 0)
        monkeypatch.setattr(raw.FileExtent, "read", watched)
        return found

    return start


NAMES = ("glm4_moe", "qwen3_next", "deepseek_v3", "qwen2-tied")


@pytest.mark.parametrize("name", daily(NAMES, NAMES[:2]))
def test_checkpoint_in_chunks_comes_back_as_the_release(in_chunks, releases, tmp_path, streamed, name):
    path = in_chunks(name)
    convert(path, tmp_path / "back")
    extents = streamed()
    convert(releases(name), tmp_path / "streamed")
    assert models.content(tmp_path / "streamed") == models.content(path)
    specs = open_checkpoint(releases(name)).specs.values()
    (projection,) = (one for one in specs if one.name.endswith("layers.0.self_attn.o_proj.weight"))
    assert sum(extent.nbytes == projection.nbytes for extent in extents) > 2
    extents.clear()
    convert(path, tmp_path / "back in pieces")
    assert len(extents) > 3
    for back in ("back", "back in pieces"):
        assert models.unequal(tmp_path / back, releases(name)) == []


def test_files_that_are_read_again_to_go_on_after_a_crash(in_chunks, releases):
    path = in_chunks("qwen3_next")
    (output, *_) = make_plan(RunOptions("convert", str(releases("qwen3_next")), "out")).outputs
    reader = TorchDistCheckpoint(path / "release")
    found = {name: tensor for file in output.files.names for name, tensor in output.files.read(file, path)}
    assert found.keys() == reader.specs.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, reader.read([name])[name])


QWEN3_8B = load("Qwen/Qwen3-8B").config


def qwen3_8b_boxes(key, size, rank, ranks):
    """What Megatron's rank holds of a tensor."""
    if key.endswith(("word_embeddings.weight", "output_layer.weight")):
        rows = -(-size[0] // (128 * ranks)) * 128  # the default of --make-vocab-size-divisible-by
        return [((rows * rank, 0), (max(0, min(rows, size[0] - rows * rank)), size[1]))]
    if key.endswith("linear_qkv.weight"):
        return [((size[0] // ranks * rank, 0), (size[0] // ranks, size[1]))]
    if key.endswith("linear_fc1.weight"):
        rows = size[0] // 2 // ranks
        return [((half + rows * rank, 0), (rows, size[1])) for half in (0, size[0] // 2)]
    if key.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return [((0, size[1] // ranks * rank), (size[0], size[1] // ranks))]
    return [((0,) * len(size), size)]


@pytest.mark.parametrize("ranks", daily((1, 2, 4, 8), (8,)))
def test_what_ranks_of_a_large_model_read(ranks):
    specs = {rule.megatron: TensorSpec(rule.megatron, rule.megatron_shape, "bfloat16") for rule in rules_of(QWEN3_8B)}
    cut, whole = (
        TorchDistFiles(specs, {}, cuts=cuts)._metadata() for cuts in (rank_cuts.rank_cuts(QWEN3_8B, "mcore", specs), {})
    )
    for rank in range(ranks):
        own = reads = reads_whole = 0
        for key, spec in specs.items():
            boxes = qwen3_8b_boxes(key, spec.shape, rank, ranks)
            own += sum(torch.Size(sizes).numel() for _, sizes in boxes)
            reads, reads_whole = reads + read_by(cut, key, boxes), reads_whole + read_by(whole, key, boxes)
        assert reads_whole == sum(torch.Size(spec.shape).numel() for spec in specs.values())
        assert own <= reads <= 1.05 * own

"""A large tensor that passes through as it is: in pieces, never held as a whole, and to the same bytes."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import models
from support.messages import refusal
from support.models import content
from support.whole_files import flip

from ckptkit.app.api import convert, quantize
from ckptkit.converters.megatron import rank_cuts
from ckptkit.core.plan import Plan, Step, View
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.reader import Shard
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.formats.torch_dist.writer import TorchDistFiles
from ckptkit.formats.torch_save import blob
from ckptkit.quant.schemes.w4a16 import int4_scheme
from ckptkit.storage import buffers
from ckptkit.storage import read as raw
from ckptkit.transfer import copy as copying
from ckptkit.transfer.files import FilesWriter

EMBEDDING = "embedding.word_embeddings.weight"


@pytest.fixture
def in_pieces(monkeypatch):
    """Streams every tensor and chunk in small pieces. Returns the file and the tensor's start for each piece read."""
    read = []
    extent_read = raw.FileExtent.read

    def watched(self, reader, start, nbytes):
        read.append((self.path.name, self.offset))
        return extent_read(self, reader, start, nbytes)

    sizes = ((copying, "BATCH", 0), (buffers, "BUFFER", 8192), (raw, "BUFFER", 8192), (raw, "ARENA", 3 * 4096))
    for module, name, size in (*sizes, (blob, "AT_ONCE", 0)):
        monkeypatch.setattr(module, name, size)
    monkeypatch.setattr(raw.FileExtent, "read", watched)
    return read


def module_of(name):
    return name.split(".")[-2]


@pytest.mark.parametrize(
    ("verb", "name"), [("to Megatron", "qwen3_moe"), ("to HF", "qwen2-tied"), ("to INT4", "qwen3_moe")]
)
def test_the_same_bytes(request, releases, converted, tmp_path, verb, name):
    def run(out):
        if verb == "to INT4":
            quantize(releases(name), out, int4_scheme(group_size=32))
        else:
            convert((releases if verb == "to Megatron" else converted)(name), out)

    run(tmp_path / "whole")
    read = request.getfixturevalue("in_pieces")
    run(tmp_path / "pieces")
    assert content(tmp_path / "pieces") == content(tmp_path / "whole")
    # Some tensors are larger than a piece.
    assert len(read) > len(set(read)) > 10


def test_what_is_streamed_is_not_read_as_a_tensor(releases, in_pieces, tmp_path, monkeypatch):
    names = []
    read = Shard.read
    monkeypatch.setattr(Shard, "read", lambda self, name, *reader: (names.append(name), read(self, name, *reader))[1])
    convert(releases("qwen2-untied"), tmp_path / "out")
    assert {*map(module_of, names)} == {"q_proj", "k_proj", "v_proj"}


@pytest.fixture
def held(monkeypatch):
    """The tensors of a Megatron checkpoint that are read as such."""
    names = []
    read = TorchDistCheckpoint.read
    monkeypatch.setattr(
        TorchDistCheckpoint,
        "read",
        lambda self, wanted, *reader: (names.extend(wanted), read(self, wanted, *reader))[1],
    )
    return names


def test_gate_and_up_come_back_one_after_the_other(releases, in_pieces, held, tmp_path, monkeypatch):
    monkeypatch.setattr(rank_cuts, "_SMALLEST", 1)
    convert(releases("qwen2-untied"), tmp_path / "in chunks")
    for size in (0, 1 << 20):  # chunks piece by piece, and each as a whole
        monkeypatch.setattr(blob, "AT_ONCE", size)
        del in_pieces[:], held[:]
        convert(tmp_path / "in chunks", tmp_path / f"out {size}")
        assert models.unequal(tmp_path / f"out {size}", releases("qwen2-untied")) == []
        # Merged by rows in turn, and cut by columns.
        assert {*map(module_of, held)} == {"linear_qkv", "linear_proj", "linear_fc2"}
        assert bool(in_pieces) == (size == 0)


def test_gate_and_up_in_one_chunk_are_read_once(converted, in_pieces, held, tmp_path):
    convert(converted("qwen2-untied"), tmp_path / "out")
    assert "decoder.layers.3.mlp.linear_fc1.weight" in held
    assert "decoder.layers.3.mlp.linear_fc2.weight" not in held


@pytest.mark.parametrize(
    ("size", "what"), [(0, "the bytes of model.embed_tokens.weight"), (1 << 20, r"\.distcp at byte \d+: its bytes")]
)
@pytest.mark.usefixtures("in_pieces")
def test_a_checksum_that_does_not_hold(converted, copy_of, tmp_path, monkeypatch, size, what):
    path = copy_of(converted("qwen2-untied"))
    (extent,) = extents(path, EMBEDDING)
    flip(extent.path, extent.offset + extent.nbytes // 2)
    monkeypatch.setattr(blob, "AT_ONCE", size)
    refusal(what, convert, path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def padded(converted, tmp_path):
    """A checkpoint whose embedding has 200 rows more than the vocabulary, as Megatron pads it."""
    source = TorchDistCheckpoint(converted("qwen2-untied") / "release")
    tensors = source.read(list(source.specs))
    tensors[EMBEDDING] = torch.nn.functional.pad(tensors[EMBEDDING], (0, 0, 0, 200), value=1)
    model = models.InMemory(source.config, tensors)
    shutil.copytree(converted("qwen2-untied") / "hf", tmp_path / "padded" / "hf")
    copying.copy(model, FilesWriter(tmp_path / "padded", TorchDistFiles(model.specs, source.args)), "writing")
    return tmp_path / "padded"


@pytest.mark.usefixtures("in_pieces")
def test_a_padded_vocabulary(padded, releases, held, tmp_path, monkeypatch):
    expected = models.tensors(releases("qwen2-untied"))
    for size in (0, 1 << 20):
        monkeypatch.setattr(blob, "AT_ONCE", size)
        del held[:]
        convert(padded, tmp_path / f"out {size}")
        found = models.tensors(tmp_path / f"out {size}")
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert held
        assert EMBEDDING not in held
    # A checksum is of the padding too.
    monkeypatch.setattr(blob, "AT_ONCE", 0)
    (extent,) = extents(padded, EMBEDDING)
    flip(extent.path, extent.offset + extent.nbytes - 1)
    refusal("model.embed_tokens.weight", convert, padded, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def extents(path, name):
    """Where the bytes of a tensor stand that is read piece by piece."""
    found = list(TorchDistCheckpoint(path / "release").extents(name) or ())
    assert all(isinstance(extent, raw.FileExtent) for extent in found)
    return found


def test_bytes_that_do_not_lie_end_to_end_are_not_streamed():
    """The first of two tensors is padded on disk. Put together, its padding would stand between them."""

    def place(name, *sizes):
        return [raw.FileExtent(Path(name), 100 * index, size) for index, size in enumerate(sizes)]

    places = {"a": place("a", 8, 4), "b": place("b", 16), "c": place("c", 8, 8)}
    specs = {
        name: TensorSpec(name, (nbytes,), "uint8")
        for name, nbytes in {"a": 8, "b": 16, "c": 16, "ab": 24, "cb": 32, "1": 8, "2": 8}.items()
    }
    known = {
        "byte_ranges": staticmethod(list),
        "is_streamable": staticmethod(lambda name: True),
        "extents": staticmethod(places.get),
    }
    source = type("Source", (SimpleNamespace,), known)(
        config={}, specs=specs, groups=[(name,) for name in places], read=None
    )

    def extents(inputs, outputs, wanted):
        step = Step(inputs, tuple(specs[name] for name in outputs), list, "", is_byte_copy=True)
        found = View(source, Plan((step,), inputs)).extents(wanted)
        return None if found is None else list(found)

    assert extents(("c", "b"), ("cb",), "cb") == places["c"] + places["b"]
    assert extents(("a", "b"), ("ab",), "ab") is None
    # Alone, what goes on behind its end is left to the reader.
    assert extents(("a",), ("1",), "1") == places["a"][:1]
    assert extents(("b",), ("1",), "1") == places["b"]
    # Of two that were one, the second must begin where an extent does.
    assert extents(("c",), ("1", "2"), "2") == places["c"][1:]
    assert extents(("b",), ("1", "2"), "2") is None

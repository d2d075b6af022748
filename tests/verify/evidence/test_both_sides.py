"""Both sides in one pass: tensors that come by in pieces are measured and compared as those read as a whole."""

import shutil

import pytest

from ckptkit.converters.open import open_checkpoint
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.verify.evidence import both_sides
from ckptkit.verify.evidence.both_sides import BothSides, TensorPair
from ckptkit.verify.evidence.extremes import extremes
from ckptkit.verify.evidence.reading import as_hf_view

NAME = "model.embed_tokens.weight"


@pytest.fixture
def pieces(monkeypatch):
    """Every matrix is so large that it is read in pieces, of a few rows."""
    monkeypatch.setattr(both_sides, "ARENA", 0)
    monkeypatch.setattr("ckptkit.verify.evidence.extremes._PIECE_BYTES", 1024)
    monkeypatch.setattr(both_sides, "BUFFER", 2048)


def one(sides, unreadable=None):
    (found,) = sides.read([NAME], unreadable)
    return found


@pytest.mark.usefixtures("pieces")
def test_pieces_are_measured_as_the_whole(releases, converted):
    hf, path = HfCheckpoint(releases("qwen3_moe")), converted("qwen3_moe")
    megatron = as_hf_view(open_checkpoint(path), path, hf.specs)
    expected = extremes(hf.read([NAME])[NAME])
    assert one(BothSides(megatron, hf)) == TensorPair(NAME, expected, is_equal=True)
    assert one(BothSides(hf, None)) == TensorPair(NAME, expected)
    assert BothSides(megatron, hf).largest([(NAME,)]) == 0


@pytest.mark.usefixtures("pieces")
def test_the_last_piece_differs_or_is_not_there(releases, tmp_path):
    source = HfCheckpoint(releases("qwen3_moe"))
    shutil.copytree(source.root, tmp_path / "there")
    there = HfCheckpoint(tmp_path / "there")
    (extent,) = there.extents(NAME) or ()
    with extent.path.open("r+b") as file:
        file.seek(there._shard_of[NAME].offsets[NAME] + extent.nbytes - 1)
        file.write(b"\x11")
    found = one(BothSides(there, source))
    assert not found.is_equal
    assert found.a is not None
    assert found.b is not None
    assert found.stats == extremes(there.read([NAME])[NAME])
    extent.path.write_bytes(extent.path.read_bytes()[: there._shard_of[NAME].offsets[NAME] + 1])
    unreadable = {}
    assert list(BothSides(there, source).read([NAME], unreadable)) == []
    assert "ends before its" in unreadable[NAME]

"""Tensors in torch.save's format: read by torch itself, of the size that was promised, and by ckptkit's own reader."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import pytest
import torch

from ckptkit.core.dtypes import STORAGE_CLASS, dtype_name, torch_dtype
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.torch_dist.writer import TorchDistFiles
from ckptkit.formats.torch_save.blob import Blob
from ckptkit.formats.torch_save.saved_tensor import SavedLayout
from ckptkit.storage.buffers import bytes_of
from ckptkit.storage.write import Regions, WrittenFile

SHAPES = [(3, 4), (1, 2, 5), (7,), (), (0, 4), (1000, 33)]


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Values that differ from one another, as far as the dtype has so many."""
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def written(path: Path, tensor: torch.Tensor, offset: int = 0) -> SavedLayout:
    """Writes it to `offset` of a new file."""
    saved = SavedLayout.of(tuple(tensor.shape), dtype_name(tensor.dtype))
    file = WrittenFile(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644), offset + saved.size, Regions())
    content = bytes_of(tensor.contiguous())
    saved.write(file, offset, lambda begin, end: content[begin:end])
    file.close()
    return saved


@pytest.mark.parametrize("dtype", STORAGE_CLASS)
@pytest.mark.parametrize("shape", SHAPES)
def test_torch_and_ckptkit_read_it(tmp_path: Path, shape: tuple[int, ...], dtype: str) -> None:
    tensor = numbers(shape, torch_dtype(dtype))
    saved = written(tmp_path / "x", tensor, 1000)
    assert (tmp_path / "x").stat().st_size == 1000 + saved.size
    content = (tmp_path / "x").read_bytes()[1000:]
    found = torch.load(io.BytesIO(content), weights_only=True)
    assert found.dtype == tensor.dtype
    assert found.stride() == tensor.stride()
    assert torch.equal(found, tensor)
    assert torch.equal(Blob(tmp_path / "x", 1000, saved.size).tensor(dtype, shape), tensor)


def test_torch_maps_it_into_memory(tmp_path: Path) -> None:
    tensor = numbers((64, 64), torch.bfloat16)
    written(tmp_path / "x.pt", tensor)
    assert torch.equal(torch.load(tmp_path / "x.pt", mmap=True, weights_only=True), tensor)


def test_a_zip_whose_checksums_hold_and_whose_data_is_aligned(tmp_path: Path) -> None:
    tensor = numbers((3, 5), torch.float32)
    saved = written(tmp_path / "x", tensor)
    with zipfile.ZipFile(tmp_path / "x") as archive:
        assert archive.testzip() is None
        assert archive.namelist() == ["archive/data.pkl", "archive/byteorder", "archive/version", "archive/data/0"]
        assert archive.read("archive/data/0") == tensor.numpy().tobytes()
        assert archive.read("archive/version") == b"3\n"
    assert saved.data.begin % 64 == 0
    assert (tmp_path / "x").read_bytes()[saved.data.begin :][:60] == tensor.numpy().tobytes()


def test_the_pickle_is_what_torch_writes(tmp_path: Path) -> None:
    tensor = numbers((2, 3, 4), torch.bfloat16)
    saved = written(tmp_path / "ours", tensor)
    torch.save(tensor, tmp_path / "archive.pt")
    with zipfile.ZipFile(tmp_path / "archive.pt") as theirs, zipfile.ZipFile(tmp_path / "ours") as ours:
        assert theirs.read("archive/data.pkl") == ours.read("archive/data.pkl")
    assert saved.size == (tmp_path / "ours").stat().st_size


def test_a_tensor_beyond_4_gib(tmp_path: Path) -> None:
    shape = (5 << 30,)
    saved = SavedLayout.of(shape, "uint8")
    descriptor = os.open(tmp_path / "x", os.O_CREAT | os.O_WRONLY, 0o644)
    # The data stays a hole in the file: reading 5 GB to check their sum would take long, and so is not asked for.
    for content, offset in ((saved.header(0), 0), (saved.trailer(0), saved.data.end)):
        os.pwrite(descriptor, content, offset)
    os.close(descriptor)
    found = torch.load(tmp_path / "x", mmap=True, weights_only=True)
    assert found.shape == shape
    assert (int(found[0]), int(found[-1])) == (0, 0)
    (entry,) = [entry for name, entry in Blob(tmp_path / "x", 0, saved.size).entries().items() if name == "data/0"]
    assert entry.file_size == 5 << 30


def test_a_dtype_without_a_storage_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CkptkitError, match="output_layer.weight .* has a dtype that no Megatron checkpoint holds"):
        TorchDistFiles({"output_layer.weight": TensorSpec("output_layer.weight", (2, 2), "float8_e4m3fn")}, {})

"""Files of torch.save: ours are read by torch itself, and its own one tensor at a time, with nothing run."""

import errno
import io
import os
import pickle
import re
import struct
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.messages import refusal
from torch import nn

from ckptkit.core.dtypes import STORAGE_CLASS, dtype_name, torch_dtype
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.torch_dist.writer import TorchDistFiles
from ckptkit.formats.torch_save import blob, saved_file
from ckptkit.formats.torch_save.blob import Blob
from ckptkit.formats.torch_save.saved_file import SavedFile
from ckptkit.formats.torch_save.saved_tensor import SavedLayout
from ckptkit.storage.buffers import bytes_of
from ckptkit.storage.write import Regions, WrittenFile

BUFFER = torch.arange(3000, dtype=torch.float32)


def save(path, content):
    torch.save(content, path)
    return path


def read(path, name):
    file = SavedFile(path)
    return file.read(file.tensor(file.content[name], name))


TENSORS = {
    "plain": torch.arange(24, dtype=torch.bfloat16).reshape(4, 6),
    "transposed": torch.arange(24, dtype=torch.float16).reshape(4, 6).t(),
    "part": BUFFER[100:124].view(4, 6),
    "strided": BUFFER[100:148].view(8, 6)[::2, 1:3],
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
    "parameter": nn.Parameter(torch.arange(6.0)),
    "buffer": BUFFER,
}


def test_tensors_are_what_torch_reads(tmp_path):
    path = save(tmp_path / "x.pt", TENSORS)
    expected = torch.load(path)
    for name in TENSORS:
        found = read(path, name)
        assert found.is_contiguous()
        assert found.dtype == expected[name].dtype
        assert torch.equal(found, expected[name]), name


def test_of_a_large_buffer_only_the_tensors_part_is_held(tmp_path, monkeypatch):
    path = save(tmp_path / "x.pt", {"first": BUFFER[:10], "second": BUFFER[10:30]})
    monkeypatch.setattr(saved_file, "_PIECE", 512)
    read_into, sizes = Blob.read_into, []

    def seen(self, info, buffer, start=0):
        if "/data/" in info.filename:
            sizes.append(buffer.nbytes)
        read_into(self, info, buffer, start)

    monkeypatch.setattr(Blob, "read_into", seen)
    file = SavedFile(path)
    assert torch.equal(file.read(file.tensor(file.content["first"], "first")), BUFFER[:10])
    assert (max(sizes), sum(sizes)) == (512, 3000 * 4 + 40)
    sizes.clear()
    assert torch.equal(file.read(file.tensor(file.content["second"], "second")), BUFFER[10:30])
    # The checksum of the buffer is known by now.
    assert sizes == [80]


def test_a_flipped_bit_is_found(tmp_path):
    path = save(tmp_path / "x.pt", {"part": BUFFER[:10], "whole": BUFFER})
    content = bytearray(path.read_bytes())
    content[content.index(BUFFER[1000:1010].numpy().tobytes())] ^= 1
    path.write_bytes(content)
    for name in ("part", "whole"):
        refusal("match", read, path, name)


def test_a_file_that_is_cut_short_is_no_zip_and_torchs_old_format_is_named(tmp_path):
    path = save(tmp_path / "x.pt", {"it": BUFFER})
    path.write_bytes(path.read_bytes()[:-100])
    refusal("missing or damaged", read, path, "it")
    refusal("No such file", SavedFile, tmp_path / "y.pt")
    torch.save({"it": BUFFER}, path, _use_new_zipfile_serialization=False)
    refusal("1.6", SavedFile, path)


def test_whichever_read_fails_the_file_is_named(tmp_path, monkeypatch):
    path = save(tmp_path / "x.pt", {"it": 1})
    file, read_into = SavedFile(path), blob.read_into
    assert file.content == {"it": 1}
    for good in range(6):
        file.forget()
        reads = iter([read_into] * good)

        def failing(*arguments, reads=reads):
            if (read := next(reads, None)) is None:
                raise OSError(errno.EIO, "Input/output error")
            return read(*arguments)

        monkeypatch.setattr(blob, "read_into", failing)
        with pytest.raises(CkptkitError, match=f"^{re.escape(str(path))} at byte 0: .*Input/output error"):
            file.content  # noqa: B018 - a cached property that raises


class Rebuilt:
    """Pickles as a tensor with arguments of our choice."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return torch._utils._rebuild_tensor_v2, self.arguments


class Storage:
    """Pickles as storage 0 of bf16 numbers."""


class Pickler(pickle.Pickler):
    def persistent_id(self, value):
        return ("storage", torch.BFloat16Storage, "0", "cpu", 12) if isinstance(value, Storage) else None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((Storage(), 0, (13,), (1,), False, {}), "bytes"),
        ((Storage(), 6, (7,), (1,), False, {}), "bytes"),
        ((Storage(), 0, (2, 2), (12, 1), False, {}), "bytes"),
        ((Storage(), 0, (1 << 50,), (0,), False, {}), "bytes"),
        ((Storage(), -1, (2,), (1,), False, {}), "shape"),
        ((Storage(), 0, (2,), (1, 1), False, {}), "shape"),
        ((Storage(), 0, ("2",), (1,), False, {}), "shape"),
        (("no storage", 0, (2,), (1,), False, {}), "shape"),
    ],
)
def test_descriptions_that_reach_beyond_the_file(tmp_path, arguments, said):
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive, archive.open("x/data.pkl", "w") as stream:
        Pickler(stream, 2).dump({"it": Rebuilt(*arguments)})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x/data/0", bytes(24))
    refusal(said, read, path, "it")


def numbers(shape, dtype):
    """Values that differ from one another, as far as the dtype has so many."""
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def written(path, tensor, offset=0):
    saved = SavedLayout.of(tuple(tensor.shape), dtype_name(tensor.dtype))
    file = WrittenFile(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644), offset + saved.size, Regions())
    content = bytes_of(tensor.contiguous())
    saved.write(file, offset, lambda begin, end: content[begin:end])
    file.close()
    return saved


@pytest.mark.parametrize("dtype", STORAGE_CLASS)
def test_torch_and_ckptkit_read_it(tmp_path, dtype):
    for number, shape in enumerate([(3, 4), (1, 2, 5), (7,), (), (0, 4), (1000, 33)]):
        tensor, path = numbers(shape, torch_dtype(dtype)), tmp_path / f"{number}"
        saved = written(path, tensor, 1000)
        assert path.stat().st_size == 1000 + saved.size
        found = torch.load(io.BytesIO(path.read_bytes()[1000:]), weights_only=True)
        assert (found.dtype, found.stride()) == (tensor.dtype, tensor.stride())
        assert torch.equal(found, tensor)
        assert torch.equal(Blob(path, 1000, saved.size).tensor(dtype, shape), tensor)


def test_a_zip_whose_checksums_hold_whose_data_is_aligned_and_whose_pickle_is_torchs(tmp_path):
    tensor = numbers((3, 5), torch.float32)
    saved = written(tmp_path / "x", tensor)
    torch.save(tensor, tmp_path / "archive.pt")
    assert saved.size == (tmp_path / "x").stat().st_size
    with zipfile.ZipFile(tmp_path / "x") as archive, zipfile.ZipFile(tmp_path / "archive.pt") as theirs:
        assert archive.testzip() is None
        assert archive.namelist() == ["archive/data.pkl", "archive/byteorder", "archive/version", "archive/data/0"]
        assert archive.read("archive/data/0") == tensor.numpy().tobytes()
        for name in ("archive/data.pkl", "archive/version"):
            assert archive.read(name) == theirs.read(name)
    assert saved.data.begin % 64 == 0
    assert (tmp_path / "x").read_bytes()[saved.data.begin :][:60] == tensor.numpy().tobytes()


def test_a_tensor_beyond_4_gib(tmp_path):
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


def test_a_dtype_without_a_storage_class_is_refused(tmp_path):
    with pytest.raises(CkptkitError, match="output_layer.weight.*Megatron"):
        TorchDistFiles({"output_layer.weight": TensorSpec("output_layer.weight", (2, 2), "float8_e4m3fn")}, {})


_OURS, _THEIRS = {"a": 1}, {"b": 2}
_END, _LOCATOR, _END_64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sLQL"), struct.Struct("<4sQ2H2L4Q")


def _saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _by_torch(content):
    try:
        return torch.load(io.BytesIO(content), weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, OSError, ValueError, EOFError, KeyError):
        return None


def _by_ckptkit(content):
    return Blob(Path("saved.pt"), 0, len(content), memoryview(content)).object()


def _zipped(*entries):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, value in entries:
            archive.writestr(name, pickle.dumps(value, 2))
        archive.writestr("x/version", "3\n")
    return file.getvalue()


def _called_otherwise(name, other):
    """An entry with a Unicode path field, by which zipfile names it, and miniz does not."""
    path = b"\1" + struct.pack("<L", zlib.crc32(name.encode())) + other.encode()
    info = zipfile.ZipInfo(name)
    info.extra = struct.pack("<HH", 0x7075, len(path)) + path
    return info


def _two_directories(chosen):
    """Two saves in one file, each with a ZIP64 record; the locator names the `chosen` one, zipfile takes the last."""
    first, last = _saved(_THEIRS), _saved(_OURS)
    parts = [(content, content.rfind(b"PK\6\6")) for content in (first, last)]
    heads = [_END_64.unpack_from(content, at)[-1] for content, at in parts]
    body = b"".join(content[:head] for (content, _), head in zip(parts, heads, strict=True))
    places = []
    # The save whose entries begin the file keeps its offsets; the other's are moved.
    for (content, at), head, moved in zip(parts, heads, (0, heads[0]), strict=True):
        directory, begin = bytearray(content[head:at]), len(body)
        entry = 0
        while entry < len(directory):
            lengths = struct.unpack_from("<3H", directory, entry + 28)
            struct.pack_into("<L", directory, entry + 42, struct.unpack_from("<L", directory, entry + 42)[0] + moved)
            entry += 46 + sum(lengths)
        record = list(_END_64.unpack_from(content, at))
        places.append(begin + len(directory))
        body += bytes(directory) + _END_64.pack(*record[:-1], begin)
    return body + _LOCATOR.pack(b"PK\6\7", 0, places[chosen], 1) + last[-_END.size :]


_DIFFERENT = {
    "the locator names another record": lambda: _two_directories(0),
    "names differ in case": lambda: _zipped(("x/DATA.PKL", _THEIRS), ("x/data.pkl", _OURS)),
    "a Unicode path": lambda: _zipped(
        (_called_otherwise("x/data.pkl", "x/no"), _THEIRS), (_called_otherwise("x/no", "x/data.pkl"), _OURS)
    ),
}


@pytest.mark.parametrize("make", _DIFFERENT.values(), ids=_DIFFERENT)
def test_a_file_in_which_torch_reads_another_pickle_is_refused(make):
    content = make()
    assert _by_torch(content) == _THEIRS
    message = "differently|fields that torch|contradict each other|two zip entries"
    with pytest.raises(CkptkitError, match=f"{message}|Corrupt zip64"):  # of zipfile itself, since Python 3.12.3
        _by_ckptkit(content)


_BASES = [
    _two_directories(0),
    _two_directories(1),
    _saved(_OURS),
    _zipped(("x/data.pkl", _OURS), ("x/data.pkk", _THEIRS)),
]


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(
    st.sampled_from(_BASES),
    st.lists(st.tuples(st.integers(0, 700), st.sampled_from([0, 1, 2, 8, 32, 64, 98, 107, 128, 255])), max_size=3),
    st.sampled_from([b"", b"", b"\0", b"PK\5\6" + bytes(18)]),
)
def test_what_is_accepted_is_what_torch_reads(content, edits, behind):
    changed = bytearray(content)
    for back, value in edits:
        changed[-1 - back % len(changed)] = value
    try:
        found = _by_ckptkit(bytes(changed) + behind)
    except CkptkitError:
        return
    assert _by_torch(bytes(changed) + behind) in (found, None)


def test_a_file_of_torch_is_accepted_and_one_with_something_behind_it_is_not():
    assert _by_ckptkit(_saved(_OURS)) == _OURS
    refusal("other bytes follow", _by_ckptkit, _saved(_OURS) + b"\0")

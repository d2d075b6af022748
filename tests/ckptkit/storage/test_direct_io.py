"""Bytes are read and written as they are, past the page cache or through it, in no more memory than a reader has."""

import errno
import os

import pytest
import safetensors.torch
import torch

from ckptkit.core.extents import ByteRange
from ckptkit.core.plan import Plan, Step, View
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.storage import read as raw
from ckptkit.storage.buffers import bytes_of, cuts
from ckptkit.storage.read import FileExtent, FileReader, read_into, read_new
from ckptkit.storage.write import Regions, WrittenFile

MIB = 1 << 20
# Beginnings and lengths that fit blocks of 4096 bytes, and that do not.
RANGES = [
    (0, 3 * MIB),
    (1, 3 * MIB),
    (4095, 3 * MIB + 2),
    (4096, 9 * MIB + 4095),
    (12345, 17 * MIB + 1),
    (77, 1000),
    (0, 0),
]


def numbers(count, seed=0):
    return (
        torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)).numpy().tobytes()
    )


def opened(path, size):
    return WrittenFile(os.open(path, os.O_CREAT | os.O_RDWR, 0o644), size, Regions())


@pytest.fixture(params=["past the cache", "refused when opened", "refused when used"])
def file_system(request, monkeypatch):
    """This machine's own, and two that have no way past the page cache."""
    open_, pwrite, preadv = os.open, os.pwrite, os.preadv
    direct = set()

    def watched(path, flags, mode=0o777):
        if flags & os.O_DIRECT and request.param == "refused when opened":
            raise OSError(errno.EINVAL, "Invalid argument")
        descriptor = open_(path, flags, mode)
        (direct.add if flags & os.O_DIRECT else direct.discard)(descriptor)
        return descriptor

    def refuse(descriptor):
        if descriptor in direct and request.param == "refused when used":
            raise OSError(errno.EINVAL, "Invalid argument")

    def writes(descriptor, content, offset):
        refuse(descriptor)
        return pwrite(descriptor, content, offset)

    def reads(descriptor, buffers, offset, flags=0):
        refuse(descriptor)
        return preadv(descriptor, buffers, offset, flags)

    monkeypatch.setattr(os, "open", watched)
    monkeypatch.setattr(os, "pwrite", writes)
    monkeypatch.setattr(os, "preadv", reads)
    return str(request.param)


def test_written_bytes_are_in_the_file(file_system, tmp_path):
    for offset, length in RANGES:
        content = numbers(length)
        file = opened(tmp_path / f"{offset}-{length}", offset + length + 10)
        file.write(content, offset)
        file.close()
        assert (tmp_path / f"{offset}-{length}").read_bytes() == bytes(offset) + content + bytes(10)


@pytest.mark.parametrize("cached", [True, False])
def test_every_way_to_read_gives_the_bytes_of_the_file(file_system, tmp_path, cached):
    path = tmp_path / "x"
    for offset, length in RANGES:
        content = numbers(offset + length + 5000)
        path.write_bytes(content)
        if not cached:
            forget(path)
        buffer, wanted = bytearray(length), ByteRange(path, offset, offset + length)
        assert read_into(path, memoryview(buffer), offset) == length
        expected = content[offset : offset + length]
        assert buffer == FileReader().read(wanted) == bytes_of(read_new(wanted)) == expected
        # Beyond the end, what is there.
        beyond = bytearray(2 * len(content))
        assert read_into(path, memoryview(beyond), 100) == len(content) - 100
        assert beyond[: len(content) - 100] == content[100:]
        assert bytes_of(read_new(ByteRange(path, 100, 2 * len(content)))) == content[100:]


def forget(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def test_cuts_tile_and_keep_blocks_whole():
    for offset, nbytes in ((0, 0), (0, 1), (5, 100 * MIB), (raw.BUFFER, 3 * raw.BUFFER), (raw.BUFFER - 1, 2)):
        found = list(cuts(offset, nbytes))
        assert [begin for begin, _ in found] == [0, *(end for _, end in found)][: len(found)]
        assert (found[-1][1] if found else 0) == nbytes
        assert all(0 < end - begin <= raw.BUFFER for begin, end in found)
        assert all((offset + end) % raw.BUFFER == 0 for _, end in found[:-1])


@pytest.fixture
def file(tmp_path):
    (tmp_path / "x").write_bytes(numbers(10 * MIB + 77))
    return tmp_path / "x"


@pytest.fixture
def requests(monkeypatch):
    found = []
    preadv = os.preadv

    def watched(descriptor, buffers, offset):
        found.append(sum(map(len, buffers)))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", watched)
    return found


def loaded(reader, path, begin, end):
    found = reader.loaded(ByteRange(path, begin, end))
    return None if found is None else bytes(bytes_of(found))


def test_load_of_ranges_that_touch_is_one_request(file, requests):
    content, reader = file.read_bytes(), FileReader()
    ranges = [
        ByteRange(file, *edges)
        for edges in ((5000, 2 * MIB), (2 * MIB, 4 * MIB + 1), (9 * MIB, 10 * MIB + 77), (100, 200))
    ]
    reader.load(ranges)
    # And one behind the end of the file, where that is in the page cache, to find that it is the end.
    assert requests[:2] == [4 * MIB + 4096, MIB + 4096]
    assert len(requests) <= 3
    del requests[:]
    for path, begin, end in ranges:
        assert loaded(reader, path, begin, end) == content[begin:end]
    assert loaded(reader, file, 7 * MIB, 7 * MIB + 10) is None
    assert requests == []


def test_read_replaces_what_was_loaded(file, requests):
    content, reader = file.read_bytes(), FileReader()
    reader.load([ByteRange(file, 5000, 5010)])
    assert loaded(reader, file, 5000, 5010) == content[5000:5010]
    assert reader.read(ByteRange(file, 6 * MIB, 8 * MIB)) == content[6 * MIB : 8 * MIB]
    assert loaded(reader, file, 5000, 5010) is None
    assert len(requests) == 2


def test_large_ranges_are_read_in_requests_of_one_size(file, requests, monkeypatch):
    monkeypatch.setattr(raw, "BUFFER", 4 * MIB)
    FileReader().load([ByteRange(file, 0, 9 * MIB)])
    assert requests == [4718592, 4718592]
    del requests[:]
    FileReader().load([ByteRange(file, 0, 4 * MIB + 1)])
    assert requests == [4 * MIB + 4096]


def test_ranges_larger_than_the_memory_are_not_loaded_but_can_be_read(file, requests, monkeypatch):
    monkeypatch.setattr(raw, "ARENA", 2 * MIB)
    reader = FileReader()
    reader.load([ByteRange(file, 0, 100), ByteRange(file, MIB, 4 * MIB)])
    assert requests == []
    assert loaded(reader, file, 0, 100) is None
    assert reader.read(ByteRange(file, 77, 4 * MIB)) == file.read_bytes()[77 : 4 * MIB]


def test_unreadable_ranges_are_skipped_by_load_and_raised_by_read(file, tmp_path):
    reader, end = FileReader(), 10 * MIB + 77
    absent = ByteRange(tmp_path / "absent", 0, 100)
    reader.load([absent, ByteRange(file, 10 * MIB, 11 * MIB)])
    assert reader.loaded(absent) is None
    assert len(loaded(reader, file, 10 * MIB, end) or b"") == 77
    assert loaded(reader, file, 10 * MIB, end + 1) is None
    assert len(reader.read(ByteRange(file, 10 * MIB, end + 1))) == 77
    assert len(reader.read(ByteRange(file, 11 * MIB, 12 * MIB))) == 0
    with pytest.raises(OSError, match="early"):
        FileExtent(file, 10 * MIB, 78).read(reader, 0, 78)
    with pytest.raises(FileNotFoundError):
        reader.read(absent)


def test_neighbours_are_joined_without_a_copy_where_they_are_loaded(tmp_path):
    tensors = {
        name: torch.arange(12, dtype=torch.bfloat16).reshape(3, 4) + 100 * index for index, name in enumerate("abc")
    }
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    source = HfCheckpoint(tmp_path)
    reader = FileReader()

    def joined(*names):
        calls = []
        spec = TensorSpec("x", (3 * len(names), 4), "bfloat16")
        step = Step(names, (spec,), lambda parts: (calls.append(1), [torch.cat(list(parts))])[1], "", is_byte_copy=True)
        found = View(source, Plan((step,), names)).read(["x"], reader)["x"]
        assert torch.equal(found, torch.cat([tensors[name] for name in names]))
        return found, not calls

    assert [joined(*names)[1] for names in ("ab", "ba", "ac")] == [False] * 3
    reader.load(source.byte_ranges("abc"))
    assert [joined(*names)[1] for names in ("ab", "abc", "ba", "ac", "bc")] == [True, True, False, False, True]

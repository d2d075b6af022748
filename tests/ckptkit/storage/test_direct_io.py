"""Bytes are read and written as they are, past the page cache or through it, whatever stands beside them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ckptkit.core.extents import ByteRange
from ckptkit.storage import read as raw
from ckptkit.storage.buffers import bytes_of, cuts
from ckptkit.storage.read import FileReader, read_into, read_new
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


def numbers(count: int, seed: int = 0) -> bytes:
    return (
        torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)).numpy().tobytes()
    )


def opened(path: Path, size: int) -> WrittenFile:
    return WrittenFile(os.open(path, os.O_CREAT | os.O_RDWR, 0o644), size, Regions())


@pytest.fixture(params=["past the cache", "refused when opened", "refused when used"])
def file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """This machine's own, and two that have no way past the page cache."""
    open_, pwrite, preadv = os.open, os.pwrite, os.preadv
    direct: set[int] = set()

    def watched(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT and request.param == "refused when opened":
            raise OSError(errno.EINVAL, "Invalid argument")
        descriptor = open_(path, flags, mode)
        (direct.add if flags & os.O_DIRECT else direct.discard)(descriptor)
        return descriptor

    def refuse(descriptor: int) -> None:
        if descriptor in direct and request.param == "refused when used":
            raise OSError(errno.EINVAL, "Invalid argument")

    def writes(descriptor: int, content: bytes, offset: int) -> int:
        refuse(descriptor)
        return pwrite(descriptor, content, offset)

    def reads(descriptor: int, buffers: Sequence[bytes], offset: int, flags: int = 0) -> int:
        refuse(descriptor)
        return preadv(descriptor, buffers, offset, flags)

    monkeypatch.setattr(os, "open", watched)
    monkeypatch.setattr(os, "pwrite", writes)
    monkeypatch.setattr(os, "preadv", reads)
    return str(request.param)


@pytest.mark.parametrize(("offset", "length"), RANGES)
def test_written_bytes_are_in_the_file(file_system: str, tmp_path: Path, offset: int, length: int) -> None:
    content = numbers(length)
    file = opened(tmp_path / "x", offset + length + 10)
    file.write(content, offset)
    file.close()
    assert (tmp_path / "x").read_bytes() == bytes(offset) + content + bytes(10)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(("offset", "length"), RANGES)
def test_every_way_to_read_gives_the_bytes_of_the_file(
    file_system: str, tmp_path: Path, offset: int, length: int, cached: bool
) -> None:
    content = numbers(offset + length + 5000)
    (tmp_path / "x").write_bytes(content)
    if not cached:
        forget(tmp_path / "x")
    buffer, wanted = bytearray(length), ByteRange(tmp_path / "x", offset, offset + length)
    assert read_into(tmp_path / "x", memoryview(buffer), offset) == length
    expected = content[offset : offset + length]
    assert buffer == FileReader().read(wanted) == bytes_of(read_new(wanted)) == expected


def forget(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


@pytest.mark.parametrize("length", [2 * MIB, 2 * MIB + 1, 9 * MIB + 4095])
@pytest.mark.parametrize("cached", [True, False])
def test_reading_beyond_the_end_gives_what_is_there(
    file_system: str, tmp_path: Path, length: int, cached: bool
) -> None:
    content = numbers(length)
    (tmp_path / "x").write_bytes(content)
    if not cached:
        forget(tmp_path / "x")
    buffer = bytearray(2 * length)
    assert read_into(tmp_path / "x", memoryview(buffer), 100) == length - 100
    assert buffer[: length - 100] == content[100:]
    assert bytes_of(read_new(ByteRange(tmp_path / "x", 100, 2 * length))) == content[100:]


def test_neighbours_written_by_threads_are_all_in_the_file(tmp_path: Path) -> None:
    sizes = [MIB + 4097 * index + 13 for index in range(24)]
    pieces = [numbers(size, seed) for seed, size in enumerate(sizes)]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    file = opened(tmp_path / "x", sum(sizes))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(file.write, pieces, starts))
    file.close()
    assert (tmp_path / "x").read_bytes() == b"".join(pieces)


def test_a_failing_disk_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = opened(tmp_path / "x", 4 * MIB)

    def full(descriptor: int, content: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        file.write(bytes(4 * MIB), 0)


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, 0), (0, 1), (5, 100 * MIB), (raw.BUFFER, 3 * raw.BUFFER), (raw.BUFFER - 1, 2)]
)
def test_cuts_tile_and_keep_blocks_whole(offset: int, nbytes: int) -> None:
    found = list(cuts(offset, nbytes))
    assert [begin for begin, _ in found] == [0, *(end for _, end in found)][: len(found)]
    assert (found[-1][1] if found else 0) == nbytes
    assert all(0 < end - begin <= raw.BUFFER for begin, end in found)
    assert all((offset + end) % raw.BUFFER == 0 for _, end in inner(found))


def inner(found: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    return list(found)[:-1]

"""A reader loads the bytes of the file, ranges that touch in one request, and never more than its memory holds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ckptkit.core.extents import ByteRange
from ckptkit.core.plan import Plan, Step, View
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.storage import read as raw
from ckptkit.storage.buffers import bytes_of
from ckptkit.storage.read import FileExtent, FileReader

MIB = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """10 MiB and a bit."""
    (tmp_path / "x").write_bytes(numbers(10 * MIB + 77))
    return tmp_path / "x"


def numbers(nbytes: int) -> bytes:
    return (
        torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).numpy().tobytes()
    )


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes were asked for, each time."""
    found: list[int] = []
    preadv = os.preadv

    def watched(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        found.append(sum(map(len, buffers)))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", watched)
    return found


def loaded(reader: FileReader, path: Path, begin: int, end: int) -> bytes | None:
    found = reader.loaded(ByteRange(path, begin, end))
    return None if found is None else bytes(bytes_of(found))


def test_load_of_ranges_that_touch_is_one_request(file: Path, requests: list[int]) -> None:
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


def test_read_replaces_what_was_loaded(file: Path, requests: list[int]) -> None:
    content, reader = file.read_bytes(), FileReader()
    reader.load([ByteRange(file, 5000, 5010)])
    assert loaded(reader, file, 5000, 5010) == content[5000:5010]
    assert reader.read(ByteRange(file, 6 * MIB, 8 * MIB)) == content[6 * MIB : 8 * MIB]
    assert loaded(reader, file, 5000, 5010) is None
    assert len(requests) == 2


def test_large_ranges_are_read_in_requests_of_one_size(
    file: Path, requests: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw, "BUFFER", 4 * MIB)
    FileReader().load([ByteRange(file, 0, 9 * MIB)])
    assert requests == [4718592, 4718592]
    del requests[:]
    FileReader().load([ByteRange(file, 0, 4 * MIB + 1)])
    assert requests == [4 * MIB + 4096]


def test_ranges_larger_than_the_memory_are_not_loaded_but_can_be_read(
    file: Path, requests: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw, "ARENA", 2 * MIB)
    reader = FileReader()
    reader.load([ByteRange(file, 0, 100), ByteRange(file, MIB, 4 * MIB)])
    assert requests == []
    assert loaded(reader, file, 0, 100) is None
    assert reader.read(ByteRange(file, 77, 4 * MIB)) == file.read_bytes()[77 : 4 * MIB]


def test_unreadable_ranges_are_skipped_by_load_and_raised_by_read(file: Path, tmp_path: Path) -> None:
    reader, end = FileReader(), 10 * MIB + 77
    absent = ByteRange(tmp_path / "absent", 0, 100)
    reader.load([absent, ByteRange(file, 10 * MIB, 11 * MIB)])
    assert reader.loaded(absent) is None
    assert len(loaded(reader, file, 10 * MIB, end) or b"") == 77
    assert loaded(reader, file, 10 * MIB, end + 1) is None
    assert len(reader.read(ByteRange(file, 10 * MIB, end + 1))) == 77
    assert len(reader.read(ByteRange(file, 11 * MIB, 12 * MIB))) == 0
    with pytest.raises(OSError, match="the file ends too early"):
        FileExtent(file, 10 * MIB, 78).read(reader, 0, 78)
    with pytest.raises(FileNotFoundError):
        reader.read(absent)


def test_neighbours_are_joined_without_a_copy_where_they_are_loaded(tmp_path: Path) -> None:
    """And are the same where they lie apart, or in another order."""
    tensors = {
        name: torch.arange(12, dtype=torch.bfloat16).reshape(3, 4) + 100 * index for index, name in enumerate("abc")
    }
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    source = HfCheckpoint(tmp_path)
    reader = FileReader()

    def joined(*names: str) -> tuple[torch.Tensor, bool]:
        calls: list[int] = []
        spec = TensorSpec("x", (3 * len(names), 4), "bfloat16")
        step = Step(names, (spec,), lambda parts: (calls.append(1), [torch.cat(list(parts))])[1], "", is_byte_copy=True)
        found = View(source, Plan((step,), names)).read(["x"], reader)["x"]
        assert torch.equal(found, torch.cat([tensors[name] for name in names]))
        return found, not calls

    assert [joined(*names)[1] for names in ("ab", "ba", "ac")] == [False] * 3
    reader.load(source.byte_ranges("abc"))
    assert [joined(*names)[1] for names in ("ab", "abc", "ba", "ac", "bc")] == [True, True, False, False, True]

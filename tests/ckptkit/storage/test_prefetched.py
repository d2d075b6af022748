"""Bytes that are read before they are asked for are those of the file, in one request where they touch, and never too many of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ckptkit.core.plan import Plan, Step, View
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.storage import read as raw
from ckptkit.storage.read import held, prefetched, read_into, view

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


def test_what_touches_is_one_request(file: Path, requests: list[int]) -> None:
    content = file.read_bytes()
    places = [(file, 5000, 2 * MIB), (file, 2 * MIB, 4 * MIB + 1), (file, 9 * MIB, 10 * MIB + 77), (file, 100, 200)]
    with prefetched(places):
        # And one behind the end of the file, where that is in the page cache, to find that it is the end.
        assert requests[:2] == [4 * MIB + 4096, MIB + 4096]
        assert len(requests) <= 3
        del requests[:]
        for path, begin, end in places:
            buffer = bytearray(end - begin)
            assert read_into(path, memoryview(buffer), begin) == end - begin
            assert buffer == view(path, begin, end - begin) == content[begin:end]
        assert requests == []
        # What is not there is read, and what is there stays.
        assert held(file, 7 * MIB, 10) is None
        assert view(file, 6 * MIB, 2 * MIB) == content[6 * MIB : 8 * MIB]
        assert view(file, 5000, 10) == content[5000:5010]
        assert len(requests) == 1
    assert held(file, 5000, 10) is None


def test_large_requests_are_of_about_one_size(file: Path, requests: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw, "BUFFER", 4 * MIB)
    with prefetched([(file, 0, 9 * MIB)]):
        assert requests == [4718592, 4718592]
    del requests[:]
    with prefetched([(file, 0, 4 * MIB + 1)]):
        assert requests == [4 * MIB + 4096]


def test_nothing_is_held_that_is_too_large(file: Path, requests: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw, "ARENA", 2 * MIB)
    with prefetched([(file, 0, 100), (file, MIB, 4 * MIB)]):
        assert requests == []
        assert held(file, 0, 100) is None


def test_a_file_that_is_not_there_or_too_short_is_told_where_it_is_read(file: Path, tmp_path: Path) -> None:
    with prefetched([(tmp_path / "absent", 0, 100), (file, 10 * MIB, 11 * MIB)]):
        assert held(file, 10 * MIB, 77) is not None
        assert held(file, 10 * MIB, 78) is None
        with pytest.raises(OSError, match="the file ends too early"):
            view(file, 10 * MIB, 78)
        with pytest.raises(FileNotFoundError):
            view(tmp_path / "absent", 0, 100)


def test_neighbours_are_put_together_without_a_copy(tmp_path: Path) -> None:
    """And are the same where they lie apart, or in another order."""
    tensors = {
        name: torch.arange(12, dtype=torch.bfloat16).reshape(3, 4) + 100 * index for index, name in enumerate("abc")
    }
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    source = HfCheckpoint(tmp_path)

    def joined(*names: str) -> tuple[torch.Tensor, bool]:
        calls: list[int] = []
        spec = TensorSpec("x", (3 * len(names), 4), "bfloat16")
        step = Step(names, (spec,), lambda parts: (calls.append(1), [torch.cat(list(parts))])[1], "", passes=True)
        found = View(source, Plan((step,), names)).read(["x"])["x"]
        assert torch.equal(found, torch.cat([tensors[name] for name in names]))
        return found, not calls

    assert [joined(*names)[1] for names in ("ab", "ba", "ac")] == [False] * 3
    with prefetched(source.places("abc")):
        assert [joined(*names)[1] for names in ("ab", "abc", "ba", "ac", "bc")] == [True, True, False, False, True]

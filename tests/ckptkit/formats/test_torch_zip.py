"""A torch.save file in which torch's own reader would find another pickle than ckptkit does is refused."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.torch_save.blob import Blob

_OURS, _THEIRS = {"a": 1}, {"b": 2}
_END, _LOCATOR, _END_64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sLQL"), struct.Struct("<4sQ2H2L4Q")


def _saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _by_torch(content: bytes) -> Any:
    """What torch.load reads; None where it refuses."""
    try:
        return torch.load(io.BytesIO(content), weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, OSError, ValueError, EOFError, KeyError):
        return None


def _by_ckptkit(content: bytes) -> Any:
    return Blob(Path("saved.pt"), 0, len(content), memoryview(content)).object()


def _zipped(*entries: tuple[str | zipfile.ZipInfo, object]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, value in entries:
            archive.writestr(name, pickle.dumps(value, 2))
        archive.writestr("x/version", "3\n")
    return file.getvalue()


def _called_otherwise(name: str, other: str) -> zipfile.ZipInfo:
    """An entry with a Unicode path field, by which zipfile names it, and miniz does not."""
    path = b"\1" + struct.pack("<L", zlib.crc32(name.encode())) + other.encode()
    info = zipfile.ZipInfo(name)
    info.extra = struct.pack("<HH", 0x7075, len(path)) + path
    return info


def _two_directories(chosen: int) -> bytes:
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
def test_a_file_in_which_torch_reads_another_pickle_is_refused(make: Callable[[], bytes]) -> None:
    content = make()
    assert _by_torch(content) == _THEIRS
    said = "readers take differently|fields that torch|contradict each other|two entries have one name"
    said += "|Corrupt zip64"  # of zipfile itself, since Python 3.12.3
    with pytest.raises(CkptkitError, match=said):
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
def test_what_is_accepted_is_what_torch_reads(content: bytes, edits: list[tuple[int, int]], behind: bytes) -> None:
    changed = bytearray(content)
    for back, value in edits:
        changed[-1 - back % len(changed)] = value
    try:
        found = _by_ckptkit(bytes(changed) + behind)
    except CkptkitError:
        return
    assert _by_torch(bytes(changed) + behind) in (found, None)


def test_a_file_of_torch_is_accepted_and_one_with_something_behind_it_is_not() -> None:
    assert _by_ckptkit(_saved(_OURS)) == _OURS
    with pytest.raises(CkptkitError, match="something follows them"):
        _by_ckptkit(_saved(_OURS) + b"\0")

"""Tells whether every reader of a zip would find the same entries in it.

A zip says several times where its directory is and what its entries are called, and readers believe different ones:
Python's zipfile and the miniz in torch then unpickle different bytes. What torch.save writes says the same everywhere.

Source: APPNOTE.TXT of PKWARE, sections 4.3.14 to 4.3.16, 4.4.11 and 4.5.3.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from operator import attrgetter
from zipfile import ZIP_STORED, ZipInfo

LOCAL_HEADER = 30  # bytes at the least
_END, _LOCATOR, _END_64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sLQL"), struct.Struct("<4sQ2H2L4Q")
END_BYTES = _END.size + _LOCATOR.size + _END_64.size
_IS_ZIP64 = b"\1\0"  # the extra field of an entry with sizes or an offset of 64 bits


def zip_problem(found: Sequence[ZipInfo], tail: bytes, length: int) -> str | None:
    """What keeps entries of a zip of `length` bytes from being read one by one, or lets readers differ about them.

    `tail`: its last END_BYTES bytes, or all. None: nothing.
    """
    if any(info.compress_type != ZIP_STORED for info in found):
        return "an entry is compressed"
    directory, count = _directory(tail, length)
    if directory is None or count != len(found):
        return "the records at its end contradict each other, or something follows them"
    return _named_otherwise(found) or _misplaced(found, directory)


def _directory(tail: bytes, length: int) -> tuple[int | None, int]:
    """Where the directory begins and how many entries it has; None where the records at the end do not agree."""
    if len(tail) < _END.size:
        return None, 0
    mark, _, _, _, count, nbytes, begin, comment = _END.unpack(tail[-_END.size :])
    end = length - _END.size
    if mark != b"PK\5\6" or comment:
        return None, 0
    if tail[-_END.size - _LOCATOR.size :][:4] == b"PK\6\7" and len(tail) == END_BYTES:
        end -= _LOCATOR.size + _END_64.size
        _, disk, where, _ = _LOCATOR.unpack_from(tail, _END_64.size)
        mark, size, _, _, _, _, _, count, nbytes, begin = _END_64.unpack_from(tail)
        if (mark, size, disk, where) != (b"PK\6\6", _END_64.size - 12, 0, end):
            return None, 0
    return (begin if begin + nbytes == end else None), count


def _named_otherwise(found: Sequence[ZipInfo]) -> str | None:
    """Names that readers take differently: miniz makes no difference between `DATA.PKL` and `data.pkl`."""
    folder = found[0].filename.partition("/")[0] if found else ""
    for info in found:
        if info.orig_filename != info.filename or not info.filename.isascii():
            return f"entry {info.orig_filename!r:.80} has a name that readers take differently"
        if not info.filename.startswith(f"{folder}/"):
            return f"entry {info.filename!r:.80} is in another folder than the first"
        if info.extra and (
            info.extra[:2] != _IS_ZIP64 or len(info.extra) != 4 + int.from_bytes(info.extra[2:4], "little")
        ):
            return f"entry {info.filename!r:.80} has fields that torch.save does not write"
    return "two entries have one name" if len({info.filename.lower() for info in found}) < len(found) else None


def _misplaced(found: Sequence[ZipInfo], directory: int) -> str | None:
    end = 0
    if found and min(info.header_offset for info in found):
        return "its first entry is not at its start"
    for info in sorted(found, key=attrgetter("header_offset")):
        if info.header_offset < end:
            return f"entry {info.filename!r:.80} overlaps another"
        end = info.header_offset + LOCAL_HEADER + info.file_size
    return "an entry is longer than the file" if end > directory else None

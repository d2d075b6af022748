"""Decodes the change of one tensor, in place and a piece at a time, and computes the checksums that writers store.

Both encodings are over bytes and know no dtype; each is one zstd frame. `xor`: the old bytes XOR the new ones.
`overwrite`: the number of changed bytes and their positions, all uint32 little-endian, then their new values. Format as
in slime 624b824a, `diff_and_compress` and `overwrite_encode`, and in `_apply_delta` of its patch of SGLang.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from ckptkit.core.errors import DamagedError, words_of

if TYPE_CHECKING:
    from zstandard import ZstdDecompressionReader

Bytes = NDArray[np.uint8]

_PIECE = 4 << 20  # bytes, or positions, that are decoded at a time
_WRONG = "the file was changed or cut, or the writer had a tensor of another dtype or shape"


class _Hasher(Protocol):
    def update(self, data: bytes | memoryview, /) -> object: ...
    def hexdigest(self) -> str: ...


class _Adler32:
    """Adler-32 as the hashes of other libraries are used."""

    def __init__(self) -> None:
        self._value = 1

    def update(self, data: bytes | memoryview, /) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def _xxh3() -> _Hasher:
    import xxhash

    return xxhash.xxh3_128()


CHECKSUMS: dict[str, Callable[[], _Hasher]] = {"xxh3-128": _xxh3, "blake3": blake3, "adler32": _Adler32}


def checksum(algorithm: str, content: Bytes) -> str:
    """The checksum of a tensor's bytes, in hex, by one of CHECKSUMS."""
    hasher = CHECKSUMS[algorithm]()
    hasher.update(content.data)
    return hasher.hexdigest()


def apply(encoding: str, payload: Bytes, state: Bytes) -> int:
    """Changes the bytes of a tensor in place, and returns how many of them are others now.

    `encoding`: one of ENCODINGS. Raises DamagedError for a payload that is not of a tensor of so many bytes; then
    `state` is of no use any more.
    """
    import zstandard

    try:
        return ENCODINGS[encoding](payload, state)
    except zstandard.ZstdError as error:
        raise DamagedError(f"its payload is not whole zstd data ({words_of(error)})", _WRONG) from error


def _xor(payload: Bytes, state: Bytes) -> int:
    changed, at, stream = 0, 0, _decoded(payload)
    while len(piece := _next(stream, _PIECE)):
        if at + len(piece) > len(state):
            break
        changed += int(np.count_nonzero(piece))
        state[at : at + len(piece)] ^= piece
        at += len(piece)
    if len(piece) or at != len(state):
        size = f"{at}" if not len(piece) else f"{at + len(piece)} or more"
        raise DamagedError(f"its payload is for {size} bytes, and the tensor has {len(state)}", _WRONG)
    return changed


def _overwrite(payload: Bytes, state: Bytes) -> int:
    positions, values = _decoded(payload), _decoded(payload)
    head = _next(positions, 4)
    count = int.from_bytes(head.tobytes(), "little") if len(head) == 4 else 0
    if not 0 < count <= len(state):
        raise DamagedError(f"its payload is for {count} changed bytes, and the tensor has {len(state)}", _WRONG)
    _skip(values, 4 + 4 * count)
    changed, last = 0, -1
    for begin in range(0, count, _PIECE):
        size = min(_PIECE, count - begin)
        raw, new = _next(positions, 4 * size), _next(values, size)
        if len(raw) != 4 * size or len(new) != size:
            raise DamagedError(f"its payload ends before the last of {count} changed bytes", _WRONG)
        at = raw.view("<u4").astype(np.int64)
        if int(at.max()) >= len(state):
            raise DamagedError(f"its payload changes byte {int(at.max())} of a tensor of {len(state)}", _WRONG)
        if int(np.diff(at, prepend=last).min()) <= 0:
            raise DamagedError("its payload has positions that do not ascend", _WRONG)
        changed, last = changed + int(np.count_nonzero(state[at] != new)), int(at[-1])
        state[at] = new
    if len(_next(values, 1)):
        raise DamagedError(f"its payload goes on after the last of {count} changed bytes", _WRONG)
    return changed


ENCODINGS: dict[str, Callable[[Bytes, Bytes], int]] = {"xor": _xor, "overwrite": _overwrite}


def _decoded(payload: Bytes) -> ZstdDecompressionReader:
    import zstandard

    return zstandard.ZstdDecompressor().stream_reader(payload.data)


def _next(stream: ZstdDecompressionReader, size: int) -> Bytes:
    """The next bytes: fewer where the data ends."""
    parts, missing = [], size
    while missing and (part := stream.read(missing)):
        parts.append(part)
        missing -= len(part)
    return np.frombuffer(b"".join(parts), np.uint8)


def _skip(stream: ZstdDecompressionReader, size: int) -> None:
    while size and (skipped := len(_next(stream, min(size, _PIECE)))):
        size -= skipped

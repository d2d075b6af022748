"""Stands in for NVIDIA's driver library where there is none, so that vLLM's compiled operators can be imported.

They are linked against `libcuda.so.1`. Of its functions they need a handful to be there, and call none of them while a
model is built and loaded. A library of that name is written without a compiler (ELF, System V ABI), each of whose
functions answers CUDA_ERROR_NO_DEVICE.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Sequence
from pathlib import Path

_NAME = "libcuda.so.1"
_FUNCTIONS = ("cuDriverGetVersion", "cuGetProcAddress_v2", "cuInit", "cuPointerGetAttribute", "cuTensorMapEncodeTiled")
_PAGE = 0x10000  # of the largest pages that Linux has on these machines
# Machine number, and the code of `return 100`.
_MACHINES = {
    "x86_64": (62, bytes.fromhex("b864000000c3")),
    "aarch64": (183, bytes.fromhex("800c8052c0035fd6")),
}


def load(scratch: Path) -> None:
    """Loads the driver or, where there is none, what stands in for it, written into `scratch`.

    Raises OSError on a machine that this knows no code for.
    """
    try:
        ctypes.CDLL(_NAME, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        if platform.machine() not in _MACHINES:
            raise
        path = scratch / f"libcuda-{os.getpid()}.so.1"  # ranks share `scratch`, and must not write what another runs
        path.write_bytes(library(_NAME, _FUNCTIONS, *_MACHINES[platform.machine()]))
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def library(name: str, functions: Sequence[str], machine: int, code: bytes) -> bytes:
    """A shared library whose functions all run `code`. One page that is read and run, one with the dynamic section."""
    strings = b"\0" + b"".join(one.encode() + b"\0" for one in (name, *functions))
    offsets = {one: strings.index(b"\0" + one.encode() + b"\0") + 1 for one in (name, *functions)}
    count = len(functions) + 1
    # Of the hash table: one bucket, in which each symbol leads to the next.
    table = struct.pack(f"<{3 + count}I", 1, count, 1, 0, *range(2, count), 0)
    at_code = 64 + 3 * 56
    at_symbols = _aligned(at_code + len(code))
    at_table = at_symbols + 24 * count
    at_strings = at_table + len(table)
    symbols = bytes(24) + b"".join(
        struct.pack("<IBBHQQ", offsets[one], 0x12, 0, 1, at_code, len(code)) for one in functions
    )
    dynamic = [(4, at_table), (5, at_strings), (6, at_symbols), (10, len(strings)), (11, 24), (14, offsets[name])]
    entries = b"".join(struct.pack("<QQ", *one) for one in [*dynamic, (0, 0)])
    text = code.ljust(at_symbols - at_code, b"\0") + symbols + table + strings
    end = at_code + len(text)
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\2\1\1", 3, machine, 1, 0, 64, 0, 0, 64, 56, 3, 64, 0, 0)
    segments = [(1, 5, 0, end), (1, 6, _PAGE, len(entries)), (2, 6, _PAGE, len(entries))]
    heads = b"".join(
        struct.pack("<IIQQQQQQ", kind, flags, start, start, start, size, size, 8 if kind == 2 else _PAGE)
        for kind, flags, start, size in segments
    )
    return (header + heads + text).ljust(_PAGE, b"\0") + entries


def _aligned(offset: int) -> int:
    return -(-offset // 8) * 8

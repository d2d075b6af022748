"""CRC-32 as zips have it: by zlib-ng, several times as fast, or by the standard library where that is not installed.

A witness's environment need not have it.
"""

from __future__ import annotations

try:
    from zlib_ng.zlib_ng import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

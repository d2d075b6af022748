"""SHA-256 of a tensor: what manifests hold, and what tells that a file written earlier is still whole."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ckptkit.raw import bytes_of
from ckptkit.specs import TensorSpec

_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True)
class TensorDigest:
    """One tensor: dtype as torch spells it without `torch.`, shape, and the SHA-256 of its bytes in hexadecimal."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str

    @classmethod
    def of(cls, tensor: Tensor) -> TensorDigest:
        """The digest of a contiguous tensor on the CPU."""
        return cls(dtype_name(tensor.dtype), tuple(tensor.shape), hashlib.sha256(bytes_of(tensor)).hexdigest())

    @classmethod
    def known(cls, spec: TensorSpec, sha256: str) -> TensorDigest:
        """That of a tensor whose bytes have this SHA-256."""
        return cls(dtype_name(spec.dtype), spec.shape, sha256)

    @classmethod
    def parse(cls, entry: Any) -> TensorDigest | None:
        """What `to_json` wrote; None for anything else."""
        if not isinstance(entry, list) or len(entry) != 3:
            return None
        dtype, shape, sha256 = entry
        sound = isinstance(dtype, str) and isinstance(shape, list) and all(type(size) is int for size in shape) and is_sha256(sha256)
        return cls(dtype, tuple(shape), sha256) if sound else None

    def to_json(self) -> list[Any]:
        """`[dtype, shape, SHA-256]`."""
        return [self.dtype, list(self.shape), self.sha256]


def is_sha256(text: object) -> bool:
    """Whether this is a SHA-256 in lower hexadecimal."""
    return isinstance(text, str) and len(text) == 64 and _HEX.issuperset(text)


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")

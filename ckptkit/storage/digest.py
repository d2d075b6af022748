"""BLAKE3 digests of tensors, for manifests and for verifying files of an earlier run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from ckptkit.core.dtypes import dtype_name
from ckptkit.storage.buffers import bytes_of

if TYPE_CHECKING:
    from torch import Tensor

_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True)
class TensorDigest:
    """dtype (torch's name without `torch.`) and shape of a tensor, and the BLAKE3 of its bytes in hexadecimal."""

    dtype: str
    shape: tuple[int, ...]
    blake3: str

    @classmethod
    def of(cls, tensor: Tensor) -> TensorDigest:
        """The digest of a contiguous tensor on the CPU."""
        return cls(dtype_name(tensor.dtype), tuple(tensor.shape), blake3(bytes_of(tensor)).hexdigest())

    @classmethod
    def parse(cls, entry: Any) -> TensorDigest | None:
        """Parses the result of `to_json`. Returns None for anything else."""
        if not isinstance(entry, list) or len(entry) != 3:
            return None
        dtype, shape, digest = entry
        has_shape = isinstance(shape, list) and all(type(size) is int for size in shape)
        return cls(dtype, tuple(shape), digest) if has_shape and isinstance(dtype, str) and is_blake3(digest) else None

    def to_json(self) -> list[Any]:
        """`[dtype, shape, BLAKE3]`."""
        return [self.dtype, list(self.shape), self.blake3]


def is_blake3(text: object) -> bool:
    """Whether this is a BLAKE3 in lower hexadecimal."""
    return isinstance(text, str) and len(text) == 64 and _HEX.issuperset(text)

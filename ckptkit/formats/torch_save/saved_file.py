"""Reads files of torch.save with many tensors, such as a rank's `model_optim_rng.pt`, one tensor at a time.

Nothing that its pickle names is run, and only the bytes of the tensors that are asked for are held in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.core.dtypes import DTYPE_OF_STORAGE, ITEMSIZE, torch_dtype
from ckptkit.core.errors import CkptkitError, DamagedError, code_of
from ckptkit.formats.torch_save.blob import Blob, crc32, is_layout, reach
from ckptkit.formats.torch_save.records import Record, kind_of
from ckptkit.storage.regular import open_regular

if TYPE_CHECKING:
    from torch import Tensor

# How torch began a file before its zip format (torch 1.6): a pickle of a magic number (`torch/serialization.py`).
_OLD_FORMAT = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_PIECE = 1 << 24


def require_saved(path: Path) -> None:
    """Raises OSError or CkptkitError unless a file is one of torch.save, by its first bytes or its zip's directory."""
    with open_regular(path) as file:
        if file.read(len(_OLD_FORMAT)) == _OLD_FORMAT:
            return
    blob = Blob(path, 0, path.stat().st_size)
    blob.entry(blob.entries(), "data.pkl")


@dataclass(frozen=True)
class SavedTensor:
    """Where a tensor lies: its storage's key and, in elements, where it begins in it and its strides."""

    shape: tuple[int, ...]
    dtype: str
    storage: str
    offset: int
    stride: tuple[int, ...]

    @property
    def reach(self) -> int:
        """Elements from its first to behind its last one."""
        return reach(self.shape, self.stride)


class SavedFile:
    """A file of torch.save, opened by its zip directory. Raises CkptkitError if damaged or in torch's old format.

    `allowed` is which classes and functions its pickle may name (`module.name`); None: any, since none is run.
    """

    def __init__(self, path: Path, allowed: Callable[[str], bool] | None = None) -> None:
        try:
            with open_regular(path) as file:
                old = file.read(len(_OLD_FORMAT)) == _OLD_FORMAT
            self._blob = Blob(path, 0, path.stat().st_size)
        except OSError as error:
            raise CkptkitError(f"{path}: {error.strerror}", "copy it from the save", code=code_of(error)) from error
        if old:
            raise CkptkitError(
                f"{path} is in the format that torch wrote before 1.6",
                "where you trust it: torch.load it with an old torch, torch.save it with a new one",
            )
        self.path = path
        self._allowed = allowed
        self._sound: set[str] = set()

    @cached_property
    def content(self) -> Any:
        """The saved object, with Records for everything that is not plain data (tensors too)."""
        return self._blob.object(self._allowed)

    def forget(self) -> None:
        """Lets go of `content`; tensors that were found in it can still be read."""
        self.__dict__.pop("content", None)

    def tensor(self, value: Any, name: str) -> SavedTensor:
        """The tensor that a value of `content` describes. Raises CkptkitError, with `name`, for another kind."""
        if isinstance(value, Record) and value.kind == "torch._utils._rebuild_parameter" and value.args:
            value = value.args[0]
        if not isinstance(value, Record) or value.kind != "torch._utils._rebuild_tensor_v2" or len(value.args) < 4:
            raise CkptkitError(
                f"{self.path}: {name} is {kind_of(value)}, no plain tensor",
                "only dense bf16, fp16 and fp32 weights can be read",
            )
        storage, offset, shape, stride = value.args[:4]
        kind = kind_of(storage[1]) if isinstance(storage, tuple) and len(storage) >= 5 else ""
        dtype = DTYPE_OF_STORAGE.get(kind.rpartition(".")[2])
        if dtype is None or type(storage[2]) is not str or not is_layout(offset, shape, stride):
            raise DamagedError(f"{self.path}: {name} is described in a way that torch does not write")
        found = SavedTensor(shape, dtype, storage[2], offset, stride)
        entry = self._entries.get(f"data/{found.storage}")
        if (
            entry is None
            or (found.offset + found.reach) * ITEMSIZE[dtype] > entry.file_size
            or math.prod(shape) > entry.file_size
        ):
            raise DamagedError(f"{self.path}: the bytes of {name} are not in it")
        return found

    @cached_property
    def _entries(self) -> Mapping[str, Any]:
        return self._blob.entries()

    def read(self, tensor: SavedTensor) -> Tensor:
        """The tensor, contiguous, without the rest of its storage. Raises CkptkitError for a wrong checksum."""
        import torch

        info = self._entries[f"data/{tensor.storage}"]
        size = ITEMSIZE[tensor.dtype]
        flat = torch.empty(tensor.reach * size, dtype=torch.uint8)
        if flat.numel() != info.file_size and tensor.storage not in self._sound:
            self._check(info)
        self._blob.read_into(info, memoryview(flat.numpy()), tensor.offset * size)  # type: ignore[arg-type]
        self._sound.add(tensor.storage)
        return flat.view(torch_dtype(tensor.dtype)).as_strided(tensor.shape, tensor.stride).contiguous()

    def _check(self, info: Any) -> None:
        """One pass over a storage that is read in parts, for its checksum."""
        checksum, piece = 0, bytearray(_PIECE)
        for start in range(0, info.file_size, _PIECE):
            view = memoryview(piece)[: info.file_size - start]
            self._blob.read_into(info, view, start)
            checksum = crc32(view, checksum)
        self._blob.check(info, checksum)

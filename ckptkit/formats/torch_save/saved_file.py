"""Reads torch.save files with many tensors, such as a rank's `model_optim_rng.pt`, one tensor at a time, and without
running code from their pickles.
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

# The start of files before torch's zip format (torch 1.6): a pickle of a magic number (`torch/serialization.py`).
_OLD_FORMAT = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_PIECE = 1 << 24


def require_saved(path: Path) -> None:
    """Raises OSError or CkptkitError unless a file was written by torch.save, by its start or its zip's directory."""
    with open_regular(path) as file:
        if file.read(len(_OLD_FORMAT)) == _OLD_FORMAT:
            return
    blob = Blob(path, 0, path.stat().st_size)
    blob.entry(blob.entries(), "data.pkl")


@dataclass(frozen=True)
class SavedTensor:
    """The position of a tensor: its storage's key and, in elements, its offset and strides."""

    shape: tuple[int, ...]
    dtype: str
    storage: str
    offset: int
    stride: tuple[int, ...]

    @property
    def reach(self) -> int:
        """Elements of the storage from the first to the last one."""
        return reach(self.shape, self.stride)


class SavedFile:
    """A torch.save file. Raises CkptkitError if it is damaged or in torch's old format.

    `allowed`: which classes and functions its pickle may name (`module.name`), or None for any, as none is run.
    """

    def __init__(self, path: Path, allowed: Callable[[str], bool] | None = None) -> None:
        try:
            with open_regular(path) as file:
                old = file.read(len(_OLD_FORMAT)) == _OLD_FORMAT
            self._blob = Blob(path, 0, path.stat().st_size)
        except OSError as error:
            raise CkptkitError(f"{path}: {error.strerror}", "copy this file again", code=code_of(error)) from error
        if old:
            hint = "if you trust the file, load it with torch 1.6 or later and save it again"
            raise CkptkitError(f"{path} is in the format that torch wrote before 1.6", hint)
        self.path, self._allowed = path, allowed
        self._checked: set[str] = set()  # storages with a valid checksum

    @cached_property
    def content(self) -> Any:
        """The saved object, with Records for everything except plain data (also for tensors)."""
        return self._blob.object(self._allowed)

    def forget(self) -> None:
        """Frees `content`; tensors found in it can still be read."""
        self.__dict__.pop("content", None)

    def tensor(self, value: Any, name: str) -> SavedTensor:
        """The tensor described by a value of `content`. Raises CkptkitError, with `name`, for another value."""
        if isinstance(value, Record) and value.kind == "torch._utils._rebuild_parameter" and value.args:
            value = value.args[0]
        if not isinstance(value, Record) or value.kind != "torch._utils._rebuild_tensor_v2" or len(value.args) < 4:
            message = f"{self.path}: {name} is {kind_of(value)}, not a plain tensor"
            raise CkptkitError(message, "save it with dense bf16, fp16 or fp32 weights")
        storage, offset, shape, stride = value.args[:4]
        kind = kind_of(storage[1]) if isinstance(storage, tuple) and len(storage) >= 5 else ""
        dtype = DTYPE_OF_STORAGE.get(kind.rpartition(".")[2])
        if dtype is None or type(storage[2]) is not str or not is_layout(offset, shape, stride):
            raise DamagedError(f"{self.path}: {name} has an invalid dtype, shape, stride or offset")
        tensor = SavedTensor(shape, dtype, storage[2], offset, stride)
        size = entry.file_size if (entry := self._entries.get(f"data/{tensor.storage}")) else -1
        if (offset + tensor.reach) * ITEMSIZE[dtype] > size or math.prod(shape) > size:
            raise DamagedError(f"{self.path} does not contain all bytes of {name}")
        return tensor

    @cached_property
    def _entries(self) -> Mapping[str, Any]:
        return self._blob.entries()

    def read(self, tensor: SavedTensor) -> Tensor:
        """The tensor, contiguous, without the rest of its storage. Raises CkptkitError for a wrong checksum."""
        import torch

        info = self._entries[f"data/{tensor.storage}"]
        size = ITEMSIZE[tensor.dtype]
        flat = torch.empty(tensor.reach * size, dtype=torch.uint8)
        if flat.numel() != info.file_size and tensor.storage not in self._checked:
            self._check(info)
        self._blob.read_into(info, memoryview(flat.numpy()), tensor.offset * size)  # type: ignore[arg-type]
        self._checked.add(tensor.storage)
        return flat.view(torch_dtype(tensor.dtype)).as_strided(tensor.shape, tensor.stride).contiguous()

    def _check(self, info: Any) -> None:
        """Verifies the checksum of a storage in pieces."""
        checksum, piece = 0, bytearray(_PIECE)
        for start in range(0, info.file_size, _PIECE):
            view = memoryview(piece)[: info.file_size - start]
            self._blob.read_into(info, view, start)
            checksum = crc32(view, checksum)
        self._blob.check(info, checksum)

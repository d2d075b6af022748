"""Dtypes by torch's name without `torch.`: their sizes, and their names in safetensors and torch.save."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Name, bytes per element, code in safetensors' header (github.com/huggingface/safetensors#format), and storage class
# in pickles of torch.save and torch_dist (`torch/storage.py`), or None if the format does not support it.
_TABLE = (
    ("float64", 8, "F64", "DoubleStorage"),
    ("float32", 4, "F32", "FloatStorage"),
    ("float16", 2, "F16", "HalfStorage"),
    ("bfloat16", 2, "BF16", "BFloat16Storage"),
    ("float8_e4m3fn", 1, "F8_E4M3", None),
    ("float8_e5m2", 1, "F8_E5M2", None),
    ("float8_e8m0fnu", 1, "F8_E8M0", None),
    ("uint64", 8, "U64", None),
    ("uint32", 4, "U32", None),
    ("uint16", 2, "U16", None),
    ("int64", 8, "I64", "LongStorage"),
    ("int32", 4, "I32", "IntStorage"),
    ("int16", 2, "I16", "ShortStorage"),
    ("int8", 1, "I8", "CharStorage"),
    ("uint8", 1, "U8", "ByteStorage"),
    ("bool", 1, "BOOL", "BoolStorage"),
    ("complex64", 8, None, None),
    ("complex128", 16, None, None),
    ("float8_e4m3fnuz", 1, None, None),
    ("float8_e5m2fnuz", 1, None, None),
)
ITEMSIZE = {name: size for name, size, _, _ in _TABLE}
SAFETENSORS_CODE = {name: code for name, _, code, _ in _TABLE if code}
DTYPE_OF_CODE = {code: name for name, code in SAFETENSORS_CODE.items()}
COMPUTED = ("bfloat16", "float16", "float32")  # the dtypes of trained models
STORAGE_CLASS = {name: storage for name, _, _, storage in _TABLE if storage}
DTYPE_OF_STORAGE = {storage: name for name, storage in STORAGE_CLASS.items()}


def torch_dtype(name: str) -> torch.dtype:
    """torch.bfloat16 for `bfloat16`."""
    import torch  # headers are read without it

    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")

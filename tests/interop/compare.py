"""Compares two HF directories tensor by tensor, by the safetensors library alone."""

from __future__ import annotations

from pathlib import Path

import torch
from support import models


def differences(left: Path, right: Path) -> list[str]:
    """The names that only one has, and those whose dtype, shape or bits differ."""
    one, other = models.tensors(left), models.tensors(right)
    return sorted(one.keys() ^ other.keys()) + [
        name
        for name in sorted(one.keys() & other.keys())
        if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])
    ]

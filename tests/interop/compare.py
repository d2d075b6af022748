"""Compares two HF directories tensor by tensor, by the safetensors library alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from support import models


def changed(found: Path, wanted: Path, apart_from: Iterable[str] = ()) -> list[str]:
    """Names that only one of two HF directories has, or that differ in dtype or in a bit."""
    ours, theirs = models.tensors(found), models.tensors(wanted)
    return sorted(
        name
        for name in ours.keys() | theirs.keys()
        if name not in set(apart_from)
        and not (
            name in ours
            and name in theirs
            and (ours[name].dtype, ours[name].shape) == (theirs[name].dtype, theirs[name].shape)
            and torch.equal(ours[name].flatten().view(torch.uint8), theirs[name].flatten().view(torch.uint8))
        )
    )

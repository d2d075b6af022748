"""Refuses options that would do nothing: whoever gives one believes that it does something."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ckptkit.core.errors import UsageError


def refuse_quantizing_options(given: Sequence[str]) -> None:
    """Raises UsageError when a conversion that does not quantize was `given` options for it (`--group-size`)."""
    if not given:
        return
    hint = (
        "leave it out, or add --quantize w4a16 on the way from Megatron to HF; "
        "`ckptkit quantize` quantizes an HF checkpoint"
    )
    if "--tp" in given:
        hint += "; what is converted to Megatron is not cut, and loads at any parallel size"
    raise UsageError(f"{', '.join(given)} is about quantized weights, and has no effect where none are written", hint)


def refuse_hf(hf: str | Path | None, path: str | Path) -> None:
    """Raises UsageError when an HF directory is given beside what lies at `path`, which is HF itself."""
    if hf:
        raise UsageError(
            "--hf gives the config of a Megatron checkpoint, and has no effect here",
            f"leave it out: {path} is an HF checkpoint",
        )

"""Quantizes a trainer's weights while it streams them to SGLang: `from ckptkit.quant.online import OnlineQuantizer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptkit.quant.online.quantizer import OnlineQuantizer

__all__ = ["OnlineQuantizer"]


def __getattr__(name: str) -> Any:
    if name != "OnlineQuantizer":
        raise AttributeError(f"module 'ckptkit.quant.online' has no attribute {name!r}")
    # On first use, since SGLang imports single modules from here.
    from ckptkit.quant.online.quantizer import OnlineQuantizer

    return OnlineQuantizer

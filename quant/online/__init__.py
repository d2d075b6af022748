"""Quantizes the weights of a trainer while it streams them to SGLang: `from quant.online import OnlineQuantizer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quant.online.quantizer import OnlineQuantizer

__all__ = ["OnlineQuantizer"]


def __getattr__(name: str) -> Any:
    if name != "OnlineQuantizer":
        raise AttributeError(f"module 'quant.online' has no attribute {name!r}")
    from quant.online.quantizer import OnlineQuantizer  # on first use, since SGLang imports single modules from here

    return OnlineQuantizer

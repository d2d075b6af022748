"""Recognizes quantized formats that ckptkit does not read, by the names of their tensors or by config.json."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ckptkit.core.errors import UnsupportedError

_BITSANDBYTES = (".weight.absmax", ".weight.nested_absmax", ".weight.quant_map", ".SCB")
_LAST_OF_BITSANDBYTES = {name[name.rfind(".") :] for name in _BITSANDBYTES}
_START = "start from the unquantized release"
_HINTS = {
    "MLX": f"it is made for Apple's MLX; {_START}",
    "bitsandbytes": f"{_START}, or load it with transformers, call dequantize() and save_pretrained()",
    "GPTQ": f"{_START}; `ckptkit quantize` makes INT4 of it that SGLang, vLLM and slime read",
    "AWQ or AutoRound": f"{_START}; `ckptkit quantize` makes INT4 of it that SGLang, vLLM and slime read",
    "NVIDIA ModelOpt": _START,
}


def refuse_foreign(names: Collection[str], where: object) -> None:
    """Raises UnsupportedError, naming the format, where tensors of these names are quantized in one of them."""
    if (found := foreign_format(names)) is not None:
        raise UnsupportedError(
            f"{where} holds weights in the quantized format of {found}, which ckptkit does not read", _HINTS[found]
        )


def refuse_modelopt(config: Mapping[str, Any], where: object) -> None:
    """Raises UnsupportedError for NVIDIA ModelOpt's formats, whose tensors are named as those of compressed-tensors."""
    content = config.get("quantization_config")
    if isinstance(content, Mapping) and content.get("quant_method") == "modelopt":
        name = "NVIDIA ModelOpt"
        raise UnsupportedError(
            f"{where} holds weights in the quantized format of {name} ({content.get('quant_algo')}), which ckptkit "
            "does not read",
            _HINTS[name],
        )


def foreign_format(names: Collection[str]) -> str | None:
    """The name of the format, by what stands beside each weight (or in its place); None for any other.

    AutoRound stores GPTQ's tensors without an order of the input features, and so under the names that AWQ has.
    """
    endings = {name[name.rfind(".") :] for name in names}
    if ".qweight" in endings:
        return "GPTQ" if ".g_idx" in endings else "AWQ or AutoRound"
    if not endings.isdisjoint(_LAST_OF_BITSANDBYTES) and any(name.endswith(_BITSANDBYTES) for name in names):
        return "bitsandbytes"
    if any(".weight.quant_state." in name for name in names):
        return "bitsandbytes"
    return "MLX" if {".scales", ".biases"} <= endings else None

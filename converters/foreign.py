"""Recognizes quantized formats that ckptkit does not read, by the names of their tensors."""

from __future__ import annotations

from collections.abc import Collection

from ckptkit.core.errors import UnsupportedError

_BITSANDBYTES = (".weight.absmax", ".weight.nested_absmax", ".weight.quant_map", ".SCB")
_LAST_OF_BITSANDBYTES = {name[name.rfind(".") :] for name in _BITSANDBYTES}
_START = "start from the unquantized release"
_HINTS = {
    "MLX": f"it is made for Apple's MLX; {_START}",
    "bitsandbytes": f"{_START}, or load it with transformers, call dequantize() and save_pretrained()",
    "GPTQ": f"{_START}; `ckptkit quantize` makes INT4 of it that SGLang, vLLM and slime read",
    "AWQ": f"{_START}; `ckptkit quantize` makes INT4 of it that SGLang, vLLM and slime read",
}


def refuse_foreign(names: Collection[str], where: object) -> None:
    """Raises UnsupportedError, naming the format, where tensors of these names are quantized in one of them."""
    if (found := foreign_format(names)) is not None:
        raise UnsupportedError(
            f"{where} holds weights in the quantized format of {found}, which ckptkit does not read", _HINTS[found]
        )


def foreign_format(names: Collection[str]) -> str | None:
    """MLX, bitsandbytes, GPTQ or AWQ, by what stands beside each weight (or in its place); None for any other."""
    endings = {name[name.rfind(".") :] for name in names}
    if ".qweight" in endings:
        return "GPTQ" if ".g_idx" in endings else "AWQ"
    if not endings.isdisjoint(_LAST_OF_BITSANDBYTES) and any(name.endswith(_BITSANDBYTES) for name in names):
        return "bitsandbytes"
    if any(".weight.quant_state." in name for name in names):
        return "bitsandbytes"
    return "MLX" if {".scales", ".biases"} <= endings else None

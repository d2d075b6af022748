"""Recognizes quantized formats that ckptkit does not read, by the names of their tensors or by config.json."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ckptkit.core.errors import UnsupportedError
from ckptkit.formats.hf.side_files import quantization_of

_BITSANDBYTES = (".weight.absmax", ".weight.nested_absmax", ".weight.quant_map", ".SCB")
_LAST_OF_BITSANDBYTES = {name[name.rfind(".") :] for name in _BITSANDBYTES}
_START = "start from the unquantized release"
_MLX = f"it is made for Apple's MLX; {_START}"
_HINTS = {
    "MLX": _MLX,
    "bitsandbytes": f"{_START}, or load it with transformers, call dequantize() and save_pretrained()",
    "GPTQ": f"{_START}; `ckptkit quantize` makes INT4 of it that SGLang, vLLM and slime read",
    "AWQ or AutoRound": f"{_START}; `ckptkit quantize` makes INT4 of it that SGLang, vLLM and slime read",
    "NVIDIA ModelOpt": _START,
    "NVFP4": _START,
}
_STACKED = ".switch_mlp."  # mlx-lm's module of routed experts, in quantized and other models
# Beginnings of compressed-tensors' names of floating formats in small blocks (`CompressionFormat`).
_BLOCKS = ("nvfp4", "mxfp4", "mxfp6", "mxfp8")


def refuse_foreign(names: Collection[str], where: object) -> None:
    """Raises UnsupportedError, naming the format, where tensors of these names are quantized in one of them."""
    if any(_STACKED in name for name in names):
        raise UnsupportedError(f"{where} holds experts stacked as MLX has them ({_STACKED.strip('.')})", _MLX)
    if (found := foreign_format(names)) is not None:
        raise UnsupportedError(
            f"{where} holds weights in the quantized format of {found}, which ckptkit does not read", _HINTS[found]
        )


def refuse_stated(config: Mapping[str, Any], where: object) -> None:
    """Raises UnsupportedError for formats whose tensors have the names of one that is read, by what config.json says.

    These are MLX's, of which a mode has scales alone, NVIDIA ModelOpt's, and compressed-tensors' NVFP4 and MX formats.
    """
    if _is_mlx(config):
        raise UnsupportedError(
            f"{where} holds weights in the quantized format of MLX, which ckptkit does not read", _MLX
        )
    content = quantization_of(config)
    if isinstance(content, Mapping) and (name := _stated(content)) is not None:
        raise UnsupportedError(
            f"{where} holds weights in the quantized format of {name}, which ckptkit does not read", _START
        )


def _is_mlx(config: Mapping[str, Any]) -> bool:
    """Whether mlx-lm wrote this config, which says how weights are quantized under a key of its own."""
    content = config.get("quantization")
    return isinstance(content, Mapping) and {"group_size", "bits"} <= content.keys() and "quant_method" not in content


def _stated(content: Mapping[str, Any]) -> str | None:
    method = content.get("quant_method")
    if method == "modelopt":
        return f"NVIDIA ModelOpt ({content.get('quant_algo')})"
    if method != "compressed-tensors":
        return None
    groups = content.get("config_groups")
    inside = groups.values() if isinstance(groups, Mapping) else ()
    for one in (content, *(group for group in inside if isinstance(group, Mapping))):
        if isinstance(form := one.get("format"), str) and form.startswith(_BLOCKS):
            return f"{form.partition('-')[0].upper()} (compressed-tensors {form})"
    return None


def foreign_format(names: Collection[str]) -> str | None:
    """The name of the format, by what stands beside each weight (or in its place); None for any other.

    AutoRound stores GPTQ's tensors without an order of the input features, and so under the names that AWQ has. Of
    NVFP4, compressed-tensors has a `weight_global_scale` beside each weight, and ModelOpt a `weight_scale_2`.
    """
    endings = {name[name.rfind(".") :] for name in names}
    if ".weight_scale_2" in endings:
        return "NVIDIA ModelOpt"
    if ".weight_global_scale" in endings:
        return "NVFP4"
    if ".qweight" in endings:
        return "GPTQ" if ".g_idx" in endings else "AWQ or AutoRound"
    if not endings.isdisjoint(_LAST_OF_BITSANDBYTES) and any(name.endswith(_BITSANDBYTES) for name in names):
        return "bitsandbytes"
    if any(".weight.quant_state." in name for name in names):
        return "bitsandbytes"
    return "MLX" if {".scales", ".biases"} <= endings else None

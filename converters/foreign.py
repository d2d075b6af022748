"""Recognizes unsupported quantized formats, by tensor names or by config.json."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ckptkit.core.errors import UnsupportedError
from ckptkit.core.specs import summarize
from ckptkit.formats.hf.side_files import quantization_of

_BITSANDBYTES = (".weight.absmax", ".weight.nested_absmax", ".weight.quant_map", ".SCB")
_LAST_OF_BITSANDBYTES = {name[name.rfind(".") :] for name in _BITSANDBYTES}
_START = "start from the unquantized release"
_MLX = f"the checkpoint is for Apple's MLX; {_START}"
_HINTS = {
    "MLX": _MLX,
    "bitsandbytes": f"{_START}, or load it with transformers, call dequantize() and save_pretrained()",
    **dict.fromkeys(
        ("GPTQ", "AWQ or AutoRound"), f"{_START}; `ckptkit quantize` writes INT4 that SGLang, vLLM and slime load"
    ),
    "NVIDIA ModelOpt's AWQ": _START,
}
_OF_ADAPTERS = ".adapter."
_STACKED = ".switch_mlp."  # mlx-lm's module of routed experts, in quantized and other models
# Prefixes of compressed-tensors' unsupported formats (`CompressionFormat`) -> names for messages.
_NOT_READ = {"mxfp6": "MXFP6", "int-quantized": "INT8"}
# Supported values of ModelOpt's `quant_algo`.
MODELOPT_READ = frozenset(
    {"FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "MIXED_PRECISION", "MXFP4", "MXFP8", "NVFP4", "W4A16_NVFP4"}
)


def refuse_foreign(names: Collection[str], where: object) -> None:
    """Raises UnsupportedError, naming the format, if tensor names show an unsupported quantized format."""
    if any(_STACKED in name for name in names):
        raise UnsupportedError(f"{where} has experts stacked in MLX's layout ({_STACKED.strip('.')})", _MLX)
    if (form := foreign_format(names)) is not None:
        raise UnsupportedError(f"{where} has weights quantized as {form}, which ckptkit does not read", _HINTS[form])


def refuse_adapters(names: Collection[str], where: object) -> None:
    """Raises UnsupportedError if a Megatron checkpoint has LoRA adapters.

    For each base weight, Megatron-Bridge (`peft/adapter_wrapper.py`; used by NeMo-RL, verl and miles) saves
    `adapter.linear_in` and `adapter.linear_out`, or those of `adapter.adapter_q` etc. for parts of a fused weight.
    """
    pairs = [name for name in names if _OF_ADAPTERS in name and name.endswith(".linear_in.weight")]
    if not pairs:
        return
    is_only_adapters = all(_OF_ADAPTERS in name for name in names if not name.endswith("_extra_state"))
    model = "without a base model" if is_only_adapters else "in addition to the weights"
    restore = "restore run_config.yaml, which has the rank and alpha, or " if is_only_adapters else ""
    raise UnsupportedError(
        f"{where} has {len(pairs)} Megatron LoRA adapters {model}, which ckptkit does not convert: {summarize(pairs)}",
        f"{restore}export the adapters as PEFT after training (Megatron-Bridge's AutoBridge.save_hf_adapter), then "
        "`ckptkit verify ADAPTER --source BASE` and `ckptkit convert BASE DST --merge ADAPTER`",
    )


def refuse_declared_format(config: Mapping[str, Any], where: object) -> None:
    """Raises UnsupportedError for formats that only config.json distinguishes from supported ones.

    These are an MLX mode without biases, formats of NVIDIA ModelOpt, and MXFP6 and INT8 of compressed-tensors.
    """
    content = quantization_of(config)
    name = "MLX" if _is_mlx(config) else _unsupported_format(content) if isinstance(content, Mapping) else None
    if name is not None:
        message = f"{where} has weights quantized as {name}, which ckptkit does not read"
        raise UnsupportedError(message, _HINTS.get(name, _START))


def _is_mlx(config: Mapping[str, Any]) -> bool:
    """Whether mlx-lm wrote this config; it describes quantization under a different key."""
    content = config.get("quantization")
    return isinstance(content, Mapping) and {"group_size", "bits"} <= content.keys() and "quant_method" not in content


def _unsupported_format(content: Mapping[str, Any]) -> str | None:
    method = content.get("quant_method")
    if method == "modelopt":
        inner = content.get("quantization")
        algorithm = (inner if isinstance(inner, Mapping) else content).get("quant_algo")
        return None if str(algorithm).upper() in MODELOPT_READ else f"NVIDIA ModelOpt ({algorithm})"
    if method != "compressed-tensors":
        return None
    groups = content.get("config_groups")
    inside = [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []
    for one in (content, *inside):
        form = str(one.get("format"))
        name = next((name for start, name in _NOT_READ.items() if form.startswith(start)), None)
        if name is not None and (name != "INT8" or any(map(_is_int8, inside))):
            return f"{name} (compressed-tensors {form})"
    return None


def _is_int8(group: Mapping[str, Any]) -> bool:
    """Whether a config group has 8-bit integers with quantized activations (W8A8), which are stored as int8."""
    weights = group.get("weights")
    is_int8 = isinstance(weights, Mapping) and (weights.get("type", "int"), weights.get("num_bits", 8)) == ("int", 8)
    return is_int8 and bool(group.get("input_activations"))


def foreign_format(names: Collection[str]) -> str | None:
    """The name of an unsupported format, or None. The tensors stored with a weight or in its place identify it.

    AutoRound stores GPTQ's tensors without `g_idx`, so its names equal AWQ's. ModelOpt's AWQ multiplies each input of a
    weight by a `pre_quant_scale`.
    """
    endings = {name[name.rfind(".") :] for name in names}
    if ".pre_quant_scale" in endings:
        return "NVIDIA ModelOpt's AWQ"
    if ".qweight" in endings:
        return "GPTQ" if ".g_idx" in endings else "AWQ or AutoRound"
    if not endings.isdisjoint(_LAST_OF_BITSANDBYTES) and any(name.endswith(_BITSANDBYTES) for name in names):
        return "bitsandbytes"
    if any(".weight.quant_state." in name for name in names):
        return "bitsandbytes"
    return "MLX" if {".scales", ".biases"} <= endings else None

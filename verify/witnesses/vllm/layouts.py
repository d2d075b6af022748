"""The layout that vLLM's steps after loading give a module, by its method and kernel.

vLLM chooses these while it builds the model: for the GPU's capability, the scheme, and the sizes of each layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ckptkit.quant.formats.part_names import WEIGHT_PACKED, WEIGHT_SCALE
from ckptkit.verify.witnesses.loading.layouts.layout import Layout, not_kept, reordered, swapped_halves, unknown_layout
from ckptkit.verify.witnesses.loading.layouts.marlin import marlin
from ckptkit.verify.witnesses.loading.layouts.values import absorbed, fp8_blocks, products

_BITS = 4
_PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
_CACHE = ("q_scale", "k_scale", "v_scale", "prob_scale")  # copied into attributes of attention, and deleted
# Experts' kernels that keep gate and up, or that put up before gate.
_KEPT = ("TRITON", "BATCHED_TRITON", "VLLM_CUTLASS", "BATCHED_VLLM_CUTLASS", "DEEPGEMM", "BATCHED_DEEPGEMM")
_SWAPPED = ("FLASHINFER_CUTLASS",)
_MARLIN = ("MARLIN", "BATCHED_MARLIN")


def layout(module: nn.Module, method: Any) -> Layout | None:
    """The layout that a method of quantization gives a module's parameters, or None if they do not change."""
    if type(method).__name__ in _PLAIN:
        return None
    scheme: Any = getattr(module, "scheme", None)
    if (kernel := getattr(scheme, "kernel", None)) is not None:
        return _packed_layout(module, kernel)
    if hasattr(scheme or method, "fp8_linear"):
        return _fp8_layout(module, scheme or method)
    if any(name in _CACHE for name, _ in module.named_parameters(recurse=False)):
        return not_kept(_CACHE)
    return _experts_layout(module, method)


def _run(module: nn.Module, inputs: Tensor) -> Tensor:
    method: Any = module.quant_method
    outputs: Tensor = method.apply(module, inputs, bias=None)
    return outputs


def _packed_layout(module: nn.Module, kernel: Any) -> Layout:
    """INT4 of a Linear layer: Marlin's layout is known, every other kernel is run."""
    config, name = kernel.config, type(kernel).__name__
    ordered = getattr(config, "has_g_idx", False)  # 0.33 refuses such checkpoints
    if ordered or config.weight_type.size_bits != _BITS or config.act_type.itemsize == 1:
        return unknown_layout(name)
    return marlin(bias=True) if name == "MarlinLinearKernel" else products(partial(_run, module), config.act_type)


def _block(module: nn.Module) -> tuple[int, int] | None:
    sizes: Any = getattr(module, "weight_block_size", None)
    return (int(sizes[0]), int(sizes[1])) if sizes else None


def _fp8_layout(module: nn.Module, method: Any) -> Layout:
    """FP8 of a Linear layer in blocks: unchanged except for its scales, or in Marlin's layout, whose kernel is run."""
    block, kernel = _block(module), type(method.fp8_linear).__name__
    if block is None:
        return unknown_layout(kernel)
    if kernel.startswith(("Marlin", "Humming")):
        return products(partial(_run, module), module.orig_dtype, block)  # type: ignore[arg-type]
    return fp8_blocks(block, _pairs(module))


def _pairs(module: nn.Module) -> list[tuple[str, str]]:
    """The weights of a module with scales, and the names of these."""
    own = [name for name, _ in module.named_parameters(recurse=False)]
    return [(name, scale) for name in own for scale in (f"{name}_scale_inv", f"{name}_scale") if scale in own]


def _experts_layout(module: nn.Module, method: Any) -> Layout | None:
    """The layout of experts, by the kernel that vLLM has chosen for them."""
    if getattr(method, "num_bits", _BITS) != _BITS or getattr(method, "actorder", None) == "group":
        return unknown_layout(type(method).__name__)
    backends = (getattr(method, f"{kind}_backend", None) for kind in ("wna16", "fp8", "unquantized"))
    value: str = next((one.value for one in backends if one is not None), type(method).__name__)
    backend = value.replace(" ", "_").upper()
    block, pairs = _block(module), _pairs(module)
    if hasattr(method, "wna16_backend"):
        # 0.33 has no such attribute, and its layout was not compared.
        is_marlin = backend in _MARLIN and getattr(method, "marlin_input_dtype", method) is None
        return marlin(bias=True) if is_marlin else unknown_layout(f"{backend} of experts")
    if type(method).__name__ == "CompressedTensorsWNA16MoEMethod":
        return reordered(_TRITON)
    if hasattr(method, "fp8_backend") and block and backend in _KEPT:
        return fp8_blocks(block, pairs)
    if hasattr(method, "unquantized_backend") and backend in _KEPT:
        return None
    if backend in _SWAPPED and (block or not pairs):
        own = [name for name, _ in module.named_parameters(recurse=False) if name.startswith("w13_weight")]
        return reordered(dict.fromkeys(own, swapped_halves))
    return unknown_layout(f"{backend} of experts")


def _bytes_of_columns(tensor: Tensor) -> Tensor:
    """[experts, words, columns] -> bytes [experts, columns, 4 x words]."""
    return tensor.transpose(1, 2).contiguous().view(torch.uint8)


_TRITON_PARTS = {WEIGHT_PACKED: _bytes_of_columns, WEIGHT_SCALE: lambda tensor: tensor.transpose(1, 2).contiguous()}
_TRITON: Mapping[str, Any] = {
    f"{matrix}_{part}": order for matrix in ("w13", "w2") for part, order in _TRITON_PARTS.items()
}


def attention_layout(module: Any) -> Layout | None:
    """Latent attention computes matrices from `kv_b_proj`, which is also kept; other attention computes none."""
    if not hasattr(module, "kv_b_proj"):
        return None
    return absorbed(module.kv_b_proj, module.num_heads, module.qk_nope_head_dim, _block(module.kv_b_proj))

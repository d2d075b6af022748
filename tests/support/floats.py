"""Releases in low-precision floats, made from plain ones by formulas of their own, each as its writer spells it."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.quantized import E2M1, blocks, rewrite

# A module's name and weight to the tensors that store it, by full name.
Store = Callable[[str, Tensor], Mapping[str, Tensor]]
AMAX = 0.5  # NVFP4's tensor scale is made of it, for every tensor: no test model has larger weights


@dataclass(frozen=True)
class Spelling:
    """One way to store weights: what it makes of one, and what stands in config.json or in hf_quant_config.json."""

    store: Store
    config: Mapping[str, Any]
    beside: Mapping[str, Any] | None = None
    columns: int = 1  # what must divide the columns of a weight


def write(plain, target, spelling, wanted=None):
    """A copy of an HF directory whose projections (or the `wanted` weights) are stored so, and others are listed."""
    left = []

    def store(name, tensor):
        module, is_one = name.removesuffix(".weight"), (wanted or _projection)(name)
        fits = is_one and tensor.shape[-1] % spelling.columns == 0
        left.extend([module] if _projection(name) and not fits else [])
        return spelling.store(module, tensor) if fits else {name: tensor}

    def edit(config):
        draft = f"model.layers.{config.get('num_hidden_layers')}."  # `model.decoder.` in SGLang
        left.extend([name.replace(draft, "model.decoder.") for name in left if name.startswith(draft)])
        return config | _listing(spelling.config, left)

    rewrite(plain, target, store, edit)
    if spelling.beside is not None:
        (target / "hf_quant_config.json").write_text(json.dumps(_listing(spelling.beside, left)))
    return target


# Where each format lists what is not quantized.
_KEYS = {"fp8": "ignored_layers", "mxfp8": "ignored_layers", "quark": "exclude"}


def _listing(config, left):
    found = dict(config)
    for section, usual in (("quantization_config", "ignore"), ("quantization", "exclude_modules")):
        if left and section in found:
            content = found[section]
            key = _KEYS.get(content.get("quant_method"), usual)
            found[section] = content | {key: [*content.get(key, []), *left]}
    return found


def _projection(name):
    return name.endswith(("_proj.weight", "_proj_with_mqa.weight")) and "eh_proj" not in name


def fp8_block(weight, size=128, *, powers=False):
    rows, columns = weight.shape
    cut = blocks(weight, size, size)
    scale = cut.abs().amax((1, 3), keepdim=True).clamp(min=1e-4) / 448
    if powers:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    codes = (cut / scale).clamp(-448, 448).flatten(2, 3).flatten(0, 1)[:rows, :columns]
    return codes.to(torch.float8_e4m3fn), scale[:, 0, :, 0]


def deepseek(module, weight):
    """FP8 in blocks of 128 x 128, or of 16 x 16, in which these small models have more than one."""
    codes, scale = fp8_block(weight, 16)
    return {f"{module}.weight": codes, f"{module}.weight_scale_inv": scale}


def deepseek_powers(module, weight):
    codes, scale = fp8_block(weight, 32, powers=True)
    return {f"{module}.weight": codes, f"{module}.weight_scale_inv": scale}


def exponents(scale):
    return (torch.log2(scale) + 127).to(torch.uint8)


def mx_scale(weight, largest):
    """[rows, groups, 32], and the power of two of each group."""
    groups = weight.float().unflatten(-1, (-1, 32))
    return groups, torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1).clamp(min=1e-30) / largest)))


def mxfp8(ending):
    def store(module, weight):
        groups, scale = mx_scale(weight, 448.0)
        codes = (groups / scale.unsqueeze(-1)).flatten(1).to(torch.float8_e4m3fn)
        return {f"{module}.weight": codes, f"{module}.{ending}": exponents(scale)}

    return store


# Of equal distances the first counts: ties toward zero, or to even codes.
TO_ZERO = torch.arange(16)
TO_EVEN = torch.cat([torch.arange(0, 16, 2), torch.arange(1, 16, 2)])


def nearest(values, order=TO_ZERO):
    """The code of the E2M1 number nearest to each, two in a byte, the even one in the low bits."""
    codes = order[(values.unsqueeze(-1).clamp(-6, 6) - E2M1[order]).abs().argmin(-1)].to(torch.uint8)
    return codes[..., 0::2] + 16 * codes[..., 1::2]


def mxfp4(weight_name):
    def store(module, weight):
        groups, scale = mx_scale(weight, 6.0)
        codes = nearest((groups / scale.unsqueeze(-1)).flatten(1))
        return {f"{module}.{weight_name}": codes, f"{module}.weight_scale": exponents(scale)}

    return store


# What DeepSeek-V4's releases quantize.
V4_QUANTIZED = re.compile(
    r"(layers|mtp)\.\d+\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)|ffn\..*experts\..*|[eh]_proj)\.weight"
)


def deepseek_v4(module, weight):
    """Routed experts in MXFP4, everything else in FP8; scales are powers of two in a dtype of their own."""
    if ".ffn.experts." in module:
        stored = mxfp4("weight")(module, weight)
        codes, scale = stored[f"{module}.weight"], stored[f"{module}.weight_scale"].view(torch.float8_e8m0fnu)
        return {f"{module}.weight": codes.view(torch.int8), f"{module}.scale": scale}
    codes, powers = fp8_block(weight, powers=True)
    return {f"{module}.weight": codes, f"{module}.scale": exponents(powers).view(torch.float8_e8m0fnu)}


def nvfp4(weight, whole=AMAX / 2688):
    groups = weight.float().unflatten(-1, (-1, 16))
    scale = (groups.abs().amax(-1) / (6 * whole)).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    return nearest((groups / (scale.float() * whole).unsqueeze(-1)).flatten(1), TO_EVEN), scale


def modelopt_nvfp4(*, inputs):
    def store(module, weight):
        codes, scale = nvfp4(weight)
        found = {
            f"{module}.weight": codes,
            f"{module}.weight_scale": scale,
            f"{module}.weight_scale_2": torch.tensor(AMAX / 2688),
        }
        return found | ({f"{module}.input_scale": torch.tensor(0.01)} if inputs else {})

    return store


def quark_nvfp4(module, weight):
    """ModelOpt's, with another name of the inputs' scale. Source: `schemes/quark_nvfp4.py` of vLLM 0.26."""
    stored = modelopt_nvfp4(inputs=True)(module, weight)
    return {name.replace(".input_scale", ".input_scale_2"): part for name, part in stored.items()}


def compressed_nvfp4(module, weight):
    divisor = torch.tensor([2688 / AMAX])
    codes, scale = nvfp4(weight, float(1 / divisor))
    return {
        f"{module}.weight_packed": codes,
        f"{module}.weight_scale": scale,
        f"{module}.weight_global_scale": divisor,
        f"{module}.input_global_scale": torch.tensor([100.0]),
    }


def channel(module, weight):
    scale = (weight.float().abs().amax(1, keepdim=True) / 448).bfloat16()
    return {f"{module}.weight": (weight / scale).to(torch.float8_e4m3fn), f"{module}.weight_scale": scale}


def modelopt_fp8(module, weight):
    scale = weight.float().abs().max() / 448
    codes = (weight.float() / scale).to(torch.float8_e4m3fn)
    return {f"{module}.weight": codes, f"{module}.weight_scale": scale, f"{module}.input_scale": torch.tensor(0.02)}


_STORES = {
    "fp8": deepseek,
    "fp8-ue8m0": deepseek_powers,
    "fp8-channel": channel,
    "fp8-modelopt": modelopt_fp8,
    "mxfp8": mxfp8("weight_scale_inv"),
    "mxfp4-compressed": mxfp4("weight_packed"),
    "mxfp4-quark": mxfp4("weight"),
    "nvfp4-quark": quark_nvfp4,
    "nvfp4-modelopt": modelopt_nvfp4(inputs=True),
    "nvfp4-weights": modelopt_nvfp4(inputs=False),
    "nvfp4-compressed": compressed_nvfp4,
    "deepseek-v4": deepseek_v4,
}


def _spelling(name, config=None, beside=None, columns=1):
    """One of float_spellings.json, which has the configs as releases have them."""
    return Spelling(_STORES[name], {"quantization_config": config} if config else {}, beside, columns)


_CONFIGS = json.loads(Path(__file__).with_name("float_spellings.json").read_text())
DEEPSEEK_V4 = _spelling("deepseek-v4", **_CONFIGS.pop("deepseek-v4"))
SPELLINGS = {name: _spelling(name, **fields) for name, fields in _CONFIGS.items()}

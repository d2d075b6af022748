"""Quantized releases made from plain ones, by formulas of their own, with the weights that they mean."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import contextmanager

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor

from ckptkit.quant.formats import packing
from support import models

# A weight to its parts, by what is appended to its name, and to what these mean.
Quantizer = Callable[[Tensor], tuple[Mapping[str, Tensor], Tensor]]

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])

# Releases keep the indexer's `weights_proj`.
FP8_LINEAR = re.compile(
    r"(?!thinker\.audio_tower|talker).*layers\.\d+\.(self_attn|linear_attn|mlp|block_sparse_moe)\.(?!indexer\.weights_proj)"
    r"(.*_proj|.*_proj_with_mqa|.*\.w[123]|in_proj_qkvz?|in_proj_z)\.weight"
)
FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj")


def write(plain, target, wanted, quantizer, edit):
    """A copy of an HF directory with its `wanted` tensors quantized and its config edited. Returns the plain ones."""
    meant = {}

    def store(name, tensor):
        parts, meant[name] = quantizer(tensor) if wanted(name) else ({"": tensor}, tensor)
        return {name + ending: part for ending, part in parts.items()}

    rewrite(plain, target, store, edit)
    return meant


def rewrite(plain, target, store, edit):
    """A copy of an HF directory whose tensors become those that `store` makes of each; its config is edited."""
    shutil.copytree(plain, target)
    weight_map = {}
    for file in sorted(target.glob("*.safetensors")):
        stored = {}
        for name, tensor in load_file(file).items():
            stored |= {part_name: part.contiguous() for part_name, part in store(name, tensor).items()}
        save_file(stored, file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(stored, file.name)
    write_index(target, weight_map)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(edit(config), indent=2))


def write_index(path, weight_map):
    total = sum(tensor.nbytes for tensor in models.tensors(path).values())
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(content))


def blocks(weight, height, width):
    """[rows of blocks, height, columns of blocks, width], filled up with zeros, float32."""
    rows, columns = weight.shape
    filled = torch.nn.functional.pad(weight.float(), (0, -columns % width, 0, -rows % height))
    return filled.unflatten(1, (-1, width)).unflatten(0, (-1, height))


def fp8_blocks(height, width, dtype=torch.float32, ending="_scale_inv"):
    """One scale a block; in float8_e8m0fnu it is rounded up to a power of two. A `width` of 0 is a whole row."""

    def quantize(weight):
        rows, columns = weight.shape
        cut = blocks(weight, height, width or columns)
        scale = cut.abs().amax((1, 3), keepdim=True) / 448
        if dtype is torch.float8_e8m0fnu:
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        stored = scale.to(dtype)
        codes = (cut / stored.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
        meant = (codes.float() * stored.float()).to(torch.bfloat16)
        whole = [one.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous() for one in (codes, meant)]
        return {"": whole[0], ending: stored[:, 0, :, 0].contiguous()}, whole[1]

    return quantize


def fp8_config(block, kept=()):
    """A quantization_config of FP8 in blocks as Qwen's and DeepSeek's releases have it, `kept` what is not in it."""
    known = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    return known | ({"modules_to_not_convert": list(kept)} if kept else {})


def with_fp8_blocks(plain, target, block):
    """A copy in square FP8 blocks as Qwen and DeepSeek publish them: the linear layers of the decoder.

    config.json names every other matrix in `modules_to_not_convert`, and the vision tower of Qwen2.5-VL as a whole:
    SGLang fuses its `attn.qkv` under another name.
    """
    kept = [
        name.removesuffix(".weight")
        for name, tensor in models.tensors(plain).items()
        if tensor.dim() > 1 and not FP8_LINEAR.fullmatch(name)
    ]
    if any(name.startswith("visual.") for name in kept):
        kept.append("visual")

    def edit(config):
        return config | {"quantization_config": fp8_config((block, block), kept)}

    write(plain, target, lambda name: FP8_LINEAR.fullmatch(name) is not None, fp8_blocks(block, block), edit)
    return target


def one_an_expert(release, target, *, transposed):
    """A copy with one tensor an expert; the release itself where it has no fused experts, or they have biases.

    `transposed`: fused experts are [experts, in, out].
    """
    names = models.tensors(release)
    if not any(FUSED.fullmatch(name) for name in names) or any(name.endswith("_proj_bias") for name in names):
        return release
    rewrite(release, target, lambda name, tensor: dict(_apart(name, tensor, transposed)), dict)
    return target


def _apart(name, tensor, transposed):
    if not (match := FUSED.fullmatch(name)):
        yield name, tensor
        return
    kinds = ("gate", "up") if match[2] == "gate_up" else ("down",)
    for number, expert in enumerate(tensor):
        parts = (expert.T if transposed else expert).chunk(len(kinds))
        for kind, part in zip(kinds, parts, strict=True):
            yield f"{match[1]}.{number}.{kind}_proj.weight", part.clone()


def int4(bits=4, **arguments):
    """compressed-tensors' own compressor, and its decompressor for what is meant."""
    args = QuantizationArgs(num_bits=bits, type="int", **arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format="pack-quantized")

    def quantize(weight):
        together = weight.reshape(weight.shape[0], -1, args.group_size or weight.shape[1])
        scale, zero_point = calculate_qparams(together.amin(-1), together.amax(-1), args)
        stored = PackedQuantizationCompressor.compress(
            {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}, scheme
        )
        meant = PackedQuantizationCompressor.decompress(dict(stored), scheme)["weight"]
        return {name.removeprefix("weight"): part for name, part in stored.items()}, meant

    return quantize


def widen(path, plain, part):
    """Packs modules of an INT4 directory in groups of 32 again, in 8 bits from `plain`; config_groups name each."""
    quantize, plain_weights = int4(8, strategy="group", group_size=32), {}
    for file in plain.glob("*.safetensors"):
        plain_weights |= load_file(file)
    for file in sorted(path.glob("*.safetensors")):
        stored = load_file(file)
        for name in [name for name in stored if name.endswith(f"{part}.weight_packed")]:
            weight = name.removesuffix("_packed")
            stored |= {weight + ending: one.contiguous() for ending, one in quantize(plain_weights[weight])[0].items()}
        save_file(stored, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    first = groups["group_0"]
    others = f"re:(?!.*{re.escape(part)}$).*_proj$"
    groups["group_1"] = first | {"weights": first["weights"] | {"num_bits": 8}, "targets": [f"re:.*{re.escape(part)}$"]}
    groups["group_0"] = first | {"targets": [others]}
    (path / "config.json").write_text(json.dumps(config, indent=2))
    write_index(path, json.loads((path / "model.safetensors.index.json").read_text())["weight_map"])


def one_target(content):
    for group in content["config_groups"].values():
        group["targets"] = ["Linear"]


def mxfp4(experts):
    """[experts, in, out], 32 inputs with one power of two: each weight to the nearest of the 16 numbers."""
    groups = experts.float().transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
    codes = (groups.unsqueeze(-1) / torch.exp2(exponents)[..., None, None] - E2M1).abs().argmin(-1)
    meant = (E2M1[codes] * torch.exp2(exponents).unsqueeze(-1)).flatten(-2).transpose(1, 2)
    blocks = codes[..., 0::2] + 16 * codes[..., 1::2]
    return {"_blocks": blocks.to(torch.uint8), "_scales": (exponents + 127).to(torch.uint8)}, meant.to(
        torch.bfloat16
    ).contiguous()


def group_config(form, *groups, ignore=("lm_head",)):
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {f"group_{index}": one for index, one in enumerate(groups)},
        "ignore": list(ignore),
    }


def compressed_config(form, **weights):
    arguments = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "dynamic": False,
        "observer": "minmax",
        "observer_kwargs": {},
        **weights,
    }
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": arguments}
    return group_config(form, group)


@contextmanager
def small_groups_allowed():
    """Lets experts have zero points in small groups, which SGLang loads and repacks rightly but computes wrongly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "SMALL_TILE", 0)
        yield

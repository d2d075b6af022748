"""Test models in FP8 blocks as Qwen and DeepSeek publish them: the linear layers of the decoder, experts one by one.

config.json names every other matrix in `modules_to_not_convert`, and the vision tower of Qwen2.5-VL as a whole: SGLang
fuses its `attn.qkv` under another name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from support import models
from support.quantized import fp8_blocks, fp8_config, rewrite, write

# Releases keep the indexer's `weights_proj`.
LINEAR = re.compile(
    r"(?!thinker\.audio_tower|talker).*layers\.\d+\.(self_attn|linear_attn|mlp|block_sparse_moe)\.(?!indexer\.weights_proj)"
    r"(.*_proj|.*_proj_with_mqa|.*\.w[123]|in_proj_qkvz?|in_proj_z)\.weight"
)
FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj")


def with_fp8_blocks(plain: Path, target: Path, block: int) -> Path:
    """A copy in blocks of `block` rows and columns."""
    kept = [
        name.removesuffix(".weight")
        for name, tensor in models.tensors(plain).items()
        if tensor.dim() > 1 and not LINEAR.fullmatch(name)
    ]

    if any(name.startswith("visual.") for name in kept):
        kept.append("visual")

    def edit(config: dict[str, Any]) -> dict[str, Any]:
        return config | {"quantization_config": fp8_config((block, block), kept)}

    write(plain, target, lambda name: LINEAR.fullmatch(name) is not None, fp8_blocks(block, block), edit)
    return target


def one_an_expert(release: Path, target: Path, *, transposed: bool) -> Path:
    """A copy with one tensor an expert; the release itself where it has no fused experts, or they have biases.

    `transposed`: fused experts are [experts, in, out].
    """
    names = models.tensors(release)
    if not any(FUSED.fullmatch(name) for name in names) or any(name.endswith("_proj_bias") for name in names):
        return release
    rewrite(release, target, lambda name, tensor: dict(_apart(name, tensor, transposed)), dict)
    return target


def _apart(name: str, tensor: Tensor, transposed: bool) -> Iterator[tuple[str, Tensor]]:
    if not (match := FUSED.fullmatch(name)):
        yield name, tensor
        return
    kinds = ("gate", "up") if match[2] == "gate_up" else ("down",)
    for number, expert in enumerate(tensor):
        parts = (expert.T if transposed else expert).chunk(len(kinds))
        for kind, part in zip(kinds, parts, strict=True):
            yield f"{match[1]}.{number}.{kind}_proj.weight", part.clone()

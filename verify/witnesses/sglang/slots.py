"""Where SGLang must keep each HF tensor, predicted from its name and the model's sizes, never from SGLang's loader.

Layout at tensor parallel size 1 (SGLang 0.5.16 and 0.5.23, `layers/linear.py`, `layers/moe/fused_moe_triton/layer.py`,
the compressed-tensors W4A16 schemes and `fp8.py`): q, k, v rows are stacked in `qkv_proj`, gate and up rows in
`gate_up_proj`; expert e is `w13_weight[e]` (gate rows above up rows) and `w2_weight[e]`. Packed expert weights and
their scales are transposed. Scales of FP8 blocks are stacked as the rows are, each part rounded up to whole blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.formats.hf.side_files import quantization_of
from converters.config.dims import ModelDims
from converters.hf_names import FUSED, GATE_UP, QKV
from converters.planner import expected_hf
from quant.formats.part_names import (
    INT4_PARTS,
    PACKED,
    WEIGHT_G_IDX,
    WEIGHT_PACKED,
    WEIGHT_SCALE,
    WEIGHT_SCALE_INV,
    WEIGHT_SHAPE,
    WEIGHT_ZERO_POINT,
)
from verify.evidence.expected import weights_of

_SHARED = re.compile(r"(.+\.mlp)\.shared_experts\.((?:gate|up|down)_proj\.\w+)")
_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(\w+)")
_VOCAB = ("model.embed_tokens.weight", "lm_head.weight")
_ZEROS_A_WORD = 8

# Allocated for every packed layer of experts, but read only with activation ordering.
_G_IDX = re.compile(r".+\.mlp\.experts\.w(?:13|2)_(?:weight_g_idx|g_idx_sort_indices)")


@dataclass(frozen=True)
class Slot:
    """`param[index]` must hold the HF tensor (its transpose where `transposed`).

    `compared` is False for `weight_shape`: SGLang never uses it, keeps only the last of a fused layer's shards, and
    rounds those of experts to the model's dtype. It must be loaded all the same.
    """

    param: str
    index: tuple[int | slice, ...] = ()
    transposed: bool = False
    compared: bool = True


def fuses_shared(names: Iterable[str]) -> bool:
    """Whether SGLang must keep the shared expert of GLM-4.5 as one more routed expert: where it is packed like those.

    SGLang 0.5.16's `glm4_moe.py` leaves no choice. It cannot build a packed shared expert of its own (it asks for its
    `weight`), and it drops one in BF16 beside packed routed experts without a word unless fusion is disabled.
    """
    return any(_SHARED.fullmatch(name) and name.endswith(PACKED) for name in names)


def unplaced(config: Mapping[str, Any]) -> str | None:
    """Why it is not known where SGLang keeps the quantized weights of this config; None where it is."""
    quantization = quantization_of(config)
    if quantization is None or block_rows(config):
        return None
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if (
        method == "compressed-tensors"
        and quantization.get("format") == "pack-quantized"
        and weights_of(config).get("num_bits") == 4
    ):
        return None
    return (
        f"where SGLang keeps weights quantized by {method!r} in this format is not written down yet "
        "(it is for packed INT4 and FP8 in blocks)"
    )


def block_rows(config: Mapping[str, Any]) -> int:
    """How many output rows share a scale in an FP8 checkpoint with scales for blocks; 0 for every other one."""
    quantization = quantization_of(config)
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != "fp8":
        return 0
    match quantization.get("weight_block_size"):
        case [int(rows), int()]:
            return rows
    return 0


def slot_of(name: str, dims: ModelDims, *, fused_shared: bool = False, block: int = 0) -> Slot:
    """The slot of an HF tensor; `block` as from `block_rows`. One of unknown kind is expected under its own name."""
    if fused_shared and (match := _SHARED.fullmatch(name)):
        name = f"{match[1]}.experts.{dims.experts}.{match[2]}"
    if match := _EXPERT.fullmatch(name):
        return _expert_slot(match[1], int(match[2]), match[3], match[4], dims, block)
    module, _, leaf = name.rpartition(".")
    path, _, projection = module.rpartition(".")
    if name in _VOCAB:
        return Slot(name, (slice(0, dims.vocab),))
    fused, start, rows = _fused(path, projection, dims)
    if leaf == WEIGHT_SHAPE:
        return Slot(f"{fused}.{leaf}", compared=False)
    if not rows or leaf == WEIGHT_G_IDX:
        return Slot(f"{fused}.{leaf}")
    return Slot(f"{fused}.{leaf}", (_rows(leaf, start, rows, block),))


def _rows(leaf: str, start: int, rows: int, block: int) -> slice:
    together = {WEIGHT_ZERO_POINT: _ZEROS_A_WORD, WEIGHT_SCALE_INV: block}.get(leaf) or 1
    first = -(-start // together)
    return slice(first, first - (-rows // together))


def _fused(path: str, projection: str, dims: ModelDims) -> tuple[str, int, int]:
    """Module in SGLang, first row there and number of rows; 0 rows: the tensor has a module of its own."""
    query, key = dims.heads * dims.head_dim, dims.groups * dims.head_dim
    ffn = dims.shared_ffn if path.endswith(".shared_experts") else dims.ffn
    rows = dict(zip((*QKV, *GATE_UP), (query, key, key, ffn, ffn), strict=True))
    if projection not in rows:
        return f"{path}.{projection}".lstrip("."), 0, 0
    fused, shards = next((name, shards) for name, shards in FUSED.items() if projection in shards)
    return f"{path}.{fused}", sum(rows[one] for one in shards[: shards.index(projection)]), rows[projection]


def _expert_slot(experts: str, expert: int, projection: str, leaf: str, dims: ModelDims, block: int) -> Slot:
    param = f"{experts}.{'w2' if projection == 'down' else 'w13'}_{leaf}"
    transposed = leaf in (WEIGHT_PACKED, WEIGHT_SCALE)
    if projection == "down" or leaf in (WEIGHT_SHAPE, WEIGHT_G_IDX):
        return Slot(param, (expert,), transposed, compared=leaf != WEIGHT_SHAPE)
    rows = _rows(leaf, dims.expert_ffn * (projection == "up"), dims.expert_ffn, block)
    return Slot(
        param, (expert, slice(None), rows) if transposed or leaf == WEIGHT_ZERO_POINT else (expert, rows), transposed
    )


def promised_names(config: Mapping[str, Any]) -> Iterator[str]:
    """Every HF name that a checkpoint of this model may hold: each weight plain, and its quantized parts."""
    for name in expected_hf(config):
        yield name
        module, _, leaf = name.rpartition(".")
        if leaf == "weight":
            yield from (f"{module}.{part}" for part in (*INT4_PARTS, WEIGHT_SCALE_INV))


def left_empty(param: str, config: Mapping[str, Any]) -> bool:
    """Whether SGLang allocates this parameter without wanting anything from the checkpoint in it."""
    ordered = weights_of(config).get("actorder") in ("group", "dynamic")
    return _G_IDX.fullmatch(param) is not None and (not ordered or param.endswith("_sort_indices"))


def is_draft(name: str, dims: ModelDims, config: Mapping[str, Any]) -> bool:
    """Whether the tensor belongs to a multi-token prediction layer, which SGLang loads into a draft model."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return bool(config.get("num_nextn_predict_layers")) and match is not None and int(match[1]) >= dims.layers

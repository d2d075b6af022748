"""Parts of packed INT4 weights: words, scales and shapes that are missing, of another size, or of another tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from torch import Tensor

from mutations.edits import replace, tensor
from mutations.int4 import ALL3, DEEPSEEK, DOWN, GLM, PARTS, QWEN, QWEN3, WEIGHT, of
from mutations.mutation import Damage

BOTH = "model.layers.5.mlp.experts.{10..11}.down_proj.weight"
SCALE, PACKED, SHAPE = (f"{DOWN}.{name}" for name in ("weight_scale", "weight_packed", "weight_shape"))
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def part(change: Callable[[Tensor], Tensor]) -> Damage:
    """One part of a packed weight holds something else."""

    def damage(path: Path, name: str) -> None:
        replace(path, {name: change(tensor(path, name).clone())})

    return damage


def part_of(ending: str, change: Callable[[Tensor], Tensor]) -> Damage:
    """The same of the weight that the part belongs to, which is what a finding names."""

    def damage(path: Path, weight: str) -> None:
        replace(path, {weight + ending: change(tensor(path, weight + ending).clone())})

    return damage


def without(path: Path, name: str) -> None:
    replace(path, {}, [name])


def words_lost(path: Path, weight: str) -> None:
    replace(path, {}, [f"{weight}_packed"])


def scale_without_weight(path: Path, name: str) -> None:
    replace(path, {name: torch.ones(12, 4, dtype=torch.bfloat16)})


def element(value: float) -> Callable[[Tensor], Tensor]:
    """The last scale is another."""

    def change(scale: Tensor) -> Tensor:
        scale[-1, -1] = value
        return scale

    return change


def codes(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The 4 bit codes of packed words, changed and packed again."""

    def on_words(words: Tensor) -> Tensor:
        rows, columns = words.shape[0], words.shape[1] * 8
        return pack_to_int32(change(unpack_from_int32(words, 4, torch.Size((rows, columns)))).contiguous(), 4)

    return on_words


def awq(found: Tensor) -> Tensor:
    """Nibbles of each word in AutoAWQ's order."""
    return found.reshape(len(found), -1, 8)[..., _AWQ_ORDER].reshape(found.shape)


def one_nibble(words: Tensor) -> Tensor:
    words[0, 0] ^= 0x0000F000
    return words


def swapped(ending: str) -> Damage:
    """A part of this expert and the same of the one before hold each other's values."""

    def damage(path: Path, folded: str) -> None:
        here, there = f"{DOWN}.{ending}", f"{DOWN.replace('11', '10')}.{ending}"
        replace(path, {here: tensor(path, there), there: tensor(path, here)})

    return damage


def words_copied(path: Path, folded: str) -> None:
    """The words and the scales of expert 10 stand under expert 11 too."""
    replace(path, {f"{DOWN}.{part}": tensor(path, f"{DOWN.replace('11', '10')}.{part}") for part in PARTS})


MUTATIONS = (
    # Parts
    of(
        "CK104",
        "scale missing",
        "a triplet was cut by a shard's border",
        without,
        {GLM: SCALE, QWEN3: SCALE},
        ("F13", "F22"),
    ),
    of(
        "CK104",
        "shape missing",
        "a triplet was cut by a shard's border",
        without,
        {GLM: SHAPE, DEEPSEEK: SHAPE},
        ("F13", "F22"),
    ),
    of(
        "CK104",
        "words missing",
        "a loader kept the scale and dropped the words",
        words_lost,
        {GLM: WEIGHT},
        ("F4", "F13"),
    ),
    of(
        "CK104",
        "scale without a weight",
        "a router was packed once and unpacked again",
        scale_without_weight,
        {GLM: "model.layers.5.mlp.gate.weight_scale"},
        ("F13",),
    ),
    of(
        "CK303",
        "scale of another group size",
        "groups of 96 instead of 32",
        part(lambda t: t[:, :1]),
        {QWEN3: SCALE, GLM: SCALE},
        ("F12", "F13"),
    ),
    of(
        "CK303",
        "scale turned",
        "groups along the other axis",
        part(lambda t: t.T),
        {GLM: SCALE, DEEPSEEK: SCALE},
        ("F13",),
    ),
    of(
        "CK303",
        "a word too few",
        "rows were not filled up to whole words",
        part(lambda t: t[:, :-1]),
        {QWEN3: PACKED},
        ("F13",),
    ),
    of("CK303", "words of 64 bits", "a cast to int64", part(lambda t: t.long()), {GLM: PACKED}, ("F14",)),
    of(
        "CK304",
        "scale of zero",
        "a group of zeros was divided by its scale",
        part(element(0.0)),
        {GLM: SCALE, QWEN: "model.layers.3.mlp.up_proj.weight_scale"},
        ("F13",),
    ),
    of("CK304", "scale negative", "an asymmetric scale", part(element(-0.01)), {QWEN3: SCALE}, ("F13",)),
    of(
        "CK304",
        "scale not a number",
        "a scale of an empty group",
        part(element(math.nan)),
        {GLM: SCALE, DEEPSEEK: SCALE},
        ("F13",),
    ),
    of("CK304", "scale infinite", "a scale that overflowed float16", part(element(math.inf)), {QWEN3: SCALE}, ("F13",)),
    of(
        "CK304",
        "shape that lies",
        "the shape of one rank's part",
        part(lambda t: t // 2),
        {GLM: SHAPE, DEEPSEEK: SHAPE},
        ("F13", "F15"),
    ),
    of(
        "CK308",
        "scales 200 times too large",
        "a scale was applied twice",
        part(lambda t: t * 200),
        {GLM: SCALE, QWEN3: SCALE, QWEN: "model.layers.3.mlp.up_proj.weight_scale"},
        ("F13",),
    ),
    of(
        "CK308",
        "scales 200 times too small",
        "a scale was inverted",
        part(lambda t: t / 200),
        {GLM: SCALE},
        ("F13",),
        severity="warning",
    ),
    of(
        "CK206",
        "words of an expert copied over another",
        "an expert was read by its local number",
        words_copied,
        dict.fromkeys(ALL3, "model.layers.5.mlp.experts.{10..11}.down_proj.weight_packed"),
        ("F8",),
        "slime#1799",
    ),
    # Against the source
    of(
        "CK305",
        "scale a quarter too large",
        "a scale for another grid",
        part_of("_scale", lambda t: t * 1.25),
        {GLM: WEIGHT, DEEPSEEK: WEIGHT},
        ("F12", "F13"),
    ),
    of(
        "CK305",
        "one nibble changed",
        "a bit flipped in a copy",
        part_of("_packed", one_nibble),
        {GLM: WEIGHT, QWEN: "model.layers.3.mlp.up_proj.weight"},
        ("F2",),
    ),
    of(
        "CK305",
        "nibbles in AWQ's order",
        "the words of another format",
        part_of("_packed", codes(awq)),
        {GLM: WEIGHT, QWEN3: WEIGHT},
        ("F14",),
    ),
    of(
        "CK305",
        "codes without their offset",
        "signed codes taken for unsigned ones",
        part_of("_packed", lambda words: words ^ -2004318072),
        {GLM: WEIGHT, QWEN3: WEIGHT},
        ("F14",),
    ),
    of(
        "CK305",
        "scales of two experts swapped",
        "experts off by one in the scales alone",
        swapped("weight_scale"),
        dict.fromkeys((GLM, QWEN3), BOTH),
        ("F8", "F13"),
    ),
    of(
        "CK305",
        "words of two experts swapped",
        "experts off by one in the words alone",
        swapped("weight_packed"),
        {DEEPSEEK: BOTH},
        ("F8",),
    ),
)

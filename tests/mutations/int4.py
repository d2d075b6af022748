"""INT4 checkpoints: what is packed, what config.json says of it, and the parts of packed weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from support import quantized
from torch import Tensor

from mutations.edits import edit_json, names, replace, tensor
from mutations.mutation import EH_PROJ, UP, Damage, Mutation, at

QWEN, QWEN3, GLM, DEEPSEEK = "qwen2-untied/int4", "qwen3_moe/int4", "glm4_moe/int4", "deepseek_v3/int4"
DOWN = "model.layers.5.mlp.experts.11.down_proj"
PARTS = ("weight_packed", "weight_scale", "weight_shape")
ROUTER = "model.layers.{}.mlp.gate"
WEIGHT = f"{DOWN}.weight"
ALL3 = (QWEN3, GLM, DEEPSEEK)
WORDS = {QWEN: "model.layers.{0..11}.mlp.up_proj.weight_packed", GLM: "model.layers.{0..1}.mlp.up_proj.weight_packed"}
SCALES = {QWEN: "model.layers.{0..11}.mlp.up_proj.weight_scale", GLM: "model.layers.{0..1}.mlp.up_proj.weight_scale"}
CONFIG = {QWEN: "config.json", GLM: "config.json"}


def packed(modules: Sequence[str]) -> Damage:
    """Packs modules that no reader expects packed, as a quantizer does that knows only names."""

    def damage(path: Path, folded: str) -> None:
        pack = quantized.int4(symmetric=True, strategy="group", group_size=32)
        parts = {
            f"{module}.weight{ending}": part
            for module in modules
            for ending, part in pack(tensor(path, f"{module}.weight"))[0].items()
        }
        replace(path, parts, [f"{module}.weight" for module in modules])

    return damage


def unpack(path: Path, modules: Sequence[str]) -> None:
    """Puts weights back to BF16."""
    plain = {}
    for module in modules:
        words, scale, shape = (tensor(path, f"{module}.{part}") for part in PARTS)
        plain[f"{module}.weight"] = unpack_from_int32(words, 4, torch.Size(shape.tolist())).to(
            scale.dtype
        ) * scale.repeat_interleave(32, 1)
    replace(path, plain, [f"{module}.{part}" for module in modules for part in PARTS])


def unpacked(*modules: str) -> Damage:
    """Leaves modules in BF16 that readers expect packed."""
    return lambda path, folded: unpack(path, modules)


def settings(change: Callable[[dict[str, Any]], object]) -> Damage:
    """quantization_config says something else."""
    return lambda path, place: edit_json(path / "config.json", lambda config: change(config["quantization_config"]))


def weights(**values: Any) -> Damage:
    """The arguments of the weights in quantization_config."""
    return settings(lambda config: config["config_groups"]["group_0"]["weights"].update(values))


def not_quantized(path: Path, place: str) -> None:
    edit_json(path / "config.json", lambda config: config.pop("quantization_config"))


def all_plain(path: Path, place: str) -> None:
    """The weights are BF16 and config.json still claims INT4: the wrong directory was copied."""
    unpack(path, [name.removesuffix(".weight_packed") for name in names(path, "weight_packed")])


def ignore(*entries: str) -> Damage:
    return settings(lambda config: config.update(ignore=[*config["ignore"], *entries]))


BOTH = "model.layers.5.mlp.experts.{10..11}.down_proj.weight"
SCALE, PACKED, SHAPE = (f"{DOWN}.{name}" for name in ("weight_scale", "weight_packed", "weight_shape"))
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def part(change: Callable[[Tensor], Tensor]) -> Damage:
    """One part of a packed weight holds something else."""
    return lambda path, name: replace(path, {name: change(tensor(path, name).clone())})


def part_of(ending: str, change: Callable[[Tensor], Tensor]) -> Damage:
    """The same of the weight that the part belongs to, which is what a finding names."""
    return lambda path, weight: replace(path, {weight + ending: change(tensor(path, weight + ending).clone())})


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


MUTATIONS = {
    # What is packed
    "routers packed": Mutation(
        "F3",
        "CK301",
        packed([ROUTER.format(layer) for layer in range(3, 12)]),
        at("model.layers.{3..11}.mlp.gate.weight_packed", *ALL3),
    ),
    "one router packed": Mutation(
        "F3", "CK301", packed([ROUTER.format(4)]), at("model.layers.4.mlp.gate.weight_packed", *ALL3)
    ),
    "embedding packed": Mutation(
        "F3", "CK301", packed(["model.embed_tokens"]), at("model.embed_tokens.weight_packed", GLM, QWEN)
    ),
    "output layer packed": Mutation("F3", "CK301", packed(["lm_head"]), at("lm_head.weight_packed", QWEN3, QWEN)),
    "expert not packed": Mutation("F3", "CK302", unpacked(DOWN), at(f"{DOWN}.weight", *ALL3)),
    "query packed, key not": Mutation(
        "F3", "CK302", unpacked("model.layers.3.self_attn.k_proj"), {QWEN: "model.layers.3.self_attn.k_proj.weight"}
    ),
    "gate packed, up not": Mutation(
        "F3", "CK306", unpacked("model.layers.3.mlp.up_proj"), {QWEN: "model.layers.3.mlp.up_proj"}
    ),
    "MTP projection packed": Mutation("F3", "CK302", packed(["model.layers.12.eh_proj"]), {GLM: EH_PROJ}),
    "everything plain under an INT4 config": Mutation(
        "F3 F4", "CK302", all_plain, {QWEN: "model.layers.{0..11}.mlp.up_proj.weight"}
    ),
    "INT4 config lost": Mutation("F3 F4", "CK104", not_quantized, WORDS),
    # ignore
    "ignore covers what is packed": Mutation(
        "F3",
        "CK302",
        ignore(r"re:.*layers\.7\.self_attn\.o_proj(\.weight)?$"),
        {GLM: "model.layers.7.self_attn.o_proj.weight_packed"},
    ),
    "ignore entry that readers take differently": Mutation("F3", "CK302", ignore("o_proj"), {QWEN: "config.json"}),
    "ignore by prefix": Mutation("F3", "CK302", ignore("model.layers.1"), {QWEN: "config.json"}),
    "ignore spelled for modules only": Mutation(
        "F3", "CK302", settings(lambda c: c.update(ignore=["lm_head", "re:.*mlp.gate$"])), {GLM: "config.json"}
    ),
    # What config.json says
    "another group size": Mutation(
        "F12",
        "CK303",
        weights(group_size=64),
        {QWEN: "model.layers.{0..11}.mlp.up_proj.weight_scale", DEEPSEEK: "weight_scale"},
    ),
    "asymmetric by config, symmetric on disk": Mutation(
        "F12 F13", "CK104", weights(symmetric=False), {GLM: "weight_zero_point"}
    ),
    "another number of bits": Mutation("F12", "CK303", weights(num_bits=8), WORDS),
    "another format": Mutation("F14", "CK302", settings(lambda c: c.update(format="float-quantized")), CONFIG),
    "another quantization method": Mutation("F14", "CK302", settings(lambda c: c.update(quant_method="gptq")), CONFIG),
    "one scale a row by config": Mutation("F12", "CK303", weights(strategy="channel", group_size=None), SCALES),
    # Parts
    "scale missing": Mutation("F13 F22", "CK104", without, at(SCALE, GLM, QWEN3)),
    "shape missing": Mutation("F13 F22", "CK104", without, at(SHAPE, GLM, DEEPSEEK)),
    "words missing": Mutation("F4 F13", "CK104", words_lost, {GLM: WEIGHT}),
    "scale without a weight": Mutation(
        "F13", "CK104", scale_without_weight, {GLM: "model.layers.5.mlp.gate.weight_scale"}
    ),
    "scale of another group size": Mutation("F12 F13", "CK303", part(lambda t: t[:, :1]), at(SCALE, QWEN3, GLM)),
    "scale turned": Mutation("F13", "CK303", part(lambda t: t.T), at(SCALE, GLM, DEEPSEEK)),
    "a word too few": Mutation("F13", "CK303", part(lambda t: t[:, :-1]), {QWEN3: PACKED}),
    "words of 64 bits": Mutation("F14", "CK303", part(lambda t: t.long()), {GLM: PACKED}),
    "scale of zero": Mutation(
        "F13", "CK304", part(element(0.0)), {GLM: SCALE, QWEN: "model.layers.3.mlp.up_proj.weight_scale"}
    ),
    "scale negative": Mutation("F13", "CK304", part(element(-0.01)), {QWEN3: SCALE}),
    "scale not a number": Mutation("F13", "CK304", part(element(math.nan)), at(SCALE, GLM, DEEPSEEK)),
    "scale infinite": Mutation("F13", "CK304", part(element(math.inf)), {QWEN3: SCALE}),
    "shape that lies": Mutation("F13 F15", "CK304", part(lambda t: t // 2), at(SHAPE, GLM, DEEPSEEK)),
    "scales 200 times too large": Mutation(
        "F13",
        "CK308",
        part(lambda t: t * 200),
        {GLM: SCALE, QWEN3: SCALE, QWEN: "model.layers.3.mlp.up_proj.weight_scale"},
    ),
    "scales 200 times too small": Mutation("F13", "CK308", part(lambda t: t / 200), {GLM: SCALE}, severity="warning"),
    "words of an expert copied over another": Mutation(
        "F8", "CK206", words_copied, at("model.layers.5.mlp.experts.{10..11}.down_proj.weight_packed", *ALL3)
    ),
    # Against the source
    "scale a quarter too large": Mutation(
        "F12 F13", "CK305", part_of("_scale", lambda t: t * 1.25), at(WEIGHT, GLM, DEEPSEEK)
    ),
    "one nibble changed": Mutation("F2", "CK305", part_of("_packed", one_nibble), {GLM: WEIGHT, QWEN: UP}),
    "nibbles in AWQ's order": Mutation("F14", "CK305", part_of("_packed", codes(awq)), at(WEIGHT, GLM, QWEN3)),
    "codes without their offset": Mutation(
        "F14", "CK305", part_of("_packed", lambda words: words ^ -2004318072), at(WEIGHT, GLM, QWEN3)
    ),
    "scales of two experts swapped": Mutation("F8 F13", "CK305", swapped("weight_scale"), at(BOTH, GLM, QWEN3)),
    "words of two experts swapped": Mutation("F8", "CK305", swapped("weight_packed"), {DEEPSEEK: BOTH}),
}

"""INT4 checkpoints: what is packed, and what config.json says of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from support import quantized

from mutations.edits import edit_json, names, replace, tensor
from mutations.mutation import Damage, Mutation

QWEN, QWEN3, GLM, DEEPSEEK = "qwen2-untied/int4", "qwen3_moe/int4", "glm4_moe/int4", "deepseek_v3/int4"
DOWN = "model.layers.5.mlp.experts.11.down_proj"
PARTS = ("weight_packed", "weight_scale", "weight_shape")
ROUTER = "model.layers.{}.mlp.gate"
WEIGHT = f"{DOWN}.weight"
ALL3 = (QWEN3, GLM, DEEPSEEK)
WORDS = {QWEN: "model.layers.{0..11}.mlp.up_proj.weight_packed", GLM: "model.layers.{0..1}.mlp.up_proj.weight_packed"}
SCALES = {QWEN: "model.layers.{0..11}.mlp.up_proj.weight_scale", GLM: "model.layers.{0..1}.mlp.up_proj.weight_scale"}
CONFIG = {QWEN: "config.json", GLM: "config.json"}


def of(
    code: str,
    name: str,
    imitates: str,
    damage: Damage,
    on: dict[str, str],
    modes: tuple[str, ...],
    *references: str,
    **more: Any,
) -> Mutation:
    return Mutation(name, imitates, modes, code, damage, on, references, **more)


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

    def damage(path: Path, folded: str) -> None:
        unpack(path, modules)

    return damage


def settings(change: Callable[[dict[str, Any]], object]) -> Damage:
    """quantization_config says something else."""

    def damage(path: Path, place: str) -> None:
        edit_json(path / "config.json", lambda config: change(config["quantization_config"]))

    return damage


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


MUTATIONS = (
    # What is packed
    of(
        "CK301",
        "routers packed",
        "an ignore rule that means modules was matched against parameters",
        packed([ROUTER.format(layer) for layer in range(3, 12)]),
        dict.fromkeys(ALL3, "model.layers.{3..11}.mlp.gate.weight_packed"),
        ("F3",),
        "slime debug.md",
    ),
    of(
        "CK301",
        "one router packed",
        "a rule for layers 1 does not cover layer 4",
        packed([ROUTER.format(4)]),
        dict.fromkeys(ALL3, "model.layers.4.mlp.gate.weight_packed"),
        ("F3",),
    ),
    of(
        "CK301",
        "embedding packed",
        "a published list leaves it out",
        packed(["model.embed_tokens"]),
        {GLM: "model.embed_tokens.weight_packed", QWEN: "model.embed_tokens.weight_packed"},
        ("F3",),
    ),
    of(
        "CK301",
        "output layer packed",
        "a published list leaves it out",
        packed(["lm_head"]),
        {QWEN3: "lm_head.weight_packed", QWEN: "lm_head.weight_packed"},
        ("F3",),
    ),
    of(
        "CK302",
        "expert not packed",
        "one expert was never routed to while calibrating",
        unpacked(DOWN),
        dict.fromkeys(ALL3, f"{DOWN}.weight"),
        ("F3",),
        "llm-compressor#2939",
    ),
    of(
        "CK302",
        "query packed, key not",
        "fused siblings with different schemes",
        unpacked("model.layers.3.self_attn.k_proj"),
        {QWEN: "model.layers.3.self_attn.k_proj.weight"},
        ("F3",),
        "vllm#11354",
        "auto-round#1726",
    ),
    of(
        "CK306",
        "gate packed, up not",
        "fused siblings with different schemes",
        unpacked("model.layers.3.mlp.up_proj"),
        {QWEN: "model.layers.3.mlp.up_proj"},
        ("F3",),
        "vllm#41457",
    ),
    of(
        "CK302",
        "MTP projection packed",
        "a default list does not know eh_proj",
        packed(["model.layers.12.eh_proj"]),
        {GLM: "model.layers.12.eh_proj.weight"},
        ("F3",),
    ),
    of(
        "CK302",
        "everything plain under an INT4 config",
        "a BF16 directory was registered where INT4 is pushed",
        all_plain,
        {QWEN: "model.layers.{0..11}.mlp.up_proj.weight"},
        ("F3", "F4"),
        "Relax low-precision",
    ),
    of("CK104", "INT4 config lost", "config.json was taken from the BF16 release", not_quantized, WORDS, ("F3", "F4")),
    # ignore
    of(
        "CK302",
        "ignore covers what is packed",
        "a list of another recipe",
        ignore(r"re:.*layers\.7\.self_attn\.o_proj(\.weight)?$"),
        {GLM: "model.layers.7.self_attn.o_proj.weight_packed"},
        ("F3",),
        "vllm#40252",
    ),
    of(
        "CK302",
        "ignore entry that readers take differently",
        "a plain entry is a part of a name for one reader and the whole for another",
        ignore("o_proj"),
        {QWEN: "config.json"},
        ("F3",),
        "sglang#24927",
    ),
    of(
        "CK302",
        "ignore by prefix",
        "layers.1 also covers layers 10 to 19 for a reader of prefixes",
        ignore("model.layers.1"),
        {QWEN: "config.json"},
        ("F3",),
    ),
    of(
        "CK302",
        "ignore spelled for modules only",
        "a rule that ends at the module does not protect the parameter",
        settings(lambda c: c.update(ignore=["lm_head", "re:.*mlp.gate$"])),
        {GLM: "config.json"},
        ("F3",),
        "slime debug.md",
    ),
    # What config.json says
    of(
        "CK303",
        "another group size",
        "the converter's default is 32, the recipe's 128",
        weights(group_size=64),
        {QWEN: "model.layers.{0..11}.mlp.up_proj.weight_scale", DEEPSEEK: "weight_scale"},
        ("F12",),
    ),
    of(
        "CK104",
        "asymmetric by config, symmetric on disk",
        "a converter whose default is asymmetric",
        weights(symmetric=False),
        {GLM: "weight_zero_point"},
        ("F12", "F13"),
    ),
    of("CK303", "another number of bits", "a config for 8 bits", weights(num_bits=8), WORDS, ("F12",)),
    of(
        "CK302",
        "another format",
        "a config of float8 beside packed words",
        settings(lambda c: c.update(format="float-quantized")),
        CONFIG,
        ("F14",),
    ),
    of(
        "CK302",
        "another quantization method",
        "a config of GPTQ beside packed words",
        settings(lambda c: c.update(quant_method="gptq")),
        CONFIG,
        ("F14",),
    ),
    of(
        "CK303",
        "one scale a row by config",
        "a strategy that was not used",
        weights(strategy="channel", group_size=None),
        SCALES,
        ("F12",),
    ),
)

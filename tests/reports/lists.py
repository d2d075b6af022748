"""Reports about lists of modules that are left out: what they name, what they miss, and what they call otherwise."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mutations.edits import edit_json, names, replace, tensor
from support.floats import SPELLINGS, write
from support.quantized import one_target, widen

from reports.files import number_files, on_checkpoint
from reports.quantized import cache_scales, int4_without, quantization
from reports.report import SOURCE, Case, Change

LAYERS = tuple(f"model.language_model.layers.{layer}" for layer in range(12))
FP8 = tuple(f".{part}_proj.weight" for part in ("q", "k", "v", "o", "gate", "up", "down"))
_NVFP4 = SPELLINGS["nvfp4-modelopt"]
_BESIDE = "hf_quant_config.json"


def _excluding(*modules: str, packed: str = r".*_proj\.weight") -> Change:
    """The release in ModelOpt's NVFP4; what else has a matrix stands in the list."""

    def prepare(work: Path) -> None:
        write((work / SOURCE).resolve(), work / "CKPT", _NVFP4, lambda name: re.fullmatch(packed, name) is not None)
        exclude(lambda listed: [*listed, *modules])(work)

    return prepare


def exclude(change: Callable[[list[str]], list[str]]) -> Change:
    """exclude_modules is another list."""

    def damage(work: Path) -> None:
        def edit(content: dict[str, Any]) -> None:
            content["quantization"]["exclude_modules"] = change(content["quantization"]["exclude_modules"])

        edit_json(work / "CKPT" / _BESIDE, edit)

    return damage


def without(*modules: str) -> Change:
    """exclude_modules does not name these."""
    return exclude(lambda listed: [one for one in listed if one not in modules])


def _hard_coded(listed: list[str]) -> list[str]:
    """A prefix that no module has: the one of the layers, before the one of the language model."""
    return [one.replace("model.language_model.", "model.layers.language_model.") for one in listed]


def _head_packed(path: Path) -> None:
    """The output layer in NVFP4, which the list leaves out."""
    name = "lm_head.weight"
    replace(path, dict(_NVFP4.store("lm_head", tensor(path, name))), [])


def _without_k(path: Path) -> None:
    replace(path, {}, names(path, ".k_scale"))


def _containers(content: dict[str, Any]) -> None:
    """The modules that hold an expert's projections, as llm-compressor lists what has no weight of its own."""
    content["ignore"] += [f"model.layers.{layer}.mlp.experts.{one}" for layer in range(12) for one in range(12)]


def _fp8_listed(work: Path) -> None:
    """FP8 in blocks, and a list of what is left in BF16 under the name that transformers gives it."""
    write((work / SOURCE).resolve(), work / "CKPT", SPELLINGS["fp8"], lambda name: name.endswith(FP8))
    kept = ("in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z", "conv1d", "out_proj")
    left = [f"{name}.linear_attn.{part}" for name in LAYERS for part in kept]
    left += ["lm_head", "model.visual", "mtp"]
    quantization(lambda content: content.update(modules_to_not_convert=left))(work)


def _gates_of_a_mixture(content: dict[str, Any]) -> None:
    """The router of each layer, as in the list of the mixture of experts; a dense layer has gate_proj there."""
    content["modules_to_not_convert"] += [f"{layer}.mlp.gate" for layer in LAYERS]


def _cache(work: Path) -> None:
    """FP8 with calibrated scales of the cache."""
    write((work / SOURCE).resolve(), work / "CKPT", SPELLINGS["fp8-channel"])
    cache_scales(work)


def _packed_experts(path: Path) -> None:
    """Experts of a layer in one tensor a part, under names that quantized experts do not have."""
    old = names(path, ".mlp.experts.")
    stacked: dict[tuple[str, str, str], dict[int, torch.Tensor]] = {}
    for name in old:
        match = re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)_proj\.(.+)", name)
        assert match
        stacked.setdefault((match[1], match[3], match[4]), {})[int(match[2])] = tensor(path, name)
    whole = {key: torch.stack([one[number] for number in sorted(one)]) for key, one in stacked.items()}
    new: dict[str, torch.Tensor] = {}
    for (stem, part, ending), found in whole.items():
        suffix = "" if ending == "weight" else f"_{ending}"
        if part == "down":
            new[f"{stem}.down_proj{suffix}"] = found
        elif part == "gate":
            up = whole[stem, "up", ending]
            new[f"{stem}.gate_up_proj{suffix}"] = torch.cat([found, up], 1) if found.ndim > 1 else found
    replace(path, new, old)
    number_files(path)


ROUTERS = tuple(f"model.layers.{layer}.mlp.gate" for layer in range(12))
ATTENTION = tuple(f"{layer}.self_attn.{part}_proj" for layer in LAYERS for part in "qkvo")


def _without_drafts(work: Path) -> None:
    """NVFP4 of attention and experts of the language model."""
    write(
        (work / SOURCE).resolve(),
        work / "CKPT",
        SPELLINGS["nvfp4-compressed"],
        lambda name: re.fullmatch(r".*language_model\.layers.*(self_attn|mlp).*_proj\.weight", name) is not None,
    )
    kept = ["re:mtp.*", "re:.*visual.*", "re:.*linear_attn.*", "re:.*mlp.gate$", "re:.*shared_expert_gate$"]
    quantization(lambda content: content["ignore"].extend(kept))(work)


def _without_draft_experts(content: dict[str, Any]) -> None:
    kept = [entry for entry in content["ignore"] if "mtp" not in entry]
    draft = ["re:mtp.layers.0.self_attn.*", "re:mtp.layers.0.mlp.shared_expert.*", "mtp.layers.0.mlp.gate"]
    content["ignore"] = [*kept, "mtp.fc", *draft]


_KEPT = (3, 5, 6)


def _experts_kept(work: Path) -> None:
    """MXFP4 of experts as Quark stores it, but for three layers; expressions name those as every reader asks."""
    write(
        (work / SOURCE).resolve(),
        work / "CKPT",
        SPELLINGS["mxfp4-quark"],
        lambda name: ".experts." in name and int(name.split(".")[2]) not in _KEPT,
    )
    kept = ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]
    layers = [f"re:model.layers.{layer}.mlp.experts.*" for layer in _KEPT]
    quantization(lambda content: content.update(exclude=[*kept, *layers]))(work)


def _one_by_one(content: dict[str, Any]) -> None:
    parts = [f"{expert}.{part}_proj" for expert in range(12) for part in ("gate", "up", "down")]
    kept = [entry for entry in content["exclude"] if "experts" not in entry]
    content["exclude"] = [*kept, *(f"model.layers.{layer}.mlp.experts.{part}" for layer in _KEPT for part in parts)]


def _two_widths(work: Path) -> None:
    int4_without()(work)
    widen(work / "CKPT", (work / SOURCE).resolve(), ".down_proj")


CASES = {
    "Model-Optimizer#1858": Case("qwen3_moe/", ("mlp.gate",), without(*ROUTERS), _excluding(*ROUTERS)),
    "Model-Optimizer#479": Case(
        "qwen3_vl-tied/",
        ("self_attn",),
        exclude(_hard_coded),
        _excluding(*ATTENTION, "model.visual*", packed=r".*language_model.*mlp\.\w+_proj\.weight"),
    ),
    "vllm#45132": Case("qwen2-untied/", ("lm_head",), on_checkpoint(_head_packed), _excluding()),
    "vllm#46264": Case("qwen2-untied/", ("k_scale",), on_checkpoint(_without_k), _cache),
    "sglang#32736": Case("qwen3_moe-tiles/int4", ("mlp.experts",), quantization(_containers)),
    "sglang#23687": Case(
        "qwen3_5/",
        ("transformers 5.12", "mlp.gate_proj.weight", "mlp.gate'"),
        quantization(_gates_of_a_mixture),
        _fp8_listed,
    ),
    "Model-Optimizer#2334": Case(
        "qwen3_5_moe/",
        ("experts.down_proj",),
        on_checkpoint(_packed_experts),
        _excluding(
            "model.visual*", "mtp.*", "*linear_attn*", packed=r".*language_model.*experts\.\d+\.\w+_proj\.weight"
        ),
    ),
    "vllm#41994": Case(
        "qwen3_5_moe/",
        ("vLLM 0.26 would pack", "mtp.layers.0.mlp.experts.{0..11}.down_proj.weight"),
        quantization(_without_draft_experts),
        _without_drafts,
    ),
    "sglang#37673": Case(
        "qwen3_moe/",
        ("SGLang 0.5.16 would pack model.layers.{3,5..6}.mlp.experts.{0..11}.gate_proj.weight",),
        quantization(_one_by_one),
        _experts_kept,
    ),
    "auto-round#2188": Case(
        "qwen2-untied-tiles/",
        ("mlp.gate_proj.weight_packed", "config.json says 8 bits"),
        quantization(one_target),
        _two_widths,
        "ckptkit lint CKPT --reader vllm",
    ),
}

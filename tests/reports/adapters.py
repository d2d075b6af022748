"""Reports about LoRA adapters and deltas: what exporters save of experts, what a merge loses, updates that are lost."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from mutations.edits import names, replace, tensor
from safetensors.torch import load_file, save_file
from support.deltas import publish_chain, version_at
from torch import Tensor

from ckptkit.app.api import convert, quantize
from quant.formats.scheme import QuantScheme
from reports.report import SOURCE, Case, Change

VERIFY = "ckptkit verify CKPT"
WEIGHTS = "adapter_model.safetensors"
RANK = 4


def _save(
    path: Path, factors: Mapping[str, Tensor], targets: Sequence[str] = ("gate_up_proj", "down_proj", "experts")
) -> None:
    path.mkdir()
    save_file({f"base_model.model.{name}.weight": one for name, one in factors.items()}, path / WEIGHTS)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": [*targets]}
    (path / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": SOURCE}))


def _experts(release: Path) -> dict[str, tuple[int, int, int]]:
    """The blocks of experts: how many, and their sizes."""
    firsts = names(release, ".experts.0.gate_proj.weight")
    blocks = {name.removesuffix(".0.gate_proj.weight"): tuple(tensor(release, name).shape) for name in firsts}
    counts = {
        one: len([name for name in names(release, f"{one}.") if name.endswith("up_proj.weight")]) for one in blocks
    }
    return {block: (counts[block], *sizes) for block, sizes in blocks.items()}  # type: ignore[misc]


def _random(*shape: int) -> Tensor:
    return torch.randn(shape) * 0.02


def _shared_outer(work: Path) -> None:
    """One A for gate and up of all experts and one B for down, as Megatron-Bridge exports and SGLang reads them."""
    torch.manual_seed(5)
    factors: dict[str, Tensor] = {}
    for block, (experts, inner, hidden) in _experts(work / SOURCE).items():
        factors[f"{block}.gate_up_proj.lora_A"] = _random(1, RANK, hidden)
        factors[f"{block}.gate_up_proj.lora_B"] = _random(experts, 2 * inner, RANK)
        factors[f"{block}.down_proj.lora_A"] = _random(experts, RANK, inner)
        factors[f"{block}.down_proj.lora_B"] = _random(1, hidden, RANK)
    _save(work / "CKPT", factors)


def _without_shared(work: Path) -> None:
    """What PEFT leaves that knows no module of the shared factors' names."""
    factors = load_file(work / "CKPT" / WEIGHTS)
    save_file({name: one for name, one in factors.items() if one.shape[0] != 1}, work / "CKPT" / WEIGHTS)


def _layers_pairs(*leaves: str) -> Change:
    """A pair for each projection of these names outside of experts."""

    def prepare(work: Path) -> None:
        torch.manual_seed(5)
        factors: dict[str, Tensor] = {}
        for name in names(work / SOURCE, "_proj.weight"):
            module = name.removesuffix(".weight")
            if module.endswith(leaves) and ".experts." not in name:
                rows, columns = tensor(work / SOURCE, name).shape
                factors[f"{module}.lora_A"], factors[f"{module}.lora_B"] = _random(RANK, columns), _random(rows, RANK)
        _save(work / "CKPT", factors, leaves)

    return prepare


def _named(new_name: Callable[[str], str]) -> Change:
    """Every factor has another name."""

    def damage(work: Path) -> None:
        factors = load_file(work / "CKPT" / WEIGHTS)
        save_file({new_name(name): one for name, one in factors.items()}, work / "CKPT" / WEIGHTS)

    return damage


def _trainers_name(name: str) -> str:
    """What is left of a trainer's own names after two of five rules."""
    name = re.sub(r"mixer\.(in|out)_proj", r"mamba.\1_proj", name.replace("backbone.", "model."))
    return name.replace("mixer.shared_experts", "mixer.shared_expert")


def _turned(work: Path) -> None:
    """Pairs of experts as PEFT 0.18 has them: the inputs of a tensor [experts, inputs, outputs] are its rows."""
    factors = load_file(work / "CKPT" / WEIGHTS)
    shutil.rmtree(work / "CKPT")
    torch.manual_seed(5)
    turned = {}
    for name in factors:
        other = factors[name.replace("lora_A", "lora_B") if "lora_A" in name else name.replace("lora_B", "lora_A")]
        turned[name.removeprefix("base_model.model.").removesuffix(".weight")] = _random(*reversed(other.shape))
    _save(work / "CKPT", turned)


def _dense_merged(scheme: QuantScheme | None = None) -> Change:
    """The release with an adapter of its attention merged into it, quantized afterwards, and the adapter."""

    def prepare(work: Path) -> None:
        _layers_pairs("q_proj", "k_proj", "v_proj", "o_proj")(work)
        (work / "CKPT").rename(work / "ADAPTER")
        convert((work / SOURCE).resolve(), work / "CKPT", merge=work / "ADAPTER", quantize=scheme)

    return prepare


def _the_base(work: Path) -> None:
    """The adapter was not taken: the base's own weights."""
    shutil.rmtree(work / "CKPT")
    shutil.copytree((work / SOURCE).resolve(), work / "CKPT")


def _base_quantized(work: Path) -> None:
    shutil.rmtree(work / "CKPT")
    quantize((work / SOURCE).resolve(), work / "CKPT", _INT4)


def _linear_attention(*parts: tuple[str, int]) -> Change:
    """Pairs of the linear attention under these names, each with so many rows; 0: all of in_proj_qkv."""

    def make(work: Path) -> None:
        torch.manual_seed(5)
        factors: dict[str, Tensor] = {}
        for name in names(work / SOURCE, "linear_attn.in_proj_qkv.weight"):
            rows, columns = tensor(work / SOURCE, name).shape
            for part, own in parts:
                module = name.replace("in_proj_qkv.weight", part)
                factors[f"{module}.lora_A"] = _random(RANK, columns)
                factors[f"{module}.lora_B"] = _random(own or rows, RANK)
        shutil.rmtree(work / "CKPT", ignore_errors=True)
        _save(work / "CKPT", factors, [part for part, _ in parts])

    return make


_INT4 = QuantScheme(32, "qmax7")


def pairs_merged(work: Path) -> None:
    """The release with an adapter of its experts, a pair a layer, merged into it, and the adapter."""
    _one_pair(RANK)(work)
    (work / "CKPT").rename(work / "ADAPTER")
    convert((work / SOURCE).resolve(), work / "CKPT", merge=work / "ADAPTER")


def _one_pair(rank: int) -> Change:
    """Experts of a layer in one pair, as PEFT has them, of this rank each."""

    def prepare(work: Path) -> None:
        torch.manual_seed(5)
        factors: dict[str, Tensor] = {}
        for block, (experts, inner, hidden) in _experts(work / SOURCE).items():
            factors[f"{block}.base_layer.lora_A"] = _random(experts * rank, hidden)
            factors[f"{block}.base_layer.lora_B"] = _random(2 * inner, rank * experts)
            factors[f"{block}.lora_A"] = _random(experts * rank, inner)
            factors[f"{block}.lora_B"] = _random(hidden, rank * experts)
        shutil.rmtree(work / "CKPT", ignore_errors=True)
        _save(work / "CKPT", factors)

    return prepare


def _without_experts_deltas(work: Path) -> None:
    """The grouped export writes the base's own experts."""
    replace(work / "CKPT", {name: tensor(work / SOURCE, name) for name in names(work / SOURCE, ".experts.")})


def _published(work: Path) -> None:
    """Three deltas, and a host's own checkpoint after them."""
    publish_chain(work / "DELTAS", (work / SOURCE).resolve(), ("xor",) * 3)
    convert(work / "DELTAS", work / "CKPT", hf=(work / SOURCE).resolve())


def _missed_the_last(work: Path) -> None:
    """The engine could not apply the last delta, and said so to nobody."""
    shutil.rmtree(work / "CKPT")
    shutil.copytree(work / "DELTAS", work / "EARLIER")
    shutil.rmtree(version_at(work / "EARLIER", 3))
    convert(work / "EARLIER", work / "CKPT", hf=(work / SOURCE).resolve())


def _chain(work: Path) -> None:
    publish_chain(work / "CKPT", (work / SOURCE).resolve(), ("xor",) * 3)


def _pruned(work: Path) -> None:
    """The oldest version is pruned; the rest is replayed on the first base."""
    shutil.rmtree(version_at(work / "CKPT", 1))


CASES = {
    "Megatron-Bridge#5384": Case(
        "qwen2-untied-tiles/",
        ("self_attn.q_proj.weight", "quantization steps off"),
        _base_quantized,
        _dense_merged(_INT4),
    ),
    "ms-swift#5450": Case("qwen3-untied/", ("self_attn.q_proj.weight",), _the_base, _dense_merged()),
    "tinker-cookbook#525": Case(
        "qwen3_5/",
        ("linear_attn.in_proj_q", "the base has no"),
        _linear_attention(("in_proj_q", 48), ("in_proj_k", 48), ("in_proj_v", 160)),
        _linear_attention(("in_proj_qkv", 0)),
    ),
    "Relax#262": Case(
        "qwen3-untied/",
        ("base_model.model. before every name", "the adapter changes nothing"),
        _named(lambda name: name.removeprefix("base_model.model.")),
        _layers_pairs("q_proj", "k_proj", "v_proj", "o_proj"),
    ),
    "prime-rl#3014": Case(
        "nemotron_h/",
        ("the base has no model.layers.0.mamba.in_proj",),
        _named(_trainers_name),
        _layers_pairs("in_proj", "out_proj", "up_proj", "down_proj"),
    ),
    "Automodel#3284": Case(
        "qwen3_moe/",
        ("A [rank, 128] and B [192, rank] of 12 experts", "A [48, 192], B [128, 48]"),
        _turned,
        _one_pair(RANK),
        VERIFY,
    ),
    "unsloth#5410": Case("qwen3_moe/", (".mlp.experts.", "144"), _without_experts_deltas, pairs_merged),
    "Megatron-Bridge#6076": Case(
        "qwen3_moe/", ("lora_A is missing", ".experts.gate_up_proj"), _without_shared, _shared_outer
    ),
    "Megatron-Bridge#5588": Case(
        "qwen3_moe/",
        ("SGLang 0.5.16 takes factors with an axis of experts; vLLM 0.26 refuses the adapter", ".experts."),
        prepare=_shared_outer,
        twin=VERIFY,
    ),
    "Automodel#3834": Case(
        "qwen3_moe/",
        ("rank 4, as adapter_config.json says", "rank 1", ".experts."),
        _one_pair(1),
        _one_pair(RANK),
        VERIFY,
    ),
    "Megatron-Bridge#3341": Case("qwen3_moe/", (".mlp.experts.",), _without_experts_deltas, pairs_merged),
    "slime#2104": Case("qwen2-untied/", ("model.",), _missed_the_last, _published),
    "SkyRL#1902": Case("qwen2-untied/", (), _pruned, _chain),
}

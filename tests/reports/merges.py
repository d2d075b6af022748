"""Reports about merges of LoRA adapters: what they leave out, scale otherwise, or write under the base's config."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from mutations.edits import edit_config, names, replace, tensor
from safetensors.torch import load_file, save_file
from torch import Tensor

from ckptkit.app.api import convert
from reports.adapters import RANK, WEIGHTS, pairs_merged
from reports.files import number_files, on_checkpoint
from reports.report import SOURCE, Case, Change

CONFIG = "adapter_config.json"


def _random(*shape: int) -> Tensor:
    return torch.randn(shape) * 0.02


def save(path: Path, factors: Mapping[str, Tensor], targets: Sequence[str], **settings: Any) -> None:
    """An adapter as PEFT saves it; names are the base's, of factors without `.weight`."""
    path.mkdir()
    named = {f"base_model.model.{name}.weight": one.contiguous() for name, one in factors.items()}
    save_file(named, path / WEIGHTS)
    content = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": [*targets]}
    (path / CONFIG).write_text(json.dumps(content | {"base_model_name_or_path": SOURCE} | settings))


def attention(release: Path, *, rank: int = RANK) -> dict[str, Tensor]:
    """A pair for q, k, v and o of every layer of the language model."""
    torch.manual_seed(5)
    factors: dict[str, Tensor] = {}
    for name in names(release, "self_attn."):
        if (
            re.fullmatch(r".*layers\.\d+\.self_attn\.[qkvo]_proj\.weight", name)
            and "visual" not in name
            and "tower" not in name
            and not name.startswith("mtp.")
        ):
            module, (rows, columns) = name.removesuffix(".weight"), tensor(release, name).shape
            factors[f"{module}.lora_A"], factors[f"{module}.lora_B"] = _random(rank, columns), _random(rows, rank)
    return factors


def merged(adapter: Callable[[Path], None]) -> Change:
    """The adapter, and the release with it merged."""

    def prepare(work: Path) -> None:
        adapter(work)
        convert((work / SOURCE).resolve(), work / "CKPT", merge=work / "ADAPTER")

    return prepare


def _of_attention(**settings: Any) -> Callable[[Path], None]:
    return lambda work: save(
        work / "ADAPTER", attention(work / SOURCE), ["q_proj", "k_proj", "v_proj", "o_proj"], **settings
    )


def _scaled(factor: float) -> Change:
    """What was added is so many times what the adapter's settings say."""

    def damage(work: Path) -> None:
        new = {}
        for name in names(work / SOURCE, "self_attn."):
            here, there = tensor(work / "CKPT", name), tensor(work / SOURCE, name)
            new[name] = (there.float() + factor * (here.float() - there.float())).bfloat16()
        replace(work / "CKPT", new)

    return damage


def _the_base(work: Path) -> None:
    shutil.rmtree(work / "CKPT")
    shutil.copytree((work / SOURCE).resolve(), work / "CKPT")


def _with_adapter_beside(work: Path) -> None:
    """What the merger writes: the base, and the adapter in a directory below it."""
    _the_base(work)
    shutil.copytree(work / "ADAPTER", work / "CKPT" / "lora_adapter")


def _without_drafts(path: Path) -> None:
    replace(path, {}, names(path, "mtp."))
    number_files(path)


def experts_of(release: Path) -> dict[str, Tensor]:
    """Experts of a layer in one pair, as PEFT has them for a fused tensor [experts, rows, columns]."""
    torch.manual_seed(5)
    factors: dict[str, Tensor] = {}
    for name in names(release, ".experts.gate_up_proj"):
        if name.endswith("gate_up_proj"):
            block = name.removesuffix(".gate_up_proj")
            experts, rows, columns = tensor(release, name).shape
            _, out, inner = tensor(release, f"{block}.down_proj").shape
            factors[f"{block}.base_layer.lora_A"] = _random(experts * RANK, columns)
            factors[f"{block}.base_layer.lora_B"] = _random(rows, RANK * experts)
            factors[f"{block}.lora_A"] = _random(experts * RANK, inner)
            factors[f"{block}.lora_B"] = _random(out, RANK * experts)
    return factors


def _gemma(work: Path) -> None:
    save(
        work / "ADAPTER", experts_of(work / SOURCE), [], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    )


def _most_fell_back(path: Path) -> None:
    """All but the first layer's experts are the base's own."""
    base = path.parent / SOURCE
    replace(
        path,
        {
            name: tensor(base, name)
            for name in names(path, ".experts.")
            if "layers.0." not in name and "per_expert" not in name
        },
    )


def _mixtral(work: Path) -> None:
    """Experts of a layer in one pair, over a base that has them one by one."""
    torch.manual_seed(5)
    release, factors = work / SOURCE, dict[str, Tensor]()
    for name in names(release, ".experts.0.w1.weight"):
        block = name.removesuffix(".0.w1.weight")
        experts = len([one for one in names(release, f"{block}.") if one.endswith(".w1.weight")])
        inner, hidden = tensor(release, name).shape
        factors[f"{block}.base_layer.lora_A"] = _random(experts * RANK, hidden)
        factors[f"{block}.base_layer.lora_B"] = _random(2 * inner, RANK * experts)
        factors[f"{block}.lora_A"] = _random(experts * RANK, inner)
        factors[f"{block}.lora_B"] = _random(hidden, RANK * experts)
    save(work / "ADAPTER", factors, [], target_parameters=["experts.gate_up_proj", "experts.down_proj"])


def _experts_from_base(path: Path) -> None:
    base = path.parent / SOURCE
    replace(path, {name: tensor(base, name) for name in names(path, ".experts.")})


def _one_by_one(work: Path) -> None:
    """A pair for each expert's Linear, as a 4-bit gpt-oss has them, beside those of attention."""
    release, factors = work / SOURCE, attention(work / SOURCE)
    for name in names(release, ".experts.gate_up_proj"):
        if name.endswith("gate_up_proj"):
            block = name.removesuffix(".gate_up_proj")
            experts, hidden, rows = tensor(release, name).shape
            for expert in range(experts):
                module = f"{block}.gate_up_projs.{expert}"
                factors[f"{module}.lora_A"], factors[f"{module}.lora_B"] = _random(RANK, hidden), _random(rows, RANK)
    save(work / "ADAPTER", factors, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_projs.0"])


def _only_attention_merged(work: Path) -> None:
    """The merge knows the pairs of attention alone."""
    _one_by_one(work)
    save(work / "SMALL", attention(work / SOURCE), ["q_proj", "k_proj", "v_proj", "o_proj"])
    convert((work / SOURCE).resolve(), work / "CKPT", merge=work / "SMALL")


def _untied_merge(work: Path) -> None:
    """Embedding and output layer were trained apart (modules_to_save); the config says that they are two."""
    torch.manual_seed(5)
    release = work / SOURCE
    rows = tensor(release, "model.embed_tokens.weight")
    whole = {"model.embed_tokens.weight": rows + 0.01, "lm_head.weight": rows + 0.02}
    _of_attention(modules_to_save=["embed_tokens", "lm_head"])(work)
    file = work / "ADAPTER" / WEIGHTS
    save_file(load_file(file) | {f"base_model.model.{name}": one.contiguous() for name, one in whole.items()}, file)
    save(work / "SMALL", attention(release), ["q_proj", "k_proj", "v_proj", "o_proj"])
    convert(release.resolve(), work / "CKPT", merge=work / "SMALL")
    replace(work / "CKPT", whole)
    edit_config(work / "CKPT", tie_word_embeddings=False)


def _tied_again(path: Path) -> None:
    """The flag is still that of the base."""
    edit_config(path, tie_word_embeddings=True)


def _head_discarded(path: Path) -> None:
    replace(path, {}, ["lm_head.weight"])
    edit_config(path, tie_word_embeddings=True)


def _expert_after_expert(work: Path) -> None:
    """Merged by a reading in which column j of B is that of expert j // rank."""
    shutil.copytree(work / "ADAPTER", work / "OTHER")
    factors = load_file(work / "OTHER" / WEIGHTS)
    turned = {
        name: one.unflatten(1, (-1, RANK)).transpose(1, 2).flatten(1).contiguous()
        for name, one in factors.items()
        if "lora_B" in name
    }
    save_file(factors | turned, work / "OTHER" / WEIGHTS)
    shutil.rmtree(work / "CKPT")
    convert((work / SOURCE).resolve(), work / "CKPT", merge=work / "OTHER")


CASES = {
    "verl#7285": Case("qwen2-untied/", ("self_attn.q_proj.weight",), _with_adapter_beside, merged(_of_attention())),
    "Qwen-VL-Series-Finetune#259": Case(
        "qwen3_5/", ("mtp.", "missing"), on_checkpoint(_without_drafts), merged(_of_attention())
    ),
    "unsloth-zoo#779": Case("gemma4/", (".experts.",), on_checkpoint(_most_fell_back), merged(_gemma)),
    "unsloth-zoo#812": Case("mixtral/", (".experts.",), on_checkpoint(_experts_from_base), merged(_mixtral)),
    "unsloth-zoo#885": Case(
        "gpt_oss/", ("the base has no model.layers.0.mlp.experts.gate_up_projs.0",), prepare=_only_attention_merged
    ),
    "aprender#2189": Case(
        "qwen2-untied/", ("self_attn.q_proj.weight",), _scaled(1 / RANK**0.5), merged(_of_attention(use_rslora=True))
    ),
    "mlx-vlm#841": Case("qwen2-untied/", ("self_attn.q_proj.weight",), _scaled(RANK), merged(_of_attention())),
    "transformers#45127": Case("qwen2-tied/", ("lm_head.weight",), on_checkpoint(_tied_again), _untied_merge),
    "unsloth#9331": Case("qwen2-tied/", ("lm_head.weight",), on_checkpoint(_head_discarded), _untied_merge),
    "unsloth#6930": Case("qwen3_moe/", (".mlp.experts.", "144"), _expert_after_expert, pairs_merged),
}

"""Reports about conversions of newer families: what a mapping did not know, and what a config or a dtype became."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mutations.edits import edit_common, edit_json, edit_stored, names, replace, tensor
from torch import Tensor

from ckptkit.app.api import convert
from reports.configs import config, settings
from reports.exports import changed, stored
from reports.files import number_files, on_checkpoint, without_tensors
from reports.report import SOURCE, Case

MTP_EXPERTS = "mtp.layers.0.mlp.experts"
_DRAFT = "mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc1.weight"


def _random(found: Tensor) -> Tensor:
    return torch.randn(found.shape).mul(0.02).to(found.dtype)


def _release(work: Path, change: Callable[[Path], object]) -> Path:
    """The release as a copy that is changed."""
    release = work / SOURCE
    target = release.resolve()
    release.unlink()
    shutil.copytree(target, release)
    change(release)
    return release


def _draft_experts_packed(path: Path) -> None:
    """The experts of the MTP layer in one tensor each, as Qwen3.6 has them."""
    old, stacks = names(path, f"{MTP_EXPERTS}."), {}
    for part in ("gate", "up", "down"):
        own = sorted((name for name in old if f".{part}_proj." in name), key=lambda name: int(name.split(".")[5]))
        stacks[part] = torch.stack([tensor(path, name) for name in own])
    new = {f"{MTP_EXPERTS}.gate_up_proj": torch.cat([stacks["gate"], stacks["up"]], 1)}
    replace(path, new | {f"{MTP_EXPERTS}.down_proj": stacks["down"]}, old)
    number_files(path)


def _from_packed_drafts(work: Path) -> None:
    release = _release(work, _draft_experts_packed)
    convert(release, work / "CKPT")


def _yarn(content: dict[str, Any]) -> None:
    content["rope_parameters"] = {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }


def _from_yarn(work: Path) -> None:
    release = _release(work, lambda path: edit_json(path / "config.json", _yarn))
    convert(release, work / "CKPT")


def _base_of_the_class(path: Path) -> None:
    edit_common(path, lambda content: setattr(content["args"], "rotary_base", 10000))


def _float32(path: Path) -> None:
    new = {
        name: tensor(path, name).float() * (1 + 2**-12)
        for name in names(path, "linear_attn.")
        if name.endswith(("A_log", "norm.weight"))
    }
    replace(path, new)


def _kept_in_float32(work: Path) -> None:
    """Decay and norms of the linear attention in float32, as the release has them."""
    release = _release(work, _float32)
    shutil.copytree(release, work / "CKPT")


def _folded(path: Path) -> None:
    """Norms of a class that multiplies by 1 + w, stored as 1 + w."""
    kinds = re.compile(r"(layernorm|[qk]_norm|language_model\.norm|mtp\..*norm\w*)\.weight")
    replace(
        path,
        {name: tensor(path, name) + 1 for name in names(path, "norm") if kinds.search(name) and "visual" not in name},
    )


def _without_shared_keys(path: Path) -> None:
    """What transformers saves: layers that use the keys of another have none."""
    own = re.compile(r"language_model\.layers\.(7|8|9|10|11)\.self_attn\.(k_proj|v_proj|k_norm)")
    replace(path, {}, [name for name in names(path, "self_attn") if own.search(name)])
    number_files(path)


def _short_types(content: dict[str, Any]) -> None:
    content["text_config"]["layer_types"] = ["full_attention"] * 3 + ["minimax_m3_sparse"] * 4


def _types(content: dict[str, Any]) -> None:
    content["text_config"]["layer_types"] = ["full_attention"] * 3 + ["minimax_m3_sparse"] * 9


def _backend(path: Path) -> None:
    edit_json(path / "tokenizer_config.json", lambda content: content.update(tokenizer_class="TokenizersBackend"))


def _down_turned(path: Path) -> None:
    key = "decoder.layers.{}.mlp.experts.experts.linear_fc2.weight"
    for layer in range(12):
        for expert in range(12):
            edit_stored(path, key.format(layer), lambda found: found.mT.contiguous(), expert)


def _own_output_layer(work: Path) -> None:
    """The side files are still the release's."""
    made, path = work / "made", work / "CKPT"
    shutil.copytree((work / SOURCE).resolve(), made)
    replace(made, {"lm_head.weight": _random(tensor(made, "model.embed_tokens.weight"))})
    edit_json(made / "config.json", lambda content: content.update(tie_word_embeddings=False))
    shutil.rmtree(path)
    convert(made, path)
    shutil.rmtree(path / "hf")
    shutil.copytree((work / SOURCE).resolve(), path / "hf")


CASES = {
    "Megatron-Bridge#4657": Case(
        "kimi_k2/megatron",
        ("e_score_correction_bias",),
        lambda work: [
            stored(f"decoder.layers.{layer}.mlp.router.expert_bias", torch.zeros_like)(work) for layer in range(1, 12)
        ],
    ),
    "Megatron-Bridge#3740": Case("qwen3_5_moe/", (MTP_EXPERTS,), stored(_DRAFT, _random, 12), _from_packed_drafts),
    "Megatron-Bridge#5334": Case(
        "step3p5/hf", ("shared_head.output.weight",), without_tensors("shared_head.output"), settings(eos_token_id=3)
    ),
    "Model-Optimizer#1305": Case(
        "glm4_moe/hf", ("e_score_correction_bias",), without_tensors("e_score_correction_bias")
    ),
    "Megatron-Bridge#3077": Case("qwen2-untied/", ("rotary_base",), on_checkpoint(_base_of_the_class), _from_yarn),
    "swiss-ai/Megatron-LM#106": Case("qwen3-untied/hf", ("q_norm.weight",), without_tensors("q_norm", "k_norm")),
    "ms-swift#9412": Case(
        "qwen3_5/",
        ("linear_attn.A_log",),
        changed("linear_attn.A_log", lambda found: found.to(torch.bfloat16)),
        _kept_in_float32,
    ),
    "mlx-vlm#2114": Case(
        "qwen3_5/hf", ("input_layernorm.weight", "each element is 1 more than the source's"), on_checkpoint(_folded)
    ),
    "vllm#54917": Case("gemma4-small-as-released/hf", prepare=on_checkpoint(_without_shared_keys)),
    "auto-round#1984": Case("minimax_m3_vl/hf", ("layer_types",), config(_short_types), config(_types)),
    "unsloth#8448": Case("qwen2-untied/hf", prepare=on_checkpoint(_backend)),
    "Megatron-Bridge#3743": Case("gpt_oss-square/megatron", ("down_proj.weight", "144"), on_checkpoint(_down_turned)),
    "slime#345": Case("qwen2/megatron", ("untie_embeddings_and_output_weights = True",), _own_output_layer),
}

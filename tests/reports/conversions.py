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
from reports.exports import AGAINST, VERIFY, changed, stored
from reports.files import number_files, on_checkpoint, without_tensors
from reports.report import SOURCE, Report

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


REPORTS = (
    Report(
        "Megatron-Bridge#4657",
        "2026-07",
        "The bridges of the DeepSeek family map the router's selection bias in MTP layers alone: in Kimi K2's other "
        "layers it stays zero.",
        AGAINST,
        "kimi_k2/megatron",
        "CK202",
        ("e_score_correction_bias",),
        lambda work: [
            stored(f"decoder.layers.{layer}.mlp.router.expert_bias", torch.zeros_like)(work) for layer in range(1, 12)
        ],
    ),
    Report(
        "Megatron-Bridge#3740",
        "2026-05",
        "Qwen3.6 has the MTP layer's experts in one tensor each, Qwen3.5 one by one under the same class: none is "
        "found, and all stay as initialized.",
        AGAINST,
        "qwen3_5_moe/",
        "CK202",
        (MTP_EXPERTS,),
        stored(_DRAFT, _random, 12),
        _from_packed_drafts,
    ),
    Report(
        "Megatron-Bridge#5334",
        "2026-08",
        "Step-3.5 publishes an output layer for each MTP layer, Megatron shares one: the export lacks them.",
        VERIFY,
        "step3p5/hf",
        "CK104",
        ("shared_head.output.weight",),
        without_tensors("shared_head.output"),
        settings(eos_token_id=3),
    ),
    Report(
        "Model-Optimizer#1305",
        "2026-04",
        "An exporter returns before it collects biases: the router's selection bias is dropped.",
        VERIFY,
        "glm4_moe/hf",
        "CK104",
        ("e_score_correction_bias",),
        without_tensors("e_score_correction_bias"),
    ),
    Report(
        "Megatron-Bridge#3077",
        "2026-04",
        "YaRN is asked for by an override of rope_scaling, which in transformers 5 replaces the base too: training "
        "takes 10000.",
        AGAINST,
        "qwen2-untied/",
        "CK701",
        ("rotary_base",),
        on_checkpoint(_base_of_the_class),
        _from_yarn,
    ),
    Report(
        "swiss-ai/Megatron-LM#106",
        "2026-02",
        "A converter does not read from the checkpoint that queries and keys are normalized, and writes no such norms.",
        VERIFY,
        "qwen3-untied/hf",
        "CK104",
        ("q_norm.weight",),
        without_tensors("q_norm", "k_norm"),
    ),
    Report(
        "ms-swift#9412",
        "2026-05",
        "Qwen3.5's decay and gated norms are float32 in the release; loaded in bfloat16 they are saved so.",
        AGAINST,
        "qwen3_5/",
        "CK203",
        ("linear_attn.A_log",),
        changed("linear_attn.A_log", lambda found: found.to(torch.bfloat16)),
        _kept_in_float32,
    ),
    Report(
        "mlx-vlm#2114",
        "2026-08",
        "A converter added the 1 of norms that multiply by 1 + w; eight of eleven published conversions have it twice.",
        AGAINST,
        "qwen3_5/hf",
        "CK202",
        ("input_layernorm.weight", "each element is 1 more than the source's"),
        on_checkpoint(_folded),
    ),
    Report(
        "vllm#54917",
        "2026-09",
        "Gemma 4 as transformers saves it has no keys in layers that share those of another; vLLM asked for them.",
        VERIFY,
        "gemma4-small-as-released/hf",
        prepare=on_checkpoint(_without_shared_keys),
        verdict="sound",
        reason="such layers use no keys of their own; a reader asked for what is never used",
    ),
    Report(
        "auto-round#1984",
        "2026-07",
        "config.json of a quantized MiniMax-M3 has layer_types for 7 layers; without it the answers are wrong.",
        VERIFY,
        "minimax_m3_vl/hf",
        "CK101",
        ("layer_types",),
        config(_short_types),
        config(_types),
    ),
    Report(
        "unsloth#8448",
        "2026-08",
        "transformers 5 writes tokenizer_class TokenizersBackend, which version 4 and other readers do not know.",
        VERIFY,
        "qwen2-untied/hf",
        prepare=on_checkpoint(_backend),
        verdict="sound",
        reason="transformers 5 reads what it wrote; which release reads it is in no file",
    ),
    Report(
        "Megatron-Bridge#3743",
        "2026-05",
        "An import of gpt-oss in BF16 leaves down_proj of the experts in HF's layout, which its sizes do not show: it "
        "is square.",
        AGAINST,
        "gpt_oss-square/megatron",
        "CK202",
        ("down_proj.weight", "144"),
        on_checkpoint(_down_turned),
    ),
    Report(
        "slime#345",
        "2025-09",
        "A tied Qwen2.5 is converted with an output layer of its own, for which the release has no weights.",
        AGAINST,
        "qwen2/megatron",
        "CK701",
        ("untie_embeddings_and_output_weights = True",),
        _own_output_layer,
    ),
)

"""Reports about the files of adapters: settings that are not there, prefixes in the wrong place, sides exchanged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from mutations.edits import edit_json, tensor
from safetensors.torch import load_file, save_file

from reports.adapters import VERIFY, WEIGHTS
from reports.merges import CONFIG, attention, experts_of, save
from reports.report import SOURCE, Case, Change

ALL = ["q_proj", "k_proj", "v_proj", "o_proj"]


def _of_attention(work: Path) -> None:
    save(work / "CKPT", attention(work / SOURCE), ALL)


def _named(new_name: Callable[[str], str]) -> Change:
    def damage(work: Path) -> None:
        factors = load_file(work / "CKPT" / WEIGHTS)
        save_file({new_name(name): one for name, one in factors.items()}, work / "CKPT" / WEIGHTS)

    return damage


def _without_alpha(work: Path) -> None:
    edit_json(work / "CKPT" / CONFIG, lambda content: content.pop("lora_alpha"))


def _as_text(work: Path) -> None:
    """The names of the text class alone."""
    _named(lambda name: name.replace("model.language_model.", "model."))(work)


def _of_experts(work: Path) -> None:
    """Over the release with the experts of a layer in one tensor."""
    (work / SOURCE).unlink()
    (work / "CKPT").rename(work / SOURCE)
    save(work / "CKPT", experts_of(work / SOURCE), [], target_parameters=["experts.gate_up_proj", "experts.down_proj"])


def _exchanged(work: Path) -> None:
    """Factors as of a tensor [experts, columns, rows]: A has the outputs, B the inputs."""
    factors = load_file(work / "CKPT" / WEIGHTS)
    other = {
        name: factors[
            name.replace("lora_A", "lora_@").replace("lora_B", "lora_A").replace("lora_@", "lora_B")
        ].T.contiguous()
        for name in factors
    }
    save_file(other, work / "CKPT" / WEIGHTS)


def _whole(rows: int) -> Change:
    """Embedding and output layer too (modules_to_save), with so many rows more than the base has."""

    def make(work: Path) -> None:
        shutil.rmtree(work / "CKPT", ignore_errors=True)
        save(work / "CKPT", attention(work / SOURCE), ALL, modules_to_save=["embed_tokens", "lm_head"])
        file, whole = work / "CKPT" / WEIGHTS, {}
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            own = tensor(work / SOURCE, name)
            whole[f"base_model.model.{name}"] = torch.cat([own + 0.01, own[:rows]])
        save_file(load_file(file) | whole, file)

    return make


CASES = {
    "surogate#173": Case("qwen2-untied/", ("lora_alpha not there", "PEFT takes 8"), _without_alpha, _of_attention),
    "vllm#48019": Case(
        "qwen3_vl-tied/", ("vLLM 0.26 has no layer of this name", "answers with the base"), _as_text, _of_attention
    ),
    "Automodel#3595": Case(
        "qwen3_omni_moe/",
        ("base_model.model. before every name",),
        _named(lambda name: f"thinker.{name.replace('.thinker.', '.')}"),
        _of_attention,
    ),
    "ART#803": Case("qwen3_5_moe/fused", (".experts",), _exchanged, _of_experts, VERIFY),
    "LlamaFactory#10186": Case(
        "qwen2-untied/", ("[352, 128], as in the base", "[360, 128]", "embed_tokens"), _whole(8), _whole(0), VERIFY
    ),
    "LlamaFactory#9545": Case(
        "qwen2-untied/",
        ("SGLang 0.5.16 leaves it out silently, vLLM 0.26 refuses the adapter",),
        _whole(0),
        _of_attention,
    ),
}

"""Reports about the files of adapters: settings that are not there, prefixes in the wrong place, sides exchanged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from mutations.edits import edit_json, tensor
from safetensors.torch import load_file, save_file

from reports.adapters import OVER_BASE, VERIFY, WEIGHTS
from reports.merges import CONFIG, attention, experts_of, save
from reports.report import SOURCE, Change, Report

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


REPORTS = (
    Report(
        "surogate#173",
        "2026-09",
        "adapter_config.json without lora_alpha: one reader scales by 0, PEFT by 8 / r, others stop.",
        f"{VERIFY} --strict",
        "qwen2-untied/",
        "CK131",
        ("lora_alpha not there", "PEFT takes 8"),
        _without_alpha,
        _of_attention,
    ),
    Report(
        "vllm#48019",
        "2026-07",
        "An adapter that was trained on the language model alone is served on the wrapper, whose layers have a "
        "prefix: no name is found, and the base answers.",
        f"{OVER_BASE} --strict",
        "qwen3_vl-tied/",
        "CK137",
        ("vLLM 0.26 has no layer of this name", "answers with the base"),
        _as_text,
        _of_attention,
    ),
    Report(
        "Automodel#3595",
        "2026-08",
        "The wrapper's `thinker.` stands before `base_model.model.`, not behind it.",
        VERIFY,
        "qwen3_omni_moe/",
        "CK133",
        ("base_model.model. before every name",),
        _named(lambda name: f"thinker.{name.replace('.thinker.', '.')}"),
        _of_attention,
    ),
    Report(
        "ART#803",
        "2026-08",
        "PEFT takes a tensor of experts for [experts, inputs, outputs], Qwen3.6 has outputs first: the factors of "
        "an identity adapter are on each other's side.",
        OVER_BASE,
        "qwen3_5_moe/fused",
        "CK132",
        (".experts",),
        _exchanged,
        _of_experts,
        twin=VERIFY,
    ),
    Report(
        "LlamaFactory#10186",
        "2026-02",
        "An adapter with a whole embedding and output layer was trained on a base whose vocabulary had grown.",
        OVER_BASE,
        "qwen2-untied/",
        "CK132",
        ("[352, 128], as in the base", "[360, 128]", "embed_tokens"),
        _whole(8),
        _whole(0),
        twin=VERIFY,
    ),
    Report(
        "LlamaFactory#9545",
        "2025-11",
        "resize_vocab trains embedding and output layer whole (modules_to_save), which vLLM does not serve.",
        f"{OVER_BASE} --strict",
        "qwen2-untied/",
        "CK137",
        ("SGLang 0.5.16 leaves it out silently, vLLM 0.26 refuses the adapter",),
        _whole(0),
        _of_attention,
    ),
)

"""Reports about the files of adapters: settings that are not there, prefixes in the wrong place, sides exchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mutations.edits import edit_json
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
)

"""Reports about draft models: what they lack, and what a launch or config.json says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mutations.edits import edit_config
from safetensors.torch import load_file, save_file
from support.drafts import KINDS, save_draft, tensors_of

from reports.files import on_checkpoint
from reports.launches import SCRIPT, launch, said
from reports.report import Change, Report

OVER_TARGET = "ckptkit verify CKPT --source RELEASE"
_OPTIONS = (
    "--sglang-speculative-algorithm EAGLE3 --sglang-speculative-draft-model-path DRAFT "
    "--sglang-speculative-num-steps 3 --sglang-speculative-eagle-topk 1 --sglang-speculative-num-draft-tokens 4"
)


def _draft(kind: str, **config: Any) -> Change:
    return lambda work: save_draft(work / "CKPT", tensors_of(kind), KINDS[kind][0] | config)


def _headless(path: Path) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file, {"format": "pt"})


def _drafting(work: Path) -> None:
    """A launch that drafts with an EAGLE3 model."""
    launch("qwen2")(work)
    save_draft(work / "DRAFT", tensors_of("SpecForge"), KINDS["SpecForge"][0])
    said("--rollout-batch-size 32", f"--rollout-batch-size 32 {_OPTIONS}")(work)


REPORTS = (
    Report(
        "sglang#27829",
        "2026-06",
        "An EAGLE3 draft for all tokens has no output layer and states draft_vocab_size: SGLang does not take the "
        "target's, and drafts by random numbers.",
        OVER_TARGET,
        "qwen3-untied/",
        "CK141",
        ("the output layer", "draft_vocab_size 352: SGLang 0.5.16 serves random numbers"),
        on_checkpoint(_headless),
        _draft("ModelOpt, all tokens"),
    ),
    Report(
        "NeMo-RL#3960",
        "2026-09",
        "A draft's max_position_embeddings is its training's length, 2048: behind that nothing is accepted.",
        f"{OVER_TARGET} --strict",
        "qwen3-untied/",
        "CK144",
        ("max_position_embeddings 256, as the target", "64, for as many positions"),
        on_checkpoint(lambda path: edit_config(path, max_position_embeddings=64)),
        _draft("SpecForge"),
        twin=OVER_TARGET,
    ),
    Report(
        "sglang#21272",
        "2026-03",
        "EAGLE is asked for with an EAGLE3 draft, which then gets the states of one layer in place of three.",
        SCRIPT,
        code="CK745",
        names=("EAGLE3, for a draft model of EAGLE3", "EAGLE, at"),
        damage=said("speculative-algorithm EAGLE3", "speculative-algorithm EAGLE"),
        prepare=_drafting,
    ),
)

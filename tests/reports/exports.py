"""Reports about conversions that write every tensor, and the wrong values, shapes or dtypes into some."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from mutations.edits import edit_stored, names, replace, tensor
from mutations.torch_dist import FC1
from torch import Tensor

from reports.files import on_checkpoint, without_tensors
from reports.quantized import deepseek_v4
from reports.report import Change, Report

VERIFY = "ckptkit verify CKPT"
AGAINST = "ckptkit verify CKPT --source RELEASE"
EXPERT_FC1 = "decoder.layers.5.mlp.experts.experts.linear_fc1.weight"


def changed(part: str, change: Callable[[Tensor], Tensor]) -> Change:
    """Every tensor with this part in its name is changed."""
    return on_checkpoint(
        lambda path: replace(path, {name: change(tensor(path, name)).contiguous() for name in names(path, part)})
    )


def stored(key: str, change: Callable[[Tensor], Tensor], experts: int = 1) -> Change:
    """A tensor of a Megatron checkpoint is changed, for the first experts of it."""

    def damage(path: Path) -> None:
        for expert in range(experts):
            edit_stored(path, key, change, expert)

    return on_checkpoint(damage)


def _interleaved(fused: Tensor) -> Tensor:
    """Rows of gate and up in turn, in place of gate above up."""
    gate, up = fused.chunk(2, dim=-2)
    return torch.stack([gate, up], dim=-2).reshape(fused.shape)


def _padded(path: Path) -> None:
    more = {}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        found = tensor(path, name)
        more[name] = torch.cat([found, torch.zeros(32, found.shape[1], dtype=found.dtype)])
    replace(path, more)


def _local_numbers(path: Path) -> None:
    """Rank 1 takes the experts 0..5 for its own, which are 6..11."""
    own = {}
    for name in names(path, ".mlp.experts."):
        before, number, after = _split(name)
        if number >= 6:
            own[name] = tensor(path, f"{before}{number - 6}{after}")
    replace(path, own)


def _repeated(path: Path) -> None:
    """Every rank of four has the experts of the first."""
    new = {}
    for name in names(path, ".experts."):
        whole = tensor(path, name)
        new[name] = torch.cat([whole[: len(whole) // 4]] * 4)
    replace(path, new)


def _split(name: str) -> tuple[str, int, str]:
    before, _, rest = name.partition(".experts.")
    number, _, after = rest.partition(".")
    return f"{before}.experts.", int(number), f".{after}"


REPORTS = (
    Report(
        "Megatron-Bridge#1272",
        "2025-11",
        "Mappings do not know `to_wrap`, under which adapters keep a base: no adapted module's weight is exported.",
        VERIFY,
        "qwen2-untied/hf",
        "CK104",
        ("self_attn.q_proj.weight", "in no shard"),
        without_tensors(*(f"self_attn.{part}_proj" for part in "qkvo")),
    ),
    Report(
        "Megatron-Bridge#4107",
        "2026-06",
        "Nemotron-3 exported without its MTP layer has no final norm.",
        VERIFY,
        "nemotron_h/hf",
        "CK104",
        ("backbone.norm_f.weight", "in no shard"),
        without_tensors("backbone.norm_f"),
    ),
    Report(
        "NeMo-RL#2774",
        "2026-06",
        "Many weights of Nemotron-3 are not converted, those of its MTP layers among them.",
        AGAINST,
        "nemotron_h-latent/hf",
        "CK202",
        ("mtp.layers.0.eh_proj.weight", "missing"),
        without_tensors("mtp."),
    ),
    Report(
        "vime#388",
        "2026-08",
        "With EP=4 the experts of rank 0 arrive in all ranks' places; Gemma 4 has those of a layer in one tensor.",
        VERIFY,
        "gemma4/hf",
        "CK206",
        ("experts {0..2} and {3..5} and {6..8} and {9..11} hold the same bytes", "expert parallel rank"),
        on_checkpoint(_repeated),
    ),
    Report(
        "llm-compressor#2735",
        "2026-05",
        "DeepSeek-V4 is quantized through transformers, which drops `mtp.*` while it loads; config.json announces the "
        "layer still.",
        AGAINST,
        "deepseek_v4/hf",
        "CK202",
        ("mtp.0.attn.wkv.weight", "missing"),
        without_tensors("mtp."),
        deepseek_v4,
    ),
    Report(
        "slime#1799",
        "2026-04",
        "A converter numbers experts as a rank does: with EP=8 the ranks 1 to 7 hold the experts of rank 0.",
        VERIFY,
        "qwen3_moe/hf",
        "CK206",
        (".mlp.experts.",),
        on_checkpoint(_local_numbers),
    ),
    Report(
        "ISEEKYAN/Megatron-LM#81",
        "2026-07",
        "An export casts everything to bfloat16, the float32 selection bias of the router too.",
        AGAINST,
        "glm4_moe/hf",
        "CK203",
        ("e_score_correction_bias",),
        changed("e_score_correction_bias", lambda found: found.to(torch.bfloat16)),
    ),
    Report(
        "Megatron-LM#5844",
        "2026-07",
        "`tools/checkpoint` finds no expert of Mixtral under its own names, leaves all as initialized, and succeeds.",
        AGAINST,
        "mixtral/megatron",
        "CK202",
        ("experts",),
        stored(EXPERT_FC1, lambda found: torch.randn(found.shape).mul(0.02).to(found.dtype), experts=12),
    ),
    Report(
        "Megatron-Bridge#5366",
        "2026-08",
        "The low-memory import writes rows of gate and up in turn, where Megatron has gate above up.",
        AGAINST,
        "qwen2-untied/megatron",
        "CK202",
        ("model.layers.3.mlp.gate_proj.weight",),
        stored(FC1, _interleaved),
    ),
    Report(
        "Megatron-Bridge#5375",
        "2026-08",
        "An export keeps the rows that Megatron added to divide the vocabulary over ranks.",
        VERIFY,
        "qwen2-untied/hf",
        "CK105",
        ("embed_tokens.weight",),
        on_checkpoint(_padded),
    ),
    Report(
        "training-gym#100",
        "2026-06",
        "With expert parallelism fused experts are exported without the transpose; the rollout is gibberish.",
        VERIFY,
        "qwen3_5_moe/fused",
        "CK105",
        ("mlp.experts.down_proj",),
        changed("layers.3.mlp.experts.down_proj", lambda found: found.transpose(1, 2)),
    ),
    Report(
        "slime#1840",
        "2026-04",
        "The raw converter of gpt-oss writes down_proj of the experts in the layout of other families.",
        VERIFY,
        "gpt_oss/hf",
        "CK105",
        ("mlp.experts.down_proj",),
        changed("mlp.experts.down_proj", lambda found: found.transpose(1, 2) if found.dim() == 3 else found),
    ),
    Report(
        "NeMo-RL#2249",
        "2026-04",
        "Layers of gpt-oss are missing from the exported checkpoint.",
        VERIFY,
        "gpt_oss/hf",
        "CK104",
        ("model.layers.",),
        without_tensors("model.layers.10.", "model.layers.11."),
    ),
    Report(
        "Megatron-Bridge#4960",
        "2026-07",
        "The bridge of GLM-5 overwrites the number of MTP layers with None; conversion drops them and succeeds.",
        AGAINST,
        "glm_moe_dsa/hf",
        "CK202",
        ("model.layers.12.",),
        without_tensors("model.layers.12."),
    ),
    Report(
        "Model-Optimizer#2427",
        "2026-09",
        "A quantizer finds MTP weights by parts of names; where a family spells them otherwise, they are not exported, "
        "and config.json still announces them.",
        AGAINST,
        "deepseek_v3/hf",
        "CK202",
        ("model.layers.12.",),
        without_tensors("model.layers.12."),
    ),
    Report(
        "Megatron-Bridge#1883",
        "2026-01",
        "A custom model of the family is exported against the shards of the release: 1,481 tensors are yielded and not "
        "saved, and no weight is written.",
        VERIFY,
        "deepseek_v3/hf",
        "CK103",
        ("no weights",),
        on_checkpoint(lambda path: [file.unlink() for file in path.glob("*.safetensors*")]),
    ),
)

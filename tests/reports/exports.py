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
from reports.report import Case, Change

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


CASES = {
    "Megatron-Bridge#1272": Case(
        "qwen2-untied/hf",
        ("self_attn.q_proj.weight", "in no shard"),
        without_tensors(*(f"self_attn.{part}_proj" for part in "qkvo")),
    ),
    "Megatron-Bridge#4107": Case(
        "nemotron_h/hf", ("backbone.norm_f.weight", "in no shard"), without_tensors("backbone.norm_f")
    ),
    "NeMo-RL#2774": Case("nemotron_h-latent/hf", ("mtp.layers.0.eh_proj.weight", "missing"), without_tensors("mtp.")),
    "vime#388": Case(
        "gemma4/hf",
        ("experts {0..2} and {3..5} and {6..8} and {9..11} hold the same bytes", "expert parallel rank"),
        on_checkpoint(_repeated),
    ),
    "llm-compressor#2735": Case(
        "deepseek_v4/hf", ("mtp.0.attn.wkv.weight", "missing"), without_tensors("mtp."), deepseek_v4
    ),
    "slime#1799": Case("qwen3_moe/hf", (".mlp.experts.",), on_checkpoint(_local_numbers)),
    "ISEEKYAN/Megatron-LM#81": Case(
        "glm4_moe/hf",
        ("e_score_correction_bias",),
        changed("e_score_correction_bias", lambda found: found.to(torch.bfloat16)),
    ),
    "Megatron-LM#5844": Case(
        "mixtral/megatron",
        ("experts",),
        stored(EXPERT_FC1, lambda found: torch.randn(found.shape).mul(0.02).to(found.dtype), experts=12),
    ),
    "Megatron-Bridge#5366": Case(
        "qwen2-untied/megatron", ("model.layers.3.mlp.gate_proj.weight",), stored(FC1, _interleaved)
    ),
    "Megatron-Bridge#5375": Case("qwen2-untied/hf", ("embed_tokens.weight",), on_checkpoint(_padded)),
    "training-gym#100": Case(
        "qwen3_5_moe/fused",
        ("mlp.experts.down_proj",),
        changed("layers.3.mlp.experts.down_proj", lambda found: found.transpose(1, 2)),
    ),
    "slime#1840": Case(
        "gpt_oss/hf",
        ("mlp.experts.down_proj",),
        changed("mlp.experts.down_proj", lambda found: found.transpose(1, 2) if found.dim() == 3 else found),
    ),
    "NeMo-RL#2249": Case("gpt_oss/hf", ("model.layers.",), without_tensors("model.layers.10.", "model.layers.11.")),
    "Megatron-Bridge#4960": Case("glm_moe_dsa/hf", ("model.layers.12.",), without_tensors("model.layers.12.")),
    "Model-Optimizer#2427": Case("deepseek_v3/hf", ("model.layers.12.",), without_tensors("model.layers.12.")),
    "Megatron-Bridge#1883": Case(
        "deepseek_v3/hf",
        ("no weights",),
        on_checkpoint(lambda path: [file.unlink() for file in path.glob("*.safetensors*")]),
    ),
}

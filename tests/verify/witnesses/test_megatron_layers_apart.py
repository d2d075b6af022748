"""Real Megatron cuts what only GLM-4-0414, Gemma 3 and GPT-OSS have over two ranks as the rules predict."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import CASES
from families.case import save
from support.megatron_layouts import judge

from ckptkit.app.api import convert
from verify.evidence.subject import Subject
from verify.options import VerifyOptions
from verify.witnesses.megatron.run import run_megatron

pytestmark = pytest.mark.usefixtures("served")

HELD = {
    # [2 x 288, 128] with gate above up in one HF matrix; norms are whole on every rank.
    "glm4": {
        "mlp.linear_fc1.weight": 288 * 128,
        "post_self_attn_layernorm.weight": 128,
        "post_mlp_layernorm.weight": 128,
    },
    "gemma3": {"self_attention.linear_proj.post_layernorm.weight": 128, "mlp.linear_fc2.post_layernorm.weight": 128},
    # 10 heads, so 5 sinks a rank, and 10 x 32 + 2 x 2 x 32 biases of q, k and v; summed outputs have whole biases.
    "gpt_oss": {
        "self_attention.core_attention.softmax_offset": 5,
        "self_attention.linear_qkv.bias": 224,
        "self_attention.linear_proj.bias": 128,
        "mlp.router.bias": 12,
    },
}


@pytest.mark.parametrize("name", list(HELD))
def test_over_two_ranks(name: str, tmp_path: Path) -> None:
    save(name, CASES[name], tmp_path / "release", torch.bfloat16)
    convert(tmp_path / "release", tmp_path / "megatron")
    subject = Subject(
        tmp_path / "megatron", tmp_path / "release", options=VerifyOptions(tp=2, ep=2 if name == "gpt_oss" else 1)
    )
    assert judge(subject)[0] == []
    for report in subject.once(run_megatron).reports:
        held = {seen.name: seen.elements for seen in report.tensors}
        assert {rest: held[f"decoder.layers.7.{rest}"] for rest in HELD[name]} == HELD[name]
        if name == "gpt_oss":
            experts = {
                key
                for key in held
                if key.startswith("decoder.layers.7.mlp.experts.") and key.endswith("linear_fc1.bias")
            }
            assert experts == {
                f"decoder.layers.7.mlp.experts.experts.{expert}.linear_fc1.bias"
                for expert in range(6 * report.rank, 6 * report.rank + 6)
            }

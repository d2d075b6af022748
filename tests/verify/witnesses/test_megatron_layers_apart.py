"""Real Megatron cuts what only GLM-4-0414 and GPT-OSS have over two ranks as the rules predict."""

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

# 10 heads, so 5 sinks a rank, and 10 x 32 + 2 x 2 x 32 biases of q, k and v; summed outputs have whole biases.
HELD = {
    "self_attention.core_attention.softmax_offset": 5,
    "self_attention.linear_qkv.bias": 224,
    "self_attention.linear_proj.bias": 128,
    "mlp.router.bias": 12,
}


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("name", ["glm4", "gpt_oss"])
def test_over_two_ranks(name: str, tmp_path: Path) -> None:
    """Gate above up in one HF matrix and norms after both parts of a layer; sinks, and biases of all layers."""
    save(name, CASES[name], tmp_path / "release", torch.bfloat16)
    convert(tmp_path / "release", tmp_path / "megatron")
    subject = Subject(
        tmp_path / "megatron", tmp_path / "release", options=VerifyOptions(tp=2, ep=2 if name == "gpt_oss" else 1)
    )
    assert judge(subject)[0] == []
    for report in subject.once(run_megatron).reports if name == "gpt_oss" else ():
        held = {seen.name: seen.elements for seen in report.tensors}
        assert {rest: held[f"decoder.layers.7.{rest}"] for rest in HELD} == HELD
        biases = {name for name in held if ".7.mlp.experts." in name and name.endswith("linear_fc1.bias")}
        own = range(6 * report.rank, 6 * report.rank + 6)
        assert biases == {f"decoder.layers.7.mlp.experts.experts.{expert}.linear_fc1.bias" for expert in own}

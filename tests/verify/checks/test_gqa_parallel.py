"""Over ranks of real Megatron: q/k norms over all heads, biases, a shared expert's gate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import CASES
from families.case import save
from support.nightly import daily

from ckptkit.app.api import convert
from verify.check import Tally
from verify.checks.witnesses.megatron import right_slices, strict_load
from verify.evidence.subject import Subject
from verify.options import VerifyOptions
from verify.witnesses.megatron.run import run_megatron

# Elements that rank 1 of 2 holds, of tensors of layer 11.
HELD = {
    "minimax_m2": {"self_attention.q_layernorm.weight": 10 * 32 // 2, "self_attention.k_layernorm.weight": 2 * 32 // 2},
    "llama-biases": {
        "self_attention.linear_qkv.bias": (8 + 2 * 2) * 40 // 2,
        "self_attention.linear_proj.bias": 128,
        "mlp.linear_fc1.bias": 288,
        "mlp.linear_fc2.bias": 128,
    },
    "qwen2_moe-dense-between": {
        "mlp.shared_experts.gate_weight": 128,
        "mlp.shared_experts.linear_fc1.weight": 72 * 128,
    },
}


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("name", daily(HELD, ("llama-biases",)))
def test_every_rank_holds_its_slice(tmp_path: Path, name: str) -> None:
    save(name, CASES[name], tmp_path / "release", torch.bfloat16)
    convert(tmp_path / "release", tmp_path / "megatron")
    subject = Subject(tmp_path / "megatron", tmp_path / "release", options=VerifyOptions(tp=2))
    for check in (strict_load, right_slices):
        assert list(check(subject, Tally())) == []
    (report,) = (report for report in subject.once(run_megatron).reports if report.rank == 1)
    elements = {seen.name.removeprefix("decoder.layers.11."): seen.elements for seen in report.tensors}
    assert elements.items() >= HELD[name].items()


@pytest.mark.usefixtures("served")
def test_more_ranks_than_query_groups_hold_their_slices(tmp_path: Path) -> None:
    """2 query groups on 4 ranks: each holds half of a group's rows, 3 of its 6 heads (4 queries, a key and a value)."""
    save("llama-biases", CASES["llama-biases"], tmp_path / "release", torch.bfloat16)
    convert(tmp_path / "release", tmp_path / "megatron")
    subject = Subject(tmp_path / "megatron", tmp_path / "release", options=VerifyOptions(tp=4))
    for check in (strict_load, right_slices):
        assert list(check(subject, Tally())) == []
    for report in subject.once(run_megatron).reports:
        elements = {seen.name: seen.elements for seen in report.tensors}
        assert elements["decoder.layers.11.self_attention.linear_qkv.bias"] == 3 * 40

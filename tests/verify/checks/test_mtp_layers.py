"""Multi-token prediction layers in `verify`: counted, compared and held by real Megatron like the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import CASES
from families.case import save
from families.mtp import mimo, small, with_tensors

from ckptkit.app.api import convert
from converters.planner import rules_of
from verify.check import Tally, Unable
from verify.checks.witnesses.megatron import all_layers, right_slices, strict_load
from verify.evidence.subject import Subject
from verify.options import VerifyOptions
from verify.report import Finding
from verify.run import verify
from verify.witnesses.megatron.run import run_megatron

GLM = small(CASES["glm4_moe-mtp"], 3)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release in `hf` and what it converts to in `megatron`."""
    root = tmp_path_factory.mktemp("glm")
    save("mtp", GLM, root / "hf", torch.bfloat16)
    convert(root / "hf", root / "megatron")
    return root


def test_mtp_layers_are_counted_in_tensors_per_layer(glm: Path) -> None:
    """58: 52 of an MoE layer, 4 around it and two copies. 39: the 35 that Megatron has of an MoE layer, and 4."""
    hf, megatron = verify(glm / "hf"), verify(glm / "megatron", source=glm / "hf")
    assert hf.findings == megatron.findings == []
    assert hf.facts["tensors per layer"] == [
        "dense layers {0..1}: 14 tensors each",
        "MoE layers 2: 52 tensors each",
        "MTP layers 3: 58 tensors each",
    ]
    assert megatron.facts["tensors per layer"] == [
        "dense layers {0..1}: 9 tensors each",
        "MoE layers 2: 35 tensors each",
        "MTP layers 0: 39 tensors each",
    ]


def test_a_release_that_lost_all_but_one_tensor_of_its_layer(tmp_path: Path) -> None:
    """Of 56, the copies not counted. With none of them it is a release without the layer (test_without_mtp.py)."""
    save("mtp", with_tensors(GLM, lambda name: name.endswith("enorm.weight")), tmp_path / "hf", torch.bfloat16)
    findings = verify(tmp_path / "hf").findings
    assert {finding.code for finding in findings} == {"CK104"}
    assert sum(finding.count for finding in findings) == 55
    assert "model.layers.3.eh_proj.weight" in {finding.tensor for finding in findings}


def judge(subject: Subject) -> list[Finding]:
    return [finding for check in (strict_load, right_slices, all_layers) for finding in check(subject, Tally())]


def held(subject: Subject) -> list[set[str]]:
    """The names of MTP tensors that each rank holds a part of."""
    return [
        {seen.name for seen in report.tensors if seen.name.startswith("mtp.")}
        for report in subject.once(run_megatron).reports
    ]


@pytest.mark.usefixtures("served")
def test_real_megatron_with_tensor_and_expert_parallel_ranks(glm: Path) -> None:
    subject = Subject(glm / "megatron", glm / "hf", options=VerifyOptions(tp=2, ep=2))
    assert judge(subject) == []
    first, second = held(subject)
    experts = [f"mtp.layers.0.transformer_layer.mlp.experts.experts.{number}.linear_fc1.weight" for number in (5, 6)]
    assert [name in first for name in experts] == [True, False]
    assert [name in second for name in experts] == [False, True]


@pytest.mark.usefixtures("served")
def test_real_megatron_has_all_of_them_on_the_last_pipeline_stage(tmp_path: Path) -> None:
    """That stage also has embeddings of its own."""
    save("mimo", small(mimo(2, tied=False), 4), tmp_path / "hf", torch.bfloat16)
    convert(tmp_path / "hf", tmp_path / "megatron")
    subject = Subject(
        tmp_path / "megatron", tmp_path / "hf", options=VerifyOptions(pp=2, vpp=2, against=frozenset({"megatron"}))
    )
    assert judge(subject) == []
    names = {
        rule.megatron for rule in rules_of(subject.megatron_files.opened.config) if rule.megatron.startswith("mtp.")
    }
    assert len(names) == 2 * 11
    reports = subject.once(run_megatron).reports
    assert [report.pp for report in reports] == [0, 1]
    assert held(subject) == [set(), names]
    assert {"embedding.word_embeddings.weight", "output_layer.weight"} <= {seen.name for seen in reports[1].tensors}


@pytest.mark.usefixtures("served")
def test_what_megatron_itself_cannot_do_is_said(tmp_path: Path) -> None:
    save("mimo", small(mimo(1, tied=True), 4), tmp_path / "hf", torch.bfloat16)
    convert(tmp_path / "hf", tmp_path / "megatron")
    said = (
        "rank 1 failed while building the model, .*tied embeddings with multi-token prediction over several "
        "pipeline stages: use one stage"
    )
    with pytest.raises(Unable, match=said):
        list(strict_load(Subject(tmp_path / "megatron", tmp_path / "hf", options=VerifyOptions(pp=2)), Tally()))

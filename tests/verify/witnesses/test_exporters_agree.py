"""CK405 on ranks written by hand: what it says where an exporter's numbers are not Megatron's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support import models
from support.check_examples import hold_example

from converters.megatron.parallel import ParallelSizes
from verify.check import Tally
from verify.checks.witnesses import exporters
from verify.checks.witnesses.exporters import exporters_agree
from verify.evidence.subject import Subject
from verify.report import Finding
from verify.witnesses.megatron.job import RankReport, TensorSeen
from verify.witnesses.megatron.run import MegatronRun

LAYER = "decoder.layers.{}.self_attention.linear_proj.weight"


def rank(number: int, pp: int, layers: Sequence[Sequence[int]], *tensors: TensorSeen, ep: int = 0) -> RankReport:
    held = tuple(
        TensorSeen(LAYER.format(place), LAYER.format(layer), "equal", 8, 4)
        for place, layer in enumerate(layer for chunk in layers for layer in chunk)
    )
    chunks = tuple(tuple(chunk) for chunk in layers)
    return RankReport(number, "0.19.2", 0, pp, ep, chunks, 0, (), (), (), (*held, *tensors))


def judged(
    monkeypatch: pytest.MonkeyPatch, sizes: ParallelSizes, reports: Sequence[RankReport], **config: Any
) -> tuple[list[Finding], Tally]:
    values = models.configs()["glm4_moe"].to_dict() | config
    run = MegatronRun(sizes, "gloo on the CPU", reports, {})
    monkeypatch.setattr(exporters, "config_of", lambda subject: values)
    monkeypatch.setattr(exporters, "finished", lambda subject: run)
    tally = Tally()
    return list(exporters_agree(Subject(Path("checkpoint")), tally)), tally


def test_exporters_that_agree_are_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = [rank(0, 0, [range(6)]), rank(1, 1, [range(6, 12)]), rank(2, 0, [range(6)], ep=1)]
    found, tally = judged(monkeypatch, ParallelSizes(pp=2, ep=2), reports)
    assert found == []
    assert tally.tensors == 3 * 12  # the layers of three exporters
    assert tally.facts["whose values the layers hold"] == [
        "pp rank 0: each layer its own",
        "pp rank 1: each layer its own",
    ]


def test_a_stage_that_an_exporter_numbers_otherwise_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last of three interleaved stages is given, which verl takes for the first as well."""
    reports = [
        rank(0, 0, [(0, 1), (6, 7)]),
        rank(1, 1, [(2, 3), (8, 9)]),
        rank(2, 2, [(4, 5), (10, 11)]),
    ]
    found, _ = judged(monkeypatch, ParallelSizes(pp=3, vpp=2, last=4), reports)
    assert {(finding.code, finding.severity) for finding in found} == {("CK405", "warning")}
    assert [(finding.rank, finding.expected, finding.actual) for finding in found] == [
        ("rank 1", "layers {2..3} of stage 1, chunk 0", "verl without a bridge names them {0..1}"),
        ("rank 1", "layers {8..9} of stage 1, chunk 1", "verl without a bridge names them {6..7}"),
        ("rank 2", "layers {4..5} of stage 2, chunk 0", "verl without a bridge names them {2..3}"),
        ("rank 2", "layers {10..11} of stage 2, chunk 1", "verl without a bridge names them {8..9}"),
    ]
    hold_example("CK405", found[0])


def test_a_prediction_layer_that_is_numbered_on_or_whose_experts_are_not_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fc1 = "mlp.experts.{}.linear_fc1.weight"
    mtp = TensorSeen(
        f"mtp.layers.0.mtp_model_layer.{fc1.format('local_experts.0')}",
        f"mtp.layers.0.transformer_layer.{fc1.format('experts.6')}",
        "equal",
        8,
        4,
    )
    reports = [rank(0, 0, [range(6)], ep=1), rank(1, 1, [range(6, 12)], mtp, ep=1)]
    found, _ = judged(monkeypatch, ParallelSizes(pp=2, ep=2), reports, num_nextn_predict_layers=1)
    assert [(finding.rank, finding.actual) for finding in found] == [
        (
            "ranks 0..1",
            f"{name} leaves them {{0..5}} in mtp_model_layer of a prediction layer (its name in megatron-core 0.19.2)",
        )
        for name in ("slime", "miles")
    ] + [("rank 1", "verl without a bridge names them mtp.layers.6")]


def test_layers_that_hold_other_values_are_shown_as_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = TensorSeen("x", "decoder.layers.6.mlp.linear_fc2.weight", "differs", 8, 4, 4, 1.0, "", (LAYER.format(0),))
    reports = [rank(0, 0, [range(6)]), rank(1, 1, [range(6, 12)], wrong)]
    found, tally = judged(monkeypatch, ParallelSizes(pp=2), reports)
    assert found == []
    assert tally.facts["whose values the layers hold"][1] == "pp rank 1: those of layers 0, 7, 8, 9, 10, 11"

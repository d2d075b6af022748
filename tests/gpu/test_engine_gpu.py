"""`verify --update --release-resume --logits` with real engines on a GPU: sound models pass, broken ones do not."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
import torch
from engine_models import ATTENTION, ONLINE, ROUTER, saved, verified
from sglang_runs import int4_config, online_int4, written

from ckptkit.app.api import quantize
from quant.formats.scheme import QuantScheme
from verify.report import Report

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.sglang,
    pytest.mark.timeout(1500),
]


def failed(report: Report) -> set[str]:
    return {finding.code for finding in report.findings if finding.severity == "error"}


@pytest.mark.parametrize("name", ["dense", "moe", "mla"])
def test_updates_release_and_logits_of_sound_models_pass(name: str, tmp_path: Path) -> None:
    report = verified(saved(name, tmp_path))
    statuses = {check.code: (check.status, check.reason) for check in report.checks if check.code[:3] in ("CK5", "CK6")}
    codes = ["CK511", "CK512", "CK513", "CK601", "CK604", *["CK605"] * (name != "dense")]
    assert statuses == dict.fromkeys(codes, ("passed", None)), report.findings
    assert report.findings == []


def test_an_int4_model_passes_where_sglang_can_load_it_again(tmp_path: Path) -> None:
    source = saved("moe", tmp_path)
    quantize(source, tmp_path / "int4", QuantScheme(32, "qmax7", (ATTENTION, ROUTER)))
    report = verified(tmp_path / "int4")
    assert not failed(report), report.findings
    (warning,) = (one for one in report.findings if one.code == "CK512")
    assert "repacked INT4 layers" in warning.actual
    assert not report.reasons


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_zero_points_are_what_the_engine_computes_with(name: str, tmp_path: Path) -> None:
    source = saved(name, tmp_path)
    scheme = QuantScheme(32, "minmax", (ATTENTION, *[ROUTER] * (name == "moe")), symmetric=False)
    quantize(source, tmp_path / f"{name}-zeros", scheme, readers=("sglang",))
    report = verified(tmp_path / f"{name}-zeros", frozenset({"engine", "logits"}))
    assert not failed(report), report.findings
    assert not report.reasons


def test_a_tensor_that_updates_leave_out_is_named(tmp_path: Path) -> None:
    lost = "model.layers.3.mlp.down_proj.weight"
    source = saved("dense", tmp_path)
    path = written(tmp_path, "lost", source, {k: v for k, v in models.tensors(source).items() if k != lost})
    report = verified(path, frozenset({"engine", "update", "release-resume"}))
    found = {(one.code, one.tensor) for one in report.findings if one.code.startswith("CK5")}
    assert found >= {("CK512", lost), ("CK513", lost)}
    assert {tensor for _, tensor in found} <= {lost, None}


def test_a_packed_router_is_no_sound_engine(tmp_path: Path) -> None:
    """SGLang builds the router unquantized, drops its packed weights, and serves with what memory held."""
    source = saved("moe", tmp_path)
    packed = online_int4(models.tensors(source), [*ONLINE, ATTENTION], 32)
    config = int4_config([*ONLINE, ATTENTION], 32)
    path = written(tmp_path, "router", source, packed, quantization_config=config)
    report = verified(path, frozenset({"engine", "logits"}))
    assert "CK511" in failed(report), report.findings


def test_a_window_that_sglang_ignores_is_many_times_the_noise(tmp_path: Path) -> None:
    report = verified(saved("window", tmp_path), frozenset({"engine", "logits"}))
    assert failed(report) == {"CK601", "CK604"}, report.findings

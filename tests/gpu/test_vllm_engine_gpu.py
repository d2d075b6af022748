"""`verify --against-vllm --update --release-resume --logits` with a real `vllm.LLM` on a GPU."""

import pytest
from support import models
from support.engine_models import ATTENTION, ROUTER, SYNCED, saved, synced, verified
from support.live_faults import mistakes, reports
from support.sglang_runs import written

from ckptkit.app.api import quantize
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.verify.witnesses.process.interpreter import python_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]
ALL = frozenset({"vllm", "engine", "update", "release-resume", "logits"})
CODES = ("CK511", "CK512", "CK513", "CK601")


def live(report):
    return {one.code: (one.status, one.reason) for one in report.checks if one.code in CODES}


@pytest.mark.parametrize("name", ["dense", "moe", "mla"])
def test_updates_sleep_and_logits_of_sound_models_pass(name, tmp_path):
    report = verified(saved(name, tmp_path), ALL)
    assert live(report) == dict.fromkeys(CODES, ("passed", None)), report.findings
    assert report.findings == []


def test_int4_is_repacked_by_each_update(tmp_path):
    quantize(
        saved("moe", tmp_path), tmp_path / "int4", QuantScheme(32, "qmax7", (ATTENTION, ROUTER)), readers=("vllm",)
    )
    report = verified(tmp_path / "int4", ALL)
    # After sleep and update vLLM 0.26 has other scales of the cache and ranges of them, which caches in FP8 alone use.
    assert live(report) == dict.fromkeys(CODES, ("passed", None)) | {"CK513": ("failed", None)}, report.findings
    assert all("self_attn.attn." in str(one.tensor) and one.severity == "warning" for one in report.findings)


def test_tensor_that_updates_leave_out_is_named(tmp_path):
    lost = "model.layers.3.mlp.down_proj.weight"
    source = saved("dense", tmp_path)
    kept = {name: tensor for name, tensor in models.tensors(source).items() if name != lost}
    report = verified(written(tmp_path, "lost", source, kept), ALL - {"logits"})
    found = {(one.code, one.tensor) for one in report.findings if one.code.startswith("CK51")}
    assert found >= {("CK512", lost), ("CK513", lost)}


@pytest.mark.parametrize("name", SYNCED)
def test_planted_faults_are_named(name, tmp_path):
    path = synced(name, tmp_path / "model", "vllm")
    found = reports(tmp_path, path, program=python_of("vllm", {}), gpu=True)
    assert len(found) >= 10  # one of them without a fault
    assert mistakes(found) == []

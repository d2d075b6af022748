"""`verify --against-vllm`: from HF, INT4 and Megatron, in an environment of its own, and where there is none."""

import json
import os
import sys
from pathlib import Path

import pytest
from mutations.edits import edit_index, edit_json
from support import models
from support.messages import text_with
from support.processes import ckptkit
from support.sglang_runs import Case, answered, checked

from ckptkit.app import doctor
from ckptkit.app.api import quantize
from ckptkit.core.errors import UsageError
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.options import VerifyOptions
from ckptkit.verify.run import verify
from ckptkit.verify.witnesses.loading.job import EngineSizes, LoadReport, Observation
from ckptkit.verify.witnesses.loading.run import engine_sizes
from ckptkit.verify.witnesses.process.interpreter import Interpreter, python_of
from ckptkit.verify.witnesses.sglang.facts import SGLANG
from ckptkit.verify.witnesses.vllm import platform
from ckptkit.verify.witnesses.vllm.facts import VLLM

AGAINST = frozenset({"vllm"})


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_a_sound_checkpoint_passes_from_hf_and_megatron(releases, converted):
    done = ckptkit("verify", releases("qwen3_moe"), "--against-vllm", "--json", "--tp", "2", "--ep", "2")
    report = json.loads(done.stdout)
    assert (done.returncode, report["status"]) == (0, "passed"), done.stderr
    assert report["facts"]["vLLM"][0] == text_with("2 2 H100")
    beside = Interpreter(python_of("vllm", {})).release("sgl-deep-gemm")
    assert any(line == text_with("FP8 garbage") for line in report["facts"]["vLLM"]) == bool(beside)
    checks = {one["code"]: one["status"] for one in report["checks"] if one["code"].startswith("CK52")}
    assert checks == dict.fromkeys(("CK521", "CK522", "CK523", "CK524", "CK525", "CK527"), "passed")
    streamed = verify(converted("qwen3_moe"), source=releases("qwen3_moe"), against=AGAINST)
    assert streamed.status == "passed", streamed.findings


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_a_missing_expert_is_an_error(releases, copy_of):
    broken = copy_of(releases("glm4_moe"))
    name = "model.layers.3.mlp.experts.4.up_proj.weight"
    models.edit(broken, name, None)
    edit_index(broken, lambda weight_map: weight_map.pop(name))
    done = ckptkit("verify", broken, "--against-vllm", "--json")
    found = {one["code"]: one for one in json.loads(done.stdout)["findings"]}
    assert (done.returncode, found["CK522"]["tensor"]) == (1, name)


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_key_that_config_lacks_is_an_error_without_a_gpu_too(releases, copy_of):
    """transformers 5 does not write `norm_topk_prob`, which releases of Qwen3-VL-MoE have and vLLM reads."""
    sound = copy_of(releases("qwen3_vl_moe"))
    report = verify(sound, against=AGAINST)
    (found,) = (one for one in report.findings if one.code == "CK521")
    assert found.actual == text_with("Qwen3VLMoeTextConfig norm_topk_prob")
    edit_json(sound / "config.json", lambda config: config["text_config"].update(norm_topk_prob=True))
    report = verify(sound, against=AGAINST)
    assert next(one for one in report.checks if one.code == "CK521").status == "passed"
    assert [one for one in report.findings if one.code.startswith("CK52")] == []


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_int4_is_compared_before_repacking_alone(releases, tmp_path):
    quantize(releases("qwen3_moe"), tmp_path / "int4", QuantScheme(32, "qmax7"))
    report = verify(tmp_path / "int4", against=AGAINST)
    assert report.status == "inconclusive"
    assert report.findings == []
    assert report.reasons == [text_with("CK526 CUDA vLLM's GPU")]


def test_a_python_that_does_not_run_is_bad_usage(releases, tmp_path):
    path = tmp_path / "python"
    with pytest.raises(UsageError, match="python"):
        verify(releases("qwen2-tied"), against=AGAINST, pythons={"vllm": str(path)})
    path.write_text("#!/bin/sh\nexit 1\n")
    path.chmod(0o755)
    with pytest.raises(UsageError, match="python"):
        Interpreter(str(path)).release("vllm")


def test_a_witness_elsewhere_sees_ckptkit_and_nothing_beside_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/of/this/environment")
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    found = Interpreter(str(other), hidden=("HOME",), variables={"A": "b"}).environment(tmp_path)
    assert sorted(one.name for one in Path(found["PYTHONPATH"]).iterdir()) == ["ckptkit"]
    assert ("HOME" in found, found["A"]) == (False, "b")
    assert "/of/this/environment" in Interpreter().environment(tmp_path)["PYTHONPATH"].split(os.pathsep)


def test_doctor_looks_into_the_environment_of_each_program(tmp_path, monkeypatch):
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    monkeypatch.setattr(Interpreter, "release", lambda self, name: {"vllm": "0.26.0", "torch": "2.11.0"}.get(name))
    part = next(one for one in doctor.examine({"vllm": str(other)}).parts if one.name == "vllm")
    assert (part.usable, part.python, part.versions) == (True, str(other), ["vllm 0.26.0", "torch 2.11.0"])
    monkeypatch.setattr(Interpreter, "release", lambda *_: None)
    part = next(one for one in doctor.examine({"vllm": str(other)}).parts if one.name == "vllm")
    assert (part.usable, "pip install vllm" in str(part.missing)) == (False, True)


@pytest.mark.parametrize(
    ("given", "vllm", "sglang"),
    [
        ({"tp": 2}, EngineSizes(2), EngineSizes(2)),
        ({"tp": 4, "ep": 4}, EngineSizes(4, 4), EngineSizes(4, 4)),
        ({"tp": 4, "ep": 2}, None, EngineSizes(4, 2)),
        ({"tp": 2, "pp": 3}, EngineSizes(2, pp=3), None),
        ({"tp": 2, "ep": 2, "etp": 2}, None, None),
    ],
)
def test_sizes_that_an_engine_can_have(given, vllm, sglang, tmp_path):
    subject = Subject(tmp_path, options=VerifyOptions(**given))
    assert (engine_sizes(VLLM, subject), engine_sizes(SGLANG, subject)) == (vllm, sglang)


def report_of(*routers):
    return LoadReport("0.26.0", "SomeMoe", "cpu", "bfloat16", equal={"a": 1}, routers_seen=1, routers=routers)


def test_a_router_of_another_pipeline_stage_is_not_missing(releases):
    absent, dead = Observation("a", "a", "not there", is_absent=True), Observation("b", "b", "all zero")
    (router,) = LoadReport.merged([report_of(absent, dead), report_of()]).routers
    assert (router.tensor, router.rank) == ("b", "0")
    assert LoadReport.merged([report_of(absent), report_of(absent)]).routers == (absent,)
    results, _, _ = checked(Case(releases("qwen3_moe")), answered(report_of(absent)), VLLM)
    assert results["CK525"].status == "failed"


def test_the_stand_in_for_the_driver_is_a_library_whose_functions_fail(tmp_path):
    import ctypes

    machine, code = platform._MACHINES["x86_64"]
    path = tmp_path / "libnothing.so"
    path.write_bytes(platform.library("libnothing.so", ["one", "two"], machine, code))
    if os.uname().machine != "x86_64":
        pytest.skip("the code is of another processor")
    library = ctypes.CDLL(str(path))
    assert (library.one(), library.two()) == (100, 100)
    assert not hasattr(library, "three")

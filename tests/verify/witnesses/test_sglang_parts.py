"""The parts of the SGLang witness that need no SGLang: names, the poison, the subprocess."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from support import models
from support.messages import text_with
from support.sglang_runs import answered, int4_config

from ckptkit.core.errors import CkptkitError
from ckptkit.verify.checks.witnesses.loading import none_dropped
from ckptkit.verify.core.check import CheckResult, all_checks
from ckptkit.verify.core.run import run_checks
from ckptkit.verify.core.skip import CannotCheck, NotApplicable
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.options import VerifyOptions
from ckptkit.verify.witnesses import runner
from ckptkit.verify.witnesses.loading.bits import difference, poison, poisoned
from ckptkit.verify.witnesses.loading.compare import Loaded
from ckptkit.verify.witnesses.loading.job import LoadReport, Observation
from ckptkit.verify.witnesses.loading.run import run_engine_load
from ckptkit.verify.witnesses.process.interpreter import Interpreter
from ckptkit.verify.witnesses.sglang.adapter import left_empty
from ckptkit.verify.witnesses.sglang.facts import SGLANG
from ckptkit.verify.witnesses.vllm.adapter import left_empty as vllm_left_empty

GLM = models.configs()["glm4_moe"].to_dict()
L = "model.layers.4."
AGAINST = VerifyOptions(against=frozenset({"sglang"}))


@pytest.mark.parametrize("left_empty", [left_empty, vllm_left_empty], ids=["SGLang", "vLLM"])
def test_scales_of_inputs_are_needed_unless_nvfp4_is_of_weights_alone(left_empty):
    params = [L + "mlp.down_proj.input_scale", L + "mlp.experts.w13_input_scale", L + "mlp.down_proj.weight_scale_2"]
    layers = {"model.layers.0": {"quant_algo": "W4A16_NVFP4"}, "model.layers.1": {"quant_algo": "NVFP4"}}
    both = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    alone = both | {"quantized_layers": {"model.layers.0": {"quant_algo": "W4A16_NVFP4"}}}
    contents = [alone, both, {"quant_algo": "W4A16_NVFP4"}, {"quant_algo": "NVFP4"}, {"quant_algo": "FP8"}]
    found = [
        [left_empty(param, {"quantization_config": {"quant_method": "modelopt"} | content}) for param in params]
        for content in contents
    ]
    assert found == [[True, True, False], [False] * 3, [True, True, False], [False] * 3, [False] * 3]
    assert not left_empty(params[0], {})


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.float8_e4m3fn], ids=str
)
def test_poison_is_seen_element_by_element(dtype):
    tensor = torch.zeros(3, 4, dtype=dtype)
    assert not poisoned(tensor).any()
    poison([tensor])
    assert poisoned(tensor).all()
    assert not dtype.is_floating_point or tensor.float().isnan().all()
    tensor[1, 2] = 1
    assert poisoned(tensor).sum() == 11


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_a_dead_router_is_seen_in_any_float(dtype):
    """FP8 has neither `isfinite` nor an order."""
    for values, seen in (([1.0, 2.0], []), ([1.0, 1.0], [text_with("1.0")]), ([0.0, 0.0], [text_with("zero")])):
        router, whole = torch.tensor(values).to(dtype), SimpleNamespace(of=lambda held: held)
        loaded = SimpleNamespace(tensors={"p": router}, routers=lambda: ["r"], locate=lambda _: ("p", whole))  # noqa: B023
        assert [one.what for one in Loaded.dead_routers(loaded)] == seen


def test_difference_compares_bits():
    nan = torch.tensor([float("nan"), 0.0])
    assert difference(nan, nan.clone()) is None
    assert difference(torch.tensor([0.0]), torch.tensor([-0.0])) == text_with("1 1 [0] 0.0 -0.0")
    assert difference(torch.ones(2, 3), torch.ones(3, 2)) == text_with("shape [2 3] [3 2]")


def test_without_sglang_the_report_is_inconclusive(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(GLM))
    monkeypatch.setattr(Interpreter, "release", lambda *_: None)
    outcome = run_checks(Subject(tmp_path, options=AGAINST), [one for one in all_checks() if one.stage == "sglang"])
    assert outcome.findings == []
    assert outcome.reasons == [text_with("CK501 CK502 CK503 CK504 CK505: SGLang")]
    assert {result.status for result in outcome.checks} == {"skipped"}


def test_an_unknown_family_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GLM | {"model_type": "llama"}))
    with pytest.raises(CkptkitError, match="llama"):
        run_engine_load(Subject(tmp_path, options=AGAINST), SGLANG)


@pytest.mark.parametrize(
    "architectures", [["EvilForCausalLM"], ["Glm4MoeForCausalLM", "EvilForCausalLM"], ["Qwen2ForCausalLM"], None]
)
def test_config_that_names_another_class_never_reaches_sglang(fresh, monkeypatch, edit_json, architectures):
    """SGLang runs the files of `auto_map` to find a class that it does not have, whatever `trust_remote_code` says."""
    release = fresh("glm4_moe")
    edit_json(release / "config.json", architectures=architectures, auto_map={"AutoModel": "evil.Evil"})
    (release / "evil.py").write_text("raise SystemExit('run')\n")
    monkeypatch.setattr(Interpreter, "release", lambda *_: "0")
    monkeypatch.setattr(runner, "run_ranks", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises((CannotCheck, NotApplicable, CkptkitError)):
        run_engine_load(Subject(release, options=AGAINST), SGLANG)


def test_a_vision_tower_that_is_not_at_hand_makes_no_finding(releases, fresh_megatron, monkeypatch):
    """Megatron does not hold it. `convert` puts it beside the checkpoint; a trainer's save has nothing there."""
    release, megatron = releases("qwen2_5_vl"), fresh_megatron("qwen2_5_vl")
    monkeypatch.setattr(Interpreter, "release", lambda *_: "0")

    def run_ranks(root, *_, **__):
        (root / "log-0").touch()
        return {0: "it was started"}

    monkeypatch.setattr(runner, "run_ranks", run_ranks)
    assert "it was started" in str(run_engine_load(Subject(megatron, options=AGAINST), SGLANG).failure)
    shutil.rmtree(megatron / "carried")
    with pytest.raises(CannotCheck, match=r"visual\.\*.*--hf"):
        run_engine_load(Subject(megatron, options=AGAINST), SGLANG)
    run = run_engine_load(Subject(megatron, hf_path=release, options=AGAINST), SGLANG)
    assert "it was started" in str(run.failure)


@pytest.mark.parametrize("packed", [False, True], ids=["BF16", "INT4"])
def test_a_dense_layer_that_sglangs_class_does_not_build_is_its_limit(packed, fresh, edit_json):
    """Of three layers one is sparse, and 2 is in `mlp_only_layers`; 5 has experts. Nobody is told to pack a layer."""
    path = fresh("qwen3_moe-dense-between")
    if packed:
        edit_json(path / "config.json", quantization_config=int4_config(["lm_head"], 32))
    names = ("2.mlp.up_proj", "3.mlp.gate_proj", "5.mlp.x", "5.self_attn.q_proj")
    by_list, by_step, sparse, attention = every = [f"model.layers.{name}.weight" for name in names]
    seen = tuple(Observation(name, name, "dropped", is_dropped=True) for name in every)
    subject = Subject(path, options=AGAINST)
    report = LoadReport("0", "SomeMoe", "cpu", "bfloat16", equal={"a": 1}, dropped=seen)
    subject._results[run_engine_load, SGLANG] = answered(report)
    hints = {finding.tensor: finding.hint for finding in none_dropped["sglang"](subject, CheckResult("", ""))}
    assert hints[by_list] == text_with("mlp_only_layers config.json 2")
    assert hints[by_step] == text_with("decoder_sparse_step config.json 3")
    assert hints[attention].startswith("pack ") is packed
    assert not [name for name in (by_list, by_step, sparse) if "pack" in hints[name]]

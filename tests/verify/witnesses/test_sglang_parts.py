"""The parts of the SGLang witness that need no SGLang: names, the poison, the subprocess."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import models
from support.messages import text_with
from support.sglang_runs import answered, int4_config

from ckptkit.app.api import convert
from ckptkit.core.errors import CkptkitError
from ckptkit.verify.checks.witnesses.loading import none_dropped
from ckptkit.verify.core.check import Tally, all_checks
from ckptkit.verify.core.run import run_checks
from ckptkit.verify.core.skip import CannotCheck, NotApplicable
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.options import VerifyOptions
from ckptkit.verify.witnesses import runner
from ckptkit.verify.witnesses.loading.bits import difference, poison, poisoned
from ckptkit.verify.witnesses.loading.compare import Loaded
from ckptkit.verify.witnesses.loading.job import DROPPED, LoadReport, Observation
from ckptkit.verify.witnesses.loading.run import run_engine_load
from ckptkit.verify.witnesses.process.interpreter import Interpreter
from ckptkit.verify.witnesses.runner import Answer, last_words
from ckptkit.verify.witnesses.sglang.adapter import left_empty
from ckptkit.verify.witnesses.sglang.facts import SGLANG
from ckptkit.verify.witnesses.vllm.adapter import left_empty as vllm_left_empty

GLM = models.configs()["glm4_moe"].to_dict()
L = "model.layers.4."


@pytest.mark.parametrize("left_empty", [left_empty, vllm_left_empty], ids=["SGLang", "vLLM"])
def test_scales_of_inputs_are_needed_unless_nvfp4_is_of_weights_alone(
    left_empty: Callable[[str, dict[str, Any]], bool],
) -> None:
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
    "dtype",
    [
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.float8_e4m3fn,
    ],
)
def test_poison_is_seen_element_by_element(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 4, dtype=dtype)
    assert not poisoned(tensor).any()
    poison([tensor])
    assert poisoned(tensor).all()
    assert not dtype.is_floating_point or tensor.float().isnan().all()
    tensor[1, 2] = 1
    assert poisoned(tensor).sum() == 11


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
@pytest.mark.parametrize(("values", "why"), [([1.0, 2.0], None), ([1.0, 1.0], "1.0"), ([0.0, 0.0], "zero")])
def test_a_dead_router_is_seen_in_any_float(dtype: torch.dtype, values: list[float], why: str | None) -> None:
    """FP8 has neither `isfinite` nor an order."""
    router, whole = torch.tensor(values).to(dtype), SimpleNamespace(of=lambda held: held)
    loaded = SimpleNamespace(tensors={"p": router}, routers=lambda: ["r"], place=lambda _: ("p", whole))
    assert [one.what for one in Loaded.dead_routers(loaded)] == ([text_with(why)] if why else [])  # type: ignore[arg-type]


def test_difference_compares_bits() -> None:
    nan = torch.tensor([float("nan"), 0.0])
    assert difference(nan, nan.clone()) is None
    assert (
        difference(torch.tensor([0.0]), torch.tensor([-0.0]))
        == "1 of 1 elements differ, first at [0]: 0.0 instead of -0.0"
    )
    assert difference(torch.ones(2, 3), torch.ones(3, 2)) == "shape [2, 3] instead of [3, 2]"


def test_last_words_of_an_exception(tmp_path: Path) -> None:
    frames = '  File "a.py", line 1\n    f()\n  File "b.py", line 7\n    g()\n'
    (tmp_path / "log").write_text(f"noise\nTraceback (most recent call last):\n{frames}ValueError: no\nmore\n")
    assert last_words(tmp_path / "log") == 'ValueError: no | more | at File "b.py", line 7'


def test_last_words_without_an_exception(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("\n".join(map(str, range(20))))
    assert last_words(tmp_path / "log") == "it last printed: " + " | ".join(map(str, range(12, 20)))
    (tmp_path / "log").write_text("")
    assert last_words(tmp_path / "log") == "it printed nothing"


def test_without_sglang_the_report_is_inconclusive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GLM))
    monkeypatch.setattr(Interpreter, "release", lambda *_: None)
    outcome = run_checks(
        Subject(tmp_path, options=VerifyOptions(against=frozenset({"sglang"}))),
        [one for one in all_checks() if one.stage == "sglang"],
    )
    results, findings = outcome.checks, outcome.findings
    assert findings == []
    assert outcome.reasons == [text_with("CK501 CK502 CK503 CK504 CK505: SGLang")]
    assert {result.status for result in results} == {"skipped"}
    assert all("pip install sglang" in str(result.reason) for result in results)


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GLM | {"model_type": "llama"}))
    with pytest.raises(CkptkitError, match="llama"):
        run_engine_load(Subject(tmp_path, options=VerifyOptions(against=frozenset({"sglang"}))), SGLANG)


@pytest.mark.parametrize(
    "architectures",
    [
        ["EvilForCausalLM"],
        ["TransformersForCausalLM"],
        ["Glm4MoeForCausalLM", "EvilForCausalLM"],
        ["Qwen2ForCausalLM"],
        "Glm4MoeForCausalLM",
        [],
        None,
    ],
)
def test_config_that_names_another_class_never_reaches_sglang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architectures: object
) -> None:
    """SGLang runs the files of `auto_map` to find a class that it does not have, whatever `trust_remote_code` says."""
    release = tmp_path / "release"
    models.save("glm4_moe", release)
    config = json.loads((release / "config.json").read_text())
    (release / "config.json").write_text(
        json.dumps(config | {"architectures": architectures, "auto_map": {"AutoModel": "evil.Evil"}})
    )
    (release / "evil.py").write_text("raise SystemExit('run')\n")
    monkeypatch.setattr(Interpreter, "release", lambda *_: "0")
    monkeypatch.setattr(runner, "run_ranks", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(
        (CannotCheck, NotApplicable, CkptkitError),
        match=r"(not \['Glm4MoeForCausalLM'\]: SGLang would run another class|is another model|is none of ckptkit)",
    ):
        run_engine_load(Subject(release, options=VerifyOptions(against=frozenset({"sglang"}))), SGLANG)


def test_a_vision_tower_that_is_not_at_hand_makes_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron does not hold it. `convert` puts it beside the checkpoint; a trainer's save has nothing there."""
    release, megatron = tmp_path / "release", tmp_path / "megatron"
    models.save("qwen2_5_vl", release)
    convert(release, megatron)
    monkeypatch.setattr(Interpreter, "release", lambda *_: "0")

    def run_ranks(root: Path, *_: object, **__: object) -> dict[int, str]:
        (root / "log-0").touch()
        return {0: "it was started"}

    monkeypatch.setattr(runner, "run_ranks", run_ranks)
    against = frozenset({"sglang"})
    assert "it was started" in str(
        run_engine_load(Subject(megatron, options=VerifyOptions(against=against)), SGLANG).failure
    )
    shutil.rmtree(megatron / "carried")
    with pytest.raises(CannotCheck, match=r"visual\.\*.*--hf"):
        run_engine_load(Subject(megatron, options=VerifyOptions(against=against)), SGLANG)
    run = run_engine_load(Subject(megatron, hf_path=release, options=VerifyOptions(against=against)), SGLANG)
    assert "it was started" in str(run.failure)


def dropped(*names: str) -> Answer[LoadReport]:
    """What the witness reports where SGLang has no place for these tensors."""
    seen = tuple(Observation(name, name, DROPPED) for name in names)
    return answered(LoadReport("0", "SomeMoe", "cpu", "bfloat16", equal={"a": 1}, dropped=seen))


@pytest.mark.parametrize("packed", [False, True], ids=["BF16", "INT4"])
def test_a_dense_layer_that_sglangs_class_does_not_build_is_its_limit(packed: bool, tmp_path: Path) -> None:
    """Of three layers one is sparse, and 2 is in `mlp_only_layers`; 5 has experts. Nobody is told to pack a layer."""
    models.save("qwen3_moe-dense-between", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["mlp_only_layers"], config["decoder_sparse_step"]) == ([2, 7], 3)
    if packed:
        (tmp_path / "config.json").write_text(
            json.dumps(config | {"quantization_config": int4_config(["lm_head"], 32)})
        )
    subject = Subject(tmp_path, options=VerifyOptions(against=frozenset({"sglang"})))
    by_list, by_step, sparse, attention = (
        f"model.layers.{name}.weight" for name in ("2.mlp.up_proj", "3.mlp.gate_proj", "5.mlp.x", "5.self_attn.q_proj")
    )
    subject._results[run_engine_load, SGLANG] = dropped(by_list, by_step, sparse, attention)
    hints = {finding.tensor: finding.hint for finding in none_dropped["sglang"](subject, Tally())}
    assert hints[by_list] == text_with("mlp_only_layers config.json 2")
    assert hints[by_step] == text_with("decoder_sparse_step config.json 3")
    assert hints[sparse] == text_with("config.json")
    assert ("pack it" in hints[attention]) is packed
    assert not [name for name in (by_list, by_step, sparse) if "pack" in hints[name]]

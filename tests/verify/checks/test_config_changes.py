"""CK702: whatever describes the model in config.json is compared with the source's; how it is stored may differ."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import HF_CASES, case
from mutations.edits import edit_config
from support.installed import release
from support.messages import text_with
from support.nightly import daily

from ckptkit.verify.checks.config.config import UNKNOWN, class_default
from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.reports.text import headline
from ckptkit.verify.run import verify

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("changes", "expected", "actual", "severity"),
    [
        ({"attention_dropout": 0.5}, "attention_dropout = 0.0", "attention_dropout = 0.5", "error"),
        ({"eos_token_id": [3, 5]}, "eos_token_id = 3", "eos_token_id = [3, 5]", "error"),
        ({"made_up": 7}, f"made_up = {UNKNOWN}", "made_up = 7", "warning"),
        # The source has it in the other spelling.
        ({"rope_parameters": ..., "rope_theta": 5e5}, "rope_theta = 10000", "rope_theta = 500000.0", "error"),
    ],
)
def test_a_key_that_changed_is_one_finding_in_its_own_spelling(changes, expected, actual, severity, releases, fresh):
    found = verify(edit_config(fresh("qwen2-tied"), **changes), source=releases("qwen2-tied")).findings
    (finding,) = (one for one in found if one.code == "CK702")
    assert (finding.severity, finding.expected, finding.actual) == (severity, expected, actual)


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("hidden_act", ..., []),  # the value of the class
        ("made_up", 7, [("warning", f"text_config.made_up = {UNKNOWN}", "text_config.made_up = 7")]),
        ("head_dim", 64, [("error", "text_config.head_dim = 32", "text_config.head_dim = 64")]),
    ],
)
def test_a_key_of_text_config_is_compared_by_itself(key, value, found, releases, fresh):
    path = fresh("qwen3_5")
    text = json.loads((path / "config.json").read_text())["text_config"] | {key: value}
    edit_config(path, text_config={name: one for name, one in text.items() if one is not ...})
    report = verify(path, source=releases("qwen3_5"))
    assert [(one.severity, one.expected, one.actual) for one in report.findings if one.code == "CK702"] == found


def test_values_that_the_class_has_without_a_key():
    config = {"model_type": "gemma4", "text_config": {"model_type": "gemma4_text"}}
    assert class_default(config, ("text_config", "final_logit_softcapping"), 30.0) is None
    assert class_default(config, ("text_config", "head_dim"), 32) == 256
    assert class_default(config, ("text_config", "num_global_key_value_heads"), 2) is UNKNOWN  # made of others
    assert class_default({"model_type": "none"}, ("head_dim",), 32) is UNKNOWN


def test_the_source_is_another_model_is_one_finding_and_not_one_a_key(releases):
    report = verify(releases("qwen2-tied"), source=releases("glm4_moe"))
    first, *others = [one for one in report.findings if one.cause is None and one.severity == "error"]
    assert (first.code, others) == ("CK702", [])
    assert headline(report) == text_with("config.json qwen2 glm4_moe 12 layers hidden size")
    assert {one.code for one in report.findings if one.cause == "CK702-1"} == {"CK202"}


@pytest.mark.parametrize("spelling", ["v4", "v5"])
def test_rotary_scaling_that_was_removed(spelling, tmp_path, fresh):
    path = fresh("qwen2-tied")
    theta = json.loads((path / "config.json").read_text())["rope_parameters"]["rope_theta"]
    source = Path(str(path) + "-source")
    path.rename(source)
    if spelling == "v5":
        edit_config(source, rope_parameters={**YARN, "rope_theta": theta})
    else:
        edit_config(source, rope_parameters=..., rope_theta=theta, rope_scaling={"type": "yarn", **YARN})
    found = verify(fresh("qwen2-tied"), source=source).findings
    assert {(one.code, one.severity) for one in found} == {("CK702", "error")}
    keys = [one.expected.removeprefix("rotary ") for one in found]
    assert keys == ["factor = 4.0", "original_max_position_embeddings = 64", "rope_type = yarn"]


def test_the_other_spelling_and_storage_are_no_change(releases, fresh):
    path = fresh("glm4_moe")
    rope = json.loads((path / "config.json").read_text())["rope_parameters"]
    old = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor")} | {"torch_dtype": "bfloat16"}
    storage = {"transformers_version": "4.54.0", "use_cache": False, "_name_or_path": "/somewhere"}
    edit_config(path, rope_parameters=..., dtype=..., architectures=["Glm4MoeForCausalLM", "Other"], **old, **storage)
    assert verify(path, source=releases("glm4_moe")).findings == []


# CK731: keys of config.json that SGLang reads and transformers 5 does not write.


DEEPSEEK = '"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1'
# What config.json lacks once transformers 5 has saved it, by hand from SGLang's classes and the releases.
LACKING = {
    "deepseek_v3": DEEPSEEK,
    "moonlight": DEEPSEEK,
    "deepseek_v32": DEEPSEEK,
    "exaone_moe": f'"is_moe_layer": {json.dumps([False] * 2 + [True] * 10)}',
    "glm4_moe_lite": '"first_k_dense_replace": 1',
    **({} if release("sglang") >= (0, 5, 23) else {"gpt_oss": '"swiglu_limit": 7.0'}),
    "hy_v3": '"first_k_dense_replace": 2, "qk_norm": true, "route_norm": true',
    "minimax_m2": '"scoring_func": "sigmoid", "use_qk_norm": true, "use_routing_bias": true, "rotary_dim": 16',
    "nemotron_h": '"mamba_n_groups": 4',
    "qwen3_next": '"full_attention_interval": 4',
    "qwen3_5": '"text_config.full_attention_interval": 4',
    "qwen3_5_moe": '"text_config.full_attention_interval": 4',
}


@pytest.mark.parametrize("name", daily(LACKING, ("deepseek_v3", "exaone_moe", "nemotron_h", "qwen3_5")))
def test_what_transformers_leaves_out_is_named_with_its_value(name, tmp_path, alone):
    """The config as `save_pretrained` writes it, without what the test models add to be as released."""
    case.save(name, replace(HF_CASES[name], edit=lambda config: config), tmp_path / "model", torch.bfloat16)
    _, (finding,) = alone("CK731", tmp_path / "model")
    assert (finding.expected, finding.severity) == (f"{LACKING[name]}, which SGLang's class reads", "error")
    assert finding.file == str(tmp_path / "model" / "config.json")
    assert "transformers 5" in finding.hint


# Further test models of families with such keys.
ALSO = {"kimi_k2", "kimi_k25", "glm_moe_dsa", "glm_moe_dsa-shared", "qwen3_5_text-tied", "qwen3_5_moe_text"}
ALSO |= {"nemotron_h-latent", "exaone_moe-groups-tied"}
ALSO |= {"gpt_oss-v4"} if "gpt_oss" in LACKING else set()


def test_configs_as_released_lack_nothing(tmp_path, alone):
    for name, model in HF_CASES.items():
        config = model.edit(json.loads(model.config().to_json_string(use_diff=False)))
        (tmp_path / "config.json").write_text(json.dumps(config))
        result, found = alone("CK731", tmp_path)
        assert found == [], name
        assert (result is not None and result.status == "passed") == (name in LACKING or name in ALSO), name


def test_a_lacking_key_is_said_where_sglang_is_the_engine(tmp_path, codes, only, monkeypatch):
    monkeypatch.setattr("ckptkit.quant.engines.sglang.package_release", lambda package: (0, 5, 16))
    without = replace(HF_CASES["gpt_oss"], edit=lambda config: {**config, "swiglu_limit": None})
    case.save("gpt_oss", without, tmp_path / "model", torch.bfloat16)
    assert only(verify(tmp_path / "model")).code == "CK731"
    assert "CK731" in codes(preflight(hf_checkpoint=tmp_path / "model"))
    vllm = ["--vllm-gpu-memory-utilization", "0.7"]
    assert "CK731" not in codes(preflight(hf_checkpoint=tmp_path / "model", arguments=vllm))
    monkeypatch.setattr("ckptkit.quant.engines.sglang.package_release", lambda package: (0, 5, 23))
    assert "CK731" not in codes(preflight(hf_checkpoint=tmp_path / "model"))

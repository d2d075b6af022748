"""CK731: keys of config.json that SGLang reads and transformers 5 does not write.

That SGLang stops without each of them is shown by tests/verify/witnesses/test_sglang_configs.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import HF_CASES, case
from support.check_examples import hold_example
from support.fixture_types import CodesOf, OnlyFinding, RunAlone
from support.installed import release

from verify.launch.preflight import preflight
from verify.run import verify

DEEPSEEK = '"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1'
# What config.json lacks once transformers 5 has saved it, by hand from SGLang's classes and the releases.
LACKING = {
    "deepseek_v3": DEEPSEEK,
    "moonlight": DEEPSEEK,
    "deepseek_v32": DEEPSEEK,
    "exaone_moe": f'"is_moe_layer": {json.dumps([False] * 2 + [True] * 10)}',
    "granite-4-dense-tied": '"rope_theta": 10000000.0',
    "glm4_moe_lite": '"first_k_dense_replace": 1',
    **({} if release("sglang") >= (0, 5, 23) else {"gpt_oss": '"swiglu_limit": 7.0'}),
    "hy_v3": '"first_k_dense_replace": 2, "qk_norm": true, "route_norm": true',
    "minimax_m2": '"scoring_func": "sigmoid", "use_qk_norm": true, "use_routing_bias": true, "rotary_dim": 16',
    "nemotron_h": '"mamba_n_groups": 4',
    "qwen3_next": '"full_attention_interval": 4',
    "qwen3_5": '"text_config.full_attention_interval": 4',
    "qwen3_5_moe": '"text_config.full_attention_interval": 4',
}


@pytest.mark.parametrize("name", LACKING)
def test_what_transformers_leaves_out_is_named_with_its_value(name: str, tmp_path: Path, alone: RunAlone) -> None:
    """The config as `save_pretrained` writes it, without what the test models add to be as released."""
    case.save(name, replace(HF_CASES[name], edit=lambda config: config), tmp_path / "model", torch.bfloat16)
    _, (finding,) = alone("CK731", tmp_path / "model")
    assert (finding.expected, finding.severity) == (f"{LACKING[name]}, which SGLang's class reads", "error")
    assert finding.file == str(tmp_path / "model" / "config.json")
    assert "transformers 5 does not write" in finding.hint


# Further test models of families with such keys.
ALSO = {"kimi_k2", "kimi_k25", "glm_moe_dsa", "glm_moe_dsa-shared", "qwen3_5_text-tied", "qwen3_5_moe_text"}
ALSO |= {"nemotron_h-latent", "exaone_moe-groups-tied", "gemma4_unified", "deepseek_v4", "minimax_m3_vl"}
ALSO |= {"gpt_oss-v4"} if "gpt_oss" in LACKING else set()


@pytest.mark.parametrize("name", HF_CASES)
def test_a_config_as_released_lacks_nothing(name: str, tmp_path: Path, alone: RunAlone) -> None:
    config = HF_CASES[name].edit(json.loads(HF_CASES[name].config().to_json_string(use_diff=False)))
    (tmp_path / "config.json").write_text(json.dumps(config))
    result, found = alone("CK731", tmp_path)
    assert found == []
    assert (result is not None and result.status == "passed") == (name in LACKING or name in ALSO)


def test_a_lacking_key_is_said_where_sglang_is_the_engine(
    tmp_path: Path, codes: CodesOf, only: OnlyFinding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("converters.families.gpt_oss.package_release", lambda package: (0, 5, 16))
    without = replace(HF_CASES["gpt_oss"], edit=lambda config: {**config, "swiglu_limit": None})
    case.save("gpt_oss", without, tmp_path / "model", torch.bfloat16)
    hold_example("CK731", only(verify(tmp_path / "model")))
    assert "CK731" in codes(preflight(hf_checkpoint=tmp_path / "model"))
    vllm = ["--vllm-gpu-memory-utilization", "0.7"]
    assert "CK731" not in codes(preflight(hf_checkpoint=tmp_path / "model", arguments=vllm))
    monkeypatch.setattr("converters.families.gpt_oss.package_release", lambda package: (0, 5, 23))
    assert "CK731" not in codes(preflight(hf_checkpoint=tmp_path / "model"))

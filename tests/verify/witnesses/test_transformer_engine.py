"""Transformer Engine's layer spec, which trainers use, where it is installed."""

from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec

import pytest
from families import OF_A_KIND
from mutations.torch_dist import key_lost
from support import models
from support.nightly import daily
from support.processes import environment

from ckptkit.app.api import convert
from ckptkit.converters.megatron.hybrid_model import gpt_only, needs_release
from ckptkit.converters.planner import dims_of
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.verify.checks.witnesses.megatron import all_layers, right_slices, strict_load
from ckptkit.verify.core.check import CheckResult
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.options import VerifyOptions
from ckptkit.verify.witnesses.megatron import run as megatron_run

pytestmark = pytest.mark.skipif(
    find_spec("transformer_engine") is None or find_spec("megatron") is None,
    reason="Transformer Engine or megatron-core is not installed",
)


RELEASE = tuple(map(int, version("megatron-core").split(".")[:2])) if find_spec("megatron") else (0, 0)


@pytest.fixture
def engine(monkeypatch):
    job = megatron_run._job

    def with_engine(*args):
        return replace(job(*args), transformer_engine=True)

    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    monkeypatch.setattr(megatron_run, "_job", with_engine)
    monkeypatch.setattr(megatron_run, "_WITNESS", "support.engine_runs")


def assert_sound(subject):
    result = CheckResult("", "")
    assert [one for check in (strict_load, right_slices, all_layers) for one in check(subject, result)] == []
    return result.facts["megatron"][0]


# Every family and shape of layer, but Moonlight, which this megatron-core (0.19) cannot build.
WHOLE = (
    "qwen2-untied llama-tied llama-biases mistral mixtral qwen2_moe qwen2_moe-dense-between qwen3-tied minimax_m2 mimo "
    "glm4_moe-mtp glm4_moe_lite deepseek_v3 deepseek_v32 glm_moe_dsa-shared kimi_k2 kimi_k25 glm4 gemma3_text gpt_oss "
    "qwen3_next qwen3_5 qwen3_5_moe qwen3_vl_moe"
)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *(pytest.param(name, {}, marks=[] if name in OF_A_KIND else pytest.mark.nightly) for name in WHOLE.split()),
        ("qwen2-tied", {"pp": 2}),
        ("glm4_moe", {"tp": 2, "pp": 2}),
        ("qwen3_moe", {"tp": 2, "ep": 2}),
        ("deepseek_v3", {"tp": 2}),
        ("qwen3_next", {"tp": 2}),
    ],
)
def test_every_rank_holds_its_slice(releases, converted, name, sizes):
    options = VerifyOptions(**sizes, against=frozenset({"megatron"}))
    fact = assert_sound(Subject(converted(name), releases(name), options=options))
    assert fact.endswith("Transformer Engine spec")


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("name", daily(WHOLE.split(), ["qwen2-untied", "glm4_moe-mtp", "deepseek_v3", "qwen3_next"]))
def test_megatrons_own_stack_of_hybridmodel_holds_it(releases, name, tmp_path):
    dims = dims_of(HfCheckpoint(releases(name)).config)
    if reasons := list(gpt_only(dims)):
        pytest.skip(f"HybridModel cannot hold it: {reasons[0]}")
    if lacking := [what for what, since in needs_release(dims, 1) if since > RELEASE]:
        pytest.skip(f"HybridModel of {RELEASE} lacks {lacking[0]}")
    convert(releases(name), tmp_path / "hybrid", dialect="hybrid")
    options = VerifyOptions(against=frozenset({"megatron"}))
    assert ", HybridModel, " in assert_sound(Subject(tmp_path / "hybrid", releases(name), options=options))


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("glm4_moe", "decoder.layers.5.pre_mlp_layernorm.weight"),  # by the local spec part of linear_fc1
        ("glm4_moe", "decoder.layers.5.mlp.experts.experts.linear_fc1._extra_state/shard_11_12"),
        ("deepseek_v32", "decoder.layers.5.self_attention.q_layernorm._extra_state/shard_0_1"),
    ],
)
def test_keys_that_only_this_spec_asks_for(releases, converted, copy_of, name, key):
    path = copy_of(converted(name))

    models.edit_metadata(path / "release", lambda metadata: key_lost(metadata, key))
    (finding,) = strict_load(Subject(path, releases(name)), CheckResult("", ""))
    assert (finding.code, key.partition("/")[0] in f"{finding.tensor} {finding.actual}") == ("CK401", True)

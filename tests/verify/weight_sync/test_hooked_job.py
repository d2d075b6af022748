"""The hooks inside a small job of real Megatron, on two ranks: sound weights pass, each planted fault is named."""

import re
from importlib.util import find_spec

import pytest
from support.hooked_job import LAYOUTS, run
from support.messages import text_with

pytestmark = [
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed"),
    pytest.mark.timeout(300),
]
NAME = "glm4_moe"
# By hand, of 12 layers with 12 experts, the first two dense: two norms and those of q and k a layer, router and bias
# of a MoE layer, and the last norm. All else is cut: experts, shared experts, attention, embedding and output layer.
WHOLE = 12 * 4 + 10 * 2 + 1
CUT = {"tp": 10 * (12 * 2 + 2) + 2 * 2 + 12 * 3 + 2, "ep": 10 * (6 * 2 + 2) + 2 * 2 + 12 * 3 + 2}


of_layout = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture(scope="module")
def found(releases, converted, tmp_path_factory):
    return run(releases(NAME), converted(NAME), tmp_path_factory.mktemp("job") / "out")


@of_layout
def test_sound_weights_pass_and_rank_0_says_what_was_compared(layout, found):
    cases = found[layout]
    for case in ("after_init", "ref", "actor", "actor again", "step", "after a step", "of HF", "all"):
        assert [rank["raised"] for rank in cases[case]] == ["", ""], case
        assert cases[case][1]["said"] == ""
    rest = CUT[layout] - 16
    for case, said in (("ref", "ref"), ("actor", "actor")):
        line = cases[case][0]["said"]
        assert line.startswith(f"ckptkit: before the first {said} log-probabilities: equal to ")
        assert line == text_with(f"{WHOLE} ckptkit.json 16")
        assert line == text_with(f"{rest} 16 CKPTKIT_COMPARED_PARAMETERS")
    assert f"{WHOLE + 16}" in cases["of HF"][0]["said"]
    assert cases["all"][0]["said"] == text_with(f"{WHOLE} ckptkit.json {CUT[layout]}")
    assert cases["all"][0]["said"].endswith("not compared: nothing\n")
    for case in ("actor again", "step", "after a step"):  # before the first use alone
        assert [rank["said"] for rank in cases[case]] == ["", ""]


@of_layout
@pytest.mark.parametrize(("case", "said"), [("nothing named", "weights actor"), ("absent", "/absent does not exist")])
def test_what_cannot_be_compared_is_said_and_stops_nothing(case, said, layout, found):
    first, second = found[layout][case]
    assert first == {"said": text_with(f"ckptkit: not compared: {said}"), "raised": ""}
    assert second == {"said": "", "raised": ""}


@of_layout
def test_exchanged_experts_are_named_on_their_rank(layout, found):
    first, second = found[layout]["experts exchanged on rank 1"]
    assert first["raised"] == ""
    assert "1: 2 parameter(s)" in second["raised"]
    # Expert parallel rank 1 of 2 holds experts 6 to 11; without expert parallelism a rank holds a part of each.
    numbers = re.findall(
        r"values of decoder\.layers\.4\.mlp\.experts\.experts\.(\d+)\.linear_fc1\.weight", second["raised"]
    )
    assert numbers == {"tp": ["1", "2"], "ep": ["7", "8"]}[layout]


@of_layout
def test_every_other_fault_is_named(layout, found):
    cases, mlp = found[layout], "decoder.layers.4.mlp"
    for case, name in (
        ("another norm", "decoder.layers.4.pre_mlp_layernorm.weight"),
        ("router of another layer", f"{mlp}.router.weight"),
        ("router bias", "decoder.layers.6.mlp.router.expert_bias"),
    ):
        for rank, one in enumerate(cases[case]):
            assert f"{rank}: 1" in one["raised"]
            assert one["raised"] == text_with(f"{name} {name}")
    for one in cases["router of another layer"]:
        assert one["raised"] == text_with(f"{mlp}.router.weight decoder.layers.5.mlp.router.weight")
    for case, when in (
        ("router zero", "before actor log-probabilities"),
        ("router zero at a step", "before step 1 of rollout 3"),
    ):
        for one in cases[case]:
            assert one["raised"] == text_with(f"{when} module.module.{mlp}.router.weight")
    first, second = cases["rows on rank 1"]
    assert first["raised"] == ""
    assert "rank 1: 1 parameter(s)" in second["raised"]
    assert "decoder.layers.7.self_attention.linear_qkv.weight" in second["raised"]

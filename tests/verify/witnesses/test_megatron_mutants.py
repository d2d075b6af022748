"""What one rank saved wrongly, as real Megatron's ranks hold it: findings name ranks, parameters and slices."""

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from mutations import ranks
from mutations.edits import edit_stored
from support.messages import text_with

from ckptkit.verify.checks.witnesses.megatron import all_layers, right_slices, strict_load
from ckptkit.verify.core.check import CheckResult
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.options import VerifyOptions

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")


def found(subject):
    """The findings of CK402; the other checks of Megatron have none."""
    assert [finding for check in (strict_load, all_layers) for finding in check(subject, CheckResult("", ""))] == []
    return list(right_slices(subject, CheckResult("", "")))


def test_pipeline_stages_that_were_swapped(converted, releases, copy_of):
    broken = copy_of(converted("qwen2-untied"))
    ranks.layers_of(lambda layer: (layer + 6) % 12)(broken, "")
    (finding,) = found(Subject(broken, releases("qwen2-untied"), options=VerifyOptions(pp=2)))
    assert finding.actual == text_with("{0..5} {6..11} 0 1")
    # 12 layers of 7 tensors: two norms, qkv with its bias, projection, fc1 and fc2.
    assert (finding.code, finding.rank, finding.count) == ("CK402", "ranks 0..1", 12 * 7)


@pytest.fixture(scope="module")
def faults(converted, releases, tmp_path_factory):
    """One load at TP2 PP2 EP2 of a copy with five faults: the findings by tensor."""
    broken = Path(shutil.copytree(converted("glm4_moe"), tmp_path_factory.mktemp("faults") / "broken"))
    # The layers after 7 of stage 1 (6 to 11), each with the values of the next.
    ranks.layers_of(lambda layer: {8: 9, 9: 10, 10: 8}.get(layer, layer))(broken, "")
    ranks.local_experts(broken, "", "decoder.layers.5.")
    edit_stored(broken, "decoder.layers.1.mlp.linear_fc1.weight", ranks.second_slice_swapped)
    ranks.both_of_another_layer(broken, ranks.ROUTED)
    ranks.rounded(broken, ranks.BIAS)
    findings = found(Subject(broken, releases("glm4_moe"), options=VerifyOptions(tp=2, pp=2, ep=2)))
    return {finding.tensor: finding for finding in findings}


def test_layers_shifted_inside_a_stage(faults):
    (shifted,) = [finding for tensor, finding in faults.items() if "{8..10}" in str(tensor)]
    assert shifted.actual == (text_with("{8..10} 8 9 9 10 10 8 1 {6..11}"))
    assert shifted.rank == "ranks 2..3"


def test_faults_of_one_rank_are_named_with_the_rank(faults):
    local = faults[
        "decoder.layers.5.mlp.experts.experts.{6..11}.linear_fc1.weight, "
        "decoder.layers.5.mlp.experts.experts.{6..11}.linear_fc2.weight"
    ]
    assert (local.rank, local.count, local.actual) == ("rank 1", 12, text_with("{6..11} {0..5}"))
    # gate is rows 0 to 287 of the whole tensor, up is 288 to 575; each rank holds half of either.
    swapped = faults["decoder.layers.1.mlp.linear_fc1.weight"]
    assert (swapped.rank, swapped.actual) == ("rank 1", text_with("slice 1 2"))
    norm = faults["decoder.layers.4.pre_mlp_layernorm.weight"]
    assert (norm.rank, norm.actual) == ("ranks 0..1", text_with("4 values 5"))
    bias = faults["decoder.layers.6.mlp.router.expert_bias"]
    assert (bias.rank, bias.actual) == ("ranks 2..3", text_with("bfloat16 12 12"))
    assert len(faults) == 5

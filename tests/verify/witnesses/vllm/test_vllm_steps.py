"""vLLM's steps after loading, with its own references in the place of CUDA kernels: what they make is compared."""

import pytest
from support.sglang_runs import reported
from support.vllm_repacked import run_cases
from support.vllm_runs import release
from support.vllm_steps import Steps, all_runs

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    if (found := release() or ())[:2] != (0, 26):
        pytest.skip(f"the stand-ins take the arguments of vLLM 0.26's kernels, and this is {found}")
    return all_runs(tmp_path_factory.mktemp("steps"), run_cases)


@pytest.mark.nightly
class TestSteps(Steps):
    """With stand-ins for kernels."""


def test_fp8_weights_that_are_rounded_to_powers_of_two_are_told(made):
    report = reported(made[1]["dense, FP8"])
    names = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert report.requantized.keys() == {f"model.layers.{layer}.{name}.weight" for layer in range(4) for name in names}
    # Half of what lies between a block's largest number in FP8, of four bits, and the next.
    assert 0 < max(report.requantized.values()) <= 1 / 16

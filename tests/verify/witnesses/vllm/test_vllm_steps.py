"""vLLM's steps after loading, with its own references in the place of CUDA kernels: what they make is compared."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.vllm_faults import CASES
from support.vllm_formats import CLEAN, MISORDERED, REFUSED
from support.vllm_repacked import run_cases
from support.vllm_runs import release
from support.vllm_steps import Runs, all_runs, is_clean, is_misordered, is_refused, names_fault

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
Made = tuple[dict[str, Path], Runs]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    if (found := release() or ())[:2] != (0, 26):
        pytest.skip(f"the stand-ins take the arguments of vLLM 0.26's kernels, and this is {found}")
    return all_runs(tmp_path_factory.mktemp("steps"), run_cases)


@pytest.mark.parametrize("label", CLEAN)
def test_sound_checkpoints_stand_for_the_same(label: str, made: Made) -> None:
    is_clean(label, *made)


@pytest.mark.parametrize("label", REFUSED)
def test_what_vllm_refuses_is_quoted(label: str, made: Made) -> None:
    is_refused(label, made[1])


@pytest.mark.parametrize("label", MISORDERED)
def test_scales_of_experts_no_wider_than_a_group_are_misordered(label: str, made: Made) -> None:
    is_misordered(label, made[1])


@pytest.mark.parametrize(("fault", "label"), CASES)
def test_a_planted_fault_is_named(fault: str, label: str, made: Made) -> None:
    names_fault(fault, label, made[1])


def test_fp8_weights_that_are_rounded_to_powers_of_two_are_told(made: Made) -> None:
    report = made[1]["dense, FP8"].report
    assert report is not None
    names = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert report.requantized.keys() == {f"model.layers.{layer}.{name}.weight" for layer in range(4) for name in names}
    # Half of what lies between a block's largest number in FP8, of four bits, and the next.
    assert 0 < max(report.requantized.values()) <= 1 / 16

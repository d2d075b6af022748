"""INT4 of every model type into real SGLang on a GPU, through the repacking for its kernels."""

import pytest
from support.sglang_formats import IN_INT4, write_all
from support.sglang_runs import Case, clean, refusal, run_cases

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1500)]

# Their queries, keys and values or inputs of Mamba have rows together which Marlin's tiles of 64 do not divide.
REFUSED = ("groups llama", "groups gemma3_text", "groups gemma3_text-v4", "groups phi3-tied-window")
SOUND = [label for label in IN_INT4 if label not in REFUSED]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    cases = {label: Case(path) for label, path in write_all(tmp_path_factory.mktemp("formats"), IN_INT4)}
    return run_cases(cases, tmp_path_factory.mktemp("runs"), gpu=True)


@pytest.mark.parametrize("label", SOUND)
def test_every_part_is_in_the_kernels_layout(label, runs):
    report = clean(runs[label])
    assert (report.repacked, report.unchecked) == ((), ())


@pytest.mark.parametrize("label", REFUSED)
def test_what_the_kernel_refuses_is_quoted(label, runs):
    assert "is not divisible by tile_n_size = 64" in refusal(runs[label])

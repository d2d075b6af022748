"""Every test model of every family that SGLang builds on a GPU: all tensors where SGLang keeps them."""

import pytest
from support import models
from support.sglang_families import CLEAN
from support.sglang_runs import Case, clean, run_cases

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name in CLEAN:
        models.save(name, root / name)
    return run_cases({name: Case(root / name) for name in CLEAN}, tmp_path_factory.mktemp("runs"), gpu=True)


@pytest.mark.parametrize("name", CLEAN)
def test_every_tensor_is_where_sglang_keeps_it(name, runs):
    if name == "deepseek_v4":
        pytest.importorskip("tilelang", reason="SGLang's class compiles its hyper-connections with TileLang on a GPU")
    report = clean(runs[name])
    assert (report.repacked, report.unchecked) == ((), ())

"""Every test model of every family that SGLang builds on a GPU: all tensors where SGLang keeps them."""

from collections.abc import Mapping

import pytest
from support import models
from support.sglang_families import CLEAN
from support.sglang_runs import Case, clean, run_cases

from ckptkit.verify.witnesses.loading.job import LoadReport
from ckptkit.verify.witnesses.runner import Answer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer[LoadReport]]:
    root = tmp_path_factory.mktemp("models")
    for name in CLEAN:
        models.save(name, root / name)
    return run_cases({name: Case(root / name) for name in CLEAN}, tmp_path_factory.mktemp("runs"), gpu=True)


@pytest.mark.parametrize("name", CLEAN)
def test_every_tensor_is_where_sglang_keeps_it(name: str, runs: Mapping[str, Answer[LoadReport]]) -> None:
    if name == "deepseek_v4":
        pytest.importorskip("tilelang", reason="SGLang's class compiles its hyper-connections with TileLang on a GPU")
    report = clean(runs[name])
    assert (report.repacked, report.unchecked) == ((), ())

"""Weight updates of SGLang's own models, by SGLang's own checker, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import models
import pytest
from fixture_types import PathOf
from sync_engines import digest, served
from sync_sglang import FACTORS, LAYER, SAMPLE, checksums, scaled

from ckptkit import CkptkitError
from ckptkit.hooks import SyncResult, WeightSyncCheck

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]
NAMES = ("glm4_moe", "qwen3_moe")


@pytest.fixture(scope="module", params=[1, 2])
def answers(request: pytest.FixtureRequest, releases: PathOf, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tensor parallel size, and what its ranks answer by model and state."""
    root = tmp_path_factory.mktemp("sync") / str(request.param)
    found = checksums(root, request.param, [releases(name) for name in NAMES])
    assert (root / "digest").read_text() == digest(SAMPLE)  # as SGLang computes it on a CPU
    return request.param, found


def outcomes(path: Path, tp: int, states: list[list[dict[str, Any]]]) -> list[SyncResult | CkptkitError]:
    """What comes of recording each whole update at an engine that is in these states."""
    now = 0

    def answer(asked: str, body: Mapping[str, Any]) -> tuple[int, Mapping[str, Any]]:
        known = {
            "server_info": {"tp_size": tp, "quantization": None, "version": "0.5.16"},
            "model_info": {"weight_version": str(now)},
            "weights_checker": {"success": True, "message": "Success.", "ranks": states[now]},
        }
        return 200, known[asked]

    found: list[SyncResult | CkptkitError] = []
    with served(answer) as url:
        check = WeightSyncCheck(url, digest=digest)
        for now, state in enumerate(FACTORS):
            for name, tensor in scaled(models.tensors(path), state).items():
                check.record(name, tensor)
            try:
                result = check.after_update(now)
                assert result is not None
                found.append(result)
            except CkptkitError as error:
                found.append(error)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_updates_of_real_models_are_told_apart(name: str, answers: Any, releases: PathOf) -> None:
    tp, states = answers
    loaded, updated, exchanged, lost = outcomes(releases(name), tp, states[name])
    for good in (loaded, updated):
        assert isinstance(good, SyncResult)
        assert good.unseen == []
        # The engine has no parameter for multi-token prediction layers; everything else is compared on every rank.
        assert good.by_value == sum(len(rank["checksums"]) for rank in states[name][0])
        assert good.by_change == 0
    assert isinstance(exchanged, CkptkitError)
    assert len(exchanged.details) == tp
    assert all(f"layers.{LAYER}.mlp.experts.w13_weight: not as sent" in line for line in exchanged.details)
    assert isinstance(lost, CkptkitError)
    assert all(f"layers.{LAYER}.mlp.experts" in line for line in lost.details)
    assert "w13_weight" in lost.message
    assert "w2_weight" in lost.message

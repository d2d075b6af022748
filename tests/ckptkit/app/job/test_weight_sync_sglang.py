"""Weight updates of SGLang's own models, by SGLang's own checker, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support import models
from support.fixture_types import PathOf
from support.sync_engines import digest, served
from support.sync_sglang import FACTORS, LAYER, SAMPLE, checksums, scaled

from ckptkit import CkptkitError
from ckptkit.hooks import SyncResult, WeightSyncCheck

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]
NAME, TP = "glm4_moe", 2


def outcomes(path: Path, states: list[list[dict[str, Any]]]) -> list[SyncResult | CkptkitError]:
    """What comes of recording each whole update at an engine that is in these states."""
    now = 0

    def answer(asked: str, body: Mapping[str, Any]) -> tuple[int, Mapping[str, Any]]:
        known = {
            "server_info": {"tp_size": TP, "quantization": None, "version": "0.5.16"},
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


def test_updates_of_a_real_model_on_two_ranks_are_told_apart(releases: PathOf, tmp_path: Path) -> None:
    states = checksums(tmp_path / "sync", TP, [releases(NAME)])[NAME]
    assert (tmp_path / "sync/digest").read_text() == digest(SAMPLE)  # as SGLang computes it on a CPU
    loaded, updated, exchanged, lost = outcomes(releases(NAME), states)
    for good in (loaded, updated):
        assert isinstance(good, SyncResult)
        assert (good.unseen, good.absent, good.by_change) == ([], [], 0)
        assert good.by_value == sum(len(rank["checksums"]) for rank in states[0]) > 300
    assert isinstance(exchanged, CkptkitError)
    assert len(exchanged.details) == TP
    assert all(f"layers.{LAYER}.mlp.experts.w13_weight: not as sent" in line for line in exchanged.details)
    assert isinstance(lost, CkptkitError)
    assert all(f"layers.{LAYER}.mlp.experts" in line for line in lost.details)
    assert "w13_weight" in lost.message
    assert "w2_weight" in lost.message

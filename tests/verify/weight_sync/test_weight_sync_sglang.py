"""Weight updates of SGLang's own models, by SGLang's own checker, on the CPU."""

import pytest
from support import engine_models, models
from support.sync_engines import digest, served
from support.sync_faults import checked, faults_of, mistakes
from support.sync_sglang import SAMPLE, checksums

from ckptkit.hooks import WeightSyncCheck

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]
NAME, TP = "glm4_moe", 2


def outcomes(path, states, tp):
    now = 0

    def answer(asked, body):
        known = {
            "server_info": {"tp_size": tp, "quantization": None, "version": "0.5.16"},
            "model_info": {"weight_version": str(now)},
            "weights_checker": {"success": True, "message": "Success.", "ranks": states[now - 1]},
        }
        return 200, known[asked]

    def deliver(sent, number):
        nonlocal now
        now = number

    with served(answer) as url:
        check = WeightSyncCheck(url, digest=digest)
        return dict(checked(check, models.tensors(path), deliver, versions=True))


def test_updates_of_a_real_model_on_two_ranks_are_told_apart(releases, tmp_path):
    path = releases(NAME)
    states = checksums(tmp_path / "sync", TP, [path])[NAME]
    assert (tmp_path / "sync/digest").read_text() == digest(SAMPLE)  # as SGLang computes it on a CPU
    found = outcomes(path, states, TP)
    tensors = models.tensors(path)
    assert mistakes(found, tensors) == []
    assert len(faults_of(tensors)) == 12
    for good in ("1", "2", "2 again"):
        assert (found[good]["unseen"], found[good]["absent"], found[good]["by_change"]) == ([], [], 0)
        assert found[good]["by_value"] == sum(len(rank["checksums"]) for rank in states[0]) > 300
    exchanged = found["experts exchanged"]["details"]
    assert len(exchanged) == TP
    assert all("layers.3.mlp.experts.w13_weight: the values" in line for line in exchanged)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["dense", "moe", "mla", engine_models.TRAINED])
def test_ten_faults_in_each_kind_of_model_are_named(name, tmp_path):
    """As on a GPU (tests/gpu/test_weight_sync_gpu.py), which also has INT4."""
    path = engine_models.synced(name, tmp_path, "sglang")
    found = outcomes(path, checksums(tmp_path / "sync", 1, [path])[name], 1)
    assert mistakes(found, models.tensors(path)) == []
    assert found["2"]["by_change"] == 0

"""Weight updates of real `vllm.LLM`s on a GPU: what arrived passes, and each planted fault is named."""

import pytest
from support.engine_models import SYNCED, synced
from support.sync_faults import SLEEP, faults_of, mistakes, tensors_of
from support.sync_vllm import outcomes, ways

from ckptkit.verify.witnesses.process.interpreter import python_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {name: synced(name, root, "vllm") for name in SYNCED}


@pytest.fixture(scope="module")
def found(paths, tmp_path_factory):
    return outcomes(tmp_path_factory.mktemp("sync"), 1, list(paths.values()), program=python_of("vllm", {}), gpu=True)


@pytest.mark.parametrize("name", SYNCED)
def test_sound_updates_pass_and_ten_faults_are_named(name, found, paths):
    tensors = tensors_of(paths[name])
    assert len(faults_of(tensors)) + 1 >= 10  # and sleep
    for way in ways(paths[name]):
        prefix = f"{name}: {way}: "
        steps = {step.removeprefix(prefix): said for step, said in found.items() if step.startswith(prefix)}
        assert mistakes(steps, tensors) == [], way
        print(name, way, {key: steps["2"][key] for key in ("by_value", "by_change", "unseen", "seconds")})


@pytest.mark.parametrize("name", SYNCED)
def test_sleep_level_1_keeps_weights_and_level_2_loses_them(name, found):
    assert found[f"{name}: sleep level 1"]["raised"] == ""
    assert "lost" in found[f"{name}: {SLEEP}"]["raised"]
    assert found[f"{name}: after {SLEEP}"]["raised"] == ""


def test_layout_made_once_too_often_is_named(found):
    assert "mlp.experts.w13_weight: the values" in str(found["moe: gate and up exchanged"]["details"])

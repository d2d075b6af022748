"""Weight updates of real SGLang servers on a GPU: what arrived passes, and each planted fault is named."""

import re

import pytest
import torch
from support.engine_models import SYNCED, synced
from support.sync_faults import SLEEP, faults_of, mistakes, tensors_of
from support.sync_servers import run

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]
LAYERS = 6
ON_SEVERAL_RANKS = ("moe", "mla")


@pytest.fixture(scope="module", params=[1, 2])
def found(request, tmp_path_factory):
    """Tensor parallel size, results by step, the end of the logs, and the directory of each model."""
    if request.param > torch.cuda.device_count():
        pytest.skip(f"needs {request.param} GPUs")
    root = tmp_path_factory.mktemp("sync")
    (root / "models").mkdir()
    paths = {
        name: synced(name, root / "made", "sglang") for name in (SYNCED if request.param == 1 else ON_SEVERAL_RANKS)
    }
    for name, path in paths.items():
        (root / "models" / name).symlink_to(path)
    results, log = run(root, request.param)
    for step, result in results.items():
        if isinstance(result, dict):
            print(
                step, {key: result[key] for key in ("seconds", "update_seconds", "bytes", "by_value") if key in result}
            )
    return request.param, results, log, paths


def step(found, name):
    _, results, log, _ = found
    assert name in results, log
    return results[name]


def skipped(name, found):
    if name not in found[3]:
        pytest.skip("run with one GPU an engine")


@pytest.mark.parametrize("name", SYNCED)
def test_sound_updates_pass_and_ten_faults_are_named(name, found):
    skipped(name, found)
    tensors = tensors_of(found[3][name])
    assert len(faults_of(tensors)) + 1 >= 10  # and sleep
    prefix = f"{name}: "
    steps = {key.removeprefix(prefix): said for key, said in found[1].items() if key.startswith(prefix)}
    assert mistakes(steps, tensors) == [], found[2]


@pytest.mark.parametrize("name", SYNCED)
def test_weights_lost_while_memory_was_released_are_named(name, found):
    skipped(name, found)
    assert step(found, f"{name}: resumed")["raised"] == ""
    assert "lost" in step(found, f"{name}: {SLEEP}")["raised"]
    assert step(found, f"{name}: after {SLEEP}")["raised"] == ""


def test_a_mixture_of_experts_is_compared_by_value(found):
    """Embedding, output layer and last norm; in each layer two norms, those of q and k, qkv, o, router, and experts."""
    result = step(found, "moe: 1")
    assert result["by_value"] == (3 + LAYERS * 9) * found[0] * (2 if found[0] == 1 else 1)
    assert (result["unseen"], result["absent"]) == ([], [])


@pytest.mark.parametrize("model", ["moe", "mla"])
def test_exchanged_experts_and_a_dropped_bucket_are_named_alone(model, found):
    exchanged, dropped = (
        step(found, f"{model}: {fault}")["raised"] for fault in ("experts exchanged", "a bucket dropped")
    )
    assert "layers.3.mlp.experts.w13_weight: the values" in exchanged
    assert "layers.4" not in exchanged
    assert "last check" in dropped
    assert not re.search(r"layers\.[0-35]\.", dropped)


@pytest.mark.parametrize("model", SYNCED)
def test_old_version_is_named(model, found):
    skipped(model, found)
    result = step(found, f"{model}: old version")
    assert "has weight version 96, not 97" in result["raised"], result
    assert "sent ones" not in result["raised"]


def test_projections_that_buckets_tear_apart_are_named(found):
    """SGLang 0.5.16 fuses q_a_proj and kv_a_proj_with_mqa only where both come in one call, and drops them else."""
    result = step(found, "mla: layers cut")
    assert re.search(r"layers\.\d+\.self_attn\.fused_qkv_a_proj_with_mqa\.weight", result["raised"]), result
    assert "mlp" not in result["raised"]


def test_engine_that_missed_an_update_is_named(found):
    if found[0] > 1:
        pytest.skip("two engines run where one GPU is enough for each")
    url = found[1].get("moe: last engine")
    result = step(found, "moe: last engine missed it")
    assert f"{url} has weight version 101, not 102" in result["details"], result
    assert all(line.startswith(url) for line in result["details"])


def test_experts_repacked_for_marlin_are_compared_by_value(found):
    skipped("int4", found)
    first = step(found, "int4: 1")
    assert (first["unseen"], first["by_change"]) == ([], 0)
    assert "last check" in step(found, "int4: a delta swallowed")["raised"]

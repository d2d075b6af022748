"""Weight updates of real SGLang servers on a GPU: what arrived passes, what was spoiled on the way is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_models import ATTENTION, ROUTER, saved
from support.sync_servers import run

from ckptkit.app.api import quantize
from quant.formats.scheme import QuantScheme

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.sglang,
    pytest.mark.timeout(900),
]
LAYERS = 6


def made(root: Path) -> Path:
    source = saved("moe", root)
    saved("mla", root)
    quantize(source, root / "int4", QuantScheme(32, "qmax7", (ATTENTION, ROUTER)))
    return root


@pytest.fixture(scope="module", params=[1, 2])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Tensor parallel size, results by step, and the end of the logs."""
    if request.param > torch.cuda.device_count():
        pytest.skip(f"needs {request.param} GPUs")
    results, log = run(made(tmp_path_factory.mktemp("sync")), request.param)
    for step, result in results.items():
        if isinstance(result, dict):
            print(
                step, {key: result[key] for key in ("seconds", "update_seconds", "bytes", "by_value") if key in result}
            )
    return request.param, results, log


def step(found: Any, name: str) -> dict[str, Any]:
    _, results, log = found
    assert name in results, log
    return results[name]  # type: ignore[no-any-return]


@pytest.mark.parametrize("model", ["moe", "mla"])
@pytest.mark.parametrize("name", ["1", "2", "mended", "mended again", "mended once more"])
def test_good_updates_pass(model: str, name: str, found: Any) -> None:
    result = step(found, f"{model}: {name}")
    assert result["raised"] == "", result
    assert result["seconds"] > 0
    if model == "moe":
        # Embedding, output layer and last norm; in each layer two norms, those of q and k, qkv, o, router, and experts.
        engines = 2 if found[0] == 1 else 1
        assert result["by_value"] == (3 + LAYERS * 9) * found[0] * engines
        assert result["unseen"] == []
        assert result["absent"] == []


@pytest.mark.parametrize("model", ["moe", "mla"])
def test_exchanged_experts_are_named(model: str, found: Any) -> None:
    result = step(found, f"{model}: exchanged")
    assert "layers.3.mlp.experts.w13_weight: not as sent" in result["raised"], result
    assert "layers.4" not in result["raised"]


@pytest.mark.parametrize("model", ["moe", "mla"])
def test_dropped_bucket_is_named(model: str, found: Any) -> None:
    result = step(found, f"{model}: dropped bucket")
    assert "as they were at the last check, not as sent" in result["raised"], result
    assert re.search(r"layers\.4\.", result["raised"])
    assert not re.search(r"layers\.[0-35]\.", result["raised"])


@pytest.mark.parametrize("model", ["moe", "mla"])
def test_old_version_is_named(model: str, found: Any) -> None:
    result = step(found, f"{model}: old version")
    assert "has weight version 6, not 7" in result["raised"], result
    assert "not as sent" not in result["raised"]


def test_projections_that_buckets_tear_apart_are_named(found: Any) -> None:
    """SGLang 0.5.16 fuses q_a_proj and kv_a_proj_with_mqa only where both come in one call, and drops them else."""
    result = step(found, "mla: layers cut")
    assert re.search(r"layers\.\d+\.self_attn\.fused_qkv_a_proj_with_mqa\.weight", result["raised"]), result
    assert "mlp" not in result["raised"]


def test_engine_that_missed_an_update_is_named(found: Any) -> None:
    if found[0] > 1:
        pytest.skip("two engines run where one GPU is enough for each")
    url = found[1].get("moe: last engine")
    result = step(found, "moe: last engine missed it")
    assert f"{url} has weight version 8, not 9" in result["details"], result
    assert all(line.startswith(url) for line in result["details"])


def test_repacked_experts_are_compared_by_change(found: Any) -> None:
    if found[0] > 1:
        pytest.skip("run with one GPU an engine")
    first, second, third = (step(found, f"int4: {version}") for version in (1, 2, 3))
    assert [one["raised"] for one in (first, second, third)] == ["", "", ""]
    assert first["by_change"] == 0
    for one in (second, third):
        assert one["by_change"] >= LAYERS * 2  # words or scales of two parameters
        assert all(".mlp.experts." in name for name in one["unseen"]), one["unseen"]
    stale = step(found, "int4: new version, old weights")
    assert "unchanged, though something else was sent than at the last check" in stale["raised"], stale


def test_layer_of_experts_is_recorded_in_less_than_a_second(found: Any) -> None:
    assert step(found, "a layer")["seconds"] < 1

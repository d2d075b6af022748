"""SGLang's Marlin kernels with negative scales, as AutoRound writes them, against the dequantized weights."""

import pytest
import torch

from ckptkit.verify.witnesses.loading.layouts.marlin import marlin_scales, marlin_weight

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1500)]

INPUTS, OUTPUTS = 256, 256


def packed_layer(group, draw):
    """Weights [inputs, outputs] that codes and scales of both signs mean, and both in Marlin's layout, on the GPU."""
    codes = torch.randint(0, 16, (INPUTS, OUTPUTS), generator=draw)
    sizes = torch.rand(INPUTS // group, OUTPUTS, generator=draw) * 0.01 + 0.001
    scales = (sizes * (2 * torch.randint(0, 2, sizes.shape, generator=draw) - 1)).bfloat16()
    weight = ((codes - 8).unflatten(0, (-1, group)) * scales.double().unsqueeze(1)).flatten(0, 1)
    words = (codes.unflatten(0, (-1, 8)) << (4 * torch.arange(8)).reshape(1, 8, 1)).sum(1)
    signed = torch.where(words < 2**31, words, words - 2**32).to(torch.int32)
    ordered = marlin_scales(scales)
    return weight, marlin_weight(signed).cuda(), ordered[0 if len(scales) > 1 else 1].contiguous().cuda()


def far_off(computed, expected):
    """The largest difference, as a part of the largest value; bfloat16 rounds each to 1/256."""
    return float((computed.cpu().double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("group", [32, 64, 128, INPUTS])
@pytest.mark.parametrize("tokens", [1, 16, 100])
def test_linear_layer_multiplies_by_a_scale_with_its_sign(group, tokens):
    from sgl_kernel.scalar_type import scalar_types
    from sglang.jit_kernel.gptq_marlin import gptq_marlin_gemm

    draw = torch.Generator().manual_seed(group + tokens)
    weight, words, scales = packed_layer(group, draw)
    inputs = torch.randn(tokens, INPUTS, generator=draw).bfloat16()
    workspace, none = (torch.zeros(size, dtype=torch.int32, device="cuda") for size in (1024, 0))
    outputs = gptq_marlin_gemm(
        *(inputs.cuda(), None, words, scales, None, None, none, none, workspace, scalar_types.uint4b8),
        *(tokens, OUTPUTS, INPUTS),
        use_fp32_reduce=True,
    )
    assert far_off(outputs, inputs.double() @ weight) < 0.01


@pytest.mark.parametrize("group", [32, 64, 128])
def test_experts_multiply_by_a_scale_with_its_sign(group):
    from sgl_kernel.scalar_type import scalar_types
    from sglang.jit_kernel.moe_wna16_marlin import moe_wna16_marlin_gemm

    draw = torch.Generator().manual_seed(group)
    layers = [packed_layer(group, draw) for _ in range(2)]
    words, scales = (torch.stack([layer[part] for layer in layers]) for part in (1, 2))
    inputs = torch.randn(16, INPUTS, generator=draw).bfloat16()
    workspace, tokens = torch.zeros(1024, dtype=torch.int32, device="cuda"), torch.arange(16, dtype=torch.int32).cuda()
    outputs = moe_wna16_marlin_gemm(
        *(inputs.cuda(), None, words, None, scales, None, None, None, None, workspace),
        *(tokens, tokens[:2], torch.full_like(tokens[:1], 16), torch.ones(16, 1, device="cuda")),
        *(8, 1, False, False, scalar_types.uint4b8, 16, OUTPUTS, INPUTS),
        use_fp32_reduce=True,
    )
    expected = torch.cat([inputs[:8].double() @ layers[0][0], inputs[8:].double() @ layers[1][0]])
    assert far_off(outputs, expected) < 0.01

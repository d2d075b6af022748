"""Loads checkpoints into real vLLM without a GPU and runs its steps after loading, but for the CUDA kernels in them.

`python -m support.vllm_repacked CASES.json RANK`, as `support.vllm_runs`. Each kernel that repacks weights is replaced
by vLLM's own reference for its tests (`marlin_utils_test`), and a product by one with the weight that was repacked.
"""

import os
from functools import partial

import torch

from ckptkit.verify.witnesses.process.interpreter import python_of
from ckptkit.verify.witnesses.vllm.facts import VLLM
from support import sglang_runs, vllm_faults
from support.processes import end_now, run_logged
from support.sglang_runs import ALTER

_INT4 = 8  # codes in a word


def run_cases(cases, root):
    def start(log, module, *words):
        return run_logged(log, "support.vllm_repacked", *words, program=python_of("vllm", {}), limit_s=840)

    return sglang_runs.run_cases(cases, root, engine=VLLM, start=start)


def codes_of(words):
    """int32 [inputs / 8, outputs] -> the codes [inputs, outputs] in 0..15, one after the other."""
    return torch.stack([(words >> (4 * place)) & 15 for place in range(_INT4)], 1).reshape(-1, words.shape[1])


def repack(words, perm, size_k, size_n, num_bits, is_a_8bit=False):
    """`gptq_marlin_repack` by vLLM's own reference."""
    from vllm.model_executor.layers.quantization.utils.marlin_utils_test import get_weight_perm, marlin_weights

    assert (num_bits, is_a_8bit, perm.numel()) == (4, False, 0)
    return marlin_weights(codes_of(words), size_k, size_n, num_bits, get_weight_perm(num_bits))


def repack_experts(words, perm, size_k, size_n, num_bits, **rest):
    """`gptq_marlin_moe_repack`."""
    return torch.stack([repack(one, perm[0], size_k, size_n, num_bits, **rest) for one in words])


def prepack(words, **types):
    """`machete_prepack_B`: words in some other order."""
    return words.flip(0).contiguous()


def product(a, b_q, b_type, b_group_zeros, b_group_scales, b_group_size):
    """`machete_mm` of what `prepack` made."""
    codes = codes_of(b_q.flip(0)).float() - (8 if b_group_zeros is None else 0)
    groups = len(codes) // len(b_group_scales)
    weight = codes * b_group_scales.float().repeat_interleave(groups, 0)
    if b_group_zeros is not None:
        weight += b_group_zeros.float().repeat_interleave(groups, 0)
    return (a.float() @ weight).to(a.dtype)


def marlin_product(a, c, b_q_weight, b_bias, b_scales, a_scales, global_scale, b_zeros, *rest, **sizes):
    """`marlin_gemm`: what vLLM's references for tests have put in order is put back."""
    from vllm.model_executor.layers.quantization.utils.marlin_utils import get_scale_perms
    from vllm.model_executor.layers.quantization.utils.marlin_utils_test import get_weight_perm

    inputs, outputs = len(b_q_weight) * 16, b_q_weight.shape[1] // 2
    blocks = nibbles(b_q_weight).reshape(-1, 1024)[:, get_weight_perm(4).argsort()]
    codes = blocks.reshape(inputs // 16, outputs // 16, 16, 16).transpose(1, 2).reshape(inputs, outputs).float()
    many, single = (torch.tensor(order).argsort() for order in get_scale_perms())
    order = single if len(b_scales) == 1 else many
    scales = b_scales.reshape(-1, len(order))[:, order].reshape(b_scales.shape).float()
    zeros = torch.full_like(scales, 8)
    if b_zeros.numel():
        stored = nibbles(b_zeros).reshape(-1, 8)[:, torch.tensor([0, 2, 4, 6, 1, 3, 5, 7]).argsort()]
        zeros = stored.reshape(-1, 64)[:, many].reshape(scales.shape).float()
    several = inputs // len(scales)
    return (a.float() @ ((codes - zeros.repeat_interleave(several, 0)) * scales.repeat_interleave(several, 0))).to(
        a.dtype
    )


def nibbles(words):
    """The eight codes of each word, lowest bits first, on an axis of their own."""
    return torch.stack([(words >> (4 * place)) & 15 for place in range(_INT4)], -1)


def fp8_product(kernel, layer, x, bias=None):
    """A Linear layer in FP8 blocks, by its weight and scales."""
    scales = layer.weight_scale_inv.float()
    for axis, side in enumerate(layer.weight_block_size):
        scales = scales.repeat_interleave(side, axis)
    rows, columns = layer.weight.shape
    return (x.float() @ (layer.weight.float() * scales[:rows, :columns]).t()).to(x.dtype)


def without_cuda():
    """Replaces the kernels, and tells the witness that it is on a GPU."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.kernels.linear.scaled_mm import BlockScaledMMLinearKernel
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    kernels = {
        "gptq_marlin_repack": repack,
        "gptq_marlin_moe_repack": repack_experts,
        "machete_prepack_B": prepack,
        "machete_mm": product,
        "marlin_gemm": marlin_product,
    }
    for name, kernel in kernels.items():
        setattr(ops, name, kernel)
    BlockScaledMMLinearKernel.Fp8BlockScaledMMLinearKernel.apply_weights = fp8_product
    # On Hopper DeepGEMM takes scales of 128 x 128 blocks as they are.
    fp8_utils.transform_sf_into_required_layout = lambda sf, **sizes: sf


def build(original, wanted, loading, phases):
    def repacking(model, weights, device):
        without_cuda()
        loading(model, weights, torch.device("cuda"))

    return original(wanted, repacking, phases)


def main():
    from ckptkit.verify.witnesses.vllm import adapter

    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    adapter.build = partial(build, adapter.build)
    sglang_runs.main({name: vllm_faults.restored(alter) for name, alter in {**ALTER, **vllm_faults.ALTER}.items()})


if __name__ == "__main__":
    main()
    end_now()

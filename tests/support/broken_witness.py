"""A Megatron witness with a defect, which the environment variable BREAK chooses."""

import os
import signal

import torch

HOW = os.environ["BREAK"]
if HOW == "import":
    raise OSError("libcuda.so.1: cannot open shared object file")

from ckptkit.verify.witnesses.megatron import process as witness_megatron  # noqa: E402
from ckptkit.verify.witnesses.megatron.model import GPTModel  # noqa: E402


def _defect(*_):
    raise KeyError("a defect of ours")


def _tf32(value):
    """The nearest numbers of 10 bits of mantissa, in float32."""
    return ((value.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def _general_gemm(weight, given, *_, **__):
    """As Transformer Engine's, of what `RouterGatingLinearFunction` gives it: it rounds the factors to TF32."""
    return (_tf32(given) @ _tf32(weight).t(),)


def _without_sum(module, inputs, output):
    """The output of a projection without the sum over tensor parallel ranks."""
    weight, (given, *_) = module.weight, inputs
    return torch.nn.functional.linear(given, weight), output[1]


def _planted(chunks):
    chunks[0].decoder.layers[4].self_attention.linear_proj.register_forward_hook(_without_sum)
    return chunks


def main():
    build = witness_megatron.build_chunks
    if HOW == "own":
        witness_megatron.Position.here = _defect
    if HOW == "kill":
        witness_megatron.connect = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    if HOW == "signature":  # as of a megatron-core whose method takes other arguments than the one that we know
        GPTModel.sharded_state_dict = lambda self: {}
    if HOW == "beside an engine":  # no defect: what routers find where Transformer Engine is installed
        witness_megatron.moe_utils.te_general_gemm = _general_gemm
    if HOW == "without a sum":
        witness_megatron.build_chunks = lambda *args: _planted(build(*args))
    witness_megatron.main()


if __name__ == "__main__":
    main()

"""Answers of the CPU to what Megatron-LM's training package and tools ask of a GPU, by patches of the whole process."""

from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode

HOPPER = (9, 0)


class _OnCpu(TorchFunctionMode):
    """Puts on the CPU what is made on, or moved to, a CUDA device."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        wanted = dict(kwargs or {})
        if "cuda" in str(wanted.get("device")):
            wanted["device"] = torch.device("cpu")
        if function is torch.Tensor.to:
            on_cuda = [isinstance(one, (str, torch.device)) and str(one).startswith("cuda") for one in args]
            args = [torch.device("cpu") if moved else one for one, moved in zip(args, on_cuda, strict=True)]
        return function(*args, **wanted)


def pretend_gpu():
    """Lets Megatron-LM parse its arguments, build, load and save where there is no GPU."""
    from ckptkit.verify.witnesses.megatron.model import pretend_cuda

    pretend_cuda()
    properties = SimpleNamespace(major=HOPPER[0], minor=HOPPER[1], name="cpu", total_memory=0, multi_processor_count=1)
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.get_device_capability = lambda device=None: HOPPER
    torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    torch.cuda.empty_cache = lambda: None
    torch.nn.Module.cuda = lambda self, device=None: self
    _OnCpu().__enter__()

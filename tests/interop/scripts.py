"""Runs scripts of a checkout of slime or miles without a GPU, each in a process forked from one that has the imports.

What stands in for a GPU is in `interop.cpu` and here: a CPU accelerator for slime, `safe_open` on the CPU, and two CUDA
kernels by their formulas: `_int4_kernel` for the INT4 tool, `_MXFP8Quantizer` for Transformer Engine's. The scripts
themselves run unchanged.
"""

import importlib
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from support.processes import TESTS, run_module

IMPORTS = {
    "slime": ("slime.backends.megatron_utils.hf_to_megatron", "slime.backends.megatron_utils.megatron_to_hf"),
    "miles": ("miles.backends.megatron_utils.megatron_to_hf", "miles.utils.hf_config"),
}


ASKS_FOR_CUDA = "tools/convert_hf_to_mxfp8.py"  # and does nothing without it


@dataclass(frozen=True)
class Script:
    label: str
    path: str
    arguments: Sequence[str]


@dataclass(frozen=True)
class Outcome:
    code: int
    log: str


def run_scripts(project, checkout, scripts, scratch, megatron=None):
    """Runs all of them; `megatron` is the Megatron-LM that they import, the installed one without."""
    scratch.mkdir(parents=True, exist_ok=True)
    job = {"project": project, "checkout": str(checkout), "scripts": [asdict(script) for script in scripts]}
    (scratch / "job.json").write_text(json.dumps(job))
    path = os.pathsep.join(map(str, filter(None, [TESTS.parent, TESTS, checkout, megatron])))
    run_module(
        "interop.scripts",
        scratch,
        PYTHONPATH=path,
        OMP_NUM_THREADS="1",
        CUDA_DEVICE_MAX_CONNECTIONS="1",
        HF_HUB_OFFLINE="1",
    )
    return {
        script.label: Outcome(
            json.loads((scratch / f"{index}.json").read_text()), (scratch / f"{index}.log").read_text()
        )
        for index, script in enumerate(scripts)
    }


# What follows runs in the process that is forked, and in its forks.


def main():
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    from interop.cpu import pretend_gpu

    wandb = ModuleType("wandb")  # slime's logging imports it, and these scripts log nothing
    wandb.__spec__ = ModuleSpec("wandb", None)  # accelerate looks for it
    sys.modules.setdefault("wandb", wandb)
    pretend_gpu()
    _stand_in(job["project"])
    for name in IMPORTS[job["project"]]:
        importlib.import_module(name)
    context = multiprocessing.get_context("fork")
    for index, values in enumerate(job["scripts"]):
        script = Script(**values)
        process = context.Process(target=_run, args=(Path(job["checkout"]), script, folder / f"{index}.log", index))
        process.start()
        process.join()
        (folder / f"{index}.json").write_text(json.dumps(process.exitcode))


def _stand_in(project):
    import numpy
    import safetensors

    if project == "slime":  # it refuses NumPy 2, which megatron-core 0.19 takes
        numpy.__version__ = "1.26.4"
    torch.cuda.memory_allocated = lambda device=None: 0
    torch.cuda.set_device = lambda device: None
    torch.cuda.mem_get_info = lambda device=None: (0, 0)
    made = torch.tensor  # the tools work in threads, and torch keeps a function mode to one thread
    torch.tensor = lambda *values, **more: made(*values, **more | ({"device": "cpu"} if "device" in more else {}))
    opened = safetensors.safe_open
    safetensors.safe_open = lambda file, framework, device="cpu": opened(file, framework, "cpu")
    kernel = ModuleType("fake_int4_quant_cuda")
    kernel.fake_int4_quant_cuda = _int4_kernel
    sys.modules["fake_int4_quant_cuda"] = kernel
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed = lambda *args, **more: None
    _latent_attention_in_the_local_spec()
    if project == "slime":
        _slime_on_the_cpu()
        _engine_names_for_slime()


def _slime_on_the_cpu():
    from slime.utils import accelerator
    from slime.utils.accelerator.cuda import CUDAAccelerator

    class Cpu(CUDAAccelerator):
        communication_backend_name = "gloo"

        def is_available(self):
            return True

        def device_name(self, index=None):
            return "cpu"

        def current_device(self):
            return 0

        def distributed_device_id(self, index=None):
            return None

    accelerator.set_accelerator(Cpu())


def _latent_attention_in_the_local_spec():
    from megatron.core.models import backends
    from megatron.core.transformer import multi_latent_attention

    from ckptkit.verify.witnesses.megatron.variants.attention import LatentDotProductAttention

    backends.DotProductAttention = LatentDotProductAttention
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False


def _engine_names_for_slime():
    """Gives slime Transformer Engine's names of parameters, the only ones that it knows, for the local spec's."""
    from slime.backends.megatron_utils.update_weight import common

    listed = common.named_params_and_buffers

    def renamed(args, model):
        moe = {layer for layer, moe in enumerate(args.moe_layer_freq) if moe} if args.num_experts else set()
        for name, parameter in listed(args, model):
            yield _engine_name(name, bool(args.multi_latent_attention), moe), parameter

    common.named_params_and_buffers = renamed


def _engine_name(name, latent, moe):
    name = re.sub(r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight", r"experts.\2.weight\1", name)
    layer = re.search(r"decoder\.layers\.(\d+)\.", name)
    norms = {"q_layernorm.": "linear_q_up_proj.layer_norm_", "kv_layernorm.": "linear_kv_up_proj.layer_norm_"}
    norms = norms if latent else {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if layer and int(layer[1]) not in moe:
        norms["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    for local, engine in norms.items():
        if f".{local}" in name:
            return name.replace(local, engine)
    return name


def _int4_kernel(weight, block, symmetric):
    """Codes, scales and zero points in the weight's dtype, as slime's `fake_int4_quant_cuda.cu` computes them.

    weight: [rows, columns], block: (1, group size).
    """
    groups = weight.float().unflatten(-1, (-1, block[1]))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    floor = torch.tensor(1e-5)
    if symmetric:
        scale = torch.maximum(groups.abs().amax(-1, keepdim=True) * torch.tensor(1.0 / 7.0), floor)
        zero = torch.zeros_like(scale)
    else:
        scale = torch.maximum((high - low) * torch.tensor(1.0 / 15.0), floor)
        zero = (-(low / scale).round()).clamp(0, 15)
    codes = (groups / scale).round() + zero
    return tuple(part.flatten(-2).to(weight.dtype) for part in (codes, scale, zero))


def _transformer_engines_mxfp8():
    engine = ModuleType("transformer_engine.pytorch")
    constants = ModuleType("transformer_engine.pytorch.constants")
    engine.MXFP8Quantizer, constants.TE_DType = _MXFP8Quantizer, {torch.float8_e4m3fn: None}
    sys.modules["transformer_engine"] = ModuleType("transformer_engine")
    sys.modules |= {module.__name__: module for module in (engine, constants)}


class _MXFP8Quantizer:
    """Codes and exponents of rows, as Transformer Engine's `float_to_e8m0` and `exp2f_rcp` compute them."""

    def __init__(self, fp8_dtype, *, rowwise, columnwise):
        assert rowwise
        assert not columnwise

    def quantize(self, weight):
        """weight: [rows, columns]; 32 divides both. Codes as bytes [rows, columns], exponents [rows, columns / 32]."""
        groups = weight.float().unflatten(-1, (-1, 32))
        mantissa, exponent = torch.frexp(groups.abs().amax(-1) * torch.tensor(1.0 / 448.0))
        power = (exponent - (mantissa == 0.5).int()).clamp(min=-127).masked_fill(mantissa == 0, -127)
        codes = (groups * torch.exp2(-power.float()).unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn)
        stored = (power + 127).to(torch.uint8)
        return SimpleNamespace(_rowwise_data=codes.view(torch.uint8), _rowwise_scale_inv=stored)


def _run(checkout, script, log, index):
    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": str(23455 + index)}
    sys.argv = [script.path, *script.arguments]
    if script.path == ASKS_FOR_CUDA:
        torch.cuda.is_available = lambda: True
        _transformer_engines_mxfp8()
    path = checkout / script.path
    # Not by `runpy`: Megatron starts a process to save in, which would import the script again as its main module.
    sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(path.read_text(), path, "exec"), {"__name__": "__main__", "__file__": str(path)})  # noqa: S102


if __name__ == "__main__":
    main()

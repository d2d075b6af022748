"""Loads adapters by an engine's own LoRA manager: `python adapter_managers.py ENGINE JOBS`.

JOBS is JSON: a list of [base, adapter, output]. Each output gets what the manager's buffers, scaled as it scales them,
add to the base's weights, by the engine's module and the part of it; or `refused` with the engine's words.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp

import torch
from safetensors.torch import save_file
from torch import Tensor

from ckptkit.verify.witnesses.loading.engine import ModelBuild
from ckptkit.verify.witnesses.process.exit_report import ExitReport
from support.processes import end_now

SCRATCH = Path(mkdtemp(prefix="adapters-"))
RANK = 8


def load_weights(model, weights, device):
    model.load_weights(weights)


def in_sglang(base, adapter):
    engine = import_module("ckptkit.verify.witnesses.sglang.adapter")
    model = engine.build(ModelBuild(base, SCRATCH), load_weights, ExitReport(SCRATCH / "report"))
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.lora import lora_manager
    from sglang.srt.lora.lora_registry import LoRARef
    from sglang.srt.runtime_context import get_server_args

    reference = LoRARef(lora_name="one", lora_path=str(adapter), pinned=False)
    manager = lora_manager.LoRAManager(
        base_model=model,
        base_hf_config=model.config,
        max_loras_per_batch=1,
        load_config=LoadConfig(load_format="auto"),
        dtype=torch.float32,
        server_args=get_server_args(),
        lora_backend="torch_native",
        max_lora_rank=RANK,
        target_modules=None,
        lora_paths=[reference],
    )
    manager.fetch_new_loras({reference.lora_id})
    pool, scale = manager.memory_pool, manager.loras[reference.lora_id].scaling
    rank, slot = manager.configs[reference.lora_id].r, pool.get_buffer_id(reference.lora_id)
    found = {}
    for layer, modules in enumerate(manager.lora_modules):
        for name in modules:
            target = lora_manager.get_target_module_name(name, pool.target_modules)
            a, b = (buffers[target][layer][slot].float() for buffers in (pool.A_buffer, pool.B_buffer))
            for part, (rows, (start, end)) in enumerate(parts_of(modules[name], b.shape[0])):
                found[f"{name}:{part}"] = b[start:end, :rank] @ a[rows * rank : (rows + 1) * rank] * scale
    return found


def parts_of(module, rows):
    """The parts of a fused layer: of which rows of A, and of which of B."""
    base = module.base_layer
    sizes = getattr(base, "output_sizes", None) or [rows]
    if type(base).__name__ == "QKVParallelLinear":
        sizes = [base.q_proj_shard_size, base.kv_proj_shard_size, base.kv_proj_shard_size]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [(part, (end - size, end)) for part, (size, end) in enumerate(zip(sizes, ends, strict=True))]


def in_vllm(base, adapter):
    import_module("ckptkit.verify.witnesses.vllm.platform").choose_platform(SCRATCH)
    from unittest.mock import patch

    from vllm.engine import arg_utils

    engine = import_module("ckptkit.verify.witnesses.vllm.adapter")
    kept = {}
    original, configure = arg_utils.EngineArgs, engine.configure

    def with_lora(**given):
        return original(**given | {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1, "dtype": "float32"})

    def noted(wanted):
        kept["config"] = configure(wanted)
        return kept["config"]

    with patch.object(arg_utils, "EngineArgs", with_lora), patch.object(engine, "configure", noted):
        model = engine.build(ModelBuild(base, SCRATCH), load_weights, ExitReport(SCRATCH / "report"))
    from vllm.config import set_current_vllm_config
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager

    config = kept["config"]
    with set_current_vllm_config(config):
        worker = WorkerLoRAManager(config, torch.device("cpu"), {})
        worker.create_lora_manager(model, config)
        worker.add_adapter(LoRARequest("one", 1, str(adapter)))
    found = {}
    for name, module in worker._adapter_manager.modules.items():
        a, b = module.lora_a_stacked, module.lora_b_stacked
        if isinstance(a, Tensor):  # of embeddings A has a row for each token
            a, b = (a.mT if a.dim() == 3 else a[:, 0],), (b,)
            a = (a[0][:, None],)
        for part, (one, other) in enumerate(zip(a, b, strict=True)):
            found[f"{name}:{part}"] = other[0, 0].float() @ one[0, 0].float()
    return found


def main():
    torch.Tensor.pin_memory = lambda tensor, *_: tensor
    for make in (torch.tensor, torch.zeros, torch.empty):
        unpinned = lambda *words, make=make, pin_memory=False, **given: make(*words, **given)  # noqa: E731
        setattr(torch, make.__name__, unpinned)
    load = {"sglang": in_sglang, "vllm": in_vllm}[sys.argv[1]]
    for base, adapter, output in json.loads(Path(sys.argv[2]).read_text()):
        try:
            found = load(Path(base), Path(adapter))
            save_file({name: one.contiguous() for name, one in found.items()}, output)
        except Exception as error:  # noqa: BLE001 - what an engine refuses is what is asked
            Path(f"{output}.refused").write_text(f"{type(error).__name__}: {error}")
    end_now()


if __name__ == "__main__":
    main()

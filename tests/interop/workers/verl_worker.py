"""verl on the CPU: its model merger (`python -m verl.model_merger`), and what an actor of verl saves to be merged.

With a job file as the only argument it saves: a list of {"backend": "megatron" or "fsdp", "hf": DIR, "megatron": DIR,
"actor": DIR to make}. All other arguments are the merger's own.
"""

import json
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from megatron_on_cpu import load_torch_dist, one_rank, pretend_cuda

FSDP_RANKS = 2


def on_cpu():
    """verl takes the device for CUDA and the backend for NCCL; both become the CPU's."""
    pretend_cuda()
    import verl.utils.device

    verl.utils.device.get_nccl_backend = lambda: "gloo"
    verl.utils.device.get_device_name = lambda: "cpu"
    verl.utils.device.get_device_id = lambda: 0


def save_megatron(hf, megatron, actor):
    """verl's own model, loaded from the torch_dist at `megatron` and saved by verl, all layers of a key in one."""
    from megatron.core import parallel_state
    from transformers import AutoConfig
    from verl.models.mcore import hf_to_mcore_config, init_mcore_model
    from verl.utils.megatron.dist_checkpointing import save_dist_checkpointing
    from verl.utils.megatron_utils import get_model_dist_checkpoint_path

    hf_config = AutoConfig.from_pretrained(hf)
    config = hf_to_mcore_config(hf_config, torch.bfloat16)
    config.use_cpu_initialization = True
    config.perform_initialization = False
    model = init_mcore_model(
        config, hf_config, True, True, share_embeddings_and_output_weights=hf_config.tie_word_embeddings
    ).to(torch.bfloat16)
    load_torch_dist(model, megatron)
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = {"model": model.sharded_state_dict(metadata=metadata)}
    save_dist_checkpointing(state, get_model_dist_checkpoint_path(str(actor)))


def save_fsdp(rank, store, hf, actor):
    on_cpu()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=FSDP_RANKS)
    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (FSDP_RANKS,), mesh_dim_names=("fsdp",)))
    contents = {"save_contents": ["model"], "load_contents": ["model"]}
    FSDPCheckpointManager(model=model, checkpoint_config=contents).save_checkpoint(str(actor))
    torch.distributed.destroy_process_group()


def save(job, folder):
    hf, actor = Path(job["hf"]), Path(job["actor"])
    if job["backend"] == "megatron":
        save_megatron(hf, Path(job["megatron"]), actor)
        side_files = actor / "model" / "huggingface"
    else:
        torch.multiprocessing.start_processes(
            save_fsdp, (str(folder / actor.name), hf, actor), FSDP_RANKS, start_method="spawn"
        )
        side_files = actor / "huggingface"
    side_files.mkdir(exist_ok=True)
    for file in ("config.json", "tokenizer_config.json"):
        shutil.copy(hf / file, side_files)


def main():
    on_cpu()
    if len(sys.argv) > 2:
        runpy.run_module("verl.model_merger", run_name="__main__", alter_sys=True)
        return
    jobs = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder, one_rank(Path(folder) / "store"), torch.no_grad():
        results = [save(job, Path(folder)) for job in json.loads(jobs.read_text())]
    jobs.with_suffix(".results").write_text(json.dumps(results))


if __name__ == "__main__":
    main()

"""What workers share that build megatron-core models on the CPU: one rank, and checkpoints in torch_dist format."""

import contextlib

import torch


class _Stream:
    def __init__(self, *arguments, **keywords): ...


def pretend_cuda():
    """Lets megatron-core, and tools that move models to the current GPU, stay on the CPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.Stream = _Stream
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda device=None: torch.get_rng_state()
        module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    torch.cuda.manual_seed = lambda seed: None
    torch.cuda.empty_cache = lambda: None
    torch.Tensor.cuda = lambda self, *arguments, **keywords: self
    torch.nn.Module.cuda = lambda self, *arguments, **keywords: self


@contextlib.contextmanager
def one_rank(store):
    """A process group of one rank, which meets itself in the file `store`."""
    from megatron.core import parallel_state, tensor_parallel

    pretend_cuda()
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    yield
    torch.distributed.destroy_process_group()


def save_torch_dist(model, root):
    from megatron.core import dist_checkpointing

    (root / "release").mkdir(parents=True)
    state = {"model": model.sharded_state_dict(metadata=_metadata()), "checkpoint_version": 3.0, "iteration": 0}
    dist_checkpointing.save(state, str(root / "release"), content_metadata={"singleton_local_shards": False})
    (root / "latest_checkpointed_iteration.txt").write_text("release")


def load_torch_dist(model, root):
    """Loads `root/release` into the model as Megatron-LM does by default: whatever the model asks for must be there."""
    from megatron.core import dist_checkpointing

    common = dist_checkpointing.load_common_state_dict(str(root / "release"))
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    state = {"model": model.sharded_state_dict(metadata=metadata | _metadata())}
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    loaded = dist_checkpointing.load(state, str(root / "release"))
    model.load_state_dict(loaded["model"])
    unwritten = [name for name, parameter in model.named_parameters() if parameter.isnan().any()]
    if unwritten:
        raise RuntimeError(f"not written by the checkpoint: {unwritten}")


def _metadata():
    from megatron.core import parallel_state

    return {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}

"""Makes archives of checkpoints: `make.py FOLDER` saves with the megatron-core and Megatron-LM that are on the path.

Two ranks (gloo, tensor parallel 2, no GPU) save a dense layer and a layer of experts, what a training run has beside
the weights, and the arguments as Megatron-LM's own parser and slime leave them. No test runs this.

megatron-core is a wheel unpacked by `pip install --no-deps --target`. `megatron.training`, which has the parser, is in
it from 0.17 on; for versions before, `megatron` of Megatron-LM's tag `core_vVERSION` stands behind it on PYTHONPATH.

`make.py FOLDER CHECKOUT` made the archive in `megatron_fsdp`: CHECKOUT is Megatron-LM (of August 2026), whose
`tools/checkpoint/checkpoint_inspector.py` makes `fsdp_dtensor` of the checkpoint that `0.16.1.tar.xz` holds, with
megatron-core 0.19.
"""

import contextlib
import dataclasses
import io
import multiprocessing
import os
import random
import sys
import tarfile
import tempfile
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch._dynamo
from torch.distributed.tensor import DeviceMesh
from torch.utils import cpp_extension

from ckptkit.verify.witnesses.megatron.imports import importing_megatron

FLAGS = """
--bf16 --num-layers 2 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 4 --group-query-attention
--num-query-groups 2 --kv-channels 4 --normalization RMSNorm --swiglu --disable-bias-linear --vocab-size 60
--position-embedding-type rope --untie-embeddings-and-output-weights --num-experts 2 --moe-layer-freq [0,1]
--moe-ffn-hidden-size 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --max-position-embeddings 32
--seq-length 8 --transformer-impl local --attention-backend unfused --tensor-model-parallel-size 2 --sequence-parallel
--micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-4 --tokenizer-type NullTokenizer
--no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion --use-cpu-initialization
--distributed-backend gloo --exit-signal-handler
"""


def pretend_cuda():
    """Lets megatron-core and Megatron-LM run without a GPU."""
    hopper = SimpleNamespace(major=9, minor=0, name="cpu", total_memory=0, multi_processor_count=1)
    torch.cuda.get_device_properties = lambda device=None: hopper
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch._dynamo.config.disable = True
    # megatron-core 0.15 compiles CUDA code at its import where torch finds a CUDA toolkit.
    cpp_extension.CUDA_HOME = None


def slime_config():
    """slime's data class, in a module of its name."""
    module = types.ModuleType("slime.utils.eval_config")
    config = dataclasses.make_dataclass("EvalDatasetConfig", [("name", str), ("path", str), ("top_p", float, 1.0)])
    config.__module__ = module.__name__
    vars(module)["EvalDatasetConfig"] = config
    sys.modules |= {name: types.ModuleType(name) for name in ("slime", "slime.utils")} | {module.__name__: module}
    return config


def slime_arguments(args):
    """Adds what slime adds: a data class of its own, and containers. Source: slime `utils/arguments.py`."""
    args.eval_datasets = [slime_config()("aime", "/data/aime.jsonl")]
    args.hf_checkpoint = "/models/tiny"
    args.apply_chat_template_kwargs = {"enable_thinking": False}
    args.sglang_model_routers = {"default": ("10.0.0.1", 3000)}
    args.train_env_vars = {}
    args.rollout_stop = None


def parsed():
    """The arguments of a training run, parsed and validated by Megatron-LM."""
    with importing_megatron():
        from megatron.core.enums import ModelType
        from megatron.training.arguments import parse_args, validate_args
    sys.argv = ["pretrain", *FLAGS.split()]
    with contextlib.redirect_stdout(io.StringIO()):
        args = parse_args()
        validate_args(args)
    args.padded_vocab_size = 64
    args.model_type = ModelType.encoder_or_decoder
    slime_arguments(args)
    return args


def built():
    """One rank's model with known values."""
    with importing_megatron():
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
        from megatron.core.transformer.transformer_config import TransformerConfig
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        ffn_hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=4,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        num_moe_experts=2,
        moe_layer_freq=[0, 1],
        moe_ffn_hidden_size=8,
        moe_router_topk=2,
        tensor_model_parallel_size=2,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    model = GPTModel(
        config,
        spec,
        vocab_size=64,
        max_sequence_length=32,
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    ).to(torch.bfloat16)
    rank = torch.distributed.get_rank()
    for index, (name, value) in enumerate(sorted(model.named_parameters())):
        # A number for each tensor, and another for each rank where the tensor is cut.
        cut = "norm" not in name and "router" not in name
        value.data.fill_(index + rank / 2 if cut else index)
    return model


def training_state(model, args):
    """What Megatron-LM's `generate_state_dict` puts beside the model."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
    from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine, initialize_rerun_state_machine

    rank = torch.distributed.get_rank()
    random.seed(1)
    np.random.seed(1)
    rng = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state()[:16].clone(),
        "cuda_rng_state": torch.get_rng_state()[:16].clone(),
        "rng_tracker_states": {"model-parallel-rng": torch.get_rng_state()[:16].clone()},
    }
    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    norm = model["decoder.final_layernorm.weight"]
    moment = make_sharded_optimizer_tensor(norm, torch.zeros(16), "optimizer.state.exp_avg")
    return {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 7,
        "num_floating_point_operations_so_far": 1.5e9,
        "optimizer": {
            "state": {0: {"exp_avg": moment}},
            "param_groups": [{"lr": 1e-4, "betas": (0.9, 0.95), "params": [0], "is_expert": False}],
        },
        "opt_param_scheduler": {"max_lr": np.float64(1e-4), "num_steps": 7, "lr_decay_style": "cosine"},
        "rng_state": ShardedObject("rng_state", [rng], (1, 2), (0, rank)),
        "rerun_state_machine": get_rerun_state_machine().state_dict(data_iterator=None, ckpt_format="torch_dist"),
    }


def save(rank, folder):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with importing_megatron():
        from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    tensor_parallel.random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    metadata = {
        "singleton_local_shards": False,
        "distrib_optim_sharding_type": "dp_reshardable",
        "chained_optim_avoid_prefix": True,
    }
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    args = parsed()
    model = built().sharded_state_dict(metadata={**metadata, "dp_cp_group": group})
    state = {"model": model, **training_state(model, args)}
    # As Megatron-LM saves with `--ckpt-fully-parallel-save` and `--ckpt-assume-constant-structure`, which slime sets.
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)
    parallel = FullyParallelSaveStrategyWrapper(strategy, group, True)
    dist_checkpointing.save(state, str(folder / "release"), parallel, content_metadata=metadata)
    torch.distributed.destroy_process_group()


def save_all(folder):
    context = multiprocessing.get_context("fork")
    with importing_megatron():
        import megatron.training.arguments  # noqa: F401
    (folder / "release").mkdir()
    ranks = [context.Process(target=save, args=(rank, folder)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if any(rank.exitcode for rank in ranks):
        sys.exit("a rank failed")


def convert(folder, checkout):
    """Megatron-LM's converter writes `release`; it asks for GPUs."""
    own = DeviceMesh.from_group
    on_cpu = lambda group, device_type, **more: own(group, "cpu", **more)  # noqa: E731
    DeviceMesh.from_group = staticmethod(on_cpu)
    sys.path.insert(0, str(checkout / "tools" / "checkpoint"))
    with tarfile.open(Path(__file__).with_name("0.16.1.tar.xz")) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 has it
        archive.extractall(folder / "in")  # noqa: S202 - filtered, as far as Python can
    # Without what megatron-core does not load: slime's data class, numpy's numbers.
    slime_config()
    common = torch.load(folder / "in" / "common.pt", weights_only=False)
    del common["args"].eval_datasets, common["opt_param_scheduler"]
    torch.save(common, folder / "in" / "common.pt")
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    import checkpoint_inspector

    checkpoint_inspector.check_gpu_memory = lambda threshold=0.9: False
    paths = str(folder / "in"), str(folder / "release")
    checkpoint_inspector.convert_checkpoint(*paths, True, torch.distributed.group.WORLD)


def main():
    pretend_cuda()
    with importing_megatron():
        from megatron.core.package_info import __version__
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if len(sys.argv) > 2:
            convert(folder, Path(sys.argv[2]))
        else:
            save_all(folder)
        with tarfile.open(Path(sys.argv[1]) / f"{__version__}.tar.xz", "w:xz", preset=9) as archive:
            for file in sorted((folder / "release").iterdir()):
                entry = archive.gettarinfo(file, file.name)
                entry.mtime = entry.uid = entry.gid = 0
                entry.uname = entry.gname = ""
                with file.open("rb") as content:
                    archive.addfile(entry, content)


if __name__ == "__main__":
    main()

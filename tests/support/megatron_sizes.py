"""What real Megatron says to parallel sizes: builds rank 0 of a model in its own process, in a group of no ranks."""

from dataclasses import replace

from support.calls import call


def refused_by_megatron(cases):
    """For each HF config and sizes, what Megatron raises when it builds the model, or None."""
    return call("megatron", _refused, list(cases))


# What follows runs in that process.


def _refused(cases):
    from ckptkit.verify.witnesses.megatron.model import pretend_cuda

    pretend_cuda()
    return [_built(config, sizes) for config, sizes in cases]


def _built(config, sizes):
    import torch
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from ckptkit.converters.megatron.arguments import megatron_args
    from ckptkit.converters.planner import dims_of
    from ckptkit.verify.witnesses.megatron.model import MegatronBuild, build_chunks, transformer_config

    torch.distributed.init_process_group("fake", rank=0, world_size=sizes.world, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            sizes.tp,
            expert_model_parallel_size=sizes.ep,
            expert_tensor_parallel_size=sizes.etp,
            create_gloo_process_groups=False,
        )
        dims, build = dims_of(config), MegatronBuild(sizes, torch.bfloat16, hybrid=bool(dims_of(config).pattern))
        if dims.linear:
            # The witness hides the variant from the config, which has rules of its own for it.
            args = megatron_args(dims)
            variant = args["experimental_attention_variant"]
            replace(transformer_config(dims, args, build), experimental_attention_variant=variant)
        build_chunks(dims, build)
    except (AssertionError, ValueError, RuntimeError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    return None

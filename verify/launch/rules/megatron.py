"""What Megatron refuses of a launch: its own check of arguments, its configuration, and the first step of training.

Source: Megatron-LM core_v0.14.0 to core_v0.19.0, `training/arguments.py` (validate_args),
`core/transformer/transformer_config.py` (__post_init__), `core/transformer/moe/moe_layer.py` (forward) and
`core/transformer/moe/token_dispatcher.py`. What slime's `validate_args` adds is `backends/megatron_utils/arguments.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from verify.issue import Issue
from verify.launch.rules.options import Needs, Options, broken

MIXTURE = "sequence parallelism with a mixture of experts over tensor parallel ranks"
MIXTURE_HINT = "megatron-core stops in the first step of training: turn it on, or train with one tensor parallel rank"
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_STOPS = "Megatron stops: give it, or leave the first out"
_ROWS = (
    Needs("optimizer_cpu_offload", ("use_precision_aware_optimizer",), _STOPS),
    Needs("overlap_param_gather", ("overlap_grad_reduce",), _STOPS),
)


def refused(options: Options, slimes: bool, experts: int = 0) -> Iterator[Issue]:
    """Everything that Megatron stops at. `slimes`: slime, miles or vime checks the arguments first.

    `experts`: those of a model that is built from its config.json, where no argument says them.
    """
    yield from broken(_ROWS, options)
    yield from (*_experts(options, experts), *_recomputed(options))
    ends = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    if slimes and options.value("pipeline_model_parallel_size", 1) == 1:
        for name in (one for one in ends if options.on(one)):
            expected = f"no --{name.replace('_', '-')} with a single pipeline stage"
            yield options.issue((name,), expected, "slime stops: leave it out")


def experts_of(config: Mapping[str, Any]) -> int:
    """How many experts a config.json states, by any of the names that families give them; 0 for a dense model."""
    text = config.get("text_config")
    places = [config, text] if isinstance(text, Mapping) else [config]
    stated = (one.get(name) for one in places for name in _EXPERTS)
    return next((number for number in stated if isinstance(number, int) and number > 0), 0)


def _experts(options: Options, built: int) -> Iterator[Issue]:
    experts, tp = options.value("num_experts", built), options.value("tensor_model_parallel_size", 1)
    ep, dispatcher = options.value("expert_model_parallel_size", 1), options.value("moe_token_dispatcher_type")
    if experts and tp and tp > 1 and options.off("sequence_parallel"):
        names = ("tensor_model_parallel_size", "num_experts", "sequence_parallel")
        yield options.issue(names, f"--sequence-parallel: {MIXTURE}", MIXTURE_HINT)
    if ep and ep > 1 and options.given.describes_model and options.off("num_experts") and not built:
        hint = "Megatron stops: leave --expert-model-parallel-size out"
        yield options.issue(("expert_model_parallel_size", "num_experts"), "--num-experts with it", hint)
    if experts and ep and ep > 1 and experts % ep:
        expected = f"num_experts that divides over expert_model_parallel_size = {ep}"
        hint = "Megatron stops: choose another number of ranks"
        yield options.issue(("num_experts", "expert_model_parallel_size"), expected, hint)
    known = options.on("moe_token_dispatcher_type") or options.off("moe_token_dispatcher_type")
    if options.on("moe_enable_deepep") and known and dispatcher != "flex" and not _unknown(options):
        expected = "--moe-token-dispatcher-type flex with --moe-enable-deepep"
        yield options.issue(("moe_enable_deepep", "moe_token_dispatcher_type"), expected, "Megatron stops: give it")
    if dispatcher == "allgather" and experts and options.on("rollout_batch_size"):
        hint = "slime only logs that it takes alltoall instead, for sequences of many lengths"
        expected = "--moe-token-dispatcher-type alltoall or flex"
        yield options.issue(("moe_token_dispatcher_type",), expected, hint, "warning")


def _unknown(options: Options) -> bool:
    return "moe_token_dispatcher_type" in options.given.unknown


def _recomputed(options: Options) -> Iterator[Issue]:
    granularity, method = options.value("recompute_granularity"), options.on("recompute_method")
    if granularity == "full" and options.off("recompute_method"):
        expected = "--recompute-method uniform or block with --recompute-granularity full"
        yield options.issue(("recompute_granularity", "recompute_method"), expected, "Megatron stops: give it")
    if granularity == "full" and method and options.off("recompute_num_layers"):
        expected = "--recompute-num-layers with --recompute-granularity full"
        yield options.issue(("recompute_granularity", "recompute_num_layers"), expected, "Megatron stops: give it")
    for name in ("recompute_method", "recompute_num_layers"):
        if granularity == "selective" and options.on(name):
            expected = f"no --{name.replace('_', '-')} with --recompute-granularity selective"
            yield options.issue(("recompute_granularity", name), expected, "Megatron stops: leave it out")

"""What ROLL refuses of a job's settings.

Source: ROLL 8eb27cc (2026-08) `configs/base_config.py`, `configs/worker_config.py`, `utils/config_utils.py`
(validate_megatron_batch_size), `pipeline/rlvr/rlvr_config.py`; mcore_adapter `models/model_config.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from verify.issue import Issue
from verify.launch.rules.megatron import MIXTURE, MIXTURE_HINT
from verify.launch.rules.settings import Values

_CONFIG = "actor_train.strategy_args.strategy_config"
_STOPS = "ROLL stops at its own check of settings: change one of them"


def refused(values: Values, *, gpus: int | None, megatron: bool, experts: int) -> Iterator[Issue]:
    """Everything that ROLL stops at. `gpus`: those of actor_train. `experts`: 0 for a dense or unknown model."""
    yield from (*_batch(values, gpus), *_mixture(values, experts)) if megatron else ()
    key = "actor_infer.strategy_args.strategy_name"
    name = values.text(key)
    if name is not None and name not in ("vllm", "sglang"):
        yield values.issue((key,), f"{key}: vllm or sglang", "ROLL stops: it generates with one of the two")
    yield from _lora(values, name)
    ratio, level = "async_generation_ratio", "generate_opt_level"
    if (values.decimal(ratio, 0.0) or 0.0) > 0 and values.number(level, 1) == 0:
        yield values.issue((ratio, level), f"{level} = 1 with {ratio}", _STOPS)
    if values.on("is_pure_opd") and values.on("use_opd"):
        yield values.issue(("is_pure_opd", "use_opd"), "one of is_pure_opd and use_opd", _STOPS)
    if values.on("profiler_timeline") and values.on("profiler_memory"):
        names = ("profiler_timeline", "profiler_memory")
        yield values.issue(names, "one of profiler_timeline and profiler_memory", _STOPS)
    if values.on("use_opd") and values.word("reference.strategy_args.strategy_name"):
        names = ("use_opd", "reference.strategy_args.strategy_name")
        yield values.issue(names, "a teacher in place of reference with use_opd", _STOPS)


def _lora(values: Values, engine: str | None) -> Iterator[Issue]:
    """An adapter that only one of trainer and engine has. Either has one by `lora_target`, of rank 8 by default.

    Source: ROLL `configs/model_args.py`, `distributed/strategy/vllm_strategy.py`, `sglang_strategy.py`.
    """
    targets = [f"{role}.model_args.lora_target" for role in ("actor_train", "actor_infer")]
    ranks = [f"{role}.model_args.lora_rank" for role in ("actor_train", "actor_infer")]
    trains, serves = (
        None if values.word(key) is None and not values.off(key) else not values.off(key) for key in targets
    )
    if trains and engine == "sglang":
        key = "actor_infer.strategy_args.strategy_name"
        yield values.issue((key, targets[0]), f"{key}: vllm with {targets[0]}", "ROLL stops: only vLLM takes adapters")
    elif trains and serves is False:
        hint = "ROLL sends the adapter to an engine that has no place for it: give actor_infer the same LoRA settings"
        yield values.issue(targets[::-1], f"{targets[1]} with {targets[0]}", hint)
    elif serves and trains is False:
        hint = "ROLL sends whole weights to an engine whose layers wait for an adapter: give both or neither"
        yield values.issue(targets, f"{targets[0]} with {targets[1]}", hint)
    rank, most = (values.number(key, 8) for key in ranks)
    if trains and serves and rank and most and rank > most:
        hint = "vLLM takes no adapter above its rank: give actor_infer the rank of actor_train"
        yield values.issue(ranks[::-1], f"{ranks[1]} of at least {rank}, the rank of actor_train", hint)


def _batch(values: Values, gpus: int | None) -> Iterator[Issue]:
    names = ("tensor_model", "pipeline_model", "context")
    sizes = [values.number(f"{_CONFIG}.{name}_parallel_size", 1) for name in names]
    batch = values.number("rollout_batch_size", 128)
    if gpus is None or batch is None or not all(sizes):
        return
    product = (sizes[0] or 1) * (sizes[1] or 1) * (sizes[2] or 1)
    ranks = gpus // product
    if gpus % product == 0 and ranks > 1 and batch % ranks:
        expected = f"rollout_batch_size that divides by data parallel ranks = {gpus} / {product} = {ranks}"
        yield values.issue(("rollout_batch_size",), expected, _STOPS)


def _mixture(values: Values, experts: int) -> Iterator[Issue]:
    tp, sequence = f"{_CONFIG}.tensor_model_parallel_size", f"{_CONFIG}.sequence_parallel"
    # mcore_adapter turns it on by itself where experts are cut over ranks.
    alone = values.number(f"{_CONFIG}.expert_model_parallel_size", 1) == 1
    if experts and alone and (values.number(tp, 1) or 1) > 1 and values.on(sequence) is False:
        yield values.issue((tp, sequence), f"{sequence}: true: {MIXTURE}", MIXTURE_HINT)

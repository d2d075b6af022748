"""What verl refuses of a job's settings.

Source: verl 1dda039 (2026-08) `utils/config.py` (validate_config), `workers/config/actor.py`, `critic.py` and
`rollout.py` (__post_init__, validate), `workers/engine_workers.py` (train_mini_batch) and
`workers/rollout/vllm_rollout/utils.py` (get_vllm_max_lora_rank), `vllm_async_server.py` (_apply_quantization),
`async_sglang_server.py` and `trtllm_async_server.py`, `trainer/ppo/ray_trainer.py` (_save_checkpoint) and
`utils/checkpoint/megatron_checkpoint_manager.py`; megatron-core `moe_layer.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from verify.issue import Issue
from verify.launch.rules.megatron import MIXTURE, MIXTURE_HINT
from verify.launch.rules.settings import Values

_AR = "actor_rollout_ref"
_ACTOR, _ROLLOUT, _REF = f"{_AR}.actor", f"{_AR}.rollout", f"{_AR}.ref"
_STOPS = "verl stops at its own check of settings: change one of them"
_AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
_RANKS, _ADAPTER = (f"{_AR}.model.lora.rank", f"{_AR}.model.lora_rank"), f"{_AR}.model.lora_adapter_path"
_MAX_RANK = 512
# What `rollout.quantization` may be, by engine; verl 0.7.1 lacks "ascend".
_QUANTIZATIONS = {"vllm": ("fp8", "torchao", "ascend"), "sglang": ("fp8",), "trtllm": ("fp8",)}


def refused(values: Values, *, gpus: int | None, megatron: bool, reference: bool, experts: int) -> Iterator[Issue]:
    """Everything that verl stops at. `experts`: those of the model; 0 for a dense or unknown one."""
    # A launch that says nothing of its batches is taken for a part of one.
    batches = values.word("data.train_batch_size") or values.word(f"{_ACTOR}.ppo_mini_batch_size")
    if batches and values.on(f"{_ACTOR}.use_dynamic_bsz") is False:
        yield from (*_batches(values, gpus, megatron), *_micro_batches(values, reference))
    yield from (*_rollout(values), *_quantization(values), *_loss(values))
    yield from _mixture(values, experts) if megatron else (*_sequences(values), *_tracker(values))


def _batches(values: Values, gpus: int | None, megatron: bool) -> Iterator[Issue]:
    keys = ("data.train_batch_size", f"{_ROLLOUT}.n", f"{_ACTOR}.ppo_mini_batch_size")
    batch, samples = values.number(keys[0], 1024), values.number(keys[1], 1)
    mini = values.number(keys[2], 256)
    if batch is not None and mini is not None and batch < mini:
        yield values.issue((keys[0], keys[2]), f"{keys[0]} of at least {keys[2]}", _STOPS)
    least = _least(values, gpus, megatron)
    if batch and samples and least and (batch * samples) % least:
        product = f"{batch} x {samples} = {batch * samples}"
        what = "data parallel ranks x ppo_micro_batch_size_per_gpu" if megatron else "the GPUs"
        expected = f"{keys[0]} x {keys[1]} = {product} that divides by {what} = {least}"
        yield values.issue(keys[:2], expected, _STOPS)
    micro = values.number(f"{_ACTOR}.ppo_micro_batch_size")
    if micro and mini and mini % micro:
        names = (keys[2], f"{_ACTOR}.ppo_micro_batch_size")
        yield values.issue(names, f"{names[0]} that divides by {names[1]}", _STOPS)


def _least(values: Values, gpus: int | None, megatron: bool) -> int | None:
    """The samples that every step needs a multiple of."""
    if not megatron or gpus is None:
        return gpus
    prefix = f"{_ACTOR}.megatron"
    names = ("tensor_model", "pipeline_model", "context")
    sizes = [values.number(f"{prefix}.{name}_parallel_size", 1) for name in names]
    micro = values.number(f"{_ACTOR}.ppo_micro_batch_size_per_gpu")
    if micro is None or not all(sizes):
        return None
    product = 1
    for size in sizes:
        product *= size or 1
    return gpus // product * micro if gpus % product == 0 else None


def _micro_batches(values: Values, reference: bool) -> Iterator[Issue]:
    """A size for each GPU, or the older one for all of them, and not both."""
    roles = [(_ACTOR, "ppo_micro_batch_size"), (_ROLLOUT, "log_prob_micro_batch_size")]
    roles += [(_REF, "log_prob_micro_batch_size")] if reference else []
    for prefix, name in roles:
        old, new = f"{prefix}.{name}", f"{prefix}.{name}_per_gpu"
        if values.off(old) and values.off(new):
            yield values.issue((new,), f"{new}, or {_ACTOR}.use_dynamic_bsz=True", "verl stops: give one of them")
        elif values.word(old) and values.word(new):
            yield values.issue((old, new), f"only {new}", f"verl stops: leave {old} out")


def _rollout(values: Values) -> Iterator[Issue]:
    name, stages = values.text(f"{_ROLLOUT}.name"), f"{_ROLLOUT}.pipeline_model_parallel_size"
    if name in ("vllm", "sglang", "trtllm") and (values.number(stages, 1) or 1) > 1:
        yield values.issue((stages,), f"{stages} = 1: verl serves in one stage", "verl stops: leave it out")
    keys = [f"{_ROLLOUT}.{one}_size" for one in ("expert_parallel", "tensor_model_parallel", "data_parallel")]
    ep, tp, dp = values.number(keys[0], 1), values.number(keys[1], 2), values.number(keys[2], 1)
    if name != "trtllm" and ep and tp and dp and ep > 1 and ep != tp * dp:
        yield values.issue(keys, f"{keys[0]} = tensor x data parallel ranks = {tp * dp}, or 1", _STOPS)
    if values.text(f"{_ROLLOUT}.mode") == "sync":
        hint = "verl stops from 0.7 on: leave it out, or set async"
        yield values.issue((f"{_ROLLOUT}.mode",), f"{_ROLLOUT}.mode = async", hint, "warning")
    yield from _lora(values)
    for key in _RANKS if name == "vllm" and values.on(f"{_AR}.model.lora.merge") is False else ():
        if (values.number(key, 0) or 0) > _MAX_RANK:
            yield values.issue((key,), f"a rank of at most {_MAX_RANK}, which vLLM takes", "verl stops")


def _lora(values: Values) -> Iterator[Issue]:
    """An adapter that only one of trainer and engine has. One setting gives it to both, but not to every engine.

    Source: verl `workers/rollout/vllm_rollout/vllm_async_server.py`; `sglang_rollout.py` sends what it is given as
    weights, as of 2026-01.
    """
    rank = next((key for key in _RANKS if (values.number(key, 0) or 0) > 0), None)
    name = values.text(f"{_ROLLOUT}.name")
    switch = f"{_ROLLOUT}.engine_kwargs.{name or 'vllm'}.enable_lora"
    if rank and name in ("sglang", "trtllm") and values.on(f"{_AR}.model.lora.merge") is False:
        expected = f"{_ROLLOUT}.name = vllm, or {_AR}.model.lora.merge = True, with {rank}"
        hint = f"verl gives no adapter to {name}, which generates with the base model"
        yield values.issue((rank, f"{_ROLLOUT}.name"), expected, hint, "warning")
    if values.on(switch) and all(values.off(key) or values.number(key) == 0 for key in (*_RANKS, _ADAPTER)):
        hint = "verl sends whole weights to an engine whose layers wait for an adapter: leave it out"
        yield values.issue((switch, _RANKS[1]), f"{_RANKS[1]} with {switch}", hint)


def _quantization(values: Values) -> Iterator[Issue]:
    """How the rollout packs what it is sent. Quantization-aware training decides it for vLLM instead."""
    name, key = values.text(f"{_ROLLOUT}.name"), f"{_ROLLOUT}.quantization"
    method, known = values.text(key), _QUANTIZATIONS.get(name or "")
    aware = (f"{_ACTOR}.fsdp_config.qat.enable", f"{_ACTOR}.megatron.qat.enable", f"{_ROLLOUT}.qat.enable")
    if method is None or known is None or (name == "vllm" and any(values.on(one) is not False for one in aware)):
        return
    if method not in known:
        hint = "verl stops while it starts the engine: correct it, or leave it out"
        yield values.issue((key,), f"{key} for {name}: {' or '.join(known)}", hint)
    load = f"{_ROLLOUT}.load_format"
    if name == "trtllm" and method == "fp8" and values.text(load, "dummy") not in (None, "dummy"):
        yield values.issue((load, key), f"{load} = dummy with {key}", "verl stops: leave it out")


def _loss(values: Values) -> Iterator[Issue]:
    key = f"{_ACTOR}.loss_agg_mode"
    mode = values.text(key, _AGGREGATIONS[0])
    if mode is not None and mode not in _AGGREGATIONS:
        yield values.issue((key,), f"{key}: one of {', '.join(_AGGREGATIONS)}", "verl stops: correct it")


def _sequences(values: Values) -> Iterator[Issue]:
    """Ulysses without packed sequences."""
    key, padding = f"{_ACTOR}.ulysses_sequence_parallel_size", f"{_AR}.model.use_remove_padding"
    if (values.number(key, 1) or 1) > 1 and values.on(padding, None) is False:
        yield values.issue((key, padding), f"{padding}=True with {key}", "verl stops: turn it on")


def _tracker(values: Values) -> Iterator[Issue]:
    """Nobody writes the tracker of an asynchronous save but Megatron's checkpoint manager."""
    key = f"{_ACTOR}.checkpoint.async_save"
    if values.on(key) and values.text("trainer.resume_mode", "auto") == "auto":
        hint = "leave it out: FSDP saves at once, nobody writes the tracker, and the next run starts from step 0"
        yield values.issue((key,), f"{key}=False without Megatron", hint, "warning")


def _mixture(values: Values, experts: int) -> Iterator[Issue]:
    prefix = f"{_ACTOR}.megatron"
    tp, sequence = f"{prefix}.tensor_model_parallel_size", f"{prefix}.sequence_parallel"
    if experts and (values.number(tp, 1) or 1) > 1 and values.on(sequence, None) is False:
        yield values.issue((tp, sequence), f"{sequence}=True: {MIXTURE}", MIXTURE_HINT)

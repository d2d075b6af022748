"""What NeMo-RL refuses of a job's settings.

Source: NeMo-RL 7ea279a (2026-08) `models/policy/lm_policy.py` (Policy), `algorithms/grpo.py` (setup,
async_grpo_train), `algorithms/distillation.py`, `models/generation/vllm/quantization/fp8.py` (init_fp8),
`models/megatron/setup.py`, `models/automodel/setup.py`,
`models/policy/workers/dtensor_policy_worker.py`; megatron-core `moe_layer.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from verify.issue import Issue
from verify.launch.rules.megatron import MIXTURE, MIXTURE_HINT
from verify.launch.rules.settings import Values

_MEGATRON, _DTENSOR, _DRAFT = "policy.megatron_cfg", "policy.dtensor_cfg", "policy.draft.enabled"
_PACKING, _DYNAMIC = "policy.sequence_packing.enabled", "policy.dynamic_batching.enabled"
_GENERATION = "policy.generation"
_STOPS = "NeMo-RL stops at its own check of settings: change one of them"
# Above this many tensor parallel ranks log-probabilities depend on the size of a batch.
_ACCURATE = 4


def refused(values: Values, *, megatron: bool, experts: int) -> Iterator[Issue]:
    """Everything that NeMo-RL stops at. `experts`: those of the model; 0 for a dense or unknown one."""
    yield from (*_backends(values, megatron), *_accuracy(values, megatron), *_packing(values, megatron))
    yield from (*_grpo(values), *_asynchronous(values), *_mixture(values, megatron, experts), *_resources(values))
    yield from _fp8(values, megatron)


def _backends(values: Values, megatron: bool) -> Iterator[Issue]:
    keys = (f"{_MEGATRON}.enabled", f"{_DTENSOR}.enabled")
    if megatron and values.on(keys[1]):
        yield values.issue(keys, "one of Megatron and DTensor enabled", "NeMo-RL stops: turn one of them off")
    if not megatron and values.on(keys[0]) is False and values.on(keys[1]) is False:
        yield values.issue(keys, "Megatron or DTensor enabled", "NeMo-RL stops: turn one of them on")
    if values.on(_DRAFT) and not megatron:
        yield values.issue((_DRAFT, keys[0]), f"{keys[0]}=true with {_DRAFT}", _STOPS)
    if values.on(_DRAFT) and values.on(_PACKING):
        yield values.issue((_DRAFT, _PACKING), f"{_PACKING}=false with {_DRAFT}", _STOPS)
    older = not megatron and values.on(f"{_DTENSOR}._v2") is False and values.on(f"{_DTENSOR}.enabled")
    if older and values.on(f"{_DTENSOR}.lora_cfg.enabled"):
        names = (f"{_DTENSOR}.lora_cfg.enabled", f"{_DTENSOR}._v2")
        yield values.issue(names, f"{names[1]}=true with LoRA", _STOPS)


def _accuracy(values: Values, megatron: bool) -> Iterator[Issue]:
    tp = f"{_MEGATRON}.tensor_model_parallel_size" if megatron else f"{_DTENSOR}.tensor_parallel_size"
    keys = ("policy.train_micro_batch_size", "policy.logprob_batch_size")
    train, probabilities = values.number(keys[0]), values.number(keys[1])
    if values.environment.get("NRL_IGNORE_TP_ACCURACY_CHECK") or values.on("loss_fn.force_on_policy_ratio"):
        return
    if train and probabilities and train != probabilities and (values.number(tp, 1) or 1) >= _ACCURATE:
        expected = f"{keys[0]} = {keys[1]} with {_ACCURATE} tensor parallel ranks or more"
        hint = "NeMo-RL stops at it, unless NRL_IGNORE_TP_ACCURACY_CHECK=1 is set for the job"
        yield values.issue((*keys, tp), expected, hint, "warning")


def _packing(values: Values, megatron: bool) -> Iterator[Issue]:
    if values.on(_DYNAMIC) and values.on(_PACKING):
        yield values.issue((_DYNAMIC, _PACKING), f"one of {_DYNAMIC} and {_PACKING}", _STOPS)
    stages = f"{_MEGATRON}.pipeline_model_parallel_size"
    if megatron and values.on(_DYNAMIC) and (values.number(stages, 1) or 1) > 1:
        yield values.issue((_DYNAMIC, stages), f"{stages} = 1 with {_DYNAMIC}", _STOPS)
    key = f"{_MEGATRON if megatron else _DTENSOR}.context_parallel_size"
    if (values.number(key, 1) or 1) < 2:
        return
    if megatron and values.on(_PACKING, None) is False:
        yield values.issue((key, _PACKING), f"{_PACKING}=true with {key}", _STOPS)
    if not megatron and values.on(_PACKING):
        yield values.issue((key, _PACKING), f"{_PACKING}=false with {key}", _STOPS)
    tp, sequence = f"{_DTENSOR}.tensor_parallel_size", f"{_DTENSOR}.sequence_parallel"
    if not megatron and values.on(sequence) and (values.number(tp, 1) or 1) > 1:
        yield values.issue((key, sequence), f"{sequence}=false with {key}", _STOPS)


def _grpo(values: Values) -> Iterator[Issue]:
    keys = ("grpo.num_prompts_per_step", "grpo.num_generations_per_prompt", "policy.train_global_batch_size")
    prompts, samples, batch = (values.number(key) for key in keys)
    if prompts and samples and batch and values.on("loss_fn.force_on_policy_ratio") and prompts * samples != batch:
        expected = f"{keys[2]} = prompts x generations = {prompts * samples} with loss_fn.force_on_policy_ratio"
        yield values.issue(keys, expected, _STOPS)
    key = "grpo.batch_multiplier"
    if (values.decimal(key, 1.0) or 1.0) != 1 and values.on("grpo.use_dynamic_sampling") is False:
        names = (key, "grpo.use_dynamic_sampling")
        yield values.issue(names, f"{key} = 1 without dynamic sampling", _STOPS)
    skip, penalty = "grpo.skip_reference_policy_logprobs_calculation", "loss_fn.reference_policy_kl_penalty"
    if values.on(skip) and (values.decimal(penalty, 0.0) or 0.0):
        yield values.issue((skip, penalty), f"{penalty} = 0 with {skip}", _STOPS)


def _asynchronous(values: Values) -> Iterator[Issue]:
    if not values.on("grpo.async_grpo.enabled"):
        return
    on, backend = "grpo.async_grpo.enabled", values.text(f"{_GENERATION}.backend")
    if backend == "sglang":
        expected = "vllm, megatron, trtllm or dynamo with grpo.async_grpo"
        yield values.issue((f"{_GENERATION}.backend", on), expected, _STOPS)
    key = f"{_GENERATION}.vllm_cfg.async_engine"
    if backend == "vllm" and values.on(key) is False:
        yield values.issue((key, on), f"{key}=true with grpo.async_grpo", _STOPS)
    key = "loss_fn.use_importance_sampling_correction"
    if values.on(key) is False:
        yield values.issue((key, on), f"{key}=true with grpo.async_grpo", _STOPS)
    key = f"{_GENERATION}.colocated.enabled"
    if backend not in (None, "megatron") and values.on(key, True):
        yield values.issue((key, on), f"{key}=false with grpo.async_grpo", _STOPS)


def _fp8(values: Values, megatron: bool) -> Iterator[Issue]:
    """vLLM in FP8 or MXFP8, and its cache in FP8, of GRPO."""
    engine = f"{_GENERATION}.vllm_cfg"
    precision, cache, mx = (f"{engine}.{name}" for name in ("precision", "kv_cache_dtype", "is_mx"))
    kind, weights = values.text(cache, "auto"), values.text(precision, "auto")
    if values.text(f"{_GENERATION}.backend") != "vllm" or kind is None or weights is None:
        return
    grpo, fp8 = not values.off("grpo.num_prompts_per_step"), weights == "fp8"
    for name in ("pow2_weight_scaling_factors", "pow2_activation_scaling_factors") if fp8 and values.on(mx) else ():
        if values.on(f"{engine}.{name}", None) is False:
            yield values.issue((f"{engine}.{name}", mx), f"{engine}.{name} = true with {mx}", _STOPS)
    if fp8 and kind not in ("auto", "fp8", "fp8_e4m3"):
        yield values.issue((cache,), f"{cache}: auto, fp8 or fp8_e4m3", _STOPS)
    correction = "loss_fn.use_importance_sampling_correction"
    if grpo and fp8 and values.on(correction, None) is False:
        yield values.issue((correction, precision), f"{correction}=true with {precision} fp8", _STOPS)
    if not (grpo and kind.startswith("fp8")):
        return
    if not fp8:
        yield values.issue((cache, precision), f"{precision} = fp8 with a cache in FP8", _STOPS)
    if values.on(f"{_DTENSOR}.enabled"):
        yield values.issue((cache, f"{_DTENSOR}.enabled"), "Megatron with a cache in FP8", _STOPS)
    if values.on(key := f"{engine}.async_engine"):
        yield values.issue((cache, key), f"{key}=false with a cache in FP8", _STOPS)
    stages = f"{_MEGATRON}.pipeline_model_parallel_size"
    if megatron and (values.number(stages, 1) or 1) > 1:
        yield values.issue((cache, stages), f"{stages} = 1 with a cache in FP8", _STOPS)


def _mixture(values: Values, megatron: bool, experts: int) -> Iterator[Issue]:
    tp, sequence = f"{_MEGATRON}.tensor_model_parallel_size", f"{_MEGATRON}.sequence_parallel"
    if megatron and experts and (values.number(tp, 1) or 1) > 1 and values.on(sequence, None) is False:
        yield values.issue((tp, sequence), f"{sequence}=true: {MIXTURE}", MIXTURE_HINT)


def _resources(values: Values) -> Iterator[Issue]:
    """GPUs that generation has for itself, on several nodes."""
    key, nodes = f"{_GENERATION}.colocated.resources", values.number("cluster.num_nodes")
    if values.on(f"{_GENERATION}.colocated.enabled", True) is not False or nodes is None or nodes < 2:
        return
    own, each = values.number(f"{key}.gpus_per_node"), values.number("cluster.gpus_per_node")
    if own and each and own != each and (values.number(f"{key}.num_nodes") or 0) > 0:
        names = (f"{key}.gpus_per_node", "cluster.gpus_per_node")
        yield values.issue(names, f"{names[0]} = {names[1]} on several nodes", _STOPS)

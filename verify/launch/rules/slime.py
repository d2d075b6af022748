"""What slime, miles and vime refuse of a launch, or only warn of.

Source: slime 624b824 `utils/arguments.py` (slime_validate_args), `train_async.py`, `utils/dp_schedule.py`,
`backends/sglang_utils/arguments.py` (validate_args) and `backends/megatron_utils/arguments.py`; miles 31f1ca9
`utils/arguments.py` (miles_validate_args, hf_validate_args, validate_async_off_policy_correction), `train_async.py`,
`utils/dp_schedule.py`, `ray/rollout/rollout_data_conversion.py`; vime `utils/arguments.py` (vime_validate_args).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from converters.config.values import class_of
from verify.issue import Issue
from verify.launch.rules.options import Excludes, Needs, Options, broken

_STOPS = "the trainer stops at its own check of arguments: give it, or leave the first out"
# Models of slime with sparse attention, and those that miles alone trains with contiguous parts.
_CONTIGUOUS = frozenset(
    {
        *("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"),
        *("DeepseekV4ForCausalLM", "InklingForConditionalGeneration"),
    }
)
_ROWS: tuple[Needs | Excludes, ...] = (
    *(Needs(one, ("save",), _STOPS) for one in ("save_interval", "release_train", "save_trigger_sentinel")),
    Needs("custom_megatron_post_save_hook_path", ("save",), _STOPS),
    Needs("use_opd", ("opd_type",), _STOPS),
    Needs("opd_teacher_load", ("use_opd",), _STOPS),
    Needs("opd_teacher_urls", ("use_opd",), _STOPS),
    Needs("use_dynamic_batch_size", ("max_tokens_per_gpu",), _STOPS),
    Needs("balance_by_flops", ("use_dynamic_batch_size",), _STOPS),
    Needs("use_dynamic_global_batch_size", ("use_dynamic_batch_size",), _STOPS, unless=("lora_rank",)),
    Needs("enable_mtp_training", ("mtp_num_layers",), _STOPS),
    Needs("get_mismatch_metrics", ("custom_tis_function_path",), _STOPS),
    Needs("eval_interval", ("eval_prompt_data", "eval_config"), _STOPS),
    Needs("use_kl_loss", ("ref_load",), "the trainer stops: the KL term needs the reference's weights"),
    Needs("recompute_logprobs_via_prefill", ("true_on_policy_mode",), _STOPS),
    Excludes("use_rollout_logprobs", "use_tis", "the trainer stops: leave one of them out"),
    Excludes("debug_rollout_only", "debug_train_only", "the trainer stops: leave one of them out"),
    Excludes("only_train_params_name_list", "freeze_params_name_list", "slime stops: leave one of them out"),
    *(
        Excludes(config, "prefill_num_servers", "the trainer stops: give the servers in the YAML file")
        for config in ("sglang_config", "vllm_config")
    ),
    *(
        Excludes(one, "rollout_external_engine_addrs", "the trainer stops: external engines are as they are")
        for one in ("sglang_config", "prefill_num_servers")
    ),
)


def refused(options: Options) -> Iterator[Issue]:
    """Everything that a check of these stacks stops at, and what they only warn of as a warning."""
    yield from broken(_ROWS, options)
    for rule in _RULES:
        yield from rule(options)


def _asynchronous(options: Options) -> Iterator[Issue]:
    if options.program != "train_async.py":
        return
    if options.on("colocate"):
        expected = "no --colocate with train_async.py, which generates and trains at once"
        yield options.issue(("colocate",), expected, "the trainer stops: leave --colocate out, or start train.py")
    correction = ("use_rollout_logprobs", "use_tis", "keep_old_actor")
    if options.miles and options.value("advantage_estimator") == "ppo" and all(map(options.off, correction)):
        expected = "--use-rollout-logprobs, --use-tis or --keep-old-actor with PPO in train_async.py"
        yield options.issue(("advantage_estimator",), expected, "miles stops: samples come from an older policy")


def _kl(options: Options) -> Iterator[Issue]:
    in_reward, in_loss = options.value("kl_coef", 0.0), options.value("kl_loss_coef", 0.0)
    if in_reward and in_loss:
        expected = "only one of --kl-coef and --kl-loss-coef above 0"
        yield options.issue(("kl_coef", "kl_loss_coef"), expected, "the trainer stops: set one of them to 0")
    if in_reward and options.off("ref_load"):
        expected = "--ref-load with --kl-coef"
        hint = "the trainer stops: the KL term needs the reference's weights"
        yield options.issue(("kl_coef", "ref_load"), expected, hint)


def _estimator(options: Options) -> Iterator[Issue]:
    estimator = options.value("advantage_estimator", "grpo")
    if estimator in ("reinforce_plus_plus", "reinforce_plus_plus_baseline") and options.off("normalize_advantages"):
        expected = f"--normalize-advantages with --advantage-estimator {estimator}"
        yield options.issue(("advantage_estimator", "normalize_advantages"), expected, _STOPS)
    if options.miles and estimator == "ppo" and options.value("megatron_to_hf_mode") == "bridge":
        expected = "--megatron-to-hf-mode raw with a critic"
        hint = "miles stops: its critic is not built through a bridge"
        yield options.issue(("advantage_estimator", "megatron_to_hf_mode"), expected, hint)
    if options.miles and estimator == "ppo" and options.value("kl_coef", 0.0):
        expected = "--use-kl-loss in place of --kl-coef with PPO in miles"
        hint = "miles stops: its critic never sees the reference's log-probabilities"
        yield options.issue(("advantage_estimator", "kl_coef"), expected, hint)
    if estimator == "cispo" and (clip := options.value("eps_clip", 0.2)) is not None and clip < 1:
        expected = "--eps-clip 1.0 with cispo, which has no lower bound"
        hint = "slime only warns: the lower bound stays active"
        yield options.issue(("advantage_estimator", "eps_clip"), expected, hint, "warning")


def _teacher(options: Options) -> Iterator[Issue]:
    kind = options.value("opd_type") if options.on("use_opd") else None
    if kind == "megatron" and options.off("opd_teacher_load"):
        yield options.issue(("opd_type",), "--opd-teacher-load with --opd-type megatron", _STOPS)
    if kind in ("sglang", "vllm") and options.on("opd_teacher_load"):
        expected = f"no --opd-teacher-load with --opd-type {kind}, whose teacher is a server"
        yield options.issue(("opd_teacher_load", "opd_type"), expected, "the trainer stops: leave it out")
    if kind is not None and kind != "sglang" and (options.value("opd_log_prob_top_k", 0) or 0) > 0:
        yield options.issue(("opd_log_prob_top_k", "opd_type"), "--opd-type sglang with --opd-log-prob-top-k", _STOPS)


def _batches(options: Options) -> Iterator[Issue]:
    prompts, samples = options.value("rollout_batch_size"), options.value("n_samples_per_prompt", 1)
    steps, batch = options.value("num_steps_per_rollout"), options.value("global_batch_size")
    names = ("global_batch_size", "rollout_batch_size", "n_samples_per_prompt", "num_steps_per_rollout")
    whole = prompts * samples if prompts and samples else None
    if whole and steps and batch and batch != whole // steps:
        product = f"{prompts} x {samples} / {steps} = {whole // steps}"
        expected = f"global_batch_size = rollout_batch_size x n_samples_per_prompt / num_steps_per_rollout = {product}"
        yield options.issue(names, expected, "the trainer stops: leave one of the two out")
    elif whole and batch and not steps and not _other_samples(options):
        product = f"{prompts} x {samples} = {whole}"
        if whole < batch:
            expected = f"global_batch_size of at most rollout_batch_size x n_samples_per_prompt = {product}"
            yield options.issue(names[:3], expected, "the trainer stops: a rollout has fewer samples than one step")
        elif whole % batch:
            expected = f"global_batch_size that divides rollout_batch_size x n_samples_per_prompt = {product}"
            hint = f"the last {whole % batch} samples of every rollout are not trained on"
            yield options.issue(names[:3], expected, hint, "warning")
    over = options.value("over_sampling_batch_size")
    if over and prompts and over < prompts:
        expected = "over_sampling_batch_size of at least rollout_batch_size"
        yield options.issue(("over_sampling_batch_size", "rollout_batch_size"), expected, _STOPS)


def _other_samples(options: Options) -> bool:
    """Whether a rollout may have other samples than a number of each prompt, or the batch another size."""
    names = ("rollout_function_path", "custom_generate_function_path", "custom_convert_samples_to_train_data_path")
    more = ("use_dynamic_global_batch_size", "rollout_data_postprocess_path", "lora_rank", "data_source_path")
    return any(not options.off(name) for name in (*names, *more))


def _micro_batches(options: Options) -> Iterator[Issue]:
    """Micro-batches of a fixed size over data parallel ranks."""
    dynamic = ("use_dynamic_batch_size", "use_dynamic_global_batch_size")
    if any(not options.off(name) for name in dynamic) or _other_samples(options):
        return
    batch, micro = options.value("global_batch_size"), options.value("micro_batch_size", 1)
    nodes, each = options.value("actor_num_nodes", 1), options.value("actor_num_gpus_per_node", 8)
    sizes = [options.value(f"{one}_parallel_size", 1) for one in ("tensor_model", "pipeline_model", "context")]
    if not (batch and micro and nodes and each and all(sizes)) or not options.on("actor_num_gpus_per_node"):
        return
    ranks, rest = divmod(nodes * each, sizes[0] * sizes[1] * sizes[2])
    if not rest and ranks and batch % (ranks * micro):
        product = f"{ranks} x {micro} = {ranks * micro}"
        expected = f"global_batch_size that divides by data parallel ranks x micro_batch_size = {product}"
        hint = "the trainer stops in its first step: change one of them, or give --use-dynamic-batch-size"
        yield options.issue(("global_batch_size", "micro_batch_size"), expected, hint)


def _length(options: Options) -> Iterator[Issue]:
    prompt, context = options.value("rollout_max_prompt_len"), options.value("rollout_max_context_len")
    if prompt and context and prompt >= context:
        names = ("rollout_max_prompt_len", "rollout_max_context_len")
        yield options.issue(names, "rollout_max_prompt_len below rollout_max_context_len", _STOPS)
    whole = options.on("rollout_batch_size") and not options.on("dumper_enable")
    if whole and options.off("num_rollout") and options.off("num_epoch"):
        expected = "--num-rollout or --num-epoch"
        yield options.issue(("num_rollout", "num_epoch"), expected, "the trainer stops: give one of them")
    if options.on("num_rollout") and options.on("num_epoch"):
        hint = "--num-epoch is ignored, which the trainer only logs"
        yield options.issue(("num_rollout", "num_epoch"), "one of --num-rollout and --num-epoch", hint, "warning")
    temperature = options.value("rollout_temperature", 1.0)
    if temperature is not None and temperature <= 0:
        expected = "--rollout-temperature above 0"
        yield options.issue(("rollout_temperature",), expected, "slime stops: greedy text is not a sample of a policy")
    if options.value("n_samples_per_prompt", 0) == 1 and _grouped(options):
        expected = "--n-samples-per-prompt above 1 with advantages within a group"
        hint = "the trainer only logs it: the only sample of a group is its own mean, so every advantage is 0"
        yield options.issue(("n_samples_per_prompt",), expected, hint, "warning")


def _resumed(options: Options) -> Iterator[Issue]:
    """A run goes on with the rollout behind the iteration that it loads. A critic may have loaded another."""
    rollouts, names = options.value("num_rollout"), ("num_rollout", "start_rollout_id")
    other = ("start_rollout_id", "finetune", "debug_rollout_only")
    ppo = options.value("advantage_estimator", "grpo") in ("ppo", None)
    if options.resumed and rollouts and rollouts <= options.resumed + 1 and all(map(options.off, other)) and not ppo:
        expected = f"--num-rollout above {options.resumed + 1}, as --load goes on from iteration {options.resumed}"
        hint = "the run ends without a step of training, as if it were done: --num-rollout counts from the first start"
        yield options.issue(names, expected, hint, "warning")


def _grouped(options: Options) -> bool:
    """Whether rewards less their group's mean are the whole advantage."""
    other = ("use_opd", "disable_rewards_normalization", "custom_advantage_function_path")
    more = ("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path", "rollout_function_path")
    plain = all(map(options.off, (*other, *more))) and options.value("loss_type", "policy_loss") == "policy_loss"
    return plain and options.value("advantage_estimator", "grpo") in ("grpo", "gspo", "cispo")


def _transport(options: Options) -> Iterator[Issue]:
    """Ways of sending weights other than NCCL: slime's mode and transport, miles' transfer mode."""
    delta = options.value("update_weight_mode") == "delta"
    disk = options.value("update_weight_transport", "nccl") == "disk"
    mode = options.value("update_weight_transfer_mode")
    name = "update_weight_mode" if delta else "update_weight_transfer_mode"
    if delta and not disk and options.value("update_weight_transport", "nccl") is not None:
        expected = "--update-weight-transport disk with --update-weight-mode delta"
        yield options.issue((name, "update_weight_transport"), expected, _STOPS)
    if (disk or mode == "disk-delta") and options.off("update_weight_disk_dir"):
        expected = "--update-weight-disk-dir with weights that are sent by disk"
        yield options.issue(("update_weight_transport" if disk else name,), expected, _STOPS)
    if (delta or mode == "disk-delta") and options.off("update_weight_local_checkpoint_dir"):
        expected = "--update-weight-local-checkpoint-dir with weights that are sent as differences"
        yield options.issue((name,), expected, _STOPS)
    if (delta or mode in ("disk-delta", "p2p")) and options.on("colocate"):
        expected = f"no --colocate with --{name.replace('_', '-')} {'delta' if delta else mode}"
        yield options.issue((name, "colocate"), expected, "the trainer stops: leave one of them out")
    if mode in ("disk-delta", "p2p") and (options.value("lora_rank", 0) or 0) > 0:
        expected = f"no LoRA with --update-weight-transfer-mode {mode}"
        yield options.issue((name, "lora_rank"), expected, "miles stops: leave one of them out")


def _lora(options: Options) -> Iterator[Issue]:
    if (options.value("lora_rank", 0) or 0) > 0 and options.off("target_modules"):
        expected = "--target-modules with --lora-rank"
        yield options.issue(("lora_rank", "target_modules"), expected, "miles stops: say which layers have an adapter")
    trains = (options.value("lora_rank", 0) != 0, options.on("lora_adapter_path"), options.on("multi_lora_n_adapters"))
    for name in ("sglang_enable_lora", "sglang_lora_paths", "vllm_enable_lora") if not any(trains) else ():
        if options.on(name):
            hint = "the trainer sends whole weights to layers that wait for an adapter: leave the engine's option out"
            yield options.issue((name, "lora_rank"), f"--lora-rank with --{name.replace('_', '-')}", hint)
    if options.on("lora_train_only") and any(trains):
        hint = "the engine generates with the base model, which is not the policy that is trained: leave it out"
        names = ("lora_train_only", "lora_rank")
        yield options.issue(names, "an engine with the adapter of --lora-rank", hint, "warning")


def _others(options: Options) -> Iterator[Issue]:
    if options.value("qkv_format") == "bshd" and options.on("use_dynamic_batch_size"):
        expected = "--micro-batch-size in place of --use-dynamic-batch-size with --qkv-format bshd"
        yield options.issue(("qkv_format", "use_dynamic_batch_size"), expected, "miles stops: leave one of them out")
    engines, each = options.value("eval_num_gpus", 0), options.value("eval_num_gpus_per_engine", 1)
    if engines and each and engines % each:
        expected = "eval_num_gpus that divides by eval_num_gpus_per_engine"
        yield options.issue(("eval_num_gpus", "eval_num_gpus_per_engine"), expected, _STOPS)
    at_once, samples = options.value("async_max_concurrent_samples"), options.value("n_samples_per_prompt", 1)
    if at_once and samples and at_once < samples:
        expected = "async_max_concurrent_samples of at least n_samples_per_prompt"
        yield options.issue(("async_max_concurrent_samples", "n_samples_per_prompt"), expected, _STOPS)


def _context_parallel(options: Options) -> Iterator[Issue]:
    """Contiguous parts of the tokens are for sparse attention; any other takes its parts in zigzag order."""
    model = class_of(options.config)
    if (options.value("context_parallel_size", 1) or 1) <= 1 or not model or options.on("debug_rollout_only"):
        return
    names = ("allgather_cp", "context_parallel_size")
    if options.miles and model == "DeepseekV4ForCausalLM" and options.off("allgather_cp"):
        expected = "--allgather-cp with context_parallel_size above 1 for DeepSeek-V4"
        yield options.issue(names[::-1], expected, "miles stops: give it")
    elif not options.miles and options.on("allgather_cp") and model not in _CONTIGUOUS:
        expected = f"no --allgather-cp with context_parallel_size above 1 for {model}"
        hint = "slime stops: tokens would be in another order than this attention takes them; leave --allgather-cp out"
        yield options.issue(names, expected, hint)


_RULES: tuple[Callable[[Options], Iterator[Issue]], ...] = (
    *(_asynchronous, _kl, _estimator, _teacher, _batches, _micro_batches, _length, _transport, _lora, _others),
    *(_context_parallel, _resumed),
)

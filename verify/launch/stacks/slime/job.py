"""What a job of slime, miles, vime, Relax or Megatron-LM is, by the options of its launch.

And which of its options do not go together: samples, updates or an adapter are lost, mostly in silence.

Source: slime 624b824 `utils/arguments.py` (slime_validate_args), `train_async.py`, `utils/dp_schedule.py`,
`backends/megatron_utils/arguments.py`; miles 31f1ca9 `utils/arguments.py` (miles_validate_args),
`utils/dp_schedule.py`, `ray/rollout/rollout_data_conversion.py`; and what the modules beside this one name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from converters.config.values import class_of, language_part
from verify.issue import Issue
from verify.launch.arguments import LaunchArguments, launch_arguments
from verify.launch.checks.engine import engine_config
from verify.launch.job import Job, Launch, Stack, TrainedAdapter
from verify.launch.options.arguments import Arguments, parse_arguments
from verify.launch.options.argv import options_of
from verify.launch.options.names import names, trainer_options
from verify.launch.options.speculative import of_options
from verify.launch.sides import Side, is_trained
from verify.launch.stacks.sizes import NAMES
from verify.launch.stacks.slime.gpus import placement_of
from verify.launch.stacks.slime.sides import Paths, notes_of, role_files, sharing_of, sides_of, unread_of
from verify.launch.words import LaunchText, UnresolvedWord, Word

# Models with a wrapper that miles converts in mode raw. Source: miles 31f1ca9 `megatron_to_hf/__init__.py`.
_RAW_WRAPPERS = frozenset({"kimi_vl", "kimi_k25", "qwen3_5", "qwen3_5_moe", "qwen3_6", "qwen3_6_moe", "inkling"})
_CUTS = ("tp", "pp", "ep", "etp")
# A launch that gives one of these is of slime, miles or vime.
_TRAINERS = frozenset(
    {
        *("rollout_batch_size", "actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus_per_engine"),
        *("n_samples_per_prompt", "num_rollout", "advantage_estimator"),
    }
)


def read(launch: Launch) -> Job:
    """The job of a launch by options. Raises CkptkitError where nothing is given, and for values that are not read."""
    text = launch.text
    files = role_files(text.words)
    given = parse_arguments(text.words, files.common)
    mode = given.get("megatron_to_hf_mode").value
    paths = Paths.read(launch, files, mode, given.get("train_backend").value == "fsdp")
    if not (paths.hf or paths.hub or paths.load or paths.ref_load or text.unresolved or text.issues):
        hint = "give at least one of --hf-checkpoint, --load and --ref-load, or a launch script"
        raise CkptkitError("nothing to look at", hint)
    sides, unread = sides_of(launch, paths), unread_of(launch, paths)
    sizes = _sizes(launch, given, whole=bool(text.words) and not unread)
    updates = bool(sizes.qat or paths.load or paths.ref_load)
    return Job(
        STACK,
        text,
        next((path for path in (paths.hf, paths.load, paths.ref_load) if path), Path()),
        sides,
        paths.hf,
        sizes=dict.fromkeys(["actor", *(side.role for side in sides)], sizes),
        sizes_at={name: word for name in _CUTS if (word := given.get(NAMES[name]).word)},
        sharing=sharing_of(paths, sides),
        placement=placement_of(given, text.words, text.ranks, _is_miles(text)),
        speculation=of_options(given, text.words),
        adapter=_trained(given),
        updates=updates,
        arguments=given,
        written=_written(text),
        combinations=_combinations(text, paths, _resumed(paths, sides)),
        unread=unread,
        notes=notes_of(paths, sides),
        replaced=paths.replaced,
    )


def _sizes(launch: Launch, given: Arguments, whole: bool) -> LaunchArguments:
    """The sizes of every role: preflight's own where the words give none.

    Megatron's default of etp is tp; where the launch was not read as a whole, nobody knows.
    """
    found = launch_arguments(given, launch.text.words, launch.environment)
    tp, pp, ep = (getattr(found, name) or size for name, size in launch.given.sizes.items())
    return replace(found, tp=tp, pp=pp, ep=ep, etp=found.etp or (tp if whole else None))


def _written(text: LaunchText) -> dict[str, Word]:
    """The options that a launch writes, and where each stands first."""
    found: dict[str, Word] = {}
    for option in options_of(text.words):
        if not isinstance(option.word, UnresolvedWord):
            found.setdefault(option.name, option.word)
    return found


def _resumed(paths: Paths, sides: Sequence[Side]) -> int:
    """The iteration of `--load` that the actor goes on from; 0 where it starts anew, as from `--ref-load`."""
    actor = next((side for side in sides if side.role == "actor" and is_trained(side)), None)
    return int(actor.path.name[5:]) if actor and actor.path and actor.path.parent == paths.load else 0


def _combinations(text: LaunchText, paths: Paths, resumed: int) -> tuple[Issue, ...] | None:
    """Options that do not go together. slime judges the words before --custom-config-path sets anything."""
    given = parse_arguments(text.words)
    if _TRAINERS.isdisjoint(given.given):
        return None
    sequence = _sequence(given, paths.hf, _is_miles(text))
    raw = _raw(given, paths.hf) if _is_miles(text) else ()
    samples = (*_batches(given), *_micro_batches(given), *_advantages(given), *_rollouts(given, resumed))
    return (*samples, *_adapter(given), *_switches(given, text.program_name), *sequence, *raw)


def _is_miles(text: LaunchText) -> bool:
    """Whether the program is in a directory of miles, or an option is given that of these trainers only miles has."""
    if "miles" in text.program.split("/")[:-1]:
        return True
    miles, *others = (names(one).every for one in ("miles", "slime", "megatron-lm", "sglang-router"))
    given = {one.name.removeprefix("--") for one in options_of(text.words)}
    return not given.isdisjoint(miles.difference(*others))


STACK = Stack(
    "slime",
    read,
    trainer_options,
    "slime passes over what it does not know, miles and Megatron-LM stop",
    where="among the launch arguments",
    one_model=True,
    vllm_readers=("vllm", "slime"),
)


# Options with which a rollout may have other samples than a number of each prompt, or the batch another size.
_OTHER_SAMPLES = (
    *("rollout_function_path", "custom_generate_function_path", "custom_convert_samples_to_train_data_path"),
    *("use_dynamic_global_batch_size", "rollout_data_postprocess_path", "lora_rank", "data_source_path"),
)
# Options with which an advantage is more than a reward less the mean of its group.
_OTHER_ADVANTAGES = (
    *("use_opd", "disable_rewards_normalization", "custom_advantage_function_path", "rollout_function_path"),
    *("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path"),
)


def _switches(given: Arguments, program: str) -> Iterator[Issue]:
    """Ways of training that do not go together. `program`: the file that starts the trainer, empty if not known."""
    if given.has("colocate") and program == "train_async.py":
        expected = "no --colocate with train_async.py, which generates and trains at once"
        yield given.issue(("colocate",), expected, "the trainer stops: leave --colocate out, or start train.py")
    mixture = given.value("num_experts") and given.value("train_backend", "megatron") == "megatron"
    mixture = mixture and given.lacks("debug_rollout_only")
    if mixture and given.value("moe_token_dispatcher_type") == "allgather":
        hint = "slime only logs that it takes alltoall instead, for sequences of many lengths"
        expected = "--moe-token-dispatcher-type alltoall or flex"
        yield given.issue(("moe_token_dispatcher_type",), expected, hint, "warning")


def _batches(given: Arguments) -> Iterator[Issue]:
    prompts, samples = given.value("rollout_batch_size"), given.value("n_samples_per_prompt", 1)
    steps, batch = given.value("num_steps_per_rollout"), given.value("global_batch_size")
    names = ("global_batch_size", "rollout_batch_size", "n_samples_per_prompt", "num_steps_per_rollout")
    rollout = prompts * samples if prompts and samples else None
    if rollout and steps and batch and batch != rollout // steps:
        product = f"{prompts} x {samples} / {steps} = {rollout // steps}"
        expected = f"global_batch_size = rollout_batch_size x n_samples_per_prompt / num_steps_per_rollout = {product}"
        yield given.issue(names, expected, "the trainer stops: leave one of the two out")
    elif rollout and batch and not steps and all(map(given.lacks, _OTHER_SAMPLES)):
        product = f"{prompts} x {samples} = {rollout}"
        if rollout < batch:
            expected = f"global_batch_size of at most rollout_batch_size x n_samples_per_prompt = {product}"
            yield given.issue(names[:3], expected, "the trainer stops: a rollout has fewer samples than one step")
        elif rollout % batch:
            expected = f"global_batch_size that divides rollout_batch_size x n_samples_per_prompt = {product}"
            hint = f"the last {rollout % batch} samples of every rollout are not trained on"
            yield given.issue(names[:3], expected, hint, "warning")
    over = given.value("over_sampling_batch_size")
    if over and prompts and over < prompts:
        expected = "over_sampling_batch_size of at least rollout_batch_size"
        pair = ("over_sampling_batch_size", "rollout_batch_size")
        yield given.issue(pair, expected, "the trainer stops: change one of them")


def _micro_batches(given: Arguments) -> Iterator[Issue]:
    """Micro-batches of a fixed size over data parallel ranks."""
    if not all(map(given.lacks, ("use_dynamic_batch_size", *_OTHER_SAMPLES))):
        return
    batch, micro = given.value("global_batch_size"), given.value("micro_batch_size", 1)
    nodes, each = given.value("actor_num_nodes", 1), given.value("actor_num_gpus_per_node")
    sizes = [given.value(f"{one}_parallel_size", 1) for one in ("tensor_model", "pipeline_model", "context")]
    if not (batch and micro and nodes and each and all(sizes)):
        return
    ranks, rest = divmod(nodes * each, sizes[0] * sizes[1] * sizes[2])
    if not rest and ranks and batch % (ranks * micro):
        product = f"{ranks} x {micro} = {ranks * micro}"
        expected = f"global_batch_size that divides by data parallel ranks x micro_batch_size = {product}"
        hint = "the trainer stops in its first step: change one of them, or give --use-dynamic-batch-size"
        yield given.issue(("global_batch_size", "micro_batch_size"), expected, hint)


def _advantages(given: Arguments) -> Iterator[Issue]:
    estimator, clip = given.value("advantage_estimator", "grpo"), given.value("eps_clip", 0.2)
    if estimator == "cispo" and clip is not None and clip < 1:
        hint = "slime only warns: the lower bound stays active"
        expected = "--eps-clip 1.0 with cispo, which has no lower bound"
        yield given.issue(("advantage_estimator", "eps_clip"), expected, hint, "warning")
    is_grouped = estimator in ("grpo", "gspo", "cispo") and all(map(given.lacks, _OTHER_ADVANTAGES))
    is_grouped = is_grouped and given.value("loss_type", "policy_loss") == "policy_loss"
    if is_grouped and given.value("n_samples_per_prompt") == 1:
        expected = "--n-samples-per-prompt above 1 with advantages within a group"
        hint = "the trainer only logs it: the only sample of a group is its own mean, so every advantage is 0"
        yield given.issue(("n_samples_per_prompt",), expected, hint, "warning")


def _rollouts(given: Arguments, resumed: int) -> Iterator[Issue]:
    """How many rollouts a run has. One that resumes goes on behind `resumed`; a critic may have loaded another."""
    if given.has("num_rollout") and given.has("num_epoch"):
        hint = "--num-epoch is ignored, which the trainer only logs"
        yield given.issue(("num_rollout", "num_epoch"), "one of --num-rollout and --num-epoch", hint, "warning")
    rollouts, others = given.value("num_rollout"), ("start_rollout_id", "finetune", "debug_rollout_only")
    has_critic = given.value("advantage_estimator", "grpo") in ("ppo", None)
    if resumed and rollouts and rollouts <= resumed + 1 and all(map(given.lacks, others)) and not has_critic:
        expected = f"--num-rollout above {resumed + 1}, as --load goes on from iteration {resumed}"
        hint = "the run ends without a step of training, as if it were done: --num-rollout counts from the first start"
        yield given.issue(("num_rollout", "start_rollout_id"), expected, hint, "warning")


def _adapter(given: Arguments) -> Iterator[Issue]:
    trains = given.value("lora_rank", 0) or given.has("lora_adapter_path") or given.has("multi_lora_n_adapters")
    if given.has("lora_train_only") and trains:
        hint = "the engine generates with the base model, which is not the policy that is trained: leave it out"
        names, expected = ("lora_train_only", "lora_rank"), "an engine with the adapter of --lora-rank"
        yield given.issue(names, expected, hint, "warning")
    plain = given.value("lora_rank", 0) == 0 and all(map(given.lacks, ("lora_adapter_path", "multi_lora_n_adapters")))
    for name in ("sglang_enable_lora", "sglang_lora_paths", "vllm_enable_lora"):
        if plain and given.has(name):
            hint = "the trainer sends whole weights to layers that wait for an adapter: leave the engine's option out"
            yield given.issue((name, "lora_rank"), f"--lora-rank with --{name.replace('_', '-')}", hint)


def _trained(given: Arguments) -> TrainedAdapter | None:
    """The adapter of miles. Source: miles 31f1ca9 `utils/lora.py`, `backends/sglang_utils/sglang_engine.py`."""
    rank, names = given.value("lora_rank", 0), ("lora_rank", "lora_adapter_path", "multi_lora_n_adapters")
    if not rank and not any(map(given.has, names[1:])):
        return None
    engine = f"sent as it is to SGLang, started with enable_lora and max_lora_rank {max(rank or 0, 1)}"
    engine = "the engine generates without it, by --lora-train-only" if given.has("lora_train_only") else engine
    asked_by = next(given.cite(name) for name in names if given.has(name))
    return TrainedAdapter(str(rank or ""), given.value("target_modules") or "", engine, asked_by)


def _raw(given: Arguments, hf: Path | None) -> Iterator[Issue]:
    """A model with a wrapper that miles sends in mode raw, which is its default, and has no raw converter for."""
    config = engine_config(hf) if hf else {}
    is_wrapped = config.keys() & {"text_config", "vision_config"} and config.get("model_type") not in _RAW_WRAPPERS
    if is_wrapped and given.value("megatron_to_hf_mode", "raw") == "raw" and given.lacks("debug_rollout_only"):
        expected = f"--megatron-to-hf-mode bridge with {config.get('model_type')}"
        why = "miles has no raw converter for this model and stops at the first update"
        hint = f"{why}: give --megatron-to-hf-mode bridge"
        if given.value("train_backend", "megatron") == "megatron":
            yield given.issue(("megatron_to_hf_mode",), expected, hint)


def _sequence(given: Arguments, hf: Path | None, is_miles: bool) -> Iterator[Issue]:
    """Contiguous parts of the tokens are for DeepSeek's sparse attention; other attention takes them in zigzag order.

    Before slime stopped at it, tokens were scrambled silently. miles trains other models with contiguous parts too.
    """
    config = engine_config(hf) if hf else {}
    ranks, is_sparse = given.value("context_parallel_size", 1) or 1, "index_topk" in language_part(config)
    model = None if is_sparse or is_miles or given.has("debug_rollout_only") else class_of(config)
    if model and ranks > 1 and given.has("allgather_cp"):
        expected = f"no --allgather-cp with context_parallel_size above 1 for {model}"
        hint = "tokens would be in another order than this attention takes them: leave --allgather-cp out"
        yield given.issue(("allgather_cp", "context_parallel_size"), expected, hint)
